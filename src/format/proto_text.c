/* format/proto_text.c: a prototype as text: dtype "[" sizes "]" [ " " spec ] " " device. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "opaq/proto.h"
#include "opaq/status.h"

enum opaq_status opaq_proto_print(const struct opaq_proto *proto, char *buffer, size_t capacity,
                                  struct opaq_error *error) {
    TRY(opaq_proto_check(proto, error));
    char text[OPAQ_PROTO_TEXT_BYTES];
    char spec[OPAQ_SPEC_TEXT_BYTES] = "";
    size_t length =
        (size_t)snprintf(text, sizeof text, "%s[", opaq_element_info((enum opaq_element)proto->dtype)->name);
    for (int i = 0; i < proto->rank; ++i) {
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%lld", i ? "," : "",
                                   (long long)proto->shape[i]);
    }
    if (proto->is_quantized) {
        (void)opaq_spec_print(&proto->spec, spec, sizeof spec, NULL);
    }
    length += (size_t)snprintf(text + length, sizeof text - length, "]%s%s ", spec[0] ? " " : "", spec);
    if (proto->device.type == OPAQ_DEVICE_CPU) {
        length += (size_t)snprintf(text + length, sizeof text - length, "cpu");
    } else {
        length += (size_t)snprintf(text + length, sizeof text - length, "cuda:%d", proto->device.index);
    }
    if (buffer == NULL || capacity <= length) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "proto_print: the text needs %zu bytes, the buffer has %zu",
                         length + 1, buffer == NULL ? 0 : capacity);
    }
    memcpy(buffer, text, length + 1);
    return OPAQ_OK;
}

/* A read position in the text; every read_ function either moves `at` past what it read or leaves it unchanged. */
struct cursor {
    const char *text;
    size_t length;
    size_t at;
};

static bool read_word(struct cursor *cursor, const char *word) {
    const size_t n = strlen(word);
    if (cursor->length - cursor->at < n || memcmp(cursor->text + cursor->at, word, n) != 0) {
        return false;
    }
    cursor->at += n;
    return true;
}

/* A number without leading zeros, at most 2^63 - 1. */
static bool read_number(struct cursor *cursor, int64_t *number) {
    const size_t first = cursor->at;
    int64_t value = 0;
    size_t at = first;
    for (; at < cursor->length && cursor->text[at] >= '0' && cursor->text[at] <= '9'; ++at) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, cursor->text[at] - '0', &value)) {
            return false;
        }
    }
    if (at == first || (cursor->text[first] == '0' && at > first + 1)) {
        return false;
    }
    cursor->at = at;
    *number = value;
    return true;
}

static bool read_shape(struct cursor *cursor, struct opaq_proto *proto) {
    if (!read_word(cursor, "[")) {
        return false;
    }
    while (!read_word(cursor, "]")) {
        if (proto->rank == OPAQ_RANK_LIMIT || (proto->rank > 0 && !read_word(cursor, ",")) ||
            !read_number(cursor, &proto->shape[proto->rank])) {
            return false;
        }
        ++proto->rank;
    }
    return true;
}

static bool read_device(struct cursor *cursor, struct opaq_device *device) {
    int64_t index = 0;
    if (read_word(cursor, "cuda:")) {
        const bool is_index = read_number(cursor, &index) && index <= INT32_MAX;
        *device = (struct opaq_device){OPAQ_DEVICE_CUDA, is_index ? (int32_t)index : 0};
        return is_index && cursor->at == cursor->length;
    }
    *device = (struct opaq_device){OPAQ_DEVICE_CPU, 0};
    return read_word(cursor, "cpu") && cursor->at == cursor->length;
}

static bool read_dtype(struct cursor *cursor, int32_t *dtype) {
    for (int i = OPAQ_F16; i <= OPAQ_F32; ++i) {
        if (read_word(cursor, opaq_element_info((enum opaq_element)i)->name)) {
            *dtype = i;
            return true;
        }
    }
    return false;
}

enum opaq_status opaq_proto_parse(const char *text, size_t length, struct opaq_proto *proto,
                                  struct opaq_error *error) {
    if (text == NULL || proto == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto_parse: %s is NULL",
                         text == NULL ? "text" : "proto");
    }
    struct cursor cursor = {text, length, 0};
    struct opaq_proto parsed;
    const char *expected = NULL;
    memset(&parsed, 0, sizeof parsed);
    if (!read_dtype(&cursor, &parsed.dtype)) {
        expected = "f16, bf16 or f32";
    } else if (!read_shape(&cursor, &parsed)) {
        expected = "a shape such as [4,128] of at most 8 sizes";
    } else if (!read_word(&cursor, " ")) {
        expected = "a space";
    } else {
        const char *space = memchr(text + cursor.at, ' ', length - cursor.at);
        if (space != NULL) {
            const size_t spec_length = (size_t)(space - (text + cursor.at));
            TRY(opaq_spec_parse(text + cursor.at, spec_length, &parsed.spec, error));
            parsed.is_quantized = 1;
            cursor.at += spec_length + 1;
        }
        expected = read_device(&cursor, &parsed.device) ? NULL : "cpu or cuda:0 at the end";
    }
    if (expected != NULL) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "proto_parse: expected %s at position %zu of %zu", expected,
                         cursor.at, length);
    }
    TRY(opaq_proto_check(&parsed, error));
    *proto = parsed;
    return OPAQ_OK;
}

/* cli/read/json.c: see json.h. */
#include "cli/read/json.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"

static int compare_keys(const void *first, const void *second) {
    yyjson_val *const a = *(yyjson_val *const *)first;
    yyjson_val *const b = *(yyjson_val *const *)second;
    const size_t a_length = yyjson_get_len(a);
    const size_t b_length = yyjson_get_len(b);
    const int order = memcmp(yyjson_get_str(a), yyjson_get_str(b), a_length < b_length ? a_length : b_length);
    return order != 0 ? order : (a_length > b_length) - (a_length < b_length);
}

static enum opaq_status check_keys(yyjson_val *object, const char *file, struct opaq_error *error) {
    const size_t count = yyjson_obj_size(object);
    if (count < 2) {
        return OPAQ_OK;
    }
    const size_t bytes = sizeof(yyjson_val *); /* NOLINT(bugprone-sizeof-expression): pointers are sorted */
    yyjson_val **const keys = alloc_array(count, bytes);
    yyjson_obj_iter iterator = yyjson_obj_iter_with(object);
    for (size_t i = 0; i < count; ++i) {
        keys[i] = yyjson_obj_iter_next(&iterator);
    }
    qsort(keys, count, bytes, compare_keys);
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 1; i < count && status == OPAQ_OK; ++i) {
        if (compare_keys(&keys[i - 1], &keys[i]) == 0) {
            status = opaq_fail(error, OPAQ_ERROR_TEXT, "%s: duplicate key \"%.200s\" in an object", file,
                               yyjson_get_str(keys[i]));
        }
    }
    free(keys);
    return status;
}

/* Runs before the parser, which would allocate 16 bytes for each of a hundred million brackets. */
static enum opaq_status check_depth(const char *bytes, size_t count, const char *file,
                                    struct opaq_error *error) {
    int depth = 0;
    bool is_text = false;
    for (size_t i = 0; i < count; ++i) {
        if (is_text) {
            is_text = bytes[i] != '"';
            i += bytes[i] == '\\';
        } else if (bytes[i] == '"') {
            is_text = true;
        } else if (bytes[i] == '[' || bytes[i] == '{') {
            if (++depth > JSON_DEPTH_LIMIT) {
                return opaq_fail(error, OPAQ_ERROR_LIMIT,
                                 "%s: JSON is nested deeper than %d levels at byte %zu of %zu", file,
                                 JSON_DEPTH_LIMIT, i, count);
            }
        } else if (bytes[i] == ']' || bytes[i] == '}') {
            --depth;
        }
    }
    return OPAQ_OK;
}

/* NOLINTNEXTLINE(misc-no-recursion): as deep as the limit */
static enum opaq_status check_value(yyjson_val *value, const char *file, struct opaq_error *error) {
    if (!yyjson_is_ctn(value)) {
        return OPAQ_OK;
    }
    size_t index = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *inner = NULL;
    if (yyjson_is_arr(value)) {
        yyjson_arr_foreach(value, index, count, inner) { CLI_TRY(check_value(inner, file, error)); }
        return OPAQ_OK;
    }
    yyjson_obj_foreach(value, index, count, key, inner) { CLI_TRY(check_value(inner, file, error)); }
    return check_keys(value, file, error);
}

enum opaq_status json_read(const char *bytes, size_t count, const char *file, yyjson_doc **document,
                           struct opaq_error *error) {
    CLI_TRY(check_depth(bytes, count, file, error));
    yyjson_read_err why = {0};
    /* without the flag YYJSON_READ_INSITU the reader does not write to its input */
    char *const input = (char *)(uintptr_t)bytes;
    yyjson_doc *const doc = yyjson_read_opts(input, count, YYJSON_READ_NUMBER_AS_RAW, NULL, &why);
    if (doc == NULL) {
        const char *const reason = why.msg == NULL ? "unknown" : why.msg;
        return opaq_fail(error,
                         why.code == YYJSON_READ_ERROR_MEMORY_ALLOCATION ? OPAQ_ERROR_MEMORY : OPAQ_ERROR_TEXT,
                         "%s: invalid JSON: %s at byte %zu of %zu", file, reason, why.pos, count);
    }
    const enum opaq_status status = check_value(yyjson_doc_get_root(doc), file, error);
    if (status != OPAQ_OK) {
        yyjson_doc_free(doc);
        return status;
    }
    *document = doc;
    return OPAQ_OK;
}

bool json_natural(yyjson_val *value, uint64_t *number) {
    if (!yyjson_is_raw(value)) {
        return false;
    }
    uint64_t result = 0;
    for (const char *digit = yyjson_get_raw(value); *digit != '\0'; ++digit) {
        if (*digit < '0' || *digit > '9' || result > (UINT64_MAX - 9) / 10) {
            return false;
        }
        result = result * 10 + (uint64_t)(*digit - '0');
    }
    *number = result;
    return true;
}

const char *json_text(yyjson_val *value) {
    const char *const text = yyjson_is_raw(value) ? yyjson_get_raw(value) : yyjson_get_str(value);
    return text == NULL || strlen(text) != yyjson_get_len(value) ? NULL : text;
}

const char *json_member_text(yyjson_val *object, const char *key) {
    yyjson_val *const value = yyjson_obj_get(object, key);
    return yyjson_is_str(value) ? json_text(value) : NULL;
}

bool json_is_clean(yyjson_val *value) {
    const char *const text = yyjson_get_str(value);
    const size_t length = text == NULL ? 0 : yyjson_get_len(value);
    for (size_t i = 0; i < length; ++i) {
        const unsigned char byte = (unsigned char)text[i];
        /* also U+0080 to U+009F, which terminals interpret; the text is zero-terminated */
        if (byte < 0x20 || byte == 0x7F || (byte == 0xC2 && (unsigned char)text[i + 1] < 0xA0)) {
            return false;
        }
    }
    return length != 0;
}

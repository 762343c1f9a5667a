/* format/spec_text.c: parses and prints specs. Grammar: docs/spec.md. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/float_bits.h"
#include "base/try.h"
#include "format/decimal.h"
#include "opaq/spec.h"
#include "opaq/status.h"

/* A part of the text being parsed. */
struct part {
    const char *text;
    size_t length;
    size_t position;
};

struct reader {
    const char *text;
    size_t length;
    struct opaq_spec *spec;
    struct opaq_error *error;
    const struct opaq_format_row *row;
    unsigned seen; /* SEEN_* and option bits already read */
};

enum { SEEN_USAGE = 1 << 16, SEEN_RULE = 1 << 17, SEEN_EPSILON = 1 << 18, SEEN_E4M3_MAX = 1 << 19 };

/* Whether the part is the word, which is in lower case; the part may have capitals. Not tolower(): it depends on the
 * locale. */
static bool part_is(struct part part, const char *word) {
    bool is_equal = part.length == strlen(word);
    for (size_t i = 0; i < part.length && is_equal; ++i) {
        const char c = part.text[i];
        is_equal = (c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c) == word[i];
    }
    return is_equal;
}

/* The text with unprintable characters replaced, so that a message is one readable line. */
static const char *quoted(const char *text, size_t length, char buffer[OPAQ_SPEC_TEXT_BYTES]) {
    size_t n = length < OPAQ_SPEC_TEXT_BYTES - 4 ? length : OPAQ_SPEC_TEXT_BYTES - 4;
    for (size_t i = 0; i < n; ++i) {
        buffer[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    }
    memcpy(buffer + n, n < length ? "..." : "", n < length ? 4 : 1);
    return buffer;
}

static enum opaq_status refuse(const struct reader *reader, struct part part, const char *what,
                               const char *expected) {
    char whole[OPAQ_SPEC_TEXT_BYTES];
    char piece[OPAQ_SPEC_TEXT_BYTES];
    return opaq_fail(reader->error, OPAQ_ERROR_TEXT, "spec \"%s\": %s \"%s\" at position %zu; %s",
                     quoted(reader->text, reader->length, whole), what, quoted(part.text, part.length, piece),
                     part.position, expected);
}

/* The options of a format, for a message: "nvfp4 takes rowwise, ..., 2d, ...". */
static const char *describe_options(const struct opaq_format_row *row, char *buffer, size_t capacity) {
    size_t length = (size_t)snprintf(buffer, capacity, "%s takes rowwise, columnwise, both", row->name);
    for (int i = 0; i < OPAQ_OPTION_COUNT; ++i) {
        if (row->options & 1u << i) {
            length += (size_t)snprintf(buffer + length, capacity - length, ", %s",
                                       opaq_option_name((enum opaq_option)(1 << i)));
        }
    }
    (void)snprintf(buffer + length, capacity - length, "%s%s, rule=", row->options & OPAQ_POW2 ? ", eps=" : "",
                   row->options & OPAQ_4OVER6 ? ", e4m3max=" : "");
    return buffer;
}

/* Splits "name=value"; the value's text is NULL if there is no "=". */
static struct part split_value(struct part *part) {
    const char *equals = memchr(part->text, '=', part->length);
    struct part value = {NULL, 0, 0};
    if (equals != NULL) {
        const size_t name_length = (size_t)(equals - part->text);
        value.text = equals + 1;
        value.length = part->length - name_length - 1;
        value.position = part->position + name_length + 1;
        part->length = name_length;
    }
    return value;
}

static bool read_mask(struct part value, uint16_t *mask) {
    unsigned result = 0;
    if (value.length != 6 || value.text[0] != '0' || value.text[1] != 'x') {
        return false;
    }
    for (size_t i = 2; i < 6; ++i) {
        const char c = value.text[i];
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) {
            return false;
        }
        result = result << 4 | (unsigned)digit;
    }
    *mask = (uint16_t)result;
    return true;
}

static enum opaq_status read_flag(struct reader *reader, struct part whole, int index, struct part value) {
    struct opaq_spec *spec = reader->spec;
    const uint16_t option = (uint16_t)(1u << index);
    if (value.text != NULL && option != OPAQ_HADAMARD && option != OPAQ_4OVER6) {
        return refuse(reader, value, "unexpected value", "this option takes none");
    }
    if (option == OPAQ_HADAMARD) {
        spec->hadamard_mask = OPAQ_HADAMARD_MASK_DEFAULT;
        if (value.text != NULL && !read_mask(value, &spec->hadamard_mask)) {
            return refuse(reader, value, "bad sign mask", "expected 0x and four lower-case hexadecimal digits");
        }
    }
    if (option == OPAQ_4OVER6) {
        spec->error_mode = OPAQ_ERROR_MODE_MAE;
        if (value.text != NULL && part_is(value, "mse")) {
            spec->error_mode = OPAQ_ERROR_MODE_MSE;
        } else if (value.text != NULL && !part_is(value, "mae")) {
            return refuse(reader, value, "unknown error mode", "expected mae or mse");
        }
    }
    if ((reader->row->options & option) == 0) {
        char expected[256];
        return refuse(reader, whole,
                      "option not taken:", describe_options(reader->row, expected, sizeof expected));
    }
    spec->options |= option;
    return OPAQ_OK;
}

static enum opaq_status read_rule(struct reader *reader, struct part value) {
    for (int i = 0; i < OPAQ_RULE_COUNT; ++i) {
        if (value.text != NULL && part_is(value, opaq_rule_name((enum opaq_rule)i))) {
            reader->spec->rule = (uint8_t)i;
            return OPAQ_OK;
        }
    }
    return refuse(reader, value, "unknown rule", "expected te, ocp, rceil, compressed-tensors or modelopt");
}

static enum opaq_status read_named(struct reader *reader, struct part name, struct part value, unsigned *seen) {
    struct opaq_spec *spec = reader->spec;
    if (part_is(name, "rule")) {
        *seen = SEEN_RULE;
        return read_rule(reader, value);
    }
    if (part_is(name, "eps")) {
        *seen = SEEN_EPSILON;
        if (value.text == NULL || !decimal_parse(value.text, value.length, &spec->epsilon)) {
            return refuse(reader, value, "bad number", "expected a finite number such as 1e-12");
        }
        return OPAQ_OK;
    }
    *seen = SEEN_E4M3_MAX;
    if (value.text == NULL || (!part_is(value, "448") && !part_is(value, "256"))) {
        return refuse(reader, value, "bad e4m3max", "expected 448 or 256");
    }
    spec->e4m3_max = part_is(value, "448") ? 448 : 256;
    return OPAQ_OK;
}

static enum opaq_status read_option(struct reader *reader, struct part part) {
    static const char *const usages[] = {"rowwise", "columnwise", "both"};
    const struct part whole = part;
    const struct part value = split_value(&part);
    enum opaq_status status = OPAQ_ERROR_TEXT;
    unsigned seen = 0;
    for (int i = 0; i < 3; ++i) {
        if (part_is(whole, usages[i])) {
            reader->spec->usage = (uint8_t)(i + 1);
            seen = SEEN_USAGE;
            status = OPAQ_OK;
        }
    }
    for (int i = 0; i < OPAQ_OPTION_COUNT && seen == 0; ++i) {
        if (part_is(part, opaq_option_name((enum opaq_option)(1 << i)))) {
            seen = 1u << i;
            status = read_flag(reader, whole, i, value);
        }
    }
    if (seen == 0 && (part_is(part, "rule") || part_is(part, "eps") || part_is(part, "e4m3max"))) {
        const struct part given =
            value.text == NULL ? (struct part){"", 0, whole.position + whole.length} : value;
        status = read_named(reader, part, given, &seen);
    }
    if (seen == 0) {
        char expected[256];
        return refuse(reader, whole, "unknown option",
                      describe_options(reader->row, expected, sizeof expected));
    }
    if (status == OPAQ_OK && (reader->seen & seen) != 0) {
        return refuse(reader, whole, "option given twice:", "each option stands once");
    }
    reader->seen |= seen;
    return status;
}

static enum opaq_status read_format(struct reader *reader, struct part part) {
    const char *dot = memchr(part.text, '.', part.length);
    struct part name = part;
    if (dot != NULL) {
        name.length = (size_t)(dot - part.text);
    }
    for (int i = 0; i < OPAQ_FORMAT_COUNT; ++i) {
        if (part_is(name, opaq_format_row((enum opaq_format)i)->name)) {
            reader->row = opaq_format_row((enum opaq_format)i);
        }
    }
    if (reader->row == NULL) {
        return refuse(reader, name, "unknown format",
                      "expected fp8, fp8row, fp8blk1, fp8blk2, mxfp8, mxfp4 or nvfp4");
    }
    (void)opaq_spec_make(reader->row->format, reader->spec, NULL);
    if (dot == NULL) {
        return OPAQ_OK;
    }
    const struct part element = {dot + 1, part.length - name.length - 1, part.position + name.length + 1};
    for (int i = 0; i < OPAQ_ELEMENT_COUNT; ++i) {
        if ((reader->row->elements & 1u << i) &&
            part_is(element, opaq_element_info((enum opaq_element)i)->name)) {
            reader->spec->element = (uint8_t)i;
            return OPAQ_OK;
        }
    }
    return refuse(reader, element, "unknown element",
                  reader->row->element_default == OPAQ_E2M1 ? "expected e2m1" : "expected e4m3 or e5m2");
}

static enum opaq_status read_all(struct reader *reader) {
    size_t position = 0;
    bool first = true;
    for (;;) {
        const char *start = reader->text + position;
        const char *plus = memchr(start, '+', reader->length - position);
        const size_t length = plus == NULL ? reader->length - position : (size_t)(plus - start);
        const struct part part = {start, length, position};
        const enum opaq_status status = first ? read_format(reader, part) : read_option(reader, part);
        if (status != OPAQ_OK || plus == NULL) {
            return status;
        }
        first = false;
        position += length + 1;
    }
}

enum opaq_status opaq_spec_parse(const char *text, size_t length, struct opaq_spec *spec,
                                 struct opaq_error *error) {
    if (text == NULL || spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_parse: %s is NULL", text == NULL ? "text" : "spec");
    }
    if (length >= OPAQ_SPEC_TEXT_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_TEXT,
                         "spec_parse: the text has %zu characters, at most %d are allowed", length,
                         OPAQ_SPEC_TEXT_BYTES - 1);
    }
    struct opaq_spec parsed;
    struct reader reader = {text, length, &parsed, error, NULL, 0};
    const enum opaq_status status = read_all(&reader);
    if (status != OPAQ_OK && error != NULL && length > 0 && text[length - 1] == '\0') {
        const size_t used = strlen(error->text);
        (void)snprintf(error->text + used, sizeof error->text - used,
                       "; the length %zu counts the terminator of the string", length);
    }
    TRY(status);
    if ((parsed.options & OPAQ_4OVER6) != 0 && (reader.seen & SEEN_E4M3_MAX) == 0) {
        parsed.e4m3_max = 256;
    }
    struct opaq_error reason;
    if (opaq_spec_check(&parsed, &reason) != OPAQ_OK) {
        char whole[OPAQ_SPEC_TEXT_BYTES];
        return opaq_fail(error, reason.status, "spec \"%s\": %s", quoted(text, length, whole),
                         reason.text + strlen("spec: "));
    }
    *spec = parsed;
    return OPAQ_OK;
}

static void append(char *buffer, size_t *length, const char *a, const char *b) {
    *length += (size_t)snprintf(buffer + *length, OPAQ_SPEC_TEXT_BYTES - *length, "%s%s", a, b);
}

static void print_option(const struct opaq_spec *spec, int index, char *text, size_t *length) {
    append(text, length, "+", opaq_option_name((enum opaq_option)(1 << index)));
    if (1 << index == OPAQ_HADAMARD && spec->hadamard_mask != OPAQ_HADAMARD_MASK_DEFAULT) {
        char mask[8];
        (void)snprintf(mask, sizeof mask, "0x%04x", spec->hadamard_mask);
        append(text, length, "=", mask);
    }
    if (1 << index == OPAQ_4OVER6 && spec->error_mode == OPAQ_ERROR_MODE_MSE) {
        append(text, length, "=", "mse");
    }
}

enum opaq_status opaq_spec_print(const struct opaq_spec *spec, char *buffer, size_t capacity,
                                 struct opaq_error *error) {
    TRY(opaq_spec_check(spec, error));
    const struct opaq_format_row *row = opaq_format_row((enum opaq_format)spec->format);
    char text[OPAQ_SPEC_TEXT_BYTES] = "";
    size_t length = 0;
    append(text, &length, row->name, "");
    if (spec->element != row->element_default) {
        append(text, &length, ".", opaq_element_info((enum opaq_element)spec->element)->name);
    }
    if (spec->usage != OPAQ_ROWWISE) {
        append(text, &length, "+", spec->usage == OPAQ_BOTH ? "both" : "columnwise");
    }
    for (int i = 0; i < OPAQ_OPTION_COUNT; ++i) {
        if (spec->options & 1u << i) {
            print_option(spec, i, text, &length);
        }
    }
    if ((spec->options & OPAQ_4OVER6) != 0 && spec->e4m3_max == 448) {
        append(text, &length, "+e4m3max=", "448");
    }
    if (float_to_bits(spec->epsilon) != 0) {
        char number[DECIMAL_TEXT_BYTES];
        decimal_print(spec->epsilon, number);
        append(text, &length, "+eps=", number);
    }
    if (spec->rule != OPAQ_RULE_TE) {
        append(text, &length, "+rule=", opaq_rule_name((enum opaq_rule)spec->rule));
    }
    if (buffer == NULL || capacity <= length) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "spec_print: the text needs %zu bytes, the buffer has %zu",
                         length + 1, buffer == NULL ? 0 : capacity);
    }
    memcpy(buffer, text, length + 1);
    return OPAQ_OK;
}

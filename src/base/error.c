/* base/error.c: status names and error texts. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/try.h"

/* Characters that change the text direction or break lines: U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to
 * U+2069. */
static int is_directional(const unsigned char *text) {
    return (text[0] == 0xD8 && text[1] == 0x9C) ||
           (text[0] == 0xE2 && text[1] == 0x80 &&
            (text[2] == 0x8E || text[2] == 0x8F || (text[2] >= 0xA8 && text[2] <= 0xAE))) ||
           (text[0] == 0xE2 && text[1] == 0x81 && text[2] >= 0xA6 && text[2] <= 0xA9);
}

/* The number of bytes of the UTF-8 character that begins here; 0 for a control character or invalid UTF-8. */
static size_t character(const unsigned char *text) {
    if (text[0] < 0x80) {
        return text[0] >= 0x20 && text[0] != 0x7F;
    }
    if (text[0] < 0xC2 || text[0] > 0xF4 || (text[0] == 0xC2 && text[1] < 0xA0) || is_directional(text)) {
        return 0;
    }
    const size_t length = text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : 4;
    for (size_t i = 1; i < length; ++i) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return length;
}

/* Replaces unprintable bytes: quoted text may come from a hostile file and must not control a terminal. */
static void make_printable(char *text) {
    while (*text != '\0') {
        const size_t length = character((const unsigned char *)text);
        if (length == 0) {
            *text = '?';
        }
        text += length == 0 ? 1 : length;
    }
}

enum opaq_status opaq_fail(struct opaq_error *error, enum opaq_status status, const char *format, ...) {
    if (error == NULL) {
        return status;
    }
    const int saved_errno = errno;
    error->status = status;
    va_list arguments;
    va_start(arguments, format);
    const int wanted = vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    if (wanted < 0) {
        error->text[0] = '\0';
    } else if ((size_t)wanted >= sizeof error->text) {
        memcpy(error->text + sizeof error->text - 4, "...", 4);
    }
    make_printable(error->text);
    errno = saved_errno;
    return status;
}

enum opaq_status error_prefix(struct opaq_error *error, enum opaq_status status, const char *name) {
    if (error == NULL) {
        return status;
    }
    char text[OPAQ_ERROR_TEXT_BYTES];
    memcpy(text, error->text, sizeof text);
    return opaq_fail(error, status, "%s: %s", name, text);
}

const char *opaq_status_name(enum opaq_status status) {
    switch (status) {
    case OPAQ_OK:
        return "OK";
    case OPAQ_ERROR_ARGUMENT:
        return "ARGUMENT";
    case OPAQ_ERROR_TEXT:
        return "TEXT";
    case OPAQ_ERROR_SPEC:
        return "SPEC";
    case OPAQ_ERROR_SHAPE:
        return "SHAPE";
    case OPAQ_ERROR_OVERFLOW:
        return "OVERFLOW";
    case OPAQ_ERROR_BUFFER:
        return "BUFFER";
    case OPAQ_ERROR_MEMORY:
        return "MEMORY";
    case OPAQ_ERROR_LIMIT:
        return "LIMIT";
    case OPAQ_ERROR_UNSUPPORTED:
        return "UNSUPPORTED";
    case OPAQ_ERROR_SYSTEM:
        return "SYSTEM";
    }
    return "UNKNOWN";
}

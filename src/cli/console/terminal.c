/* cli/console/terminal.c: see terminal.h. */
#define _DEFAULT_SOURCE /* the size of a terminal is not in POSIX 2008 */
#include "cli/console/terminal.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/cli_memory.h"

bool terminal_is_drawable(int descriptor) {
    const char *const kind = getenv("TERM");
    return isatty(descriptor) == 1 && kind != NULL && *kind != '\0' && strcmp(kind, "dumb") != 0;
}

int terminal_columns(int descriptor) {
    struct winsize size;
    if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col != 0) {
        return size.ws_col;
    }
    const char *const text = getenv("COLUMNS");
    char *end = NULL;
    const long columns = text == NULL ? 0 : strtol(text, &end, 10);
    return columns > 0 && columns <= 10000 && *end == '\0' ? (int)columns : 80;
}

/* Decodes one code point and its length; -1 and a length of 1 for invalid UTF-8. */
static int32_t decode(const unsigned char *text, size_t *bytes) {
    static const int32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t length = text[0] < 0x80 ? 1 : text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : 4;
    *bytes = 1;
    if (length == 1) {
        return text[0];
    }
    if (text[0] < 0xC2 || text[0] > 0xF4) {
        return -1;
    }
    int32_t code = text[0] & (0x7F >> length);
    for (size_t i = 1; i < length; ++i) {
        if ((text[i] & 0xC0) != 0x80) { /* true at the end of the text, too */
            return -1;
        }
        code = code << 6 | (text[i] & 0x3F);
    }
    if (code < least[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
        return -1;
    }
    *bytes = length;
    return code;
}

size_t shown_length(const char *text, size_t *skipped) {
    size_t bytes = 0;
    const int32_t code = decode((const unsigned char *)text, &bytes);
    const bool is_hidden = code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x061C || code == 0x200E ||
                           code == 0x200F || (code >= 0x2028 && code <= 0x202E) ||
                           (code >= 0x2066 && code <= 0x2069);
    *skipped = bytes;
    return is_hidden ? 0 : bytes;
}

static void show_filtered(FILE *file, const char *text, bool keeps_newlines) {
    while (*text != '\0') {
        size_t skipped = 0;
        const size_t bytes = shown_length(text, &skipped);
        if (bytes != 0) {
            (void)fwrite(text, 1, bytes, file);
        } else {
            (void)fputc(*text == '\n' && keeps_newlines ? '\n' : '?', file);
        }
        text += skipped;
    }
}

void show_text(FILE *file, const char *text) { show_filtered(file, text, false); }

void show_list(FILE *file, const char *format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (length < 0) {
        return;
    }
    char *const text = alloc_array((size_t)length + 1, 1);
    (void)vsnprintf(text, (size_t)length + 1, format, arguments);
    show_filtered(file, text, true);
    free(text);
}

void show(FILE *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    show_list(file, format, arguments);
    va_end(arguments);
}

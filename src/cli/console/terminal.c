/* cli/console/terminal.c: see terminal.h. */
#define _DEFAULT_SOURCE /* the size of a terminal is not in POSIX 2008 */
#include "cli/console/terminal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

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

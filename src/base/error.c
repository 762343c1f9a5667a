/* base/error.c: status names and error texts. */
#include "opaq/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
    errno = saved_errno;
    return status;
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

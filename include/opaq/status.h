/* opaq/status.h: status codes and error texts. Depends on version.h.
 *
 * A function that can fail returns an enum opaq_status and takes a `struct opaq_error *` as its last argument,
 * which may be NULL. On failure the text names the operation, what was expected and the actual values; outputs
 * are unchanged unless the declaration says otherwise. On success the error is not written. The library never
 * prints, aborts, exits, or changes errno on purpose. */
#ifndef OPAQ_STATUS_H
#define OPAQ_STATUS_H

#include "opaq/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers are part of the ABI: append, never renumber. */
enum opaq_status {
    OPAQ_OK = 0,
    OPAQ_ERROR_ARGUMENT = 1,    /* a null pointer, or a value outside its domain */
    OPAQ_ERROR_TEXT = 2,        /* a text that does not parse */
    OPAQ_ERROR_SPEC = 3,        /* a spec that contradicts itself, or does not fit the operation */
    OPAQ_ERROR_SHAPE = 4,       /* ranks or sizes that are negative or do not agree */
    OPAQ_ERROR_OVERFLOW = 5,    /* sizes whose product does not fit */
    OPAQ_ERROR_BUFFER = 6,      /* a buffer that is missing, too small, misaligned or overlapping */
    OPAQ_ERROR_MEMORY = 7,      /* an allocation failed */
    OPAQ_ERROR_LIMIT = 8,       /* a documented limit was reached */
    OPAQ_ERROR_UNSUPPORTED = 9, /* valid, but this build or device cannot do it */
    OPAQ_ERROR_SYSTEM = 10      /* the operating system refused (a thread could not be started) */
};

#define OPAQ_ERROR_TEXT_BYTES 512

struct opaq_error {
    enum opaq_status status;
    /* Always terminated; truncated with "..." if too long. UTF-8 without control characters: in quoted input,
     * '?' replaces invalid bytes. */
    char text[OPAQ_ERROR_TEXT_BYTES];
};

/* "OK", "ARGUMENT", ...; "UNKNOWN" for a number that is not a status. */
OPAQ_API const char *opaq_status_name(enum opaq_status status);

/* For code built on opaq that reports errors the same way: writes the status and the text, if `error` is not
 * NULL, and returns the status, so that a failing check is one statement. Keeps errno. */
OPAQ_API enum opaq_status opaq_fail(struct opaq_error *error, enum opaq_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif

#endif

/* base/try.h: returns from a function on the first failure. Depends on opaq/status.h. */
#ifndef OPAQ_BASE_TRY_H
#define OPAQ_BASE_TRY_H

#include "opaq/status.h"

/* Returns the status of `expression` from the calling function unless it is OPAQ_OK. Only for functions that
 * have nothing to release first. */
#define TRY(expression)                                    \
    do {                                                   \
        const enum opaq_status try_status_ = (expression); \
        if (try_status_ != OPAQ_OK) {                      \
            return try_status_;                            \
        }                                                  \
    } while (0)

/* As TRY, but prefixes the error text: "<name>: <text>". */
#define TRY_AS(name, error, expression)                       \
    do {                                                      \
        const enum opaq_status try_status_ = (expression);    \
        if (try_status_ != OPAQ_OK) {                         \
            (void)error_prefix((error), try_status_, (name)); \
            return try_status_;                               \
        }                                                     \
    } while (0)

/* Puts "<name>: " before the text of `error`, which may be NULL, and returns `status`. */
enum opaq_status error_prefix(struct opaq_error *error, enum opaq_status status, const char *name);

#endif

/* base/error.h: filling a caller's error text. Depends on opaq/status.h. */
#ifndef OPAQ_BASE_ERROR_H
#define OPAQ_BASE_ERROR_H

#include "opaq/status.h"

/* Writes the status and the formatted text, if `error` is not NULL, and returns `status`, so that a failing
 * check is one statement: return opaq_fail(error, OPAQ_ERROR_SHAPE, "...", ...). Keeps errno. */
__attribute__((format(printf, 3, 4))) enum opaq_status opaq_fail(struct opaq_error *error,
                                                                 enum opaq_status status, const char *format,
                                                                 ...);

#endif

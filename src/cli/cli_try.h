/* cli/cli_try.h: returns from the calling function if a call fails. Only for functions that have nothing to
 * release at that point; the library's own files use base/try.h, which the command may not include. */
#ifndef OPAQ_CLI_CLI_TRY_H
#define OPAQ_CLI_CLI_TRY_H

#include "opaq/status.h"

#define CLI_TRY(expression)                                \
    do {                                                   \
        const enum opaq_status try_status_ = (expression); \
        if (try_status_ != OPAQ_OK) {                      \
            return try_status_;                            \
        }                                                  \
    } while (0)

#endif

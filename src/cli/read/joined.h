/* cli/read/joined.h: projections that engines join along their rows, so that those of a module share one scale. Depends on
 * libc. */
#ifndef OPAQ_CLI_READ_JOINED_H
#define OPAQ_CLI_READ_JOINED_H

#include <stddef.h>

enum { JOINED_MOST = 3 };

/* Names of modules; NULL behind the last of fewer than JOINED_MOST. */
extern const char *const joined_projections[][JOINED_MOST];
extern const size_t joined_count;

#endif

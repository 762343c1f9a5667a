/* base/forced_kernels.h: names of kernels that somebody asks for. Depends on libc. */
#ifndef OPAQ_BASE_FORCED_KERNELS_H
#define OPAQ_BASE_FORCED_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The names, separated by commas; "" if there are none. At first those of the environment. */
const char *forced_kernels(void);

/* Other names from now on; false if there is no memory. */
bool forced_kernels_set(const char *names);

/* Whether a kernel is among them. */
bool kernel_is_forced(const char *name);

/* The first name of a list, its length and the rest of the list; NULL at the end. */
const char *kernel_name_next(const char *list, size_t *length, const char **rest);

#endif

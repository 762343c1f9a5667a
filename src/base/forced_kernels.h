/* base/forced_kernels.h: the list of forced kernel names, see opaq/kernel.h. Depends on libc. */
#ifndef OPAQ_BASE_FORCED_KERNELS_H
#define OPAQ_BASE_FORCED_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The names, separated by commas; "" if there are none. Initially those of OPAQ_KERNEL. */
const char *forced_kernels(void);

/* Replaces the list; false if an allocation failed. */
bool forced_kernels_set(const char *names);

/* Whether the list contains a kernel. */
bool kernel_is_forced(const char *name);

/* The first name of a list, its length and the rest of the list; NULL at the end. */
const char *kernel_name_next(const char *list, size_t *length, const char **rest);

#endif

/* cli/read/config_ignore.h: the modules that a quantization_config leaves as they are. */
#ifndef OPAQ_CLI_READ_CONFIG_IGNORE_H
#define OPAQ_CLI_READ_CONFIG_IGNORE_H

#include <stddef.h>
#include <yyjson.h>

#include "cli/read/name_pattern.h"

struct ignore_list {
    struct name_patterns patterns;
    const char **texts; /* of the patterns, as the configuration has them, and of its memory */
    size_t capacity;
    struct opaq_error refused; /* why the first entry that is no pattern was skipped; OPAQ_OK if none was */
};

/* Entries of the configuration's lists (ignore, exclude_modules, modules_to_not_convert), patterns of opaq/pattern.h. */
void ignore_list_make(yyjson_val *quantization, struct ignore_list *list);
void ignore_list_free(struct ignore_list *list);

/* The entry that names a module; NULL if none does. */
const char *ignore_list_find(const struct ignore_list *list, const char *module);

#endif

/* cli/config_ignore.h: the modules that a quantization_config leaves as they are. */
#ifndef OPAQ_CLI_CONFIG_IGNORE_H
#define OPAQ_CLI_CONFIG_IGNORE_H

#include <regex.h>
#include <stdbool.h>
#include <stddef.h>
#include <yyjson.h>

struct ignore_entry {
    const char *text; /* as the configuration has it, and of its memory */
    bool is_regular;
    regex_t expression;
};

struct ignore_list {
    struct ignore_entry *entries;
    size_t count;
};

/* Entries of the configuration's lists (ignore, exclude_modules, modules_to_not_convert) are names, patterns with '*',
 * or regular expressions of Python behind "re:". Expressions with counted repetition, references or look-around are
 * passed over: POSIX has no such thing, or pays too much for it. */
void ignore_list_make(yyjson_val *quantization, struct ignore_list *list);
void ignore_list_free(struct ignore_list *list);

/* The entry that names a module; NULL if none does. */
const char *ignore_list_find(const struct ignore_list *list, const char *module);

#endif

/* cli/text_set.h: a set of texts that others keep. */
#ifndef OPAQ_CLI_TEXT_SET_H
#define OPAQ_CLI_TEXT_SET_H

#include <stdbool.h>
#include <stddef.h>

struct text_set {
    const char **slots;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
};

/* False if it is there already. */
bool text_set_add(struct text_set *set, const char *text);
void text_set_free(struct text_set *set);

#endif

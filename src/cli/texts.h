/* cli/texts.h: predicates on texts, and sets of them. Depends on libc. */
#ifndef OPAQ_CLI_TEXTS_H
#define OPAQ_CLI_TEXTS_H

#include <stdbool.h>
#include <stddef.h>

bool ends_with(const char *text, const char *end);

/* As ends_with, for the first `length` characters of `text`. */
bool prefix_ends_with(const char *text, size_t length, const char *end);

/* Whether `words`, separated by spaces, contain `word`. */
bool has_word(const char *words, const char *word);

/* A hash set of texts that the caller keeps. */
struct text_set {
    const char **slots;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
};

/* False if the set has it already. */
bool text_set_add(struct text_set *set, const char *text);
void text_set_free(struct text_set *set);

#endif

/* cli/words.h: small questions about texts. */
#ifndef OPAQ_CLI_WORDS_H
#define OPAQ_CLI_WORDS_H

#include <stdbool.h>
#include <stddef.h>

bool ends_with(const char *text, const char *end);

/* The same of its first `length` characters. */
bool part_ends_with(const char *text, size_t length, const char *end);

/* Whether `word` is one of words that are separated by spaces. */
bool has_word(const char *words, const char *word);

#endif

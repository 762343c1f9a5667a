/* cli/commands/nearest.h: suggests the name closest to a mistyped one. Depends on libc. */
#ifndef OPAQ_CLI_COMMANDS_NEAREST_H
#define OPAQ_CLI_COMMANDS_NEAREST_H

#include <stddef.h>

/* Damerau-Levenshtein distance (adjacent transpositions count 1). */
size_t edit_distance(const char *a, size_t a_length, const char *b, size_t b_length);

/* The search for the nearest of many names; `best` is NULL if none is close enough. */
struct nearest {
    const char *word;
    const char *best;
    size_t best_length;
    size_t best_distance;
};
struct nearest nearest_begin(const char *word);
void nearest_try(struct nearest *nearest, const char *name, size_t length);

#endif

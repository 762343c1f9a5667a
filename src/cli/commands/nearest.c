/* cli/commands/nearest.c: see nearest.h. */
#include "cli/commands/nearest.h"

#include <string.h>

enum { LENGTH_LIMIT = 63 };

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

size_t edit_distance(const char *a, size_t a_length, const char *b, size_t b_length) {
    size_t rows[3][LENGTH_LIMIT + 1]; /* distances for the prefixes of a of i-2, i-1 and i letters */
    if (a_length > LENGTH_LIMIT || b_length > LENGTH_LIMIT) {
        return a_length + b_length;
    }
    size_t *before = rows[0];
    size_t *last = rows[1];
    size_t *now = rows[2];
    for (size_t j = 0; j <= b_length; ++j) {
        before[j] = last[j] = j;
    }
    for (size_t i = 1; i <= a_length; ++i) {
        now[0] = i;
        for (size_t j = 1; j <= b_length; ++j) {
            now[j] = smaller(smaller(last[j], now[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                now[j] = smaller(now[j], before[j - 2] + 1);
            }
        }
        size_t *const oldest = before;
        before = last;
        last = now;
        now = oldest;
    }
    return last[b_length];
}

struct nearest nearest_begin(const char *word) {
    return (struct nearest){word, NULL, 0, 0};
}

/* A name that is a prefix of the word, or the reverse, has a distance of at most 1; one that ends with the word ("nvfp4"
 * for "fp4") has none. */
void nearest_try(struct nearest *nearest, const char *name, size_t length) {
    const size_t word_length = strlen(nearest->word);
    const size_t shorter = smaller(length, word_length);
    const size_t longer = length + word_length - shorter;
    size_t distance = edit_distance(nearest->word, word_length, name, length);
    size_t allowed = longer <= 4 ? 1 : longer <= 9 ? 2 : 3;
    if (shorter >= 2 && memcmp(nearest->word, name, shorter) == 0) {
        distance = smaller(distance, 1);
    }
    if (word_length >= 3 && length > word_length &&
        memcmp(name + length - word_length, nearest->word, word_length) == 0) {
        distance = 0;
    }
    if (distance <= allowed && (nearest->best == NULL || distance < nearest->best_distance)) {
        nearest->best = name;
        nearest->best_length = length;
        nearest->best_distance = distance;
    }
}

/* cli/texts.c: see texts.h. */
#include "cli/texts.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"

bool prefix_ends_with(const char *text, size_t length, const char *end) {
    const size_t end_length = strlen(end);
    return length >= end_length && memcmp(text + length - end_length, end, end_length) == 0;
}

bool ends_with(const char *text, const char *end) { return prefix_ends_with(text, strlen(text), end); }

bool has_word(const char *words, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = strstr(words, word); at != NULL; at = strstr(at + 1, word)) {
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) {
            return true;
        }
    }
    return false;
}

/* ---- sets ---- */

/* The slot of the text, or the empty slot where it belongs. */
static const char **find(const struct text_set *set, const char *text) {
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (const char *at = text; *at != '\0'; ++at) {
        hash = (hash ^ (unsigned char)*at) * 0x100000001B3u;
    }
    size_t at = (size_t)(hash ^ hash >> 32) & (set->capacity - 1);
    while (set->slots[at] != NULL && strcmp(set->slots[at], text) != 0) {
        at = (at + 1) & (set->capacity - 1);
    }
    return &set->slots[at];
}

bool text_set_add(struct text_set *set, const char *text) {
    if (2 * set->count >= set->capacity) {
        const struct text_set old = *set;
        set->capacity = old.capacity == 0 ? 64 : 2 * old.capacity;
        set->slots = alloc_array(set->capacity, sizeof *set->slots);
        for (size_t i = 0; i < old.capacity; ++i) {
            if (old.slots[i] != NULL) {
                *find(set, old.slots[i]) = old.slots[i];
            }
        }
        free(old.slots);
    }
    const char **const slot = find(set, text);
    if (*slot != NULL) {
        return false;
    }
    *slot = text;
    ++set->count;
    return true;
}

void text_set_free(struct text_set *set) {
    free(set->slots);
    *set = (struct text_set){NULL, 0, 0};
}

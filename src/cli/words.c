/* cli/words.c: see words.h. */
#include "cli/words.h"

#include <string.h>

bool part_ends_with(const char *text, size_t length, const char *end) {
    const size_t end_length = strlen(end);
    return length >= end_length && memcmp(text + length - end_length, end, end_length) == 0;
}

bool ends_with(const char *text, const char *end) { return part_ends_with(text, strlen(text), end); }

bool has_word(const char *words, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = strstr(words, word); at != NULL; at = strstr(at + 1, word)) {
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) {
            return true;
        }
    }
    return false;
}

/* fuzz_words.h: plans' texts made from fuzz input, and the expectations for all plans. Depends on
 * opaq/opaq.h. */
#ifndef FUZZ_WORDS_H
#define FUZZ_WORDS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

static inline void expect(int condition) {
    if (!condition) {
        abort();
    }
}

static inline int begins_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* An error is terminated and printable, and begins with the function's name. */
static inline void expect_refusal(enum opaq_status status, const struct opaq_error *error, const char *who) {
    expect(error->status == status && begins_with(error->text, who));
    const char *end = memchr(error->text, '\0', sizeof error->text);
    expect(end != NULL);
    for (const char *p = error->text; p < end; ++p) {
        expect(*p >= ' ' && *p <= '~');
    }
}

static inline int is_quantized(const struct opaq_form *form) { return form->kind == OPAQ_FORM_QUANTIZED; }

static inline int same_form(const struct opaq_form *a, const struct opaq_form *b) {
    return a->kind == b->kind && (!is_quantized(a) || opaq_spec_equal(&a->spec, &b->spec));
}

/* The words in reverse order, in a buffer with room for the text. */
static inline void reverse_words(const char *text, size_t length, char *reversed) {
    size_t written = 0;
    size_t end = length;
    while (end > 0) {
        size_t begin = end;
        while (begin > 0 && text[begin - 1] != ' ') {
            --begin;
        }
        memcpy(reversed + written, text + begin, end - begin);
        written += end - begin;
        reversed[written++] = ' ';
        end = begin > 0 ? begin - 1 : 0;
    }
    written -= written > 0;
    expect(written == length);
}

/* The input's bytes unchanged, or a word for each of them, as its first byte selects; in memory of exactly the
 * text's size. NULL without input. */
static inline char *text_of_input(const uint8_t *data, size_t size, const char *const *words, size_t count,
                                  size_t *length) {
    enum { WORD_LIMIT = 64 };
    if (size == 0) {
        return NULL;
    }
    char *text = malloc(size * WORD_LIMIT);
    expect(text != NULL);
    *length = size - 1;
    memcpy(text, data + 1, size - 1);
    if (data[0] & 1) {
        *length = 0;
        for (size_t i = 1; i < size; ++i) {
            *length +=
                (size_t)snprintf(text + *length, WORD_LIMIT, "%s%s", i > 1 ? " " : "", words[data[i] % count]);
        }
    }
    char *exact = malloc(*length + (*length == 0)); /* for AddressSanitizer */
    expect(exact != NULL);
    memcpy(exact, text, *length);
    free(text);
    return exact;
}

#endif

/* op/plan/plan_words.h: the words that plans are made of, "x=mxfp8 grad=xw", and plans kept by their texts. Depends on
 * opaq/op.h. */
#ifndef OPAQ_OP_PLAN_PLAN_WORDS_H
#define OPAQ_OP_PLAN_PLAN_WORDS_H

#include <stdbool.h>

#include "base/text_table.h"
#include "opaq/op.h"

struct plan_word {
    const char *text;
    size_t length;
    size_t position;
    const char *value; /* after "=", or NULL */
    size_t value_length;
};

/* Whether a word has this key (this value, which is required). */
bool word_is(const struct plan_word *word, const char *key);
bool word_value_is(const struct plan_word *word, const char *value);

/* OPAQ_ERROR_TEXT with the word, its position and what was expected instead. */
enum opaq_status word_refuse(const struct plan_word *word, const char *expected, struct opaq_error *error);

/* The values of words. Letters: each at most once, as the bits of their places in `letters`. Integers: lowest to
 * highest, without a sign but "-". */
enum opaq_status word_read_form(const struct plan_word *word, struct opaq_form *form, struct opaq_error *error);
enum opaq_status word_read_letters(const struct plan_word *word, const char *letters, int32_t *bits,
                                   struct opaq_error *error);
enum opaq_status word_read_integer(const struct plan_word *word, int64_t lowest, int64_t highest,
                                   int64_t *integer, struct opaq_error *error);
enum opaq_status word_read_backward(const struct plan_word *word, int32_t *backward, struct opaq_error *error);
enum opaq_status word_read_precision(const struct plan_word *word, int32_t *precision,
                                     struct opaq_error *error);
enum opaq_status word_read_order(const struct plan_word *word, int32_t *order, struct opaq_error *error);

/* Calls `read` with each word of a text, in order; refuses empty words and keys that came before. */
enum opaq_status plan_read_words(const char *text, size_t length, size_t limit, void *plan,
                                 enum opaq_status (*read)(const struct plan_word *word, void *plan,
                                                          struct opaq_error *error),
                                 struct opaq_error *error);

/* The plan, of `bytes` bytes, of a text argument; parsed the first time only. */
enum opaq_status plan_find_or_parse(struct text_table *table, const struct opaq_value *text, size_t bytes,
                                    enum opaq_status (*parse)(const char *text, size_t length, void *plan,
                                                              struct opaq_error *error),
                                    void *plan, struct opaq_error *error);

#endif

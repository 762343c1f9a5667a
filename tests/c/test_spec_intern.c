/* test_spec_intern.c: one shared copy per value: the same pointer for every text of it, from any number of
 * threads, up to the limit. Also runs under ThreadSanitizer. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "support_spec.h"

static const struct opaq_spec *intern(const char *text) {
    const struct opaq_spec *spec = NULL;
    struct opaq_error error;
    if (opaq_spec_intern(text, strlen(text), &spec, &error) != OPAQ_OK) {
        CHECK_FAIL("%s", error.text);
    }
    return spec;
}

static void one_pointer_per_value(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    const struct opaq_spec **first = calloc((size_t)list.count, sizeof *first);
    for (int i = 0; first != NULL && i < list.count; ++i) {
        first[i] = intern(spec_text(&list.spec[i]).text);
        CHECK(first[i] != NULL && opaq_spec_equal(first[i], &list.spec[i]));
    }
    for (int i = 0; first != NULL && i < list.count; ++i) {
        CHECK(intern(spec_text(&list.spec[i]).text) == first[i]);
        CHECK(i == 0 || first[i] != first[i - 1]);
    }
    free(first);
    spec_list_free(&list);
}

static void aliases_share_the_pointer(void) {
    const struct opaq_spec *late = intern("nvfp4+sr+both+rht=0xd7e8"); /* before its canonical text */
    CHECK(intern("nvfp4+both+rht+sr") == late);
    CHECK(intern("nvfp4+rht+sr+both") == late);
    CHECK(intern("fp8.e4m3+rowwise") == intern("fp8"));
    CHECK(intern("fp8+eps=0") == intern("fp8+rule=te"));
    CHECK(intern("fp8+eps=0.5") == intern("fp8+eps=5e-1"));
    CHECK(intern("fp8+eps=0.5") != intern("fp8"));
}

static void only_the_given_length_counts(void) {
    char text[] = {'f', 'p', '8', 'x'};
    const struct opaq_spec *spec = NULL;
    CHECK_EQ_INT(opaq_spec_intern(text, 3, &spec, NULL), OPAQ_OK);
    CHECK(spec == intern("fp8"));
    memset(text, '#', sizeof text); /* the text is not borrowed */
    CHECK(spec == intern("fp8"));
}

static void refusals_leave_the_pointer(void) {
    const struct opaq_spec *spec = NULL;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_spec_intern("nvfp4+rth", 9, &spec, &error), OPAQ_ERROR_TEXT);
    CHECK(spec == NULL && strstr(error.text, "at position 6") != NULL);
    CHECK_EQ_INT(opaq_spec_intern("nvfp4+2d+rht", 12, &spec, NULL), OPAQ_ERROR_SPEC);
    /* the terminator is not part of it */
    CHECK_EQ_INT(opaq_spec_intern("nvfp4", 6, &spec, &error), OPAQ_ERROR_TEXT);
    CHECK_EQ_INT(opaq_spec_intern(NULL, 3, &spec, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_intern("fp8", 3, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_intern("", 0, &spec, &error), OPAQ_ERROR_TEXT);
    CHECK(spec == NULL);
}

/* ---- threads ---- */

enum { THREADS = 8, SHARED_TEXTS = 400, OWN_TEXTS = 100 };

struct worker {
    int index;
    pthread_barrier_t *start;
    const struct opaq_spec *shared[SHARED_TEXTS]; /* the result of each text on this thread */
    const struct opaq_spec *alias[SHARED_TEXTS];
    const struct opaq_spec *own[OWN_TEXTS];
};

/* Every thread requests the same values in another order, by two texts each, and some values that no other
 * thread requests. */
static void *intern_many(void *argument) {
    struct worker *worker = argument;
    char text[OPAQ_SPEC_TEXT_BYTES];
    (void)pthread_barrier_wait(worker->start);
    for (int i = 0; i < SHARED_TEXTS; ++i) {
        const int k = (i * 7 + worker->index * 53) % SHARED_TEXTS;
        const int alias_first = (worker->index + i) % 2;
        for (int step = 0; step < 2; ++step) {
            const int alias = step ^ alias_first;
            (void)snprintf(text, sizeof text, alias ? "fp8+eps=%d.25+both" : "fp8+both+eps=%d.25", k + 1000);
            *(alias ? &worker->alias[k] : &worker->shared[k]) = intern(text);
        }
        if (i % (SHARED_TEXTS / OWN_TEXTS) == 0) {
            const int own = i / (SHARED_TEXTS / OWN_TEXTS);
            (void)snprintf(text, sizeof text, "fp8row+eps=%d.5", 5000 + worker->index * OWN_TEXTS + own);
            worker->own[own] = intern(text);
        }
    }
    return NULL;
}

static void threads_agree(void) {
    static struct worker workers[THREADS];
    pthread_t thread[THREADS];
    pthread_barrier_t start;
    CHECK_EQ_INT(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; ++i) {
        workers[i].index = i;
        workers[i].start = &start;
        CHECK_EQ_INT(pthread_create(&thread[i], NULL, intern_many, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; ++i) {
        CHECK_EQ_INT(pthread_join(thread[i], NULL), 0);
    }
    (void)pthread_barrier_destroy(&start);
    for (int i = 0; i < THREADS; ++i) {
        for (int k = 0; k < SHARED_TEXTS; ++k) {
            CHECK(workers[i].shared[k] == workers[0].shared[k] && workers[i].alias[k] == workers[0].shared[k]);
            CHECK(workers[i].shared[k]->epsilon == (float)(k + 1000) + 0.25f);
        }
        for (int k = 0; k < OWN_TEXTS; ++k) {
            CHECK(workers[i].own[k]->epsilon == (float)(5000 + i * OWN_TEXTS + k) + 0.5f);
        }
    }
}

/* ---- the limit: last, because interned values stay ---- */

static void the_limit_is_an_error_and_known_texts_stay(void) {
    const struct opaq_spec *known = intern("nvfp4+both+2d");
    char text[OPAQ_SPEC_TEXT_BYTES];
    enum opaq_status status = OPAQ_OK;
    struct opaq_error error;
    int made = 0;
    for (; made <= OPAQ_INTERN_LIMIT && status == OPAQ_OK; ++made) {
        const struct opaq_spec *spec = NULL;
        (void)snprintf(text, sizeof text, "fp8blk2+eps=%d", made + 1);
        status = opaq_spec_intern(text, strlen(text), &spec, &error);
        CHECK(status != OPAQ_OK || spec->epsilon == (float)(made + 1));
        CHECK(status == OPAQ_OK || spec == NULL);
    }
    CHECK_EQ_INT(status, OPAQ_ERROR_LIMIT);
    CHECK_EQ_INT(error.status, OPAQ_ERROR_LIMIT);
    CHECK(strstr(error.text, "spec_intern") != NULL);
    CHECK(made > OPAQ_INTERN_LIMIT / 4); /* a value takes at most two texts, and earlier tests made a few */
    const struct opaq_spec *spec = NULL;
    CHECK_EQ_INT(opaq_spec_intern("fp8blk2+pow2+eps=7.5", 20, &spec, NULL), OPAQ_ERROR_LIMIT);
    CHECK_EQ_INT(opaq_spec_intern("nvfp4+rth", 9, &spec, NULL), OPAQ_ERROR_TEXT);
    CHECK(intern("nvfp4+both+2d") == known);
    CHECK(intern("fp8blk2+eps=1")->epsilon == 1.0f);
    printf("  %d more texts until the limit\n", made - 1);
}

static const struct test_case tests[] = {TEST(one_pointer_per_value),
                                         TEST(aliases_share_the_pointer),
                                         TEST(only_the_given_length_counts),
                                         TEST(refusals_leave_the_pointer),
                                         TEST(threads_agree),
                                         TEST(the_limit_is_an_error_and_known_texts_stay)};
TEST_MAIN(tests)

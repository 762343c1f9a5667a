/* test_delayed.c: delayed scaling's history, compared with a model of Transformer Engine's rule. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_float.h"
#include "support_tensor.h"

enum { COUNT_LIMIT = 5, LENGTH_LIMIT = 16 };

/* One tensor's state in Transformer Engine: entry 0 collects the current amax, the newest recorded amax is the
 * last entry. */
struct model {
    int length;
    float history[LENGTH_LIMIT];
    float scale;
};

/* The rule of Transformer Engine's kernel_bulk (common/recipe/delayed_scaling.cu): the candidates are the
 * entries before the roll, moved down by one, followed by the newest amax; the maximum includes all `length` of
 * them, and all except the first, the oldest, are kept. */
static void model_update(struct model *m, float reduced, int has_reduced, float largest, int margin,
                         int most_recent) {
    const float last = has_reduced && !(reduced == 0.0f) ? reduced : m->history[0];
    float amax = 0.0f;
    if (!(last == 0.0f)) {
        float candidates[LENGTH_LIMIT];
        for (int i = 0; i < m->length; ++i) {
            candidates[i] = i < m->length - 1 ? m->history[i + 1] : last;
            amax = fmaxf(amax, candidates[i]); /* which ignores NaNs */
        }
        for (int i = 0; i < m->length; ++i) {
            m->history[i] = i > 0 ? candidates[i] : 0.0f;
        }
    }
    amax = most_recent ? last : amax;
    if (isfinite(amax) && amax > 0.0f) {
        m->scale = (float)((double)largest * pow(2.0, -margin)) / amax;
    }
    if (isinf(m->scale)) {
        m->scale = 0x1.FFFFFEp127f;
    }
}

static uint64_t random_state = 1;

static uint32_t next_random(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

/* Mostly normal values, occasionally those of a step that overflowed. */
static float next_amax(void) {
    switch (next_random() % 12) {
    case 0:
        return 0.0f;
    case 1:
        return support_nan();
    case 2:
        return support_infinity();
    case 3:
        return 0x1p-149f * (float)(1 + next_random() % 100);
    case 4:
        return 0x1p127f;
    default:
        return (float)(1 + next_random() % 100000) * 0x1p-10f;
    }
}

struct run {
    int length;
    int count;
    int margin;
    enum opaq_element element;
    enum opaq_amax_algorithm algorithm;
    int reduced; /* 0 never, 1 always, 2 sometimes */
};

static void check_state(const struct run *run, const struct model *models, const float *history,
                        const float *scale, int step) {
    for (int t = 0; t < run->count; ++t) {
        int same = support_bits(scale[t]) == support_bits(models[t].scale);
        for (int i = 0; i < run->length; ++i) {
            same &= support_bits(history[i * run->count + t]) == support_bits(models[t].history[i]);
        }
        if (!same) {
            CHECK_FAIL(
                "length %d, margin %d, element %d, algorithm %d, reduced %d, step %d, tensor %d: scale %g, "
                "expected %g",
                run->length, run->margin, run->element, run->algorithm, run->reduced, step, t, (double)scale[t],
                (double)models[t].scale);
        }
    }
}

static void simulate(const struct run *run) {
    const size_t floats = (size_t)(run->length * run->count);
    float *history = calloc(floats, sizeof *history); /* of exactly this size, for AddressSanitizer */
    float *scale = calloc((size_t)run->count, sizeof *scale);
    struct model models[COUNT_LIMIT];
    memset(models, 0, sizeof models);
    for (int t = 0; history != NULL && scale != NULL && t < run->count; ++t) {
        models[t].length = run->length;
        models[t].scale = scale[t] = 1.0f;
    }
    const struct opaq_delayed_state state = {history, scale, run->length, run->count};
    for (int step = 0; step < 60; ++step) {
        float reduced[COUNT_LIMIT];
        const int has_reduced = run->reduced == 1 || (run->reduced == 2 && next_random() % 2);
        for (int t = 0; t < run->count; ++t) {
            history[t] = models[t].history[0] = next_amax();
            reduced[t] = next_amax();
        }
        CHECK_EQ_INT(opaq_delayed_update(&state, has_reduced ? reduced : NULL, run->element, run->margin,
                                         run->algorithm, NULL, NULL),
                     OPAQ_OK);
        for (int t = 0; t < run->count; ++t) {
            model_update(&models[t], reduced[t], has_reduced, run->element == OPAQ_E4M3 ? 448.0f : 57344.0f,
                         run->margin, run->algorithm == OPAQ_AMAX_MOST_RECENT);
        }
        check_state(run, models, history, scale, step);
    }
    free(scale);
    free(history);
}

static void random_sequences(void) {
    static const int lengths[] = {1, 2, 3, 16};
    static const int margins[] = {0, 1, -2, 64, -64};
    int runs = 0;
    for (int i = 0; i < 4 * 5 * 2 * 2 * 3; ++i) {
        const struct run run = {.length = lengths[i % 4],
                                .margin = margins[i / 4 % 5],
                                .element = i / 20 % 2 ? OPAQ_E5M2 : OPAQ_E4M3,
                                .algorithm = i / 40 % 2 ? OPAQ_AMAX_MOST_RECENT : OPAQ_AMAX_MAX,
                                .reduced = i / 80,
                                .count = 1 + i % COUNT_LIMIT};
        simulate(&run);
        ++runs;
    }
    printf("  %d sequences of 60 steps\n", runs);
}

/* Three steps of a history of three, calculated by hand. */
static void by_hand(void) {
    float history[3] = {4.0f, 0.0f, 0.0f};
    float scale = 1.0f;
    const struct opaq_delayed_state state = {history, &scale, 3, 1};
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(history[0] == 0.0f && history[1] == 0.0f && history[2] == 4.0f && scale == 112.0f);
    history[0] = 2.0f;
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 1, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(history[0] == 0.0f && history[1] == 4.0f && history[2] == 2.0f && scale == 56.0f);
    history[0] = 1.0f;
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(history[1] == 2.0f && history[2] == 1.0f && scale == 112.0f); /* the 4 is dropped, and counts for the
                                                                         * last time */
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(history[1] == 2.0f && history[2] == 1.0f && scale == 112.0f); /* no amax was collected: no change */
    const float reduced = 7.0f;
    CHECK_EQ_INT(opaq_delayed_update(&state, &reduced, OPAQ_E4M3, 0, OPAQ_AMAX_MOST_RECENT, NULL, NULL),
                 OPAQ_OK);
    CHECK(history[1] == 1.0f && history[2] == 7.0f && scale == 64.0f);
}

/* `length` amaxes count: with a history of two, an 8 and then a 1 give 448 / 8; only the next step drops the
 * 8. */
static void the_oldest_amax_counts(void) {
    static const float amaxes[] = {8.0f, 1.0f, 1.0f};
    static const float scales[] = {56.0f, 56.0f, 448.0f};
    float history[2] = {0.0f, 0.0f};
    float scale = 1.0f;
    const struct opaq_delayed_state state = {history, &scale, 2, 1};
    for (int step = 0; step < 3; ++step) {
        history[0] = amaxes[step];
        CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
        CHECK(history[0] == 0.0f && history[1] == amaxes[step] && scale == scales[step]);
    }
}

static void an_infinite_scale_is_the_largest_float(void) {
    float history[1] = {0x1p-149f};
    float scale = 1.0f;
    const struct opaq_delayed_state state = {history, &scale, 1, 1};
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(scale == 0x1.FFFFFEp127f);
    scale = support_infinity(); /* no amax collected */
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK(scale == 0x1.FFFFFEp127f);
}

static const struct test_case tests[] = {TEST(random_sequences), TEST(by_hand), TEST(the_oldest_amax_counts),
                                         TEST(an_infinite_scale_is_the_largest_float)};
TEST_MAIN(tests)

/* test_linear_parallel.c: the linear operators on threads: any number of them gives the same bytes, and
 * concurrent callers on one pool, which read and intern plans, get the same results as a single one. Also runs
 * under ThreadSanitizer. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "support_linear.h"

/* ---- numbers of threads ---- */

static void thread_count_does_not_matter(void) {
    static const int threads[] = {1, 2, 5};
    struct linear_layer layer = linear_layer_make(130, 100, 150, OPAQ_BF16); /* large enough to be shared */
    struct opaq_pool *pools[3] = {NULL};
    for (int t = 0; t < 3; ++t) {
        CHECK_EQ_INT(opaq_pool_create(threads[t], &pools[t], NULL), OPAQ_OK);
    }
    for (int i = 0; i < linear_recipe_count; ++i) {
        const char *rest = i % 3 == 0   ? "grad=xwb"
                           : i % 3 == 1 ? "grad=xwb backward=dequantized y=mxfp8 dx=nvfp4+sr"
                                        : "grad=xwb save=xw y=fp8 dx=fp8row";
        const struct linear_text plan = linear_plan(&linear_recipes[i], rest);
        struct linear_step expected = linear_step(&layer, plan.text, &linear_seeded);
        for (int t = 0; t < 3; ++t) {
            const struct opaq_parallel parallel = opaq_pool_parallel(pools[t]);
            struct linear_given given = linear_seeded;
            given.settings.parallel = &parallel;
            struct linear_step step = linear_step(&layer, plan.text, &given);
            linear_check_same_step(&step, &expected, plan.text);
            linear_step_free(&step);
        }
        linear_step_free(&expected);
    }
    for (int t = 0; t < 3; ++t) {
        opaq_pool_destroy(pools[t]);
    }
    linear_layer_free(&layer);
}

/* Tensors that the operator changes. */
static void changed_tensors_do_not_depend_on_threads(void) {
    const char *plan =
        "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed dx=fp8.e5m2+delayed grad=xwb main_grad=add";
    enum { M = 120, N = 90, K = 110 };
    static float numbers[4][N][K];
    struct linear_state states[4];
    struct linear_layer layer = linear_layer_make(M, N, K, OPAQ_BF16);
    for (int t = 0; t < 4; ++t) {
        struct opaq_pool *pool = NULL;
        CHECK_EQ_INT(opaq_pool_create(t == 3 ? 5 : t + 1, &pool, NULL), OPAQ_OK);
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        const struct opaq_tensor main_grad = {
            .data = numbers[t], .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {N, K}, .strides = {K, 1}};
        states[t] = (struct linear_state){.scale_fwd = {1, 1, 1}, .scale_bwd = {1, 1}};
        const struct linear_given given = {
            .main_grad = &main_grad, .state = &states[t], .settings = {.parallel = t == 0 ? NULL : &parallel}};
        for (int n = 0; n < 3; ++n) {
            struct linear_step step = linear_step(&layer, plan, &given);
            linear_step_free(&step);
        }
        opaq_pool_destroy(pool);
        CHECK_BYTES(numbers[t], numbers[0], sizeof numbers[0], "main_grad, case %d", t);
        CHECK_BYTES(&states[t], &states[0], sizeof states[0], "state, case %d", t);
    }
    linear_layer_free(&layer);
}

/* ---- concurrent callers ---- */

enum { CALLERS = 6, STEPS = 12, TEXTS = 60 };

struct caller {
    int index;
    pthread_barrier_t *start;
    const struct linear_layer *layer;
    const struct linear_step *expected; /* of every recipe */
    struct opaq_parallel parallel;
    int right; /* number of correct forms */
};

/* Plans that all threads request, in different orders, and some that only one requests. */
static void intern_plans(struct caller *caller) {
    const struct opaq_op *op = opaq_op_find("linear_backward");
    for (int i = 0; i < TEXTS; ++i) {
        const int k = (i * 7 + caller->index * 11) % TEXTS;
        for (int own = 0; own < 2; ++own) {
            char text[64];
            struct opaq_form form;
            const int number = own ? 1000 * (caller->index + 1) + k : k + 1;
            (void)snprintf(text, sizeof text, "grad=x dx=fp8blk2+eps=%d", number);
            const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {[7] = op_text_value(text)};
            caller->right += opaq_op_form(op, values, 0, &form, NULL) == OPAQ_OK &&
                             form.kind == OPAQ_FORM_QUANTIZED && form.spec.epsilon == (float)number;
        }
    }
}

static void *call_many(void *argument) {
    struct caller *caller = argument;
    struct linear_given given = linear_seeded;
    given.settings.parallel = &caller->parallel;
    (void)pthread_barrier_wait(caller->start);
    intern_plans(caller);
    for (int i = 0; i < STEPS; ++i) {
        const int k = (i * 5 + caller->index * 3) % linear_recipe_count;
        char rest[32]; /* a separate text, so that plans are interned while others read them */
        (void)snprintf(rest, sizeof rest, "grad=xwb margin=%d", caller->index % 3);
        const struct linear_text plan = linear_plan(&linear_recipes[k], rest);
        struct linear_step step = linear_step(caller->layer, plan.text, &given);
        linear_check_same_step(&step, &caller->expected[k], plan.text);
        linear_step_free(&step);
    }
    return NULL;
}

static void many_callers_share_a_pool(void) {
    static struct caller callers[CALLERS];
    pthread_t thread[CALLERS];
    pthread_barrier_t start;
    struct opaq_pool *pool = NULL;
    struct linear_layer layer = linear_layer_make(64, 48, 80, OPAQ_BF16);
    struct linear_step *expected = calloc((size_t)linear_recipe_count, sizeof *expected);
    for (int i = 0; i < linear_recipe_count && expected != NULL; ++i) {
        expected[i] = linear_step(&layer, linear_plan(&linear_recipes[i], "grad=xwb").text, &linear_seeded);
    }
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    CHECK_EQ_INT(pthread_barrier_init(&start, NULL, CALLERS), 0);
    for (int i = 0; i < CALLERS; ++i) {
        callers[i] = (struct caller){i, &start, &layer, expected, opaq_pool_parallel(pool), 0};
        CHECK_EQ_INT(pthread_create(&thread[i], NULL, call_many, &callers[i]), 0);
    }
    for (int i = 0; i < CALLERS; ++i) {
        CHECK_EQ_INT(pthread_join(thread[i], NULL), 0);
        CHECK_EQ_INT(callers[i].right, 2 * TEXTS);
    }
    (void)pthread_barrier_destroy(&start);
    opaq_pool_destroy(pool);
    for (int i = 0; i < linear_recipe_count && expected != NULL; ++i) {
        linear_step_free(&expected[i]);
    }
    free(expected);
    linear_layer_free(&layer);
}

static const struct test_case tests[] = {TEST(thread_count_does_not_matter),
                                         TEST(changed_tensors_do_not_depend_on_threads),
                                         TEST(many_callers_share_a_pool)};
TEST_MAIN(tests)

/* test_experts_parallel.c: the experts' operators on threads: any number of them gives the same bytes, and
 * concurrent callers on one pool, which read and intern plans, get the same results as a single one. Also runs
 * under ThreadSanitizer. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts.h"

static const int64_t random_numbers[2] = {0x123456789ABCDEF, 7000};
static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F16, OPAQ_F32};

/* A forward and a backward. */
struct experts_step {
    struct op_result forward, backward;
};

static struct experts_step step_make(const struct experts_layer *layer, const char *plan,
                                     const struct opaq_parallel *parallel) {
    const struct experts_given given = {.random = random_numbers, .parallel = parallel};
    struct experts_step step = {
        .forward = experts_call(layer->is_routed ? "moe_forward" : "mlp_forward", layer, plan, &given)};
    const struct opaq_tensor h = step.forward.outputs.tensor[1];
    struct experts_given more = given;
    more.h = &h;
    step.backward = experts_call(experts_backward_name(layer), layer, plan, &more);
    return step;
}

static void step_free(struct experts_step *step) {
    op_result_free(&step->forward);
    op_result_free(&step->backward);
}

static void check_same_step(const struct experts_step *a, const struct experts_step *b, const char *what) {
    experts_check_same(&a->forward, &b->forward, what);
    experts_check_same(&a->backward, &b->backward, what);
}

/* ---- numbers of threads ---- */

static const char *const plans[] = {"grad=xgdbc", "x=nvfp4+rht h=mxfp8 w=fp8 dy=nvfp4+rht+sr grad=xgdbc",
                                    "act=swiglu_oai dy=fp8row w=nvfp4 grad=xgdbc",
                                    "act=relu2_no_mul x=fp8+sr backward=dequantized grad=xgdbc"};
enum { PLANS = sizeof plans / sizeof plans[0] };

static void thread_count_does_not_matter(void) {
    static const int threads[] = {1, 2, 4};
    struct opaq_pool *pools[3] = {NULL};
    for (int t = 0; t < 3; ++t) {
        CHECK_EQ_INT(opaq_pool_create(threads[t], &pools[t], NULL), OPAQ_OK);
    }
    for (int i = 0; i < 2 * PLANS; ++i) {
        const bool is_moe = i % 2 == 0;
        const char *plan = plans[i / 2];
        const struct experts_sizes size = {420, is_moe ? 2 : -1, is_moe ? 2 : 1, 96,
                                           72}; /* large enough to be shared */
        struct experts_layer layer = experts_layer_make(&size, plan, dtypes[i % 3]);
        struct experts_step expected = step_make(&layer, plan, NULL);
        for (int t = 0; t < 3; ++t) {
            const struct opaq_parallel parallel = opaq_pool_parallel(pools[t]);
            struct experts_step step = step_make(&layer, plan, &parallel);
            check_same_step(&step, &expected, plan);
            step_free(&step);
        }
        step_free(&expected);
        experts_layer_free(&layer);
    }
    for (int t = 0; t < 3; ++t) {
        opaq_pool_destroy(pools[t]);
    }
}

/* ---- concurrent callers ---- */

enum { CALLERS = 6, STEPS = 8, TEXTS = 40 };

struct caller {
    int index;
    pthread_barrier_t *start;
    const struct experts_layer *layer;
    const struct experts_step *expected; /* of every plan */
    struct opaq_parallel parallel;
    int right; /* number of correct forms */
};

/* Plans that all threads request, in different orders, and some that only one requests. */
static void intern_plans(struct caller *caller) {
    const struct opaq_op *op = opaq_op_find("moe_backward");
    int place = 0;
    while (strcmp(op->argument[place].name, "plan") != 0) {
        ++place;
    }
    for (int i = 0; i < TEXTS; ++i) {
        const int k = (i * 7 + caller->index * 11) % TEXTS;
        for (int own = 0; own < 2; ++own) {
            char text[64];
            struct opaq_form form;
            struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
            (void)snprintf(text, sizeof text, "experts=%d grad=%s",
                           own ? 1000 * (caller->index + 1) + k : k + 1, k % 2 ? "xr" : "r");
            memset(values, 0, sizeof values);
            values[place] = op_text_value(text);
            caller->right += opaq_op_form(op, values, EXPERTS_DX, &form, NULL) == OPAQ_OK &&
                             form.kind == (k % 2 ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT);
        }
    }
}

static void *call_many(void *argument) {
    struct caller *caller = argument;
    (void)pthread_barrier_wait(caller->start);
    intern_plans(caller);
    for (int i = 0; i < STEPS; ++i) {
        const int k = (i * 3 + caller->index) % (PLANS - 1);
        char text[128]; /* a separate text, so that plans are interned while others read them */
        (void)snprintf(text, sizeof text, "%s experts=%d", plans[k], 4 + caller->index % 3);
        struct experts_step step = step_make(caller->layer, text, &caller->parallel);
        check_same_step(&step, &caller->expected[k], text);
        step_free(&step);
    }
    return NULL;
}

static void many_callers_share_a_pool(void) {
    static struct caller callers[CALLERS];
    pthread_t thread[CALLERS];
    pthread_barrier_t start;
    struct opaq_pool *pool = NULL;
    const struct experts_sizes size = {40, 2, 4, 64, 48};
    struct experts_layer layer = experts_layer_make(&size, plans[0], OPAQ_BF16);
    struct experts_step expected[PLANS - 1]; /* except the one without a gate */
    for (int64_t s = 0; s < 80; ++s) {       /* the same for all numbers of experts from 4 on */
        layer.ids[s] = s % 9 == 4 ? -1 : s % 4;
    }
    for (int i = 0; i < PLANS - 1; ++i) {
        expected[i] = step_make(&layer, plans[i], NULL);
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
    for (int i = 0; i < PLANS - 1; ++i) {
        step_free(&expected[i]);
    }
    experts_layer_free(&layer);
}

static const struct test_case tests[] = {TEST(thread_count_does_not_matter), TEST(many_callers_share_a_pool)};
TEST_MAIN(tests)

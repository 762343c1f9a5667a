/* test_alloc_failure.c: allocations and thread creations fail at the n-th request, for every n until no request
 * is left to fail. Each time: the right status, no leak (AddressSanitizer checks), and the next attempt works.
 * The linker redirects the library's calls to this file (--wrap, see CMakeLists.txt). */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts.h"
#include "support_linear.h"
#include "support_quant.h"
#include "support_runner_layer.h"
#include "support_spec.h"

/* ---- requests that can be made to fail ---- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **memory, size_t alignment, size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **memory, size_t alignment, size_t size);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);

static atomic_int requests_left = -1; /* number of requests until one fails; below 0: none fails */
static atomic_int failed_memory;
static atomic_int failed_threads;
static atomic_int locks_taken;

static int fails(atomic_int *kind) {
    if (atomic_load(&requests_left) < 0 || atomic_fetch_sub(&requests_left, 1) != 0) {
        return 0;
    }
    atomic_fetch_add(kind, 1);
    return 1;
}

void *__wrap_malloc(size_t size) { return fails(&failed_memory) ? NULL : __real_malloc(size); }

void *__wrap_calloc(size_t count, size_t size) {
    return fails(&failed_memory) ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *memory, size_t size) {
    return fails(&failed_memory) ? NULL : __real_realloc(memory, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails(&failed_memory) ? NULL : __real_aligned_alloc(alignment, size);
}

int __wrap_posix_memalign(void **memory, size_t alignment, size_t size) {
    return fails(&failed_memory) ? ENOMEM : __real_posix_memalign(memory, alignment, size);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    return fails(&failed_threads) ? EAGAIN : __real_pthread_create(thread, attributes, run, argument);
}

/* Never fails, but is counted. */
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    atomic_fetch_add(&locks_taken, 1);
    return __real_pthread_mutex_lock(mutex);
}

static void fail_at(int n) {
    atomic_store(&failed_memory, 0);
    atomic_store(&failed_threads, 0);
    atomic_store(&requests_left, n);
}

static void fail_never(void) { atomic_store(&requests_left, -1); }

static int has_failed(void) { return atomic_load(&failed_memory) + atomic_load(&failed_threads) > 0; }

/* The status that belongs to the failed request. */
static void check_status(enum opaq_status status, const struct opaq_error *error, int n, const char *what) {
    const enum opaq_status expected = atomic_load(&failed_memory)    ? OPAQ_ERROR_MEMORY
                                      : atomic_load(&failed_threads) ? OPAQ_ERROR_SYSTEM
                                                                     : OPAQ_OK;
    if (status != expected || (expected != OPAQ_OK && (error->status != expected || error->text[0] == '\0'))) {
        CHECK_FAIL("%s, request %d: %s, expected %s", what, n, opaq_status_name(status),
                   opaq_status_name(expected));
    }
}

enum { MANY = 1000 };

/* ---- pools ---- */

static void visit(void *argument, int64_t begin, int64_t end) {
    atomic_fetch_add((atomic_llong *)argument, end - begin);
}

static void pools(void) {
    static const int threads[] = {1, 2, 5, 16};
    for (int i = 0; i < 4; ++i) {
        int n = 0;
        int done = 0;
        for (; n < MANY && !done; ++n) {
            struct opaq_pool *pool = NULL;
            struct opaq_error error = {OPAQ_OK, ""};
            fail_at(n);
            const enum opaq_status status = opaq_pool_create(threads[i], &pool, &error);
            fail_never();
            check_status(status, &error, n, "pool_create");
            CHECK((status == OPAQ_OK) == (pool != NULL));
            done = !has_failed();
            if (status != OPAQ_OK) { /* and a second time without waiting */
                CHECK_EQ_INT(opaq_pool_create(threads[i], &pool, NULL), OPAQ_OK);
            }
            atomic_llong covered = 0;
            const struct opaq_body body = {visit, &covered};
            const struct opaq_parallel parallel = opaq_pool_parallel(pool);
            parallel.run(parallel.context, 100, &body);
            CHECK_EQ_INT(atomic_load(&covered), 100);
            opaq_pool_destroy(pool);
        }
        CHECK(done && n >= threads[i]); /* one thread each except the caller's, and some allocations */
        printf("  %d threads: %d requests\n", threads[i], n - 1);
    }
}

/* ---- interning ---- */

static void interning(void) {
    int done = 0;
    int most = 0;
    for (int n = 0; n < MANY && !done; ++n) {
        char text[2][OPAQ_SPEC_TEXT_BYTES]; /* not canonical, so that two entries are made; new in each pass */
        (void)snprintf(text[0], sizeof text[0], "fp8blk1+eps=%d.0", 3000 + n);
        (void)snprintf(text[1], sizeof text[1], "fp8blk1+both+eps=%d", 3000 + n);
        done = 1;
        for (int i = 0; i < 2; ++i) {
            const struct opaq_spec *spec = NULL;
            const struct opaq_spec *again = NULL;
            struct opaq_error error = {OPAQ_OK, ""};
            fail_at(n);
            const enum opaq_status status = opaq_spec_intern(text[i], strlen(text[i]), &spec, &error);
            fail_never();
            check_status(status, &error, n, "spec_intern");
            CHECK((status == OPAQ_OK) == (spec != NULL));
            done &= !has_failed();
            CHECK_EQ_INT(opaq_spec_intern(text[i], strlen(text[i]), &again, NULL), OPAQ_OK);
            CHECK(again != NULL && (spec == NULL || spec == again) && again->epsilon == (float)(3000 + n));
        }
        most = n;
    }
    CHECK(done && most >= 1);
    printf("  at most %d requests\n", most);
}

/* ---- operations, on a pool ---- */

static void check_operations(const struct tensor *x, const struct opaq_spec *spec,
                             const struct opaq_parallel *parallel) {
    const struct opaq_quantize_args args = args_for(spec);
    const struct opaq_execution execution = {.parallel = parallel};
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor expected_y = dequantized(&expected, 0);
    int done = 0;
    for (int n = 0; n < MANY && !done; ++n) {
        struct tensor q = quantized_like(x, spec);
        struct tensor y = plain_like(&q);
        struct opaq_error error = {OPAQ_OK, ""};
        fail_at(n);
        enum opaq_status status = opaq_quantize(&x->view, &args, &execution, &q.view, &error);
        fail_never();
        check_status(status, &error, n, "quantize");
        done = !has_failed();
        CHECK(status == OPAQ_OK || opaq_quantize(&x->view, &args, &execution, &q.view, NULL) == OPAQ_OK);
        CHECK(first_difference(&q, &expected) < 0);
        fail_at(n);
        status = opaq_dequantize(&q.view, 0, &execution, &y.view, &error);
        fail_never();
        check_status(status, &error, n, "dequantize");
        done &= !has_failed();
        CHECK(status == OPAQ_OK || opaq_dequantize(&q.view, 0, &execution, &y.view, NULL) == OPAQ_OK);
        CHECK(first_difference(&y, &expected_y) < 0);
        tensor_free(&y);
        tensor_free(&q);
    }
    CHECK(done);
    tensor_free(&expected_y);
    tensor_free(&expected);
}

static void operations(void) {
    static const char *const specs[] = {"fp8+both+sr",    "fp8row+both",       "fp8blk1+both",
                                        "fp8blk2+both",   "mxfp8+both+2d",     "mxfp4+both",
                                        "nvfp4+both+rht", "nvfp4+both+4over6", "nvfp4+both+rowscaled"};
    struct opaq_pool *pool = NULL;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct tensor x = tensor_make(300, 130, OPAQ_F32, NULL); /* large enough to be shared between threads */
    tensor_fill(&x, FILL_NORMAL, 1);
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; ++i) {
        const struct opaq_spec spec = spec_of(specs[i]);
        check_operations(&x, &spec, &parallel);
    }
    tensor_free(&x);
    opaq_pool_destroy(pool);
}

/* ---- linear operators ---- */

/* A plan is kept if an allocation succeeds and parsed again otherwise: nothing fails. */
static void plans(void) {
    const struct opaq_op *op = opaq_op_find("linear_forward");
    int done = 0;
    int most = 0;
    for (int n = 0; n < MANY && !done; ++n) {
        char text[64]; /* new in each pass: two quantizers and the plan itself are kept */
        struct opaq_form form;
        struct opaq_error error = {OPAQ_OK, ""};
        (void)snprintf(text, sizeof text, "w=fp8blk1+eps=%d y=fp8blk2+eps=%d cache", 7000 + n, 7000 + n);
        const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {[6] = op_text_value(text)};
        done = 1;
        for (int again = 0; again < 2; ++again) {
            fail_at(again ? -1 : n);
            const enum opaq_status status = opaq_op_form(op, values, LINEAR_W_SAVED, &form, &error);
            fail_never();
            CHECK_EQ_INT(status, OPAQ_OK);
            CHECK_EQ_STR(error.text, "");
            CHECK(form.kind == OPAQ_FORM_QUANTIZED && form.spec.epsilon == (float)(7000 + n));
            done &= !has_failed();
        }
        most = n;
    }
    CHECK(done && most >= 3);
    printf("  at most %d requests\n", most);
}

/* Runs in preallocated memory; the only requests are those for keeping texts, which may fail. */
static int run_without_memory(const char *name, const struct opaq_value *values,
                              const struct op_settings *settings, int n, struct op_result *result) {
    const struct opaq_op *op = opaq_op_find(name);
    static _Alignas(64) char workspace[1 << 19];
    struct opaq_outputs outputs;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 0;
    fail_at(n);
    enum opaq_status status = opaq_op_outputs(op, values, &outputs, &error);
    if (status == OPAQ_OK) {
        status = opaq_op_workspace(op, values, &bytes, &error);
    }
    fail_never();
    const int failed = has_failed();
    CHECK(bytes <= sizeof workspace);
    for (int i = 0; i < outputs.count; ++i) {
        outputs.tensor[i].data = result->outputs.tensor[i].data; /* of the same call, made earlier */
    }
    CHECK_EQ_INT(outputs.count, result->outputs.count);
    if (status == OPAQ_OK) {
        const struct opaq_execution execution = {.parallel = settings->parallel};
        fail_at(n);
        status = opaq_op_run(op, values, &outputs, (struct opaq_span){workspace, bytes}, &execution, &error);
        fail_never();
    }
    CHECK_EQ_INT(status, OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    return failed || has_failed();
}

static void linear_operators(void) {
    static const char *const formats[] = {"fp8blk1", "fp8row", "fp8"};
    struct opaq_pool *pool = NULL;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const struct linear_given given = {.settings = {.parallel = &parallel}};
    struct linear_layer layer = linear_layer_make(70, 60, 80, OPAQ_BF16);
    for (int f = 0; f < 3; ++f) {
        const struct linear_recipe recipe = {formats[f], formats[f], formats[f]};
        const char *plain = "grad=xwb";
        struct linear_step expected = linear_step(&layer, linear_plan(&recipe, plain).text, NULL);
        struct linear_step step = linear_step(&layer, linear_plan(&recipe, plain).text, NULL);
        int done = 0;
        for (int n = 0; n < MANY && !done; ++n) {
            char text[32]; /* an eps far below all values, so that only the text is new */
            struct linear_arguments arguments;
            (void)snprintf(text, sizeof text, "%s+eps=%de-30", formats[f], n + 1);
            const struct linear_recipe same = {text, text, text};
            const struct linear_text plan = linear_plan(&same, plain);
            linear_forward_arguments(&layer, plan.text, &given, &arguments);
            done = !run_without_memory("linear_forward", arguments.value, &given.settings, n, &step.forward);
            linear_backward_arguments(&layer, plan.text, &given, &step.forward, &arguments);
            done &= !run_without_memory("linear_backward", arguments.value, &given.settings, n, &step.backward);
            for (int i = 0; i < 3; ++i) {
                CHECK(op_result_difference(&step.forward, &expected.forward, i) < 0);
                CHECK(op_result_difference(&step.backward, &expected.backward, i) < 0);
                memset(step.forward.outputs.tensor[i].data, 0x5A,
                       op_tensor_bytes(&step.forward.outputs.tensor[i]));
                memset(step.backward.outputs.tensor[i].data, 0x5A,
                       op_tensor_bytes(&step.backward.outputs.tensor[i]));
            }
        }
        CHECK(done);
        linear_step_free(&expected);
        linear_step_free(&step);
    }
    linear_layer_free(&layer);
    opaq_pool_destroy(pool);
}

/* A mixture's forward and backward. */
static void experts_operators(void) {
    const struct experts_sizes size = {40, 2, 3, 48, 32};
    struct opaq_pool *pool = NULL;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const struct op_settings settings = {.parallel = &parallel};
    const char *plain = "x=fp8row w=fp8row dy=fp8row grad=xrgdbc";
    struct experts_layer layer = experts_layer_make(&size, plain, OPAQ_BF16);
    struct op_result forward = experts_call("moe_forward", &layer, plain, NULL);
    const struct opaq_tensor h = forward.outputs.tensor[1];
    const struct experts_given given = {.h = &h};
    struct op_result expected = experts_call("moe_backward", &layer, plain, &given);
    struct op_result backward = experts_call("moe_backward", &layer, plain, &given);
    int done = 0;
    for (int n = 0; n < MANY && !done; ++n) {
        char text[128];
        struct experts_arguments arguments;
        (void)snprintf(text, sizeof text,
                       "x=fp8row+eps=%de-31 w=fp8row+eps=%de-32 dy=fp8row+eps=%de-33 grad=xrgdbc", n + 1, n + 1,
                       n + 1);
        experts_arguments("moe_forward", &layer, text, NULL, &arguments);
        done = !run_without_memory("moe_forward", arguments.value, &settings, n, &forward);
        experts_arguments("moe_backward", &layer, text, &given, &arguments);
        done &= !run_without_memory("moe_backward", arguments.value, &settings, n, &backward);
        experts_check_same(&backward, &expected, text);
    }
    CHECK(done);
    op_result_free(&forward);
    op_result_free(&backward);
    op_result_free(&expected);
    experts_layer_free(&layer);
    opaq_pool_destroy(pool);
}

/* ---- runners ---- */

/* A run makes no allocation and takes no lock, including the first one. */
static void check_run(enum opaq_runner_kind kind, int64_t handle, const struct runner_inputs *inputs,
                      const struct op_result *expected, const char *what) {
    static _Alignas(64) char workspace[1 << 22];
    static _Alignas(64) char output[1 << 14];
    const int count = kind == OPAQ_RUNNER_MOE ? 3 : 1;
    struct opaq_tensor y = expected->outputs.tensor[0];
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 0;
    y.data = output;
    memset(output, 0, sizeof output);
    atomic_store(&locks_taken, 0);
    fail_at(0);
    enum opaq_status status = opaq_runner_workspace(handle, inputs->tensors, count, &bytes, &error);
    if (status == OPAQ_OK && bytes <= sizeof workspace) {
        const struct opaq_span span = {workspace, bytes};
        status = opaq_runner_run(handle, inputs->tensors, count, &y, span, NULL, &error);
    }
    fail_never();
    if (status != OPAQ_OK || has_failed() || atomic_load(&locks_taken) != 0) {
        CHECK_FAIL("%s: %s \"%s\", %d locks", what, opaq_status_name(status), error.text,
                   atomic_load(&locks_taken));
    }
    CHECK_BYTES(output, expected->outputs.tensor[0].data, op_tensor_bytes(&y), "%s", what);
}

/* The words of the plans created here; a number in x= makes each a new text, which is kept. */
static const struct {
    enum opaq_runner_kind kind;
    const char *weights, *words;
} runner_cases[] = {{OPAQ_RUNNER_LINEAR, "nvfp4+both", ""},   {OPAQ_RUNNER_LINEAR, "", " w=mxfp4"},
                    {OPAQ_RUNNER_MLP, "", " act=silu"},       {OPAQ_RUNNER_MOE, "mxfp8", " act=silu"},
                    {OPAQ_RUNNER_MOE, "", " act=silu w=fp8"}, {OPAQ_RUNNER_MOE, "", " act=silu w=nvfp4"}};

static void check_runners(int index, int *most) {
    const enum opaq_runner_kind kind = runner_cases[index].kind;
    struct runner_inputs *inputs = runner_inputs_make(OPAQ_BF16);
    int done = 0;
    for (int n = 0; n < MANY && !done; ++n) {
        char words[128];
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct op_result expected;
        struct opaq_error error = {OPAQ_OK, ""};
        int64_t handle = 0;
        const int before = opaq_runner_count();
        (void)snprintf(words, sizeof words, "x=fp8row+eps=%de-30%s", 100 * (index + 1) + n,
                       runner_cases[index].words);
        struct runner_layer layer = runner_layer_make(kind, OPAQ_BF16, runner_cases[index].weights, words);
        runner_values(&layer, NULL, values);
        fail_at(n);
        enum opaq_status status = opaq_runner_create(runner_op(kind), values, NULL, &handle, &error);
        fail_never();
        done = !has_failed();
        if (status != OPAQ_OK) { /* nothing is left of the failed attempt, and the next one works */
            check_status(status, &error, n, words);
            CHECK_EQ_INT(opaq_runner_count(), before);
            CHECK_EQ_INT(handle, 0);
            status = opaq_runner_create(runner_op(kind), values, NULL, &handle, &error);
        }
        CHECK_EQ_INT(status, OPAQ_OK);
        runner_values(&layer, inputs, values);
        CHECK_EQ_INT(op_call(runner_op(kind)->name, values, NULL, &expected, &error), OPAQ_OK);
        runner_layer_free(&layer);
        check_run(kind, handle, inputs, &expected, words);
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
        op_result_free(&expected);
        *most = n;
    }
    CHECK(done);
    runner_inputs_free(inputs);
}

static void runners(void) {
    for (int i = 0; i < (int)(sizeof runner_cases / sizeof runner_cases[0]); ++i) {
        int most = 0;
        check_runners(i, &most);
        CHECK(most >= 2); /* its own memory, and the texts it keeps */
        printf("  \"%s%s\": at most %d requests\n", runner_cases[i].weights, runner_cases[i].words, most);
    }
}

static enum opaq_status first_run(void *state, const struct opaq_runner_call *call, struct opaq_error *error) {
    (void)state;
    (void)call;
    (void)error;
    return OPAQ_OK;
}

/* The first page of slots, in a program without one: so this test runs first. */
static void first_runner(void) {
    struct opaq_runner_info info = {.kind = OPAQ_RUNNER_LINEAR, .in_features = 1, .out_features = 1};
    const struct opaq_runner_functions functions = {.abi = OPAQ_RUNNER_ABI, .run = first_run};
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    fail_at(0);
    enum opaq_status status = opaq_runner_register(&info, &functions, NULL, &handle, &error);
    fail_never();
    CHECK(has_failed());
    check_status(status, &error, 0, "runner_register");
    CHECK_EQ_INT(handle, 0);
    CHECK_EQ_INT(opaq_runner_count(), 0);
    CHECK_EQ_INT(opaq_runner_register(&info, &functions, NULL, &handle, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_destroy(handle, &error), OPAQ_OK);
}

/* Reading and describing allocate nothing. */
static void texts_allocate_nothing(void) {
    struct opaq_spec spec = spec_of("nvfp4");
    struct opaq_proto proto;
    struct opaq_error error;
    char text[OPAQ_PROTO_TEXT_BYTES];
    const char *good = "bf16[4,128] fp8+both+eps=2.5e-1 cuda:0";
    const int64_t shape[2] = {4, 128};
    fail_at(0);
    const enum opaq_status read = opaq_spec_parse("fp8+eps=2.5e-1", 14, &spec, &error);
    const enum opaq_status refused = opaq_spec_parse("fp8+rth", 7, &spec, &error);
    const enum opaq_status written = opaq_spec_print(&spec, text, sizeof text, &error);
    const enum opaq_status parsed = opaq_proto_parse(good, strlen(good), &proto, &error);
    const enum opaq_status printed = opaq_proto_print(&proto, text, sizeof text, &error);
    const enum opaq_status made = opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &proto, &error);
    fail_never();
    CHECK(read == OPAQ_OK && refused == OPAQ_ERROR_TEXT && written == OPAQ_OK && parsed == OPAQ_OK);
    CHECK(printed == OPAQ_OK && made == OPAQ_OK);
    CHECK_EQ_STR(text, good);
    CHECK(!has_failed());
}

static const struct test_case tests[] = {TEST(pools),
                                         TEST(interning),
                                         TEST(operations),
                                         TEST(plans),
                                         TEST(linear_operators),
                                         TEST(experts_operators),
                                         TEST(texts_allocate_nothing),
                                         TEST(first_runner),
                                         TEST(runners)};
TEST_MAIN(tests)

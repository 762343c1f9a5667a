/* test_runner.c: handles of runners: unknown, stale and of another kind; the calls that a runner gets;
 * errors. */
#include <stdlib.h>

#include "check.h"
#include "support_runner.h"

static const enum opaq_runner_kind kinds[] = {OPAQ_RUNNER_LINEAR, OPAQ_RUNNER_MLP, OPAQ_RUNNER_MOE};
static const char *const kind_names[] = {"linear", "mlp", "moe"};

/* A failed check unless a call fails with that status and text. */
static void refuse_row(int line, enum opaq_runner_kind kind, const struct opaq_value *values,
                       enum opaq_status status, const char *text) {
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    const enum opaq_status got = op_call(test_runner_row(kind), values, NULL, &result, &error);
    if (got != status || strstr(error.text, text) == NULL) {
        CHECK_FAIL("line %d: %s \"%s\", expected %s \"%s\"", line, opaq_status_name(got), error.text,
                   opaq_status_name(status), text);
    }
    if (got == OPAQ_OK) {
        op_result_free(&result);
    }
}

/* ---- creation and destruction ---- */

static void every_kind_registers_runs_and_is_destroyed(void) {
    const int before = opaq_runner_count();
    for (int k = 0; k < 3; ++k) {
        struct test_runner_counts counts = {0};
        struct test_runner state = {.number = (float)k + 0.5f, .counts = &counts, .workspace_bytes = 100};
        struct opaq_runner_info info;
        struct opaq_error error = {OPAQ_OK, ""};
        float output[8][RUNNER_IN];
        const int64_t handle = test_runner_register(kinds[k], &state);
        CHECK(handle > 0);
        CHECK_EQ_INT(opaq_runner_count(), before + 1);
        CHECK_EQ_INT(opaq_runner_query(handle, &info, &error), OPAQ_OK);
        const struct opaq_runner_info expected = test_runner_info(kinds[k]);
        CHECK(info.kind == expected.kind && info.experts == expected.experts && info.bytes == expected.bytes);
        CHECK(info.in_features == expected.in_features && info.out_features == expected.out_features);
        CHECK_EQ_STR(info.format, expected.format);
        CHECK_EQ_STR(info.kernel, expected.kernel);
        for (int run = 0; run < 3; ++run) {
            memset(output, 0, sizeof output);
            CHECK_EQ_INT(test_runner_run(kinds[k], handle, output, &error), OPAQ_OK);
            const float *numbers = &output[0][0];
            for (int64_t i = 0; i < 8 * info.out_features; ++i) {
                CHECK(numbers[i] == state.number);
            }
        }
        CHECK_EQ_STR(error.text, "");
        CHECK_EQ_INT(opaq_runner_destroy(handle, &error), OPAQ_OK);
        CHECK_EQ_INT(atomic_load(&counts.runs), 3);
        CHECK_EQ_INT(atomic_load(&counts.destroys), 1);
        CHECK_EQ_INT(opaq_runner_count(), before);
    }
}

static void check_absent(int line, int64_t handle, const char *why) {
    struct opaq_runner_info info;
    struct test_runner_inputs inputs;
    struct opaq_error error[2];
    char text[64];
    (void)snprintf(text, sizeof text, "runner %lld %s", (long long)handle, why);
    const enum opaq_status queried = opaq_runner_query(handle, &info, &error[0]);
    const enum opaq_status destroyed = opaq_runner_destroy(handle, &error[1]);
    if (queried != OPAQ_ERROR_ARGUMENT || destroyed != OPAQ_ERROR_ARGUMENT ||
        strstr(error[0].text, text) == NULL || strstr(error[1].text, text) == NULL) {
        CHECK_FAIL("line %d: \"%s\", \"%s\"", line, error[0].text, error[1].text);
    }
    for (int k = 0; k < 3; ++k) {
        test_runner_arguments(kinds[k], handle, 2, &inputs);
        refuse_row(line, kinds[k], inputs.values, OPAQ_ERROR_ARGUMENT, text);
    }
}

static void unknown_handles_do_not_exist(void) {
    struct test_runner_counts counts = {0};
    struct test_runner state = {.counts = &counts};
    const int64_t handle = test_runner_register(OPAQ_RUNNER_LINEAR, &state);
    static const int64_t never[] = {0, 1, 5, 65535, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 47, 65536 + 60000};
    for (size_t i = 0; i < sizeof never / sizeof never[0]; ++i) {
        check_absent(__LINE__, never[i], "does not exist");
    }
    check_absent(__LINE__, handle + 65536, "does not exist");            /* its slot's next generation */
    check_absent(__LINE__, handle | (int64_t)1 << 46, "does not exist"); /* a later one */
    check_absent(__LINE__, handle + 1, "does not exist");                /* the next slot of the page */
    check_absent(__LINE__, handle - ((int64_t)1 << 62), "does not exist");
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
}

/* A slot is used again, a handle never is. */
static void stale_handles_stay_stale(void) {
    enum { TIMES = 1000 };
    static int64_t old[TIMES];
    struct test_runner_counts counts = {0};
    struct test_runner state = {.counts = &counts};
    for (int i = 0; i < TIMES; ++i) {
        old[i] = test_runner_register(OPAQ_RUNNER_LINEAR, &state);
        CHECK(i == 0 || (old[i] != old[i - 1] && (old[i] & 65535) == (old[i - 1] & 65535)));
        CHECK_EQ_INT(opaq_runner_destroy(old[i], NULL), OPAQ_OK);
    }
    for (int i = 0; i < TIMES; ++i) {
        check_absent(__LINE__, old[i], "is gone: it was destroyed");
    }
    struct test_runner other = {.number = 7, .counts = &counts};
    const int64_t handle = test_runner_register(OPAQ_RUNNER_LINEAR, &other);
    check_absent(__LINE__, old[TIMES - 1], "is gone: it was destroyed");
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(atomic_load(&counts.destroys), TIMES + 1);
    CHECK_EQ_INT(atomic_load(&counts.runs), 0);
}

static void another_kind_is_named(void) {
    struct test_runner_counts counts = {0};
    for (int mine = 0; mine < 3; ++mine) {
        struct test_runner state = {.counts = &counts};
        const int64_t handle = test_runner_register(kinds[mine], &state);
        for (int k = 0; k < 3; ++k) {
            struct test_runner_inputs inputs;
            char text[128];
            if (k == mine) {
                continue;
            }
            (void)snprintf(text, sizeof text, "%s: runner %lld is a %s runner, expected a %s runner",
                           test_runner_row(kinds[k]), (long long)handle, kind_names[mine], kind_names[k]);
            test_runner_arguments(kinds[k], handle, 2, &inputs);
            refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_ARGUMENT, text);
        }
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    }
    CHECK_EQ_INT(atomic_load(&counts.runs), 0);
    CHECK_EQ_INT(atomic_load(&counts.destroys), 3);
}

/* ---- calls that contradict the runner ---- */

static void sizes_that_contradict_the_runner(void) {
    struct test_runner_counts counts = {0};
    for (int k = 0; k < 3; ++k) {
        struct test_runner state = {.counts = &counts};
        struct test_runner_inputs inputs;
        const int hint = kinds[k] == OPAQ_RUNNER_MOE ? 4 : 2;
        const int64_t handle = test_runner_register(kinds[k], &state);
        char text[128];
        test_runner_arguments(kinds[k], handle, 2, &inputs);
        (void)snprintf(text, sizeof text, "%s: %s is 7, but runner %lld gives %d", test_runner_row(kinds[k]),
                       k == 0 ? "out_features" : "hidden_size", (long long)handle,
                       k == 0 ? RUNNER_OUT : RUNNER_IN);
        inputs.values[hint].integer = 7;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_SHAPE, text);
        inputs.values[hint].integer = -3;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_SHAPE, "-3");
        test_runner_arguments(kinds[k], handle, 2, &inputs);
        inputs.tensors[0].shape[1] = 3;
        (void)snprintf(text, sizeof text, "has the shape [2,3], but runner %lld takes 6 features",
                       (long long)handle);
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_SHAPE, text);
        test_runner_arguments(kinds[k], handle, 2, &inputs);
        inputs.tensors[0].rank = 0;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_SHAPE, "has 0 dimensions");
        inputs.tensors[0].rank = 2;
        inputs.tensors[0].data = NULL;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_BUFFER, "is NULL");
        inputs.tensors[0].data = (char *)inputs.x + 2;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_BUFFER, "not aligned");
        inputs.tensors[0].data = inputs.x;
        inputs.tensors[0].strides[0] = -1;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_OVERFLOW, "negative");
        inputs.tensors[0].strides[0] = RUNNER_IN;
        inputs.tensors[0].dtype = OPAQ_DTYPE_I64;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_ARGUMENT, "expected f32, bf16 or f16");
        inputs.tensors[0].dtype = OPAQ_DTYPE_F32;
        inputs.tensors[0].device.type = OPAQ_DEVICE_CUDA;
        refuse_row(__LINE__, kinds[k], inputs.values, OPAQ_ERROR_UNSUPPORTED, "cuda:0");
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    }
    CHECK_EQ_INT(atomic_load(&counts.runs), 0);
}

static void choices_that_do_not_fit_the_rows(void) {
    struct test_runner_counts counts = {0};
    struct test_runner state = {.counts = &counts};
    struct test_runner_inputs inputs;
    const int64_t handle = test_runner_register(OPAQ_RUNNER_MOE, &state);
    test_runner_arguments(OPAQ_RUNNER_MOE, handle, 4, &inputs);
    inputs.tensors[1].dtype = OPAQ_DTYPE_I32;
    refuse_row(__LINE__, OPAQ_RUNNER_MOE, inputs.values, OPAQ_ERROR_ARGUMENT, "topk_weights holds int32");
    inputs.tensors[1].dtype = OPAQ_DTYPE_F32;
    inputs.tensors[2].dtype = OPAQ_DTYPE_U8;
    refuse_row(__LINE__, OPAQ_RUNNER_MOE, inputs.values, OPAQ_ERROR_ARGUMENT, "topk_ids uint8");
    inputs.tensors[2].dtype = OPAQ_DTYPE_I32;
    inputs.tensors[2].shape[1] = 1;
    refuse_row(__LINE__, OPAQ_RUNNER_MOE, inputs.values, OPAQ_ERROR_SHAPE,
               "topk_weights has the shape [4,2] and topk_ids [4,1], expected the same with 4 rows");
    inputs.tensors[2].shape[1] = 2;
    inputs.tensors[1].shape[0] = 3;
    inputs.tensors[2].shape[0] = 3;
    refuse_row(__LINE__, OPAQ_RUNNER_MOE, inputs.values, OPAQ_ERROR_SHAPE,
               "[3,2], expected the same with 4 rows");
    inputs.tensors[1].rank = 0;
    inputs.tensors[2].rank = 0;
    refuse_row(__LINE__, OPAQ_RUNNER_MOE, inputs.values, OPAQ_ERROR_SHAPE, "expected the same with 4 rows");
    CHECK_EQ_INT(atomic_load(&counts.runs), 0);
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
}

/* The shape comes from the row: without a runner, with one of another kind, with any integer. */
static void outputs_never_touch_the_runner(void) {
    for (int k = 0; k < 3; ++k) {
        struct test_runner_inputs inputs;
        struct opaq_outputs outputs;
        struct opaq_error error = {OPAQ_OK, ""};
        const struct opaq_op *op = opaq_op_find(test_runner_row(kinds[k]));
        test_runner_arguments(kinds[k], -12345, 4, &inputs);
        inputs.values[op->argument_count - 1].integer = 77;
        CHECK_EQ_INT(opaq_op_outputs(op, inputs.values, &outputs, &error), OPAQ_OK);
        CHECK_EQ_INT(outputs.count, 1);
        CHECK_EQ_INT(outputs.tensor[0].rank, 2);
        CHECK_EQ_INT(outputs.tensor[0].shape[0], 4);
        CHECK_EQ_INT(outputs.tensor[0].shape[1], 77);
        CHECK_EQ_INT(outputs.tensor[0].dtype, OPAQ_DTYPE_F32);
    }
}

/* ---- a runner's own errors ---- */

static enum opaq_status fail_silently(void *state, const struct opaq_runner_call *call,
                                      struct opaq_error *error) {
    (void)state;
    (void)call;
    memset(error->text, 'x', *(const int *)state ? sizeof error->text : 0);
    return OPAQ_ERROR_SYSTEM;
}

static void errors_of_the_runner_are_returned(void) {
    struct test_runner_counts counts = {0};
    struct test_runner state = {.number = 3, .status = OPAQ_ERROR_LIMIT, .counts = &counts};
    struct test_runner_inputs inputs;
    char text[128];
    int64_t handle = test_runner_register(OPAQ_RUNNER_MLP, &state);
    test_runner_arguments(OPAQ_RUNNER_MLP, handle, 2, &inputs);
    (void)snprintf(text, sizeof text, "mlp_gemm: runner %lld: no number 3 today", (long long)handle);
    refuse_row(__LINE__, OPAQ_RUNNER_MLP, inputs.values, OPAQ_ERROR_LIMIT, text);
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    for (int is_long = 0; is_long < 2; ++is_long) { /* no text, and one without a terminator */
        const struct opaq_runner_info info = test_runner_info(OPAQ_RUNNER_LINEAR);
        const struct opaq_runner_functions functions = {OPAQ_RUNNER_ABI, NULL, fail_silently, NULL};
        CHECK_EQ_INT(opaq_runner_register(&info, &functions, &is_long, &handle, NULL), OPAQ_OK);
        test_runner_arguments(OPAQ_RUNNER_LINEAR, handle, 2, &inputs);
        refuse_row(__LINE__, OPAQ_RUNNER_LINEAR, inputs.values, OPAQ_ERROR_SYSTEM,
                   is_long ? "xxxxxx..." : "failed without a reason");
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    }
}

/* ---- registering ---- */

static void refuse_register(int line, const struct opaq_runner_info *info,
                            const struct opaq_runner_functions *functions, enum opaq_status status,
                            const char *text) {
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 4711;
    const int before = opaq_runner_count();
    const enum opaq_status got = opaq_runner_register(info, functions, NULL, &handle, &error);
    if (got != status || strstr(error.text, text) == NULL || handle != 4711 || opaq_runner_count() != before) {
        CHECK_FAIL("line %d: %s \"%s\", expected %s \"%s\"", line, opaq_status_name(got), error.text,
                   opaq_status_name(status), text);
    }
}

static void registering_checks_arguments(void) {
    struct opaq_runner_functions functions = test_runner_functions;
    struct opaq_runner_info info = test_runner_info(OPAQ_RUNNER_LINEAR);
    refuse_register(__LINE__, NULL, &functions, OPAQ_ERROR_ARGUMENT, "info is NULL");
    refuse_register(__LINE__, &info, NULL, OPAQ_ERROR_ARGUMENT, "functions is NULL");
    CHECK_EQ_INT(opaq_runner_register(&info, &functions, NULL, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    functions.abi = OPAQ_RUNNER_ABI + 1;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_UNSUPPORTED,
                    "the ABI number 2, this library has 1");
    functions.abi = 0;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_UNSUPPORTED, "the ABI number 0");
    functions = test_runner_functions;
    functions.run = NULL;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_ARGUMENT, "run is NULL");
    functions = test_runner_functions;
    info.kind = 3;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_ARGUMENT, "kind is 3");
    info.kind = -1;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_ARGUMENT, "kind is -1");
    info = test_runner_info(OPAQ_RUNNER_LINEAR);
    info.in_features = 0;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_SHAPE, "0 features in and 5 out");
    info = test_runner_info(OPAQ_RUNNER_LINEAR);
    info.experts = 4;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_SHAPE, "4 experts in a linear runner, expected 0");
    info = test_runner_info(OPAQ_RUNNER_MOE);
    info.experts = 0;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_SHAPE, "0 experts in a moe runner");
    info = test_runner_info(OPAQ_RUNNER_MLP);
    info.out_features = 9;
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_SHAPE, "6 features in and 9 out of a mlp runner");
    info = test_runner_info(OPAQ_RUNNER_MLP);
    memset(info.format, 'x', sizeof info.format);
    refuse_register(__LINE__, &info, &functions, OPAQ_ERROR_ARGUMENT, "not terminated");
    CHECK_EQ_INT(opaq_runner_query(65536, NULL, NULL), OPAQ_ERROR_ARGUMENT);
}

/* Fills all slots, reaches the limit, and fills them again. */
static void the_limit_is_an_error(void) {
    static int64_t handles[OPAQ_RUNNER_LIMIT];
    struct test_runner_counts counts = {0};
    struct test_runner state = {.counts = &counts};
    struct opaq_runner_info info = test_runner_info(OPAQ_RUNNER_LINEAR);
    CHECK_EQ_INT(opaq_runner_count(), 0);
    for (int turn = 0; turn < 2; ++turn) {
        struct opaq_error error = {OPAQ_OK, ""};
        int64_t one_more = 0;
        int failures = 0;
        for (int i = 0; i < OPAQ_RUNNER_LIMIT; ++i) {
            failures +=
                opaq_runner_register(&info, &test_runner_functions, &state, &handles[i], NULL) != OPAQ_OK;
        }
        CHECK_EQ_INT(failures, 0);
        CHECK_EQ_INT(opaq_runner_count(), OPAQ_RUNNER_LIMIT);
        CHECK_EQ_INT(opaq_runner_register(&info, &test_runner_functions, &state, &one_more, &error),
                     OPAQ_ERROR_LIMIT);
        CHECK_EQ_STR(error.text, "runner_register: 65536 runners exist already, which is the limit");
        for (int i = 0; i < OPAQ_RUNNER_LIMIT; ++i) {
            failures += opaq_runner_destroy(handles[(i * 7919) % OPAQ_RUNNER_LIMIT], NULL) != OPAQ_OK;
        }
        CHECK_EQ_INT(failures, 0);
        CHECK_EQ_INT(opaq_runner_count(), 0);
    }
    CHECK_EQ_INT(atomic_load(&counts.destroys), 2 * OPAQ_RUNNER_LIMIT);
}

/* ---- functions that use the registry ---- */

struct reentrant {
    int64_t handle;
    int64_t child;
    int destroys;
};

static enum opaq_status destroy_itself(void *state, const struct opaq_runner_call *call,
                                       struct opaq_error *error) {
    struct reentrant *mine = state;
    (void)error;
    CHECK_EQ_INT(opaq_runner_destroy(mine->handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(mine->destroys, 0); /* it still runs */
    CHECK_EQ_INT(opaq_runner_destroy(mine->handle, NULL), OPAQ_ERROR_ARGUMENT);
    memset(call->output->data, 0, sizeof(float));
    return OPAQ_OK;
}

static void make_another(void *state) {
    struct reentrant *mine = state;
    static struct test_runner_counts counts;
    static struct test_runner other = {.counts = &counts};
    ++mine->destroys;
    mine->child = test_runner_register(OPAQ_RUNNER_LINEAR, &other);
}

static void functions_may_use_the_registry(void) {
    const struct opaq_runner_functions functions = {OPAQ_RUNNER_ABI, NULL, destroy_itself, make_another};
    const struct opaq_runner_info info = test_runner_info(OPAQ_RUNNER_LINEAR);
    struct reentrant state = {0};
    float output[8][RUNNER_IN];
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(opaq_runner_register(&info, &functions, &state, &state.handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(test_runner_run(OPAQ_RUNNER_LINEAR, state.handle, output, &error), OPAQ_OK);
    CHECK_EQ_INT(state.destroys, 1);
    check_absent(__LINE__, state.handle, "is gone");
    CHECK_EQ_INT(opaq_runner_destroy(state.child, NULL), OPAQ_OK);
}

/* ---- calls without the operator table ---- */

static void runs_by_handle_alone(void) {
    struct test_runner_counts counts = {0};
    struct test_runner state = {.number = 2, .counts = &counts, .workspace_bytes = 200};
    struct test_runner_inputs inputs;
    struct opaq_error error = {OPAQ_OK, ""};
    float y[3][RUNNER_IN];
    struct opaq_tensor output = {
        .data = y, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {3, RUNNER_IN}, .strides = {RUNNER_IN, 1}};
    _Alignas(64) char workspace[256];
    const struct opaq_span span = {workspace, sizeof workspace};
    size_t bytes = 0;
    const int64_t handle = test_runner_register(OPAQ_RUNNER_MOE, &state);
    test_runner_arguments(OPAQ_RUNNER_MOE, handle, 3, &inputs);
    CHECK_EQ_INT(opaq_runner_workspace(handle, inputs.tensors, 3, &bytes, &error), OPAQ_OK);
    CHECK_EQ_INT(bytes, 256); /* 200, rounded up to 64 */
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 3, &output, span, NULL, &error), OPAQ_OK);
    CHECK(y[0][0] == 2 && y[2][5] == 2);
    CHECK_EQ_STR(error.text, "");
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 1, &output, span, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "runner_run: got 1 inputs, but runner") != NULL);
    CHECK(strstr(error.text, "is a moe runner and takes 3") != NULL);
    CHECK_EQ_INT(opaq_runner_run(handle, NULL, 3, &output, span, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 3, NULL, span, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "got 0 outputs, expected 1") != NULL);
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 3, &output, (struct opaq_span){NULL, 0}, NULL, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "needs a workspace of 256 bytes") != NULL);
    output.data = inputs.x;
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 3, &output, span, NULL, &error), OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "overlaps") != NULL);
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_run(handle, inputs.tensors, 3, &output, span, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "runner_run: runner") == error.text && strstr(error.text, "is gone") != NULL);
    CHECK_EQ_INT(opaq_runner_workspace(handle, inputs.tensors, 3, &bytes, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(atomic_load(&counts.runs), 1);
}

static const struct test_case tests[] = {TEST(every_kind_registers_runs_and_is_destroyed),
                                         TEST(unknown_handles_do_not_exist),
                                         TEST(stale_handles_stay_stale),
                                         TEST(another_kind_is_named),
                                         TEST(sizes_that_contradict_the_runner),
                                         TEST(choices_that_do_not_fit_the_rows),
                                         TEST(outputs_never_touch_the_runner),
                                         TEST(errors_of_the_runner_are_returned),
                                         TEST(registering_checks_arguments),
                                         TEST(the_limit_is_an_error),
                                         TEST(functions_may_use_the_registry),
                                         TEST(runs_by_handle_alone)};
TEST_MAIN(tests)

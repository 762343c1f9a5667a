/* torch/torch_ops.c: registers opaq's operators with PyTorch, from plain C, and calls them.
 *
 * For each row of the operator table: a schema in the namespace "opaq" and one kernel for the CPU and CUDA keys; for
 * some a second name in the namespace "nvfp4". The fakes are registered from Python, because LibTorch's C ABI has no
 * symbolic sizes; they read the same rows. Compiled with -fexceptions: aoti_torch_check throws through these frames,
 * after everything has been freed. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/shares.h"
#include "opaq/status.h"
#include "torch/torch_cuda.h"
#include "torch/torch_scratch.h"
#include "torch/torch_shim.h"
#include "torch/torch_stack.h"

enum { KERNEL_COUNT = 32 };

/* The release whose stack conventions this file follows: 2.11. */
static const uint64_t build_version = (uint64_t)2 << 56 | (uint64_t)11 << 48;

static struct opaq_error registration;

/* Whether the operator opaq::attach_gradient exists. */
static bool watches_gradients;

/* ---- calling ---- */

/* A body and the distribution of its shares. */
struct torch_run {
    const struct opaq_body *body;
    struct shares shares;
};

/* PyTorch calls this once per thread with a range, which is ignored: threads take shares. */
static void take_shares(int64_t first, int64_t last, void *context) {
    struct torch_run *run = context;
    int64_t begin;
    int64_t end;
    (void)first;
    (void)last;
    while (shares_take(&run->shares, &begin, &end)) {
        run->body->call(run->body->argument, begin, end);
    }
}

/* Runs on PyTorch's threads; follows torch.set_num_threads. */
static void run_on_torch(void *context, int64_t count, const struct opaq_body *body) {
    struct torch_run run = {.body = body};
    uint32_t threads = 1;
    (void)context;
    shares_init(&run.shares, count, torch_get_num_threads(&threads) == 0 ? threads : 1);
    if (torch_parallel_for(0, threads, 1, take_shares, &run) != 0) {
        take_shares(0, 1,
                    &run); /* runs shares that no thread took; none runs twice, because work may accumulate */
    }
}

/* The memory of a call: its outputs, which PyTorch gets, and scratch memory. */
struct call_memory {
    const struct opaq_op *op;
    const struct opaq_value *values;
    uint64_t *handles; /* of the outputs */
    int allocated;
    struct torch_scratch scratch;
};

static bool is_random(const struct opaq_op *op, const struct opaq_outputs *outputs, int index) {
    int row = 0;
    while (index >= outputs->first[row + 1]) {
        ++row;
    }
    return op->output[row].is_random != 0;
}

static enum opaq_status give_memory(void *context, struct opaq_outputs *outputs, size_t bytes,
                                    struct opaq_span *workspace, struct opaq_error *error) {
    struct call_memory *memory = context;
    enum opaq_status status = OPAQ_OK;
    if (bytes > 0) {
        const struct opaq_device device =
            memory->values[0].tensors->device; /* these operators have a tensor as their first argument */
        status = torch_scratch_take(device, bytes, &memory->scratch, error);
        *workspace = (struct opaq_span){memory->scratch.tensor.data, bytes};
    }
    while (status == OPAQ_OK && memory->allocated < outputs->count) {
        const int i = memory->allocated;
        status = torch_tensor_allocate(&outputs->tensor[i], &memory->handles[i], error);
        if (status == OPAQ_OK) {
            ++memory->allocated;
            if (is_random(memory->op, outputs, i)) {
                status = torch_tensor_randomize(&outputs->tensor[i], memory->handles[i], error);
            }
        }
    }
    return status;
}

/* The device of the first tensor. */
static struct opaq_device device_of(const struct opaq_op *op, const struct opaq_value *values) {
    for (int i = 0; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const bool is_list = kind == OPAQ_ARGUMENT_TENSOR_LIST;
        const bool has_tensors = kind <= OPAQ_ARGUMENT_TENSOR_LIST || kind == OPAQ_ARGUMENT_CHANGED_TENSOR;
        if (has_tensors && values[i].tensors != NULL && (!is_list || values[i].count > 0)) {
            return values[i].tensors->device;
        }
    }
    return (struct opaq_device){OPAQ_DEVICE_CPU, 0};
}

/* Allocates the outputs and runs; on failure nothing is left allocated. */
static enum opaq_status compute(const struct opaq_op *op, const struct opaq_value *values,
                                uint64_t handles[OPAQ_OP_OUTPUT_LIMIT], int *count, struct opaq_error *error) {
    const struct opaq_parallel parallel = {run_on_torch, NULL};
    struct opaq_execution execution = {.parallel = &parallel};
    struct call_memory given = {.op = op, .values = values, .handles = handles};
    const struct opaq_memory memory = {give_memory, &given};
    struct torch_guard *guard = NULL;
    enum opaq_status status = OPAQ_OK;
    execution.device = device_of(op, values);
    if (execution.device.type == OPAQ_DEVICE_CUDA) {
        status = torch_cuda_begin(execution.device, &guard, &execution.stream, error);
    }
    if (status == OPAQ_OK) {
        status = opaq_op_call(op, values, &memory, &execution, error);
    }
    torch_cuda_end(guard);
    if (given.scratch.handle != 0) {
        torch_scratch_give(&given.scratch);
    }
    for (int i = 0; status != OPAQ_OK && i < given.allocated; ++i) {
        torch_tensor_free(handles[i]);
    }
    *count = given.allocated;
    return status;
}

/* Pushes the results in the schema's form: one tensor, a list, or separate values. */
static enum opaq_status give_results(const struct opaq_op *op, const uint64_t *handles, int count,
                                     uint64_t *stack, struct opaq_error *error) {
    struct torch_list *list;
    if (op->returns_one || opaq_op_changes(op)) {
        memcpy(stack, handles, (size_t)count * sizeof *handles);
        return OPAQ_OK;
    }
    if (torch_new_list_reserve_size((size_t)count, &list) != 0) {
        for (int i = 0; i < count; ++i) {
            torch_tensor_free(handles[i]);
        }
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "%s: PyTorch could not make a list", op->name);
    }
    for (int i = 0; i < count; ++i) {
        (void)torch_list_push_back(list, handles[i]); /* there is room: it cannot fail */
    }
    stack[0] = (uint64_t)(uintptr_t)list;
    return OPAQ_OK;
}

/* Gives results of inputs that require a gradient that of a runner, or one that raises in backward(), by an operator of
 * the Python package. Takes the list of inputs. Results stay as they are where that operator fails. */
static void attach_gradients(const struct opaq_op *op, const struct opaq_value *values,
                             struct torch_list *inputs, uint64_t *handles, int count) {
    const int runner = torch_runner_argument(op);
    uint64_t stack[4] = {0, (uint64_t)(uintptr_t)inputs, 0, runner < 0 ? 0 : (uint64_t)values[runner].integer};
    struct torch_list *results;
    struct torch_string *name;
    if (torch_new_list_reserve_size((size_t)count, &results) != 0 ||
        torch_new_string_handle(op->name, strlen(op->name), &name) != 0) {
        return; /* out of memory: the list so far is dropped */
    }
    for (int i = 0; i < count; ++i) {
        struct torch_tensor *result = NULL;
        (void)aoti_torch_new_tensor_handle((struct torch_tensor *)(uintptr_t)handles[i], &result);
        (void)torch_list_push_back(results, (uint64_t)(uintptr_t)result);
    }
    stack[0] = (uint64_t)(uintptr_t)results;
    stack[2] = (uint64_t)(uintptr_t)name;
    if (torch_call_dispatcher("opaq::attach_gradient", "", stack, build_version) != 0) {
        return;
    }
    results = (struct torch_list *)(uintptr_t)stack[0];
    for (int i = 0; i < count; ++i) {
        torch_tensor_free(handles[i]);
        (void)torch_list_get_item(results, (size_t)i, &handles[i]);
    }
    (void)torch_delete_list(results);
}

/* Status of the latest call on this thread; PyTorch's exceptions cannot carry it. */
static _Thread_local enum opaq_status last_status;

static void call_op(int index, uint64_t *stack) {
    const struct opaq_op *op = opaq_op_at(index);
    struct torch_arguments arguments;
    struct opaq_error error;
    uint64_t handles[OPAQ_OP_OUTPUT_LIMIT] = {0};
    int count = 0;
    error.text[0] = '\0';
    enum opaq_status status = torch_arguments_read(op, stack, watches_gradients, &arguments, &error);
    if (status == OPAQ_OK) {
        status = compute(op, arguments.value, handles, &count, &error);
    }
    if (status == OPAQ_OK && arguments.tracked != NULL && count > 0) {
        attach_gradients(op, arguments.value, arguments.tracked, handles, count);
        arguments.tracked = NULL;
    }
    torch_arguments_free(op, stack, &arguments);
    if (status == OPAQ_OK) {
        status = give_results(op, handles, count, stack, &error);
    }
    last_status = status;
    if (status != OPAQ_OK) {
        char message[OPAQ_ERROR_TEXT_BYTES + 16];
        (void)snprintf(message, sizeof message, "opaq: %s", error.text);
        aoti_torch_check(false, op->name, __FILE__, __LINE__, message);
    }
}

/* ---- registering ---- */

/* A boxed kernel receives only its stack, so each row needs its own function. */
#define KERNEL(index)                                                                   \
    static void kernel_##index(uint64_t *stack, uint64_t arguments, uint64_t results) { \
        (void)arguments;                                                                \
        (void)results;                                                                  \
        call_op(index, stack);                                                          \
    }
KERNEL(0)
KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(5)
KERNEL(6)
KERNEL(7)
KERNEL(8)
KERNEL(9)
KERNEL(10)
KERNEL(11)
KERNEL(12)
KERNEL(13)
KERNEL(14)
KERNEL(15)
KERNEL(16)
KERNEL(17)
KERNEL(18)
KERNEL(19)
KERNEL(20)
KERNEL(21)
KERNEL(22)
KERNEL(23)
KERNEL(24)
KERNEL(25)
KERNEL(26)
KERNEL(27)
KERNEL(28)
KERNEL(29)
KERNEL(30)
KERNEL(31)

static void (*const kernels[KERNEL_COUNT])(uint64_t *, uint64_t, uint64_t) = {
    kernel_0,  kernel_1,  kernel_2,  kernel_3,  kernel_4,  kernel_5,  kernel_6,  kernel_7,
    kernel_8,  kernel_9,  kernel_10, kernel_11, kernel_12, kernel_13, kernel_14, kernel_15,
    kernel_16, kernel_17, kernel_18, kernel_19, kernel_20, kernel_21, kernel_22, kernel_23,
    kernel_24, kernel_25, kernel_26, kernel_27, kernel_28, kernel_29, kernel_30, kernel_31,
};

/* Declares an operator that draws random numbers as such, if PyTorch has a tag for it, so that the compiler
 * does not recompute a call with other numbers. Only for operators with a plain tensor, `like`, as their last
 * argument: PyTorch takes the generator's device from it, and fails without one. */
static int32_t define(struct torch_library *library, const struct opaq_op *op, const char *schema) {
    bool is_random = false;
    const bool has_like = strcmp(op->argument[op->argument_count - 1].name, "like") == 0;
    for (int i = 0; has_like && i < op->output_count; ++i) {
        is_random = is_random || op->output[i].is_random != 0;
    }
    if (is_random && torch_library_def_with_tags != NULL && torch_tag_nondeterministic_seeded != NULL) {
        const int32_t tag = torch_tag_nondeterministic_seeded();
        return torch_library_def_with_tags(library, schema, &tag, 1);
    }
    return aoti_torch_library_def(library, schema);
}

static const char *const keys[] = {"CPU", "CUDA"};
enum { KEY_COUNT = sizeof keys / sizeof keys[0] };

/* The schema and the kernels of operators `first` to `last` - 1 in a namespace. Deleting the libraries unregisters the
 * operators; NULL for those that were not made. */
static enum opaq_status register_ops(const char *space, int first, int last,
                                     struct torch_library *libraries[1 + KEY_COUNT], struct opaq_error *error) {
    if (aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &libraries[0]) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch refused the namespace %s", space);
    }
    for (int i = first; i < last; ++i) {
        char schema[OPAQ_OP_SCHEMA_BYTES];
        const struct opaq_op *op = opaq_op_at(i);
        if (opaq_op_schema(op, schema, sizeof schema, error) != OPAQ_OK) {
            return error->status;
        }
        if (define(libraries[0], op, schema) != 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch refused the schema %s", schema);
        }
    }
    for (int k = 0; k < KEY_COUNT; ++k) {
        if (aoti_torch_library_init_impl(space, keys[k], __FILE__, __LINE__, &libraries[1 + k]) != 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch refused kernels for %s", keys[k]);
        }
        for (int i = first; i < last; ++i) {
            const char *name = opaq_op_at(i)->name;
            if (torch_library_impl(libraries[1 + k], name, kernels[i], build_version) != 0) {
                return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch refused %s::%s for %s", space, name,
                                 keys[k]);
            }
        }
    }
    return OPAQ_OK;
}

/* Aliases for code written for another library's nvfp4::linear_gemm and nvfp4::moe_gemm. If that library
 * defined them first, it keeps them; if it does so later, ours are withdrawn (opaq_torch_alias_withdraw). */
static struct alias {
    const char *name;
    struct torch_library *libraries[1 + KEY_COUNT];
} aliases[] = {{"linear_gemm", {NULL}}, {"moe_gemm", {NULL}}};
enum { ALIAS_COUNT = sizeof aliases / sizeof aliases[0] };

static void withdraw(struct alias *alias) {
    for (int k = KEY_COUNT; k >= 0; --k) {
        if (alias->libraries[k] != NULL) {
            (void)aoti_torch_delete_library_object(alias->libraries[k]);
        }
        alias->libraries[k] = NULL;
    }
}

static struct alias *find_alias(const char *name) {
    for (int i = 0; i < ALIAS_COUNT; ++i) {
        if (strcmp(aliases[i].name, name) == 0) {
            return &aliases[i];
        }
    }
    return NULL;
}

OPAQ_API int32_t opaq_torch_alias_define(const char *name);
OPAQ_API void opaq_torch_alias_withdraw(const char *name);

/* Defines nvfp4::name; 0 if that is done, 1 if there is no such alias or the name is another library's. */
int32_t opaq_torch_alias_define(const char *name) {
    struct alias *alias = find_alias(name);
    struct opaq_error error;
    int index = 0;
    if (alias == NULL || alias->libraries[0] != NULL) {
        return alias == NULL;
    }
    while (opaq_op_at(index) != NULL && strcmp(opaq_op_at(index)->name, name) != 0) {
        ++index;
    }
    if (register_ops("nvfp4", index, index + 1, alias->libraries, &error) != OPAQ_OK) {
        withdraw(alias);
        return 1;
    }
    return 0;
}

/* Removes nvfp4::name, if it is ours. */
void opaq_torch_alias_withdraw(const char *name) {
    struct alias *alias = find_alias(name);
    if (alias != NULL) {
        withdraw(alias);
    }
}

static enum opaq_status register_all(struct opaq_error *error) {
    const uint64_t running = aoti_torch_abi_version();
    static struct torch_library *libraries[1 + KEY_COUNT]; /* never deleted */
    if (running < build_version) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "PyTorch %d.%d is running, opaq needs 2.11 or later",
                         (int)(running >> 56), (int)(running >> 48 & 0xFF));
    }
    if (opaq_op_count() > KERNEL_COUNT) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT, "the table has %d operators, torch_ops.c has room for %d",
                         opaq_op_count(), KERNEL_COUNT);
    }
    const enum opaq_status status = register_ops("opaq", 0, opaq_op_count(), libraries, error);
    for (int i = 0; status == OPAQ_OK && i < ALIAS_COUNT; ++i) {
        (void)opaq_torch_alias_define(aliases[i].name);
    }
    return status;
}

__attribute__((constructor)) static void register_on_load(void) {
    registration.status = OPAQ_OK;
    registration.status = register_all(&registration);
}

OPAQ_API const char *opaq_torch_status(void);
OPAQ_API void opaq_torch_watch_gradients(void);
OPAQ_API int32_t opaq_torch_last_status(void);

/* NULL if every operator was registered when this library was loaded; else the reason. */
const char *opaq_torch_status(void) { return registration.status == OPAQ_OK ? NULL : registration.text; }

/* enum opaq_status of the latest operator on this thread. */
int32_t opaq_torch_last_status(void) { return (int32_t)last_status; }

/* From now on, results of inputs that require a gradient pass through opaq::attach_gradient, which must exist. */
void opaq_torch_watch_gradients(void) { watches_gradients = true; }

OPAQ_API int32_t opaq_torch_has_snapshot(void);
OPAQ_API void opaq_torch_snapshot_begin(void *guard);
OPAQ_API void opaq_torch_snapshot_end(void *guard);

/* Whether the running torch has the next two. */
int32_t opaq_torch_has_snapshot(void) { return torch_snapshot_begin != NULL && torch_snapshot_end != NULL; }

/* Around a redispatch from a kernel of the key PythonTLSSnapshot, on one thread; `guard` is 16 bytes of the caller's. */
void opaq_torch_snapshot_begin(void *guard) { torch_snapshot_begin(guard); }
void opaq_torch_snapshot_end(void *guard) { torch_snapshot_end(guard); }

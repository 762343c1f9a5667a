/* support_hiding.c: a back end whose memory only its own functions can read. */
#include "support_hiding.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/float_bits.h"
#include "check.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"
#include "support_device.h"

const struct opaq_device hiding_device = {OPAQ_DEVICE_CUDA, 0};

/* ---- memory ---- */

static _Thread_local struct hiding *current; /* memory that the thread's operations use */
static _Thread_local int depth;              /* running functions of the table */

/* The table that forwards calls, and its device. */
static const struct backend *table;
static enum test_device test_device;

static void enter(void);
static void leave(void);

static void open_device(void) { test_device = test_device_open(enter, leave, &table); }

static void need_device(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, open_device);
}

static void protect(const struct hiding *hiding, int protection) {
    if (hiding != NULL && hiding->bytes > 0 && test_device != TEST_DEVICE_CUDA &&
        mprotect(hiding->memory, hiding->bytes, protection) != 0) {
        printf("  mprotect failed\n");
        exit(1);
    }
}

struct hiding hiding_make(size_t bytes) {
    const size_t page = 4096;
    struct hiding hiding = {.bytes = (bytes + page) / page * page};
    need_device();
    hiding.memory = test_device_allocate(test_device, table, hiding.bytes);
    hiding.host = test_device == TEST_DEVICE_CUDA ? calloc(1, hiding.bytes) : hiding.memory;
    if (hiding.host == NULL) {
        printf("  no memory\n");
        exit(1);
    }
    return hiding;
}

void hiding_free(struct hiding *hiding) {
    if (hiding->host != hiding->memory) {
        free(hiding->host);
    }
    test_device_free(test_device, table, hiding->memory, hiding->bytes);
    memset(hiding, 0, sizeof *hiding);
}

void *hiding_host(const struct hiding *hiding, const void *address) {
    return hiding->host + ((const char *)address - hiding->memory);
}

void *hiding_take(struct hiding *hiding, size_t bytes) {
    char *const to = hiding->memory + hiding->used;
    hiding->used += (bytes + 63) / 64 * 64;
    if (hiding->used > hiding->bytes) {
        printf("  %zu bytes of hidden memory are too few\n", hiding->bytes);
        exit(1);
    }
    return to;
}

void *hiding_copy(struct hiding *hiding, const void *from, size_t bytes) {
    void *const to = hiding_take(hiding, bytes);
    hiding->copied = hiding->used;
    if (from != NULL && bytes > 0) {
        memcpy(hiding_host(hiding, to), from, bytes);
    }
    return to;
}

struct opaq_tensor hiding_tensor(struct hiding *hiding, const struct opaq_tensor *tensor) {
    struct opaq_tensor copy = *tensor;
    const int64_t reach = tensor_reach(tensor);
    copy.device = hiding_device;
    if (tensor->data != NULL) { /* aligned like the source, because the alignment decides which kernel runs */
        const size_t bytes = reach > 0 ? (size_t)reach : 0;
        const size_t offset = (uintptr_t)tensor->data % 64;
        copy.data = (char *)hiding_copy(hiding, NULL, offset + bytes) + offset;
        memcpy(hiding_host(hiding, copy.data), tensor->data, bytes);
    }
    return copy;
}

void hiding_hide(struct hiding *hiding) {
    current = hiding;
    if (test_device == TEST_DEVICE_CUDA) {
        test_device_write(hiding->memory, hiding->host, hiding->copied);
    }
    protect(hiding, PROT_NONE);
}

void hiding_reveal(struct hiding *hiding) {
    protect(hiding, PROT_READ | PROT_WRITE);
    if (test_device == TEST_DEVICE_CUDA) {
        test_device_read(hiding->host, hiding->memory, hiding->copied);
    }
    current = NULL;
}

void *hiding_begin(bool *is_refusing) {
    *is_refusing = test_device == TEST_DEVICE_EMULATED;
    return test_device_begin(test_device);
}

void hiding_end(void *stream) { test_device_end(test_device, stream); }

static atomic_int any_order;

int hiding_any_order(void) { return atomic_exchange(&any_order, 0); }

static void enter(void) {
    if (depth++ == 0) {
        protect(current, PROT_READ | PROT_WRITE);
    }
}

static void leave(void) {
    if (--depth == 0) {
        protect(current, PROT_NONE);
    }
}

/* ---- the table ---- */

/* One function: calls the CPU's while the memory is readable. */
#define FORWARD(name, parameters, arguments)                   \
    static enum opaq_status hiding_##name parameters {         \
        enter();                                               \
        const enum opaq_status status = table->name arguments; \
        leave();                                               \
        return status;                                         \
    }
#define RUN const struct opaq_execution *execution, struct opaq_error *error

FORWARD(zero, (void *memory, size_t bytes, RUN), (memory, bytes, execution, error))
static enum opaq_status hiding_copy_tensor(const struct opaq_tensor *from, void *to, RUN) {
    enter();
    const enum opaq_status status = table->copy(from, to, execution, error);
    leave();
    return status;
}
FORWARD(fill, (const float *value, int64_t count, float *to, RUN), (value, count, to, execution, error))
FORWARD(quantize, (const struct quant_job *job, const struct quantize_figures *figures, RUN),
        (job, figures, execution, error))
FORWARD(dequantize, (const struct quant_job *job, RUN), (job, execution, error))
FORWARD(amax,
        (const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored, int64_t step, float *amax,
         RUN),
        (copy, spec, is_stored, step, amax, execution, error))
FORWARD(remap, (const struct remap_job *job, RUN), (job, execution, error))
FORWARD(compare_figures, (const struct quant_job *a, const struct quant_job *b, bool *are_equal, RUN),
        (a, b, are_equal, execution, error))
FORWARD(noise, (const struct quant_job *job, struct opaq_noise *noise, RUN), (job, noise, execution, error))
FORWARD(delayed_update,
        (const struct opaq_delayed_state *state, const float *recorded, const float *reduced,
         const struct delayed_rule *rule, RUN),
        (state, recorded, reduced, rule, execution, error))
static enum opaq_status counted_product(const struct gemm_job *job, void *workspace, RUN) {
    atomic_fetch_add(&any_order, job->any_order);
    return table->product(job, workspace, execution, error);
}
static enum opaq_status counted_grouped_product(const struct grouped_product *job, void *workspace, RUN) {
    atomic_fetch_add(&any_order, job->any_order);
    return table->grouped_product(job, workspace, execution, error);
}
static enum opaq_status hiding_product(const struct gemm_job *job, void *workspace, RUN) {
    enter();
    const enum opaq_status status = counted_product(job, workspace, execution, error);
    leave();
    return status;
}
static enum opaq_status hiding_grouped_product(const struct grouped_product *job, void *workspace, RUN) {
    enter();
    const enum opaq_status status = counted_grouped_product(job, workspace, execution, error);
    leave();
    return status;
}
FORWARD(grouped_gradient, (const struct grouped_gradient *job, void *workspace, RUN),
        (job, workspace, execution, error))
FORWARD(column_sum,
        (const struct row_groups *groups, const struct quant_matrix *rows, const struct opaq_view *sums, RUN),
        (groups, rows, sums, execution, error))
FORWARD(route, (const struct route_job *job, RUN), (job, execution, error))
FORWARD(split, (const struct split_job *job, RUN), (job, execution, error))
FORWARD(gather_rows,
        (const struct row_groups *groups, const struct quant_matrix *from, enum row_order order,
         bool is_weighted, const struct quant_matrix *to, RUN),
        (groups, from, order, is_weighted, to, execution, error))
FORWARD(weigh_rows, (const struct row_groups *groups, const struct quant_matrix *rows, RUN),
        (groups, rows, execution, error))
FORWARD(row_dot, (const struct row_dot *job, void *workspace, RUN), (job, workspace, execution, error))
FORWARD(convert_rows, (const struct quant_matrix *from, const struct quant_matrix *to, RUN),
        (from, to, execution, error))
FORWARD(activate,
        (const struct row_groups *groups, const struct opaq_experts_plan *plan, const struct quant_matrix *h,
         const struct quant_matrix *a, RUN),
        (groups, plan, h, a, execution, error))
FORWARD(activate_backward,
        (const struct row_groups *groups, const struct opaq_experts_plan *plan, const struct quant_matrix *h,
         const struct quant_matrix *da, const struct quant_matrix *dh, RUN),
        (groups, plan, h, da, dh, execution, error))

static atomic_int allocations_left; /* until one fails; 0: none fails */

void hiding_fail_allocation(int n) { atomic_store(&allocations_left, n); }

/* Allocates from the thread's memory, which its owner frees. */
static enum opaq_status hiding_allocate(struct opaq_device device, size_t bytes, void **memory,
                                        struct opaq_error *error) {
    if (atomic_load(&allocations_left) > 0 && atomic_fetch_sub(&allocations_left, 1) == 1) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for %zu bytes on cuda:%d, as a test demands",
                         bytes, device.index);
    }
    *memory = hiding_take(current, bytes);
    return OPAQ_OK;
}

static void hiding_release(struct opaq_device device, void *memory) {
    (void)device;
    (void)memory;
}

static struct backend hiding_backend;

static void make_table(void) {
    need_device();
    hiding_backend = *table; /* with its workspaces and kernels, which access no contents */
    hiding_backend.allocate = hiding_allocate;
    hiding_backend.release = hiding_release;
    hiding_backend.product = counted_product;
    hiding_backend.grouped_product = counted_grouped_product;
    if (test_device != TEST_DEVICE_CPU) { /* an emulated GPU makes its memory readable itself */
        return;
    }
    hiding_backend.name = "hiding";
    hiding_backend.zero = hiding_zero;
    hiding_backend.copy = hiding_copy_tensor;
    hiding_backend.fill = hiding_fill;
    hiding_backend.quantize = hiding_quantize;
    hiding_backend.dequantize = hiding_dequantize;
    hiding_backend.amax = hiding_amax;
    hiding_backend.remap = hiding_remap;
    hiding_backend.compare_figures = hiding_compare_figures;
    hiding_backend.noise = hiding_noise;
    hiding_backend.delayed_update = hiding_delayed_update;
    hiding_backend.product = hiding_product;
    hiding_backend.grouped_product = hiding_grouped_product;
    hiding_backend.grouped_gradient = hiding_grouped_gradient;
    hiding_backend.column_sum = hiding_column_sum;
    hiding_backend.route = hiding_route;
    hiding_backend.split = hiding_split;
    hiding_backend.gather_rows = hiding_gather_rows;
    hiding_backend.weigh_rows = hiding_weigh_rows;
    hiding_backend.row_dot = hiding_row_dot;
    hiding_backend.convert_rows = hiding_convert_rows;
    hiding_backend.activate = hiding_activate;
    hiding_backend.activate_backward = hiding_activate_backward;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users;

void hiding_install(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_table);
    (void)pthread_mutex_lock(&lock);
    if (users++ == 0) {
        backend_install(OPAQ_DEVICE_CUDA, &hiding_backend);
    }
    (void)pthread_mutex_unlock(&lock);
}

void hiding_remove(void) {
    (void)pthread_mutex_lock(&lock);
    if (--users == 0) {
        backend_install(OPAQ_DEVICE_CUDA, NULL);
    }
    (void)pthread_mutex_unlock(&lock);
}

/* ---- calls of operators ---- */

/* Bytes of all tensors of a call, and the number of tensors in its arguments. */
static size_t measure(const struct opaq_op *op, const struct opaq_value *values,
                      const struct opaq_outputs *outputs, int64_t *tensors, bool *is_on_cpu) {
    size_t bytes = 0;
    *tensors = 0;
    *is_on_cpu = true;
    for (int i = 0; i < op->argument_count; ++i) {
        const int64_t count = argument_tensors(op->argument[i].kind, &values[i]);
        for (int64_t t = 0; t < count; ++t) {
            const int64_t reach = tensor_reach(&values[i].tensors[t]);
            *is_on_cpu = *is_on_cpu && reach >= 0 && values[i].tensors[t].device.type == OPAQ_DEVICE_CPU;
            bytes += reach > 0 ? (size_t)reach + 128 : 128;
        }
        *tensors += count;
    }
    for (int i = 0; i < outputs->count; ++i) {
        bytes += (size_t)tensor_reach(&outputs->tensor[i]) + 128;
    }
    return bytes;
}

/* The same values on the device: copied into its memory or, when measuring, without memory. */
static void values_on_device(struct hidden_call *call, const struct opaq_op *op,
                             const struct opaq_value *values, bool are_copied) {
    struct opaq_tensor *next = call->tensors;
    for (int i = 0; i < op->argument_count; ++i) {
        const int64_t count = argument_tensors(op->argument[i].kind, &values[i]);
        call->values[i] = values[i];
        if (count > 0) {
            call->values[i].tensors = next;
        }
        for (int64_t t = 0; t < count; ++t, ++next) {
            const struct opaq_tensor *tensor = &values[i].tensors[t];
            *next = are_copied ? hiding_tensor(&call->hiding, tensor) : *tensor;
            next->device = hiding_device;
        }
    }
}

/* Its data where the host can read them. */
static void reveal_tensor(const struct hiding *hiding, struct opaq_tensor *tensor) {
    if (tensor->data != NULL) {
        tensor->data = hiding_host(hiding, tensor->data);
    }
}

static _Thread_local bool pauses;

void hidden_calls_pause(bool is_paused) { pauses = is_paused; }

void hidden_call_run(struct hidden_call *call, const struct opaq_op *op, const struct opaq_value *values,
                     const struct opaq_outputs *outputs, const struct opaq_parallel *parallel) {
    struct opaq_execution execution = {.device = hiding_device, .parallel = parallel};
    int64_t tensors;
    bool is_on_cpu;
    size_t bytes = 0;
    memset(call, 0, sizeof *call);
    const size_t all = measure(op, values, outputs, &tensors, &is_on_cpu);
    if (pauses || !is_on_cpu || tensors == 0 || strstr(op->name, "_gemm") != NULL) {
        return;
    }
    hiding_install();
    call->has_run = true;
    call->tensors = calloc((size_t)tensors, sizeof *call->tensors);
    struct opaq_value measured[OPAQ_OP_ARGUMENT_LIMIT];
    values_on_device(call, op, values, false);
    memcpy(measured, call->values, (size_t)op->argument_count * sizeof *measured);
    (void)opaq_op_workspace(op, measured, &bytes, NULL);
    call->hiding = hiding_make(all + bytes + 64);
    values_on_device(call, op, values, true);
    call->outputs = *outputs;
    for (int i = 0; i < outputs->count; ++i) {
        call->outputs.tensor[i] = hiding_tensor(&call->hiding, &outputs->tensor[i]);
    }
    void *const workspace = hiding_take(&call->hiding, bytes);
    memset(hiding_host(&call->hiding, workspace), 0xA5, bytes);
    hiding_hide(&call->hiding);
    bool is_refusing;
    execution.stream = hiding_begin(&is_refusing);
    call->status = opaq_op_run(op, call->values, &call->outputs, (struct opaq_span){workspace, bytes},
                               &execution, &call->error);
    hiding_end(execution.stream);
    hiding_reveal(&call->hiding);
    hiding_remove();
    for (int64_t i = 0; i < tensors; ++i) {
        reveal_tensor(&call->hiding, &call->tensors[i]);
    }
    for (int i = 0; i < outputs->count; ++i) {
        reveal_tensor(&call->hiding, &call->outputs.tensor[i]);
    }
}

/* Whether a text of the call contains a word. For a tiled weight, the CPU's order of summation and precision
 * are those of its tile kernels; another device's are not. */
static bool has_word(const struct opaq_op *op, const struct opaq_value *values, const char *word) {
    for (int i = 0; i < op->argument_count; ++i) {
        const bool is_text = op->argument[i].kind == OPAQ_ARGUMENT_TEXT && values[i].text != NULL;
        if (is_text && strstr(values[i].text, word) != NULL) {
            return true;
        }
    }
    return false;
}

static double value_at(const struct opaq_tensor *tensor, int64_t index) {
    return tensor->dtype == OPAQ_DTYPE_F32
               ? (double)((const float *)tensor->data)[index]
               : (double)opaq_element_decode((enum opaq_element)tensor->dtype,
                                             ((const uint16_t *)tensor->data)[index]);
}

/* Whether two contiguous tensors of floats differ by less than `limit` of their norm. */
static bool are_close(const struct opaq_tensor *a, const struct opaq_tensor *b, int64_t bytes, double limit) {
    double difference = 0.0;
    double size = 0.0;
    if (a->dtype != OPAQ_DTYPE_F32 && a->dtype != OPAQ_DTYPE_BF16 && a->dtype != OPAQ_DTYPE_F16) {
        return false;
    }
    for (int64_t i = 0; i < bytes / (a->dtype == OPAQ_DTYPE_F32 ? 4 : 2); ++i) {
        const double x = value_at(a, i);
        const double y = value_at(b, i);
        difference += (x - y) * (x - y);
        size += y * y;
    }
    return difference <= limit * limit * size;
}

/* Whether tensors differ in the bits of NaNs only: those of float32 sums are the processor's own. */
static bool are_same_but_nans(const struct opaq_tensor *a, const struct opaq_tensor *b, int64_t bytes) {
    bool are_same = a->dtype == OPAQ_DTYPE_F32;
    for (int64_t i = 0; are_same && i < bytes / 4; ++i) {
        const float x = ((const float *)a->data)[i];
        const float y = ((const float *)b->data)[i];
        are_same = float_is_nan(x) ? float_is_nan(y) : float_to_bits(x) == float_to_bits(y);
    }
    return are_same;
}

/* Whether products on the device add in another order than the CPU's (docs/cuda.md). */
static bool multiplies_otherwise(void) {
    const char *product = getenv("OPAQ_CUDA_PRODUCT");
    return product == NULL || strcmp(product, "fma") != 0;
}

static void compare_tensor(const struct opaq_op *op, const struct opaq_value *values, const char *what,
                           const struct opaq_tensor *hidden, const struct opaq_tensor *expected) {
    const int64_t bytes = tensor_reach(expected);
    /* two roundings for bf16 results; for a lower precision, the error of the CPU's kernels */
    const double limit = has_word(op, values, "precision=") ? 0.02 : 0.004;
    const bool may_differ = test_device == TEST_DEVICE_CUDA && are_same_but_nans(hidden, expected, bytes);
    const bool may_round = test_device != TEST_DEVICE_CPU &&
                           (has_word(op, values, "tiled") || multiplies_otherwise()) &&
                           are_close(hidden, expected, bytes, limit);
    if (test_device != TEST_DEVICE_CPU) {
        test_device_hash(hidden->data, (size_t)bytes);
    }
    if (bytes > 0 && memcmp(hidden->data, expected->data, (size_t)bytes) != 0 && !may_round && !may_differ) {
        CHECK_FAIL("%s: %s has other bytes on the back end \"%s\"", op->name, what, hiding_backend.name);
    }
}

void hidden_call_compare(struct hidden_call *call, const struct opaq_op *op, const struct opaq_value *values,
                         const struct opaq_outputs *outputs, enum opaq_status status) {
    if (!call->has_run) {
        return;
    }
    if (status == OPAQ_OK && call->status != OPAQ_OK) { /* the copies of overlapping tensors do not overlap */
        CHECK_FAIL("%s: status %d on the hiding back end: %s", op->name, (int)call->status, call->error.text);
    }
    const bool both = status == OPAQ_OK && call->status == OPAQ_OK;
    for (int i = 0; both && i < outputs->count; ++i) {
        compare_tensor(op, values, "an output", &call->outputs.tensor[i], &outputs->tensor[i]);
    }
    for (int i = 0; both && i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_CHANGED_TENSOR && values[i].tensors != NULL) {
            compare_tensor(op, values, op->argument[i].name, call->values[i].tensors, values[i].tensors);
        }
    }
    free(call->tensors);
    hiding_free(&call->hiding);
    call->has_run = false;
}

/* cuda/gemm/product_cublaslt.cu: products of cuBLASLt: bf16, float16 and fp8, for jobs whose sums may be added up in any order
 * (job->any_order): its kernels and splits of a sum depend on the number of rows. Adapts jobs to its interface (cublaslt.h).
 *
 * Arithmetic: that of cuBLASLt with float32 sums. fp8 is multiplied on fp8 tensor cores, which add with fewer bits than float32;
 * without `precision=fast` or `fast32` partial sums are moved to float32 at intervals, with them they are not.
 *
 * Operands, in its column-major terms A = b (the weight, N rows) and B = a (the tokens, M rows), transposed as their memory needs:
 *
 *     bf16 or float16, rows or columns contiguous  any two of one dtype
 *     fp8, rows contiguous                         one scale each; a scale for each row each; fp8blk1 and fp8blk2, but not fp8blk2
 *                                                  twice. Scales are read where they are. Not e5m2 twice.
 *     c                                            contiguous rows: float32, or plain operands' dtype; bf16 or float16 for fp8
 *     bias                                         of c's dtype (fp8 with a float32 c: bf16)
 *
 * Jobs with few rows are left to opaq's kernels, which are as fast or faster there: on an H200, N = K = 8192, M = 16, fp8row
 * takes cuBLASLt 38 us, one scale each 19.6, of which reading the weight takes 16.
 *
 * A struct problem describes a product to cuBLASLt's heuristic. The algorithm that this returns is cached for the life of the
 * process: a look-up takes no lock, and only a problem's first product queries the heuristic. Descriptors are made on the stack in
 * each call, because they contain addresses. */
#include "cuda/gemm/product_cublaslt.h"

#include <pthread.h>

#include "cuda/gemm/cublaslt.h"

enum {
    WORKSPACE_BYTES = 32 << 20, /* as NVIDIA recommends for Hopper */
    WORKSPACE_ALIGNMENT = 256,
    LEAST_ALIGNMENT = 16, /* of addresses and rows, in bytes */
    DEVICES = 64,
    CACHE_ENTRIES =
        4096, /* a power of 2; if half of them are used, other problems query the heuristic in each call */
    CHOICES = 4
};

/* ---- problems ---- */

/* An operand as cuBLASLt sees it. */
struct side {
    int32_t type; /* enum lt_type */
    int32_t scale;
    int64_t lead;       /* elements from a column of the column-major matrix to the next */
    int32_t by_columns; /* the operand's columns are contiguous, not its rows */
    int32_t unused;
};

/* All that the choice of an algorithm depends on. Without padding: it is hashed and compared as bytes. */
struct problem {
    struct side a, b;
    int64_t m, n, k, c_lead;
    int32_t c_type, bias_type; /* bias_type: -1 for none */
    int32_t accumulates, is_fast;
    int32_t device, alignment; /* of all addresses, in bytes */
    int32_t has_factors;       /* that are in device memory */
    int32_t unused;
};

static int32_t plain_type(enum opaq_element dtype) {
    return dtype == OPAQ_BF16 ? LT_16BF : dtype == OPAQ_F16 ? LT_16F : LT_32F;
}

static bool describe_plain(const struct quant_matrix *plain, struct side *side) {
    const bool by_columns = plain->column_step != 1 && plain->row_step == 1;
    const int64_t step = by_columns ? plain->column_step : plain->row_step;
    const int64_t extent = by_columns ? plain->rows : plain->columns;
    const int64_t vectors = by_columns ? plain->columns : plain->rows;
    side->type = plain_type(plain->dtype);
    side->scale = LT_NO_SCALE;
    side->by_columns = by_columns;
    side->lead = vectors == 1 ? round_up(extent, 8) : step; /* the step of a single one may be anything */
    return plain->dtype != OPAQ_F32 && (by_columns || plain->column_step == 1) && side->lead % 8 == 0 &&
           side->lead >= extent;
}

/* Where the format's scales are as cuBLASLt expects them, its name for that. */
static int32_t scale_of(const struct gemm_operand *operand) {
    const struct scale_layout *layout = &operand->copy->scale_layout;
    const int64_t rows = operand->plain.rows;
    const int64_t blocks = ceil_div(operand->plain.columns, 128);
    switch ((enum opaq_format)operand->spec->format) {
    case OPAQ_FP8:
        return LT_SCALAR;
    case OPAQ_FP8ROW:
        return layout->row_per == 1 && layout->row_step == 1 ? LT_OUTER_VEC : LT_NO_SCALE;
    case OPAQ_FP8BLK1:
        return layout->row_per == 1 && layout->row_step == 1 && layout->column_per == 128 &&
                       layout->column_step == round_up(rows, 4) && rows % 8 == 0
                   ? LT_VEC128
                   : LT_NO_SCALE;
    case OPAQ_FP8BLK2:
        return layout->row_per == 128 && layout->row_step == round_up(blocks, 4) && layout->column_per == 128 &&
                       layout->column_step == 1
                   ? LT_BLK128
                   : LT_NO_SCALE;
    default:
        return LT_NO_SCALE;
    }
}

static bool describe_copy(const struct gemm_operand *operand, struct side *side) {
    const struct quant_copy *copy = operand->copy;
    side->type = operand->spec->element == OPAQ_E5M2 ? LT_E5M2 : LT_E4M3;
    side->scale = scale_of(operand);
    side->by_columns = 0;
    side->lead = copy->data_row_step;
    return side->scale != LT_NO_SCALE && !operand->is_across && copy->tile_rows == 0 &&
           copy->data_column_step == 1 && side->lead % LEAST_ALIGNMENT == 0 &&
           side->lead >= operand->plain.columns && operand->plain.columns % 16 == 0;
}

static bool describe_side(const struct gemm_operand *operand, struct side *side) {
    return operand->copy == NULL ? describe_plain(&operand->plain, side) : describe_copy(operand, side);
}

/* Which scales may meet. */
static bool is_pair(const struct side *a, const struct side *b) {
    const bool a_is_blocked = a->scale == LT_VEC128 || a->scale == LT_BLK128;
    const bool b_is_blocked = b->scale == LT_VEC128 || b->scale == LT_BLK128;
    if (a->scale == LT_NO_SCALE) {
        return a->type == b->type && b->scale == LT_NO_SCALE;
    }
    return !(a->type == LT_E5M2 && b->type == LT_E5M2) &&
           (a_is_blocked ? b_is_blocked && !(a->scale == LT_BLK128 && b->scale == LT_BLK128)
                         : a->scale == b->scale);
}

/* The most rows of a that are left to opaq's kernels. */
static int64_t few_rows(const struct side *a) {
    return a->scale == LT_NO_SCALE ? 0 : a->scale == LT_SCALAR ? 16 : 64;
}

/* OPAQ_CUDA_PRODUCT with any value selects one of opaq's own kernels ("own": the usual one). */
static bool is_refused(void) {
    static int state;
    return variable_is("OPAQ_CUDA_PRODUCT", NULL, &state);
}

/* Fills in all but device and alignment; false if cuBLASLt does not take the job. Depends on no address. */
static bool describe(const struct gemm_job *job, struct problem *problem) {
    memset(problem, 0, sizeof *problem);
    problem->m = job->a.plain.rows;
    problem->n = job->b.plain.rows;
    problem->k = job->a.plain.columns;
    if (!job->any_order || is_refused() || !describe_side(&job->a, &problem->a) ||
        !describe_side(&job->b, &problem->b) || !is_pair(&problem->a, &problem->b)) {
        return false;
    }
    const bool is_fp8 = problem->a.scale != LT_NO_SCALE;
    const int64_t limit = INT32_MAX;
    problem->c_type = plain_type(job->c.dtype);
    problem->c_lead = problem->m == 1 ? problem->n : job->c.row_step;
    problem->bias_type = job->bias == NULL ? -1 : plain_type(job->bias_dtype);
    problem->accumulates = job->accumulate;
    problem->is_fast = is_fp8 && job->precision >= OPAQ_PRECISION_FAST && problem->a.scale <= LT_OUTER_VEC;
    const int32_t bias_type = is_fp8 && job->c.dtype == OPAQ_F32 ? LT_16BF : problem->c_type;
    const bool is_c_type = is_fp8 || job->c.dtype == OPAQ_F32 || problem->c_type == problem->a.type;
    return problem->m > few_rows(&problem->a) && problem->n > 0 && problem->k > 0 && problem->m < limit &&
           problem->n < limit && problem->k < limit && job->b.plain.columns == problem->k &&
           problem->k % 8 == 0 && problem->n % (is_fp8 ? 16 : 8) == 0 && is_c_type && job->c.column_step == 1 &&
           problem->c_lead % 8 == 0 && problem->c_lead >= problem->n &&
           (problem->bias_type == -1 || problem->bias_type == bias_type);
}

/* ---- calls of cuBLASLt ---- */

struct call {
    struct lt_descriptor descriptor;
    struct lt_layout a, b, c; /* A is job->b */
};

static int layout_make(const struct cublaslt *lt, const struct side *side, int64_t rows, int64_t k,
                       struct lt_layout *layout) {
    return lt->layout_init(layout, sizeof *layout, side->type, (uint64_t)(side->by_columns ? rows : k),
                           (uint64_t)(side->by_columns ? k : rows), side->lead);
}

static int set_int(const struct cublaslt *lt, struct call *call, int attribute, int32_t value) {
    return lt->descriptor_set(&call->descriptor, attribute, &value, sizeof value);
}

static int set_address(const struct cublaslt *lt, struct call *call, int attribute, const void *address) {
    return lt->descriptor_set(&call->descriptor, attribute, &address, sizeof address);
}

/* A mode is set where it is not the default, which versions without modes have too. */
static int set_scale(const struct cublaslt *lt, struct call *call, const struct side *side,
                     const struct gemm_operand *operand, int pointer, int mode) {
    int status = LT_SUCCESS;
    if (side->scale != LT_NO_SCALE) {
        status = set_address(lt, call, pointer, operand->copy->scale);
    }
    return status == LT_SUCCESS && side->scale > LT_SCALAR ? set_int(lt, call, mode, side->scale) : status;
}

static bool call_make(const struct cublaslt *lt, const struct problem *problem, const struct gemm_job *job,
                      struct call *call) {
    /* (no branch between the calls: the first failure is as good as the last) */
    int failed = lt->descriptor_init(&call->descriptor, sizeof call->descriptor, LT_COMPUTE_32F, LT_32F);
    failed |= set_int(lt, call, LT_TRANSA, problem->b.by_columns ? LT_OP_N : LT_OP_T);
    failed |= set_int(lt, call, LT_TRANSB, problem->a.by_columns ? LT_OP_T : LT_OP_N);
    if (problem->has_factors) {
        failed |= set_int(lt, call, LT_POINTER_MODE, LT_POINTERS_OF_DEVICE);
    }
    failed |= set_scale(lt, call, &problem->b, &job->b, LT_A_SCALE_POINTER, LT_A_SCALE_MODE);
    failed |= set_scale(lt, call, &problem->a, &job->a, LT_B_SCALE_POINTER, LT_B_SCALE_MODE);
    if (problem->is_fast) {
        const int8_t fast = 1;
        failed |= lt->descriptor_set(&call->descriptor, LT_FAST_ACCUM, &fast, sizeof fast);
    }
    if (problem->bias_type != -1) {
        failed |= set_int(lt, call, LT_EPILOGUE, LT_EPILOGUE_BIAS);
        failed |= set_int(lt, call, LT_BIAS_DATA_TYPE, problem->bias_type);
        failed |= set_address(lt, call, LT_BIAS_POINTER, job->bias);
    }
    failed |= layout_make(lt, &problem->b, problem->n, problem->k, &call->a);
    failed |= layout_make(lt, &problem->a, problem->m, problem->k, &call->b);
    failed |= lt->layout_init(&call->c, sizeof call->c, problem->c_type, (uint64_t)problem->n,
                              (uint64_t)problem->m, problem->c_lead);
    return failed == LT_SUCCESS;
}

/* Whether cuBLASLt refuses a problem for good, in contrast to a failure that the next call may not meet, such as of memory. */
static bool is_unsupported(int status) {
    return status == LT_NOT_SUPPORTED || status == LT_INVALID_VALUE || status == LT_ARCH_MISMATCH;
}

enum entry_state { ENTRY_EMPTY, ENTRY_SUPPORTED, ENTRY_UNSUPPORTED };

/* Queries the heuristic; ENTRY_EMPTY: it failed, and another query may succeed. Sums may be split, but parts of a sum are added in
 * float32. */
static enum entry_state choose(const struct cublaslt *lt, lt_handle handle, const struct problem *problem,
                               struct call *call, struct lt_algorithm *algorithm) {
    struct lt_preference preference;
    struct lt_choice choices[CHOICES];
    const uint64_t bytes = WORKSPACE_BYTES;
    const uint32_t reduce = LT_REDUCE_IN_COMPUTE_TYPE;
    const uint32_t alignment = (uint32_t)problem->alignment;
    int count = 0;
    int failed = lt->preference_init(&preference, sizeof preference);
    failed |= lt->preference_set(&preference, LT_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    failed |= lt->preference_set(&preference, LT_REDUCTION_SCHEME_MASK, &reduce, sizeof reduce);
    for (int i = 0; i < 4; ++i) {
        failed |= lt->preference_set(&preference, LT_MIN_ALIGNMENT_A_BYTES + i, &alignment, sizeof alignment);
    }
    if (failed != LT_SUCCESS) {
        return ENTRY_UNSUPPORTED;
    }
    const int status = lt->choose(handle, &call->descriptor, &call->a, &call->b, &call->c, &call->c,
                                  &preference, CHOICES, choices, &count);
    if (status != LT_SUCCESS) {
        return is_unsupported(status) ? ENTRY_UNSUPPORTED : ENTRY_EMPTY;
    }
    for (int i = 0; i < count; ++i) {
        if (choices[i].status == LT_SUCCESS && choices[i].workspace_bytes <= WORKSPACE_BYTES) {
            *algorithm = choices[i].algorithm;
            return ENTRY_SUPPORTED;
        }
    }
    return ENTRY_UNSUPPORTED;
}

/* ---- cache ---- */

/* Guards changes of what follows; reading takes no lock. */
static pthread_mutex_t changes = PTHREAD_MUTEX_INITIALIZER;

/* One handle for each device, with that device current when it was made. */
static lt_handle handles[DEVICES];

static lt_handle handle_of(const struct cublaslt *lt, int device) {
    if (device < 0 || device >= DEVICES) {
        return NULL;
    }
    lt_handle handle = __atomic_load_n(&handles[device], __ATOMIC_ACQUIRE);
    if (handle == NULL) {
        (void)pthread_mutex_lock(&changes);
        handle = handles[device];
        if (handle == NULL && lt->create(&handle) == LT_SUCCESS) {
            __atomic_store_n(&handles[device], handle, __ATOMIC_RELEASE);
        }
        (void)pthread_mutex_unlock(&changes);
    }
    return handle;
}

/* A hash table with open addressing. An entry is complete before it is published, and does not change, except that a problem
 * that turned out to be unsupported is marked as that. */
struct cache_entry {
    int state; /* enum entry_state */
    struct problem problem;
    struct lt_algorithm algorithm;
};
static struct cache_entry cache[CACHE_ENTRIES];
static int cached_count;

static uint32_t hash_of(const struct problem *problem) {
    const unsigned char *bytes = (const unsigned char *)problem;
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *problem; ++i) {
        hash = (hash ^ bytes[i]) * 16777619u;
    }
    return hash ^ hash >> 16;
}

/* The problem's entry, or the empty one where it belongs. */
static struct cache_entry *entry_find(const struct problem *problem) {
    uint32_t place = hash_of(problem) % CACHE_ENTRIES;
    while (__atomic_load_n(&cache[place].state, __ATOMIC_ACQUIRE) != ENTRY_EMPTY &&
           memcmp(&cache[place].problem, problem, sizeof *problem) != 0) {
        place = (place + 1) % CACHE_ENTRIES;
    }
    return &cache[place];
}

/* The problem's algorithm. *entry: where it is cached, or NULL if the table is full. */
static bool algorithm_of(const struct cublaslt *lt, lt_handle handle, const struct problem *problem,
                         struct call *call, struct lt_algorithm *algorithm, struct cache_entry **entry) {
    struct cache_entry *found = entry_find(problem);
    int state = __atomic_load_n(&found->state, __ATOMIC_ACQUIRE);
    *entry = found;
    if (state == ENTRY_EMPTY) {
        state = choose(lt, handle, problem, call, algorithm);
        if (state == ENTRY_EMPTY) {
            return false;
        }
        (void)pthread_mutex_lock(&changes);
        found = entry_find(problem); /* another thread may have been here */
        const bool is_empty = __atomic_load_n(&found->state, __ATOMIC_RELAXED) == ENTRY_EMPTY;
        *entry = found;
        if (is_empty && cached_count < CACHE_ENTRIES / 2) {
            ++cached_count;
            found->problem = *problem;
            found->algorithm = *algorithm;
            __atomic_store_n(&found->state, state, __ATOMIC_RELEASE);
        } else if (is_empty) {
            *entry = NULL;
        }
        (void)pthread_mutex_unlock(&changes);
    } else {
        *algorithm = found->algorithm;
    }
    return state == ENTRY_SUPPORTED;
}

/* ---- products ---- */

size_t product_cublaslt_workspace(const struct gemm_job *job) {
    struct problem problem;
    return describe(job, &problem) && cublaslt_find() != NULL ? WORKSPACE_BYTES + WORKSPACE_ALIGNMENT : 0;
}

/* Whether addresses are such that cuBLASLt can use them, and how much they are aligned. */
static bool align(const struct gemm_job *job, struct problem *problem) {
    const struct gemm_operand *const operands[] = {&job->a, &job->b};
    uintptr_t addresses = (uintptr_t)job->c.data;
    uintptr_t small = (uintptr_t)job->bias;
    for (int i = 0; i < 2; ++i) {
        const struct quant_copy *copy = operands[i]->copy;
        addresses |= (uintptr_t)(copy == NULL ? operands[i]->plain.data : copy->data);
        small |= copy == NULL || operands[i]->spec->format == OPAQ_FP8 ? 0 : (uintptr_t)copy->scale;
    }
    problem->alignment = addresses % 256 == 0 ? 256 : LEAST_ALIGNMENT;
    return (addresses | small) % LEAST_ALIGNMENT == 0;
}

/* Fails if cuBLASLt fails at a product that it supports. */
static enum opaq_status run(const struct cublaslt *lt, const struct problem *problem,
                            const struct gemm_job *job, const float *factors, void *workspace,
                            cudaStream_t stream, bool *is_done, struct opaq_error *error) {
    const float of_host[2] = {1.0f, problem->accumulates ? 1.0f : 0.0f};
    const float *const both = factors == NULL ? of_host : factors;
    void *const aligned =
        (void *)(((uintptr_t)workspace + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT);
    const lt_handle handle = handle_of(lt, problem->device);
    const void *const weight = job->b.copy == NULL ? job->b.plain.data : job->b.copy->data;
    const void *const tokens = job->a.copy == NULL ? job->a.plain.data : job->a.copy->data;
    struct call call;
    struct lt_algorithm algorithm;
    struct cache_entry *entry = NULL;
    memset(&algorithm, 0, sizeof algorithm);
    if (handle == NULL || !call_make(lt, problem, job, &call) ||
        !algorithm_of(lt, handle, problem, &call, &algorithm, &entry)) {
        return OPAQ_OK;
    }
    const int status =
        lt->matmul(handle, &call.descriptor, &both[0], weight, &call.a, tokens, &call.b, &both[1], job->c.data,
                   &call.c, job->c.data, &call.c, &algorithm, aligned, WORKSPACE_BYTES, stream);
    *is_done = status == LT_SUCCESS;
    if (is_unsupported(status) && entry != NULL) {
        __atomic_store_n(&entry->state, (int)ENTRY_UNSUPPORTED, __ATOMIC_RELEASE);
    }
    return status == LT_SUCCESS || is_unsupported(status)
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_SYSTEM,
                           "cuBLASLt failed with status %d at a product of %lld x %lld x %lld", status,
                           (long long)problem->m, (long long)problem->n, (long long)problem->k);
}

enum opaq_status product_cublaslt(const struct gemm_job *job, const float *factors, void *workspace,
                                  bool *is_done, const struct opaq_execution *execution,
                                  struct opaq_error *error) {
    struct problem problem;
    struct device_state saved;
    *is_done = false;
    const struct cublaslt *const lt = describe(job, &problem) ? cublaslt_find() : NULL;
    if (lt == NULL || !align(job, &problem)) {
        return OPAQ_OK;
    }
    problem.device = execution->device.index;
    problem.has_factors = factors != NULL;
    TRY(device_enter(execution->device, &saved, error));
    const enum opaq_status status =
        run(lt, &problem, job, factors, workspace, stream_of(execution), is_done, error);
    device_leave(execution->device, saved);
    return status;
}

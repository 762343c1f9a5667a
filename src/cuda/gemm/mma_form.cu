/* cuda/gemm/mma_form.cu: which operands products on tensor cores take, how kernels read them, and decoding those that have to be
 * rows of bf16 first, also for cuBLASLt (product_decoded.cu). */
#include "cuda/gemm/mma_form.h"

/* ---- which operands ---- */

/* Whether bf16 holds the operand's values exactly, without factors that are constant in a row, or in 128 terms of it. */
static bool is_exact(const struct gemm_operand *operand) {
    if (operand->copy == NULL) {
        return operand->plain.dtype == OPAQ_BF16;
    }
    switch ((enum opaq_format)operand->spec->format) {
    case OPAQ_FP8:
    case OPAQ_FP8BLK2:
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        return true;
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1: /* across the rows each term has another factor */
        return !operand->is_across;
    case OPAQ_NVFP4:
        return !(operand->copy->is_hadamard && operand->undo_hadamard) &&
               !(operand->is_across && operand->copy->amax_step != 0);
    }
    return false;
}

/* How the operand's layout permits to read it. Depends on no address: while a workspace is measured there is none. */
static enum source source_of_layout(const struct gemm_operand *operand, enum product_part part) {
    const struct quant_copy *copy = operand->copy;
    if (part == PRODUCT_TERMS || operand_depth(operand) % PART != 0) {
        return SOURCE_ANY; /* there may be a part of a part */
    }
    if (copy == NULL) {
        return operand->plain.column_step == 1 && operand->plain.row_step % 8 == 0 ? SOURCE_BF16 : SOURCE_ANY;
    }
    if (operand->is_across || copy->tile_rows != 0 || copy->scale_layout.tiled_columns != 0 ||
        copy->data_column_step != 1 || copy->data_row_step % PART != 0) {
        return SOURCE_ANY;
    }
    return !copy->is_packed ? SOURCE_CODES8 : operand->spec->format == OPAQ_NVFP4 ? SOURCE_NVFP4 : SOURCE_MXFP4;
}

/* Whether the address is one that every source but ANY needs. */
static bool is_aligned(const struct gemm_operand *operand) {
    const void *data = operand->copy == NULL ? operand->plain.data : operand->copy->data;
    return (uintptr_t)data % 16 == 0;
}

static enum source source_of(const struct gemm_operand *operand, enum product_part part) {
    return is_aligned(operand) ? source_of_layout(operand, part) : SOURCE_ANY;
}

static int shift_of(int64_t size) {
    int shift = 0;
    while (((int64_t)1 << shift) < size) {
        ++shift;
    }
    return shift;
}

struct mma_form mma_form_of(const struct gemm_operand *operand, enum product_part part, float *constant) {
    struct mma_form form;
    memset(&form, 0, sizeof form);
    form.source = source_of(operand, part);
    if (operand->copy == NULL) {
        form.is_across_memory = operand->plain.column_step != 1;
        return form;
    }
    form.is_across_memory = operand->is_across != (operand->copy->data_column_step != 1);
    const struct opaq_spec *spec = operand->spec;
    const struct scale_layout *layout = &operand->copy->scale_layout;
    form.is_e5m2 = spec->element == OPAQ_E5M2;
    form.is_swizzled = layout->swizzled_columns != 0;
    form.scale_shift = shift_of(layout->column_per);
    form.scale_step = layout->column_step;
    switch ((enum opaq_format)spec->format) {
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        form.scale = SCALE_E8M0;
        break;
    case OPAQ_NVFP4:
        form.scale = SCALE_E4M3;
        form.factor = (spec->options & OPAQ_GLOBAL) == 0 || spec->rule == OPAQ_RULE_MODELOPT ? FACTOR_AMAX
                                                                                             : FACTOR_INVERSE;
        *constant *= (spec->options & OPAQ_GLOBAL) != 0 ? 1.0f : 1.0f / (6.0f * (float)spec->e4m3_max);
        break;
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        form.has_block_factors = true;
        form.factor = FACTOR_SCALE;
        break;
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
        form.factor = FACTOR_SCALE;
        break;
    }
    return form;
}

struct mma_arguments mma_arguments_of(const struct gemm_job *job, const struct group_part *group,
                                      enum product_part part) {
    struct mma_arguments arguments;
    memset(&arguments, 0, sizeof arguments);
    arguments.a = product_operand_of(&job->a);
    arguments.b = product_operand_of(&job->b);
    arguments.constant = 1.0f;
    arguments.a_form = mma_form_of(&job->a, part, &arguments.constant);
    arguments.b_form = mma_form_of(&job->b, part, &arguments.constant);
    arguments.target = product_target_of(job, group, part);
    return arguments;
}

void mma_arguments_settle(struct mma_arguments *arguments) {
    if (arguments->b_form.source == SOURCE_NVFP4) {
        arguments->constant *= (float)(1 << NVFP4_POWER);
    }
}

/* OPAQ_CUDA_PRODUCT=fma selects the kernel of product.cu for everything. */
static bool is_refused(void) {
    static int state;
    return variable_is("OPAQ_CUDA_PRODUCT", "fma", &state);
}

/* A row of a may have any address in one batch and an aligned one in another, so both go to the same kernel. A weight keeps its
 * address: one that is not aligned goes to the kernel of product.cu, because scratch memory for all weights would be needed
 * to decode it here. */
bool product_mma_takes(const struct gemm_job *job, enum product_part part) {
    const int64_t limit = INT32_MAX - 4096; /* rows and terms are counted in 32 bits */
    const bool is_weight_aligned = is_aligned(&job->b) || source_of_layout(&job->b, part) == SOURCE_ANY;
    return is_exact(&job->a) && is_exact(&job->b) && is_weight_aligned && job->a.plain.rows < limit &&
           job->b.plain.rows < limit && job->a.plain.columns < limit && job->b.plain.columns < limit &&
           !is_refused();
}

/* ---- decoding ---- */

struct decode_arguments {
    struct product_operand operand;
    struct mma_form form;
    struct product_target target;
    bool is_a;
    int64_t first, rows; /* those that are decoded, as far as they are there */
    uint8_t *to;         /* rows of bf16 */
    int64_t row_bytes;
};

static __global__ void __launch_bounds__(THREADS, 2) decode_operand(struct decode_arguments job) {
    __shared__ struct mma_side side;
    if (threadIdx.x == 0) {
        side_make(&job.operand, &job.target, job.is_a, &side);
    }
    __syncthreads();
    const int64_t parts = ceil_div(side.depth, PART); /* of a row; values beyond the depth are zeros */
    const int64_t rows = min_int64(job.rows, side.rows - job.first);
    const bool is_across = job.form.is_across_memory;
    const int64_t inner = is_across ? rows : parts;
    const int64_t outer = is_across ? parts : rows;
    if (inner == 0) {
        return;
    }
    int64_t y = thread_index() / inner; /* divisions are slow, so there are none in the loop */
    int64_t x = thread_index() % inner;
    const int64_t y_step = thread_count() / inner;
    const int64_t x_step = thread_count() % inner;
    for (; y < outer; y += y_step + (x + x_step >= inner), x += x_step - (x + x_step >= inner ? inner : 0)) {
        const int64_t place = is_across ? x : y;
        const int64_t row = job.first + place;
        const int64_t part = is_across ? y : x;
        uint32_t words[PART_WORDS];
        uint8_t *const to = job.to + place * job.row_bytes + part * PART * 2;
        const int k = (int)part * PART;
        if (is_codes4(job.form.source)) {
            read_part<SOURCE_NVFP4>(job.form, side, mma_row_at(job.form, side, row), k, words); /* or mxfp4's */
        } else if (job.form.source == SOURCE_CODES8) {
            read_part<SOURCE_CODES8>(job.form, side, mma_row_at(job.form, side, row), k, words);
        } else {
            any_part(job.form, side, (int)row, k, words);
        }
        store_four(words, to);
        store_four(words + 4, to + 16);
    }
}

static bool is_decoded(const struct gemm_operand *operand, enum product_part part, bool is_a) {
    const enum source source = source_of(operand, part);
    return is_a ? source != SOURCE_BF16 : source == SOURCE_ANY;
}

static int64_t decoded_row_bytes(const struct gemm_operand *operand) {
    return round_up(operand_depth(operand), PART) * 2;
}

/* Packed weights that are read across their rows, for gradients, are decoded and multiplied in slices of their columns, so that
 * the memory for it is bounded. That changes no bit: no sum has terms of two slices. A slice of this size stays in an H200's
 * cache of 50 MB. On an emulated GPU slices are as small as possible, so that weights have several there. */
#if defined(OPAQ_CUDA_EMULATION)
enum { SLICE_BYTES = 1 };
#else
enum { SLICE_BYTES = 32 << 20 };
#endif
enum { SLICE_UNIT = 128 }; /* columns, also the least: blocks of every format begin at multiples of it */

int64_t mma_slice(const struct gemm_job *job, enum product_part part) {
    const struct gemm_operand *const b = &job->b;
    if (b->copy == NULL || !b->is_across || part == PRODUCT_TERMS) {
        return b->plain.rows;
    }
    const int64_t units = SLICE_BYTES / max_int64(decoded_row_bytes(b), 1) / SLICE_UNIT;
    return min_int64(max_int64(units, 1) * SLICE_UNIT, b->plain.rows);
}

/* The memory for it: for a always, because its address is not known while a workspace is measured. */
static size_t decoded_bytes(const struct gemm_operand *operand, int64_t rows, enum product_part part,
                            bool is_a) {
    return is_a || source_of_layout(operand, part) == SOURCE_ANY
               ? (size_t)round_up(rows * decoded_row_bytes(operand), 64)
               : 0;
}

size_t product_mma_workspace(const struct gemm_job *job, enum product_part part) {
    return product_mma_takes(job, part) ? decoded_bytes(&job->a, job->a.plain.rows, part, true) +
                                              decoded_bytes(&job->b, mma_slice(job, part), part, false)
                                        : 0;
}

/* Makes the operand, which is decoded at `memory`, plain. */
static void make_plain(struct gemm_operand *gemm, struct mma_form *form, void *memory) {
    gemm->plain.row_step = decoded_row_bytes(gemm) / 2;
    gemm->plain.data = memory;
    form->source = SOURCE_BF16;
}

/* Decodes rows `first` to `first` + `rows` - 1 of the operand. */
static enum opaq_status decode(const struct product_operand *operand, const struct mma_form *form,
                               const struct product_target *target, bool is_a, int64_t first, int64_t rows,
                               void *to, const struct opaq_execution *execution, struct opaq_error *error) {
    const int64_t row_bytes = decoded_row_bytes(&operand->gemm);
    const struct decode_arguments arguments = {*operand, *form, *target,       is_a,
                                               first,    rows,  (uint8_t *)to, row_bytes};
    const int64_t parts = row_bytes / (PART * 2) * rows;
    return parts == 0 ? OPAQ_OK
                      : launch("to decode an operand", decode_operand, blocks_for(parts, THREADS), THREADS,
                               arguments, execution, error);
}

/* Restricts b and c to columns `first` to `first` + `columns` - 1 of c. The operand's own data are decoded already. */
static void take_slice(struct mma_arguments *arguments, int64_t first, int64_t columns) {
    struct quant_copy *const copy = &arguments->b.of.copy;
    struct product_target *const target = &arguments->target;
    arguments->b.gemm.plain.rows = columns;
    if (arguments->b_form.factor == FACTOR_SCALE) { /* of rows that are the columns of the copy */
        copy->scale = (float *)copy->scale + scale_index(copy, 0, first);
    }
    target->c.data =
        (char *)target->c.data + first * target->c.column_step * (target->c.dtype == OPAQ_F32 ? 4 : 2);
    target->c.columns = columns;
    if (target->bias != NULL) {
        target->bias = (const char *)target->bias + first * (target->bias_dtype == OPAQ_F32 ? 4 : 2);
    }
}

enum opaq_status mma_prepare(const struct gemm_job *job, enum product_part part, int64_t first,
                             struct mma_arguments *arguments, void *workspace,
                             const struct opaq_execution *execution, struct opaq_error *error) {
    const int64_t rows = job->a.plain.rows;
    const int64_t columns = min_int64(mma_slice(job, part), job->b.plain.rows - first);
    void *const b_memory = (char *)workspace + decoded_bytes(&job->a, rows, part, true);
    if (is_decoded(&job->a, part, true)) {
        if (first == 0) { /* the next slices find it there */
            TRY(decode(&arguments->a, &arguments->a_form, &arguments->target, true, 0, rows, workspace,
                       execution, error));
        }
        make_plain(&arguments->a.gemm, &arguments->a_form, workspace);
    }
    if (is_decoded(&job->b, part, false)) {
        TRY(decode(&arguments->b, &arguments->b_form, &arguments->target, false, first, columns, b_memory,
                   execution, error));
        make_plain(&arguments->b.gemm, &arguments->b_form, b_memory);
    }
    if (columns < job->b.plain.rows) {
        take_slice(arguments, first, columns);
    }
    return OPAQ_OK;
}

/* ---- operands for other libraries ---- */

struct factor_arguments {
    struct mma_arguments product;
    float added; /* what is added to the product is multiplied with it */
    float *factors;
};

static __global__ void write_factors(struct factor_arguments job) {
    __shared__ struct mma_side sides[2];
    sides_make(&job.product, sides);
    if (threadIdx.x == 0) {
        const float b_factor =
            factor_of(job.product.b_form, sides[1], factors_at(job.product.b_form, sides[1], 0), 0);
        const float a_factor =
            factor_of(job.product.a_form, sides[0], factors_at(job.product.a_form, sides[0], 0), 0);
        job.factors[0] = scaled(1.0f, job.product.constant, b_factor, a_factor);
        job.factors[1] = job.added;
    }
}

static bool has_one_factor(const struct gemm_operand *operand) {
    if (operand->copy == NULL) {
        return true;
    }
    const enum opaq_format format = (enum opaq_format)operand->spec->format;
    return format == OPAQ_FP8 || format == OPAQ_MXFP8 || format == OPAQ_MXFP4 ||
           (format == OPAQ_NVFP4 && operand->copy->amax_step == 0);
}

bool product_mma_decodes(const struct gemm_job *job) {
    return product_mma_takes(job, PRODUCT_WHOLE) && has_one_factor(&job->a) && has_one_factor(&job->b);
}

struct gemm_operand product_mma_decoded(const struct gemm_operand *operand, void *memory) {
    struct gemm_operand decoded;
    memset(&decoded, 0, sizeof decoded);
    decoded.plain = {
        memory, OPAQ_BF16, operand->plain.rows, operand_depth(operand), decoded_row_bytes(operand) / 2, 1};
    return decoded;
}

static const struct group_part no_group = {NULL, 0};

enum opaq_status product_mma_decode(const struct gemm_job *job, bool is_a, void *to,
                                    const struct opaq_execution *execution, struct opaq_error *error) {
    const struct gemm_operand *const operand = is_a ? &job->a : &job->b;
    float constant = 1.0f;
    const struct product_operand placed = product_operand_of(operand);
    const struct mma_form form = mma_form_of(operand, PRODUCT_WHOLE, &constant);
    const struct product_target target = product_target_of(job, &no_group, PRODUCT_WHOLE);
    return decode(&placed, &form, &target, is_a, 0, operand->plain.rows, to, execution, error);
}

enum opaq_status product_mma_factors(const struct gemm_job *job, float *factors,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    struct factor_arguments arguments;
    memset(&arguments, 0, sizeof arguments);
    arguments.product = mma_arguments_of(job, &no_group, PRODUCT_WHOLE);
    arguments.added = job->accumulate ? 1.0f : 0.0f;
    arguments.factors = factors;
    return launch("the factors of a product", write_factors, 1, WARP, arguments, execution, error);
}

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
    uint8_t *to; /* rows of bf16 */
    int64_t row_bytes;
};

static __global__ void __launch_bounds__(THREADS, 2) decode_operand(struct decode_arguments job) {
    __shared__ struct mma_side side;
    if (threadIdx.x == 0) {
        side_make(&job.operand, &job.target, job.is_a, &side);
    }
    __syncthreads();
    const int64_t parts = ceil_div(side.depth, PART); /* of a row; values beyond the depth are zeros */
    const bool is_across = job.form.is_across_memory;
    const int64_t inner = is_across ? side.rows : parts;
    const int64_t outer = is_across ? parts : side.rows;
    if (inner == 0) {
        return;
    }
    int64_t y = thread_index() / inner; /* divisions are slow, so there are none in the loop */
    int64_t x = thread_index() % inner;
    const int64_t y_step = thread_count() / inner;
    const int64_t x_step = thread_count() % inner;
    for (; y < outer; y += y_step + (x + x_step >= inner), x += x_step - (x + x_step >= inner ? inner : 0)) {
        const int64_t row = is_across ? x : y;
        const int64_t part = is_across ? y : x;
        uint32_t words[PART_WORDS];
        uint8_t *const to = job.to + row * job.row_bytes + part * PART * 2;
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

/* The memory for it: for a always, because its address is not known while a workspace is measured. */
static size_t decoded_bytes(const struct gemm_operand *operand, enum product_part part, bool is_a) {
    return is_a || source_of_layout(operand, part) == SOURCE_ANY
               ? (size_t)round_up(operand->plain.rows * decoded_row_bytes(operand), 64)
               : 0;
}

size_t product_mma_workspace(const struct gemm_job *job, enum product_part part) {
    return product_mma_takes(job, part)
               ? decoded_bytes(&job->a, part, true) + decoded_bytes(&job->b, part, false)
               : 0;
}

/* Decodes the operand to the workspace and makes it plain, where that is to be done. */
static enum opaq_status prepare(struct product_operand *operand, struct mma_form *form,
                                const struct product_target *target, bool is_a, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    struct gemm_operand *gemm = &operand->gemm;
    if (!is_decoded(gemm, target->part, is_a)) {
        return OPAQ_OK;
    }
    const struct decode_arguments arguments = {
        *operand, *form, *target, is_a, (uint8_t *)workspace, decoded_row_bytes(gemm)};
    const int64_t parts = arguments.row_bytes / (PART * 2) * gemm->plain.rows;
    gemm->plain.data = workspace;
    gemm->plain.row_step = arguments.row_bytes / 2;
    form->source = SOURCE_BF16;
    return parts == 0 ? OPAQ_OK
                      : launch("to decode an operand", decode_operand, blocks_for(parts, THREADS), THREADS,
                               arguments, execution, error);
}

enum opaq_status mma_prepare(const struct gemm_job *job, enum product_part part,
                             struct mma_arguments *arguments, void *workspace,
                             const struct opaq_execution *execution, struct opaq_error *error) {
    TRY(prepare(&arguments->a, &arguments->a_form, &arguments->target, true, workspace, execution, error));
    return prepare(&arguments->b, &arguments->b_form, &arguments->target, false,
                   (char *)workspace + decoded_bytes(&job->a, part, true), execution, error);
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
    const struct decode_arguments arguments = {product_operand_of(operand),
                                               mma_form_of(operand, PRODUCT_WHOLE, &constant),
                                               product_target_of(job, &no_group, PRODUCT_WHOLE),
                                               is_a,
                                               (uint8_t *)to,
                                               decoded_row_bytes(operand)};
    const int64_t parts = arguments.row_bytes / (PART * 2) * operand->plain.rows;
    return parts == 0 ? OPAQ_OK
                      : launch("to decode an operand", decode_operand, blocks_for(parts, THREADS), THREADS,
                               arguments, execution, error);
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

/* cuda/quant/quant_kernels.h: the arguments of the quantization kernels. Depends on cuda_functions.h. */
#ifndef OPAQ_CUDA_QUANT_QUANT_KERNELS_H
#define OPAQ_CUDA_QUANT_QUANT_KERNELS_H

#include "cuda/cuda_functions.h"
#include "definition/scale_rules.h"

struct quant_arguments {
    struct quant_job job; /* its copies are not read */
    struct quant_copy copy;
    struct group_part group;
    struct random_source random;
    const float *scale; /* fp8: given, or NULL */
    const float *amax;  /* fp8: of the tensor, if no scale is given */
};

/* A copy with the sizes of its group. */
OPAQ_DEVICE static inline struct quant_copy copy_of_group(const struct quant_copy *whole,
                                                          const struct group_part *group) {
    struct quant_copy copy = *whole;
    if (copy.usage == OPAQ_ROWWISE) {
        copy.operand.rows = rows_of_group(group, copy.operand.rows);
    } else {
        copy.operand.columns = rows_of_group(group, copy.operand.columns);
    }
    return copy;
}

/* Reads the random state, which is in device memory. */
OPAQ_DEVICE static inline struct opaq_random random_of(const struct random_source *source) {
    const uint64_t offset = source->state == NULL ? source->offset : (uint64_t)source->state[1];
    return (struct opaq_random){source->state == NULL ? source->seed : (uint64_t)source->state[0],
                                (offset + (uint64_t)source->stream) & (UINT64_MAX >> 1)};
}

/* The job with its random numbers. */
OPAQ_DEVICE static inline struct quant_job job_of(const struct quant_arguments *arguments) {
    struct quant_job job;
    job.spec = arguments->job.spec;
    if (job.spec.options & OPAQ_STOCHASTIC) {
        job.random = random_of(&arguments->random);
    }
    return job;
}

/* fp8: the scale of the tensor, given or from the amax. */
OPAQ_DEVICE static inline struct fp8_scale fp8_tensor_scale(const struct quant_arguments *arguments) {
    const struct opaq_spec *spec = &arguments->job.spec;
    return arguments->scale != NULL ? fp8_scale_given(spec, *arguments->scale)
                                    : fp8_scale_from_amax(spec, *arguments->amax,
                                                          fp8_scale_limit(spec, arguments->copy.operand.dtype));
}

/* The tensor that a copy is made of. */
static inline struct quant_matrix plain_operand(const struct quant_copy *copy) {
    return copy->usage == OPAQ_ROWWISE ? copy->operand : quant_matrix_transposed(copy->operand);
}

/* Whether the kernels for parts are used at all: not with OPAQ_CUDA_QUANTIZER=general, so that tests reach the others. */
bool uses_parts(void);

/* Whether threads can read x as parts of 16 values: contiguous, aligned rows of bf16, whose number of columns is a multiple of 16. */
bool is_in_parts(const struct quant_matrix *x);

/* Whether a copy of such a tensor, without the scale rules that divide, has codes that threads can store as parts. */
bool takes_parts(const struct quant_job *job, const struct quant_copy *copy);

/* Fast kernels for such copies: rowwise ones; and all copies of a job at once. They write every byte that is not padding. */
bool takes_rows(const struct quant_job *job, const struct quant_copy *copy);
enum opaq_status quantize_rows(const struct quant_arguments *arguments, CUDA_RUN);
bool takes_tiles(const struct quant_job *job);
enum opaq_status quantize_tiles(const struct quant_arguments *arguments, const struct quant_job *job, CUDA_RUN);

/* Encode any copy, each in its own file; packed or tiled buffers must be zero before. */
enum opaq_status encode_fp8_tensor(const struct quant_arguments *arguments, CUDA_RUN);
enum opaq_status quantize_fp8_blocks(const struct quant_arguments *arguments, CUDA_RUN);
enum opaq_status quantize_small_blocks(const struct quant_arguments *arguments, CUDA_RUN);

/* Replaces the amax in `amax` by the stored scale, after copying it to `returned` unless that is NULL. */
enum opaq_status finish_fp8_tensor(const struct quant_arguments *arguments, float *amax, float *returned,
                                   CUDA_RUN);

#endif

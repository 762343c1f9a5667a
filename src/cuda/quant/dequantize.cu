/* cuda/quant/dequantize.cu: dequantizes every format: one thread per 16 elements, which share a scale. */
#include "cuda/quant/quant_kernels.h"
#include "definition/decode_ref.h"

enum { PART = 16 };

static __global__ void dequantize_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const struct opaq_spec *spec = &arguments.job.spec;
    const bool along_rows = copy.operand.column_step == 1; /* adjacent threads write adjacent elements */
    const int64_t rows = copy.operand.rows;
    const int64_t parts = ceil_div(copy.operand.columns, PART);
    for (int64_t i = thread_index(); i < rows * parts; i += thread_count()) {
        const int64_t r = along_rows ? i / parts : i % rows;
        const int64_t c = (along_rows ? i % parts : i / rows) * PART;
        dequantize_segment(spec, &copy, r, c, PART);
    }
}

enum opaq_status dequantize_group(const struct quant_job *job, const struct group_part *group,
                                  const struct opaq_execution *execution, struct opaq_error *error) {
    struct quant_arguments arguments;
    memset(&arguments, 0, sizeof arguments);
    arguments.job = *job;
    arguments.group = *group;
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_matrix *operand = &job->copy[i].operand;
        arguments.copy = job->copy[i];
        if (operand->rows > 0 && operand->columns > 0) {
            TRY(launch("dequantize", dequantize_kernel,
                       blocks_for(operand->rows * ceil_div(operand->columns, PART), THREADS), THREADS,
                       arguments, execution, error));
        }
    }
    return OPAQ_OK;
}

enum opaq_status cuda_dequantize(const struct quant_job *job, const struct opaq_execution *execution,
                                 struct opaq_error *error) {
    const struct group_part all = {NULL, 0};
    return dequantize_group(job, &all, execution, error);
}

/* cpu/gemm/product_run.c: a product on the CPU: the kernels for tiled weights if they support it, else those for any
 * operands. */
#include "base/checked.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/packed_run.h"
#include "opaq/linear.h"

_Static_assert((int)PACKED_NEAR == OPAQ_PRECISION_NEAR && (int)PACKED_FAST == OPAQ_PRECISION_FAST &&
                   (int)PACKED_FAST32 == OPAQ_PRECISION_FAST32,
               "a plan's precision is a kernel's");

/* Maximum over both kernel families: alignment, which decides between them, is known only at run time. */
size_t cpu_product_workspace(const struct gemm_job *job) {
    const enum packed_precision precision = (enum packed_precision)job->precision;
    const size_t any = gemm_workspace_bytes(job);
    const size_t tiled = packed_could_run(job, precision) ? packed_workspace_bytes(job, precision) : 0;
    return tiled > any ? tiled : any;
}

enum opaq_status cpu_product(const struct gemm_job *job, void *workspace,
                             const struct opaq_execution *execution, struct opaq_error *error) {
    const enum packed_precision precision = (enum packed_precision)job->precision;
    (void)error;
    if (packed_can_run(job, precision)) {
        packed_run(job, precision, workspace, execution->parallel);
    } else {
        gemm_run(job, workspace, execution->parallel);
    }
    return OPAQ_OK;
}

const char *cpu_product_kernel(const struct opaq_spec *w, const struct opaq_spec *x, enum opaq_element x_dtype,
                               int32_t precision) {
    const bool is_tiled = w != NULL && (w->options & OPAQ_TILED) != 0;
    const char *packed = is_tiled ? packed_kernel_name(w, x, x_dtype, (enum packed_precision)precision) : NULL;
    return packed != NULL ? packed : gemm_kernel_name();
}

/* op/linear/linear_kernel.c: which kernel multiplies what. */
#include <stddef.h>

#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/packed_run.h"
#include "opaq/linear.h"

const char *opaq_linear_kernel(const struct opaq_spec *w, const struct opaq_spec *x, enum opaq_element x_dtype,
                               enum opaq_precision precision) {
    if ((w != NULL && opaq_spec_check(w, NULL) != OPAQ_OK) ||
        (x != NULL && opaq_spec_check(x, NULL) != OPAQ_OK) || (unsigned)precision > OPAQ_PRECISION_FAST32) {
        return NULL;
    }
    const bool is_tiled = w != NULL && (w->options & OPAQ_TILED) != 0;
    const char *packed = is_tiled ? packed_kernel_name(w, x, x_dtype, (enum packed_precision)precision) : NULL;
    return packed != NULL ? packed : gemm_kernel_name();
}

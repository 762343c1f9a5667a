/* opaq/kernel.h: the kernels of this build, and forcing one. Depends on status.h.
 *
 * Each operation takes the fastest kernel that this processor can run. For comparisons, and where one is suspected of
 * being wrong, others can be asked for by their names, by opaq_kernel_force or by the environment variable OPAQ_KERNEL. */
#ifndef OPAQ_KERNEL_H
#define OPAQ_KERNEL_H

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Name `index` ("packed_nvfp4_fast_avx2", "quantize_mxfp8_ref", "gemm_avx512", ...), NULL beyond the last one. can_run, if
 * it is not NULL, becomes 1 where this processor can run it, else 0. */
OPAQ_API const char *opaq_kernel_at(int index, int *can_run);

/* From now on kernels of these names, separated by commas, do what they can do; whatever none of them does is done as
 * before. "" or NULL: nothing is forced any more, not by OPAQ_KERNEL either. A name that does not exist, or that this
 * processor cannot run, is an error and changes nothing. No operation may be running meanwhile. */
OPAQ_API enum opaq_status opaq_kernel_force(const char *names, struct opaq_error *error);

/* What is forced, "" if nothing. Valid until the end of the process. */
OPAQ_API const char *opaq_kernel_forced(void);

#ifdef __cplusplus
}
#endif

#endif

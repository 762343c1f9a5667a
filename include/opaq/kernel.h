/* opaq/kernel.h: lists the kernels of this build and forces the use of some. Depends on status.h.
 *
 * Each operation uses the fastest kernel that this processor can run. To compare kernels, or to bypass one that
 * is suspected of being wrong, force others by name with opaq_kernel_force or the environment variable
 * OPAQ_KERNEL. */
#ifndef OPAQ_KERNEL_H
#define OPAQ_KERNEL_H

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Name `index` ("packed_nvfp4_fast_avx2", "quantize_mxfp8_ref", "gemm_avx512", ...), NULL beyond the last one.
 * Unless can_run is NULL, sets it to 1 if this processor can run the kernel, else to 0. */
OPAQ_API const char *opaq_kernel_at(int index, int *can_run);

/* Forces these kernels, a list of names separated by commas, from now on: each is used for everything it
 * supports; the rest is chosen as before. "" or NULL ends all forcing, including that of OPAQ_KERNEL. A name
 * that does not exist or that this processor cannot run is an error and changes nothing. No operation may run
 * during the call. */
OPAQ_API enum opaq_status opaq_kernel_force(const char *names, struct opaq_error *error);

/* The forced names, "" if there are none. Valid until the end of the process. */
OPAQ_API const char *opaq_kernel_forced(void);

#ifdef __cplusplus
}
#endif

#endif

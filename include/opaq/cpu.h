/* opaq/cpu.h: the instruction-set features of this processor, which select the kernels. Depends on status.h. */
#ifndef OPAQ_CPU_H
#define OPAQ_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of opaq_cpu_features(). A feature counts only if the operating system saves its registers. */
enum opaq_cpu_feature {
    OPAQ_CPU_AVX2 = 1 << 0,        /* AVX2, FMA and F16C together */
    OPAQ_CPU_AVX512 = 1 << 1,      /* AVX-512 F, BW, VL, DQ together */
    OPAQ_CPU_AVX512_VBMI = 1 << 2, /* byte permutes */
    OPAQ_CPU_AVX512_VNNI = 1 << 3, /* 8-bit and 16-bit dot products */
    OPAQ_CPU_AVX512_BF16 = 1 << 4, /* dot products of bfloat16, where they are fast: not on Intel */
    OPAQ_CPU_NEON = 1 << 5,        /* every AArch64 processor has it */
    OPAQ_CPU_DOTPROD = 1 << 6      /* 8-bit dot products of NEON */
};

/* Detected once per process. The environment variable OPAQ_CPU limits the result: "avx2", "avx512" or another
 * name of opaq_cpu_describe keeps that feature and those it requires, "ref" keeps none. Any other value limits
 * nothing, and the functions that run kernels fail with the error of opaq_cpu_check: opaq_quantize,
 * opaq_dequantize, opaq_amax, opaq_noise_measure, opaq_op_run, opaq_op_call, opaq_runner_run and
 * opaq_kernel_force. */
OPAQ_API uint32_t opaq_cpu_features(void);

/* Checks that OPAQ_CPU is unset, empty or a known name; the error lists the known names. */
OPAQ_API enum opaq_status opaq_cpu_check(struct opaq_error *error);

/* Writes "avx2 avx512 ..." (terminated, truncated to `capacity`) and returns the untruncated length, as
 * snprintf. */
OPAQ_API size_t opaq_cpu_describe(uint32_t features, char *buffer, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif

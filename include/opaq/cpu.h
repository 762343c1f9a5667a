/* opaq/cpu.h: what this processor can do, as kernels are chosen by it. Depends on status.h. */
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
    OPAQ_CPU_NEON = 1 << 5,        /* of AArch64: all of them have it */
    OPAQ_CPU_DOTPROD = 1 << 6      /* 8-bit dot products of NEON */
};

/* Found out once in a process. The environment variable OPAQ_CPU limits it: "avx2", "avx512" or another name of
 * opaq_cpu_describe leaves that feature and those it stands on, "ref" leaves none. With any other value nothing is limited,
 * and whatever runs kernels fails as opaq_cpu_check does: opaq_quantize, opaq_dequantize, opaq_amax, opaq_noise_measure,
 * opaq_op_run, opaq_op_call, opaq_runner_run and opaq_kernel_force. */
OPAQ_API uint32_t opaq_cpu_features(void);

/* Whether OPAQ_CPU is unset, empty or a name that opaq knows; the error lists them. */
OPAQ_API enum opaq_status opaq_cpu_check(struct opaq_error *error);

/* Writes "avx2 avx512 ..." (terminated, cut if too long) and returns the length it wanted, as snprintf. */
OPAQ_API size_t opaq_cpu_describe(uint32_t features, char *buffer, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif

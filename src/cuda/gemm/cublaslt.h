/* cuda/gemm/cublaslt.h: what opaq calls of NVIDIA's cuBLASLt, declared here: opaq is built without its header and linked without
 * its library, which is opened at run time. Names and numbers are those of cublasLt.h, 12.0 to 13.1, without prefixes. Depends on
 * the CUDA runtime.
 *
 * In its terms a matrix is column-major: a row-major y[M,N] is one of N rows and M columns, so y = x w^T has w as its A. */
#ifndef OPAQ_CUDA_GEMM_CUBLASLT_H
#define OPAQ_CUDA_GEMM_CUBLASLT_H

#include <cuda_runtime.h>

#include <stddef.h>
#include <stdint.h>

enum { LT_SUCCESS = 0, LT_INVALID_VALUE = 7, LT_ARCH_MISMATCH = 8, LT_NOT_SUPPORTED = 15 }; /* statuses */
enum { LT_COMPUTE_32F = 68, LT_OP_N = 0, LT_OP_T = 1 };
enum lt_type { LT_32F = 0, LT_16F = 2, LT_16BF = 14, LT_E4M3 = 28, LT_E5M2 = 29 };

/* Attributes of a descriptor, and of a preference. */
enum {
    LT_POINTER_MODE = 2,
    LT_TRANSA = 3,
    LT_TRANSB = 4,
    LT_EPILOGUE = 7,
    LT_BIAS_POINTER = 8,
    LT_A_SCALE_POINTER = 17,
    LT_B_SCALE_POINTER = 18,
    LT_FAST_ACCUM = 25,
    LT_BIAS_DATA_TYPE = 26,
    LT_A_SCALE_MODE = 31, /* from 12.8 on */
    LT_B_SCALE_MODE = 32
};
enum {
    LT_MAX_WORKSPACE_BYTES = 1,
    LT_REDUCTION_SCHEME_MASK = 3,
    LT_MIN_ALIGNMENT_A_BYTES = 5, /* then B, C and D */
};
enum { LT_EPILOGUE_BIAS = 4, LT_REDUCE_IN_COMPUTE_TYPE = 2, LT_POINTERS_OF_DEVICE = 1 };

/* Where the scales of an fp8 operand are: one; one for each row; for each row and 128 terms, rows contiguous and padded to a
 * multiple of 4; for 128 rows and 128 terms, blocks of terms contiguous and padded to a multiple of 4. */
enum lt_scale { LT_NO_SCALE = -1, LT_SCALAR = 0, LT_OUTER_VEC = 3, LT_VEC128 = 4, LT_BLK128 = 5 };

/* Opaque structs, larger than those of every version: the functions that fill them take the size. */
struct lt_descriptor {
    uint64_t data[64];
};
struct lt_layout {
    uint64_t data[16];
};
struct lt_preference {
    uint64_t data[16];
};
struct lt_algorithm {
    uint64_t data[8];
};
struct lt_choice {
    struct lt_algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

typedef void *lt_handle;

struct cublaslt {
    int (*create)(lt_handle *handle);
    int (*descriptor_init)(struct lt_descriptor *descriptor, size_t bytes, int compute, int scale_type);
    int (*descriptor_set)(struct lt_descriptor *descriptor, int attribute, const void *value, size_t bytes);
    int (*layout_init)(struct lt_layout *layout, size_t bytes, int type, uint64_t rows, uint64_t columns,
                       int64_t lead);
    int (*preference_init)(struct lt_preference *preference, size_t bytes);
    int (*preference_set)(struct lt_preference *preference, int attribute, const void *value, size_t bytes);
    int (*choose)(lt_handle handle, struct lt_descriptor *descriptor, struct lt_layout *a, struct lt_layout *b,
                  struct lt_layout *c, struct lt_layout *d, struct lt_preference *preference, int wanted,
                  struct lt_choice *choices, int *count);
    int (*matmul)(lt_handle handle, struct lt_descriptor *descriptor, const void *alpha, const void *a,
                  struct lt_layout *a_layout, const void *b, struct lt_layout *b_layout, const void *beta,
                  const void *c, struct lt_layout *c_layout, void *d, struct lt_layout *d_layout,
                  const struct lt_algorithm *algorithm, void *workspace, size_t workspace_bytes,
                  cudaStream_t stream);
};

/* The library's functions, or NULL if there is none. It is looked for once: the file that the environment variable
 * OPAQ_CUBLASLT_LIBRARY names, and no other if that is set; one that the process has loaded, as PyTorch does; one that the
 * dynamic linker finds; one beside PyTorch's or CUDA's runtime, if one of these is loaded. */
const struct cublaslt *cublaslt_find(void);

#endif

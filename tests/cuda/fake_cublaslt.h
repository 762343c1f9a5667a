/* fake_cublaslt.h: what a test sets and reads of the library of fake_cublaslt.c. Depends on nothing. */
#ifndef FAKE_CUBLASLT_H
#define FAKE_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

struct fake_cublaslt {
    int choose_status, matmul_status; /* what the heuristic and the product return */
    int choose_calls, matmul_calls;
};

typedef struct fake_cublaslt *fake_cublaslt_state_function(void);
__attribute__((visibility("default"))) fake_cublaslt_state_function fake_cublaslt_state;

/* The functions themselves, by cuBLASLt's names. */
#pragma GCC visibility push(default)
int cublasLtCreate(void **handle);
int cublasLtMatmulDescInit_internal(void *descriptor, size_t bytes, int compute, int scale_type);
int cublasLtMatmulDescSetAttribute(void *descriptor, int attribute, const void *value, size_t bytes);
int cublasLtMatrixLayoutInit_internal(void *layout, size_t bytes, int type, uint64_t rows, uint64_t columns,
                                      int64_t lead);
int cublasLtMatmulPreferenceInit_internal(void *preference, size_t bytes);
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes);
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *descriptor, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *choices, int *count);
int cublasLtMatmul(void *handle, void *descriptor, const void *alpha, const void *a, void *a_layout,
                   const void *b, void *b_layout, const void *beta, const void *c, void *c_layout, void *d,
                   void *d_layout, const void *algorithm, void *workspace, size_t workspace_bytes,
                   void *stream);
#pragma GCC visibility pop

#endif

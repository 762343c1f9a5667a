/* fake_cublaslt.c: a library with the functions of cuBLASLt that src/cuda calls. They compute nothing and return the statuses that a
 * test sets. Depends on fake_cublaslt.h. */
#include "fake_cublaslt.h"

#include <string.h>

static struct fake_cublaslt fake;

struct fake_cublaslt *fake_cublaslt_state(void) {
    return &fake;
}

int cublasLtCreate(void **handle) {
    *handle = &fake;
    return 0;
}

int cublasLtMatmulDescInit_internal(void *descriptor, size_t bytes, int compute, int scale_type) {
    (void)compute;
    (void)scale_type;
    memset(descriptor, 0, bytes);
    return 0;
}

int cublasLtMatmulDescSetAttribute(void *descriptor, int attribute, const void *value, size_t bytes) {
    (void)descriptor;
    (void)attribute;
    (void)value;
    (void)bytes;
    return 0;
}

int cublasLtMatrixLayoutInit_internal(void *layout, size_t bytes, int type, uint64_t rows, uint64_t columns,
                                      int64_t lead) {
    (void)type;
    (void)rows;
    (void)columns;
    (void)lead;
    memset(layout, 0, bytes);
    return 0;
}

int cublasLtMatmulPreferenceInit_internal(void *preference, size_t bytes) {
    memset(preference, 0, bytes);
    return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes) {
    return cublasLtMatmulDescSetAttribute(preference, attribute, value, bytes);
}

/* The choices are zeros: an algorithm without a workspace. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *descriptor, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *choices, int *count) {
    const size_t choice_bytes = 8 * sizeof(uint64_t) + sizeof(size_t) + 6 * sizeof(int);
    (void)handle;
    (void)descriptor;
    (void)a;
    (void)b;
    (void)c;
    (void)d;
    (void)preference;
    (void)wanted;
    ++fake.choose_calls;
    memset(choices, 0, choice_bytes);
    *count = fake.choose_status == 0;
    return fake.choose_status;
}

int cublasLtMatmul(void *handle, void *descriptor, const void *alpha, const void *a, void *a_layout,
                   const void *b, void *b_layout, const void *beta, const void *c, void *c_layout, void *d,
                   void *d_layout, const void *algorithm, void *workspace, size_t workspace_bytes,
                   void *stream) {
    (void)handle;
    (void)descriptor;
    (void)alpha;
    (void)a;
    (void)a_layout;
    (void)b;
    (void)b_layout;
    (void)beta;
    (void)c;
    (void)c_layout;
    (void)d;
    (void)d_layout;
    (void)algorithm;
    (void)workspace;
    (void)workspace_bytes;
    (void)stream;
    ++fake.matmul_calls;
    return fake.matmul_status;
}

/* opaq/tensor.h: a borrowed strided tensor. Depends on proto.h. */
#ifndef OPAQ_TENSOR_H
#define OPAQ_TENSOR_H

#include <stdint.h>

#include "opaq/proto.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element types in memory. The floats have the numbers of enum opaq_element. */
enum opaq_dtype {
    OPAQ_DTYPE_F64 =
        -2, /* no operator takes it; errors name it. Other unsupported dtypes are any other number */
    OPAQ_DTYPE_F16 = 4,
    OPAQ_DTYPE_BF16 = 5,
    OPAQ_DTYPE_F32 = 6,
    OPAQ_DTYPE_U8 = 16,
    OPAQ_DTYPE_I64 = 17,
    OPAQ_DTYPE_I32 = 18
};

struct opaq_tensor {
    void *data;    /* may be NULL if there are no elements, and before allocation */
    int32_t dtype; /* enum opaq_dtype */
    int32_t rank;
    struct opaq_device device;
    int64_t shape[OPAQ_RANK_LIMIT];   /* entries beyond the rank are not read */
    int64_t strides[OPAQ_RANK_LIMIT]; /* in elements */
};

#ifdef __cplusplus
}
#endif

#endif

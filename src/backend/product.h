/* backend/product.h: the arguments of a matrix product. Depends on quant_job.h. */
#ifndef OPAQ_BACKEND_PRODUCT_H
#define OPAQ_BACKEND_PRODUCT_H

#include "backend/quant_job.h"

/* One operand: rows x columns, contracted along its columns. Either a plain matrix, or a copy of a quantized
 * tensor whose rows are decoded. */
struct gemm_operand {
    struct quant_matrix plain;     /* data, dtype and steps; for a copy only rows and columns are read */
    const struct opaq_spec *spec;  /* NULL: plain */
    const struct quant_copy *copy; /* NULL: plain */
    /* For a copy with the Hadamard transform: whether its rows are transformed back. If both operands are
     * transformed with the same mask and have the same number of columns, that is unnecessary: the product is
     * the same. */
    bool undo_hadamard;
    /* A rowwise copy that is read across its rows: the operand is the copy's matrix transposed, so its columns
     * are the copy's rows. Second operands only. */
    bool is_across;
};

/* c = a b^T. With K = 0 every sum is 0; other sizes may be 0 too. */
struct gemm_job {
    struct gemm_operand a; /* M x K */
    struct gemm_operand b; /* N x K */
    struct quant_matrix c; /* M x N of f32, bf16 or f16, any steps; must not overlap anything else */
    const void *bias;      /* N values of bias_dtype (f32, bf16 or f16), contiguous; or NULL */
    enum opaq_element bias_dtype;
    bool accumulate;   /* the product is added to c */
    bool any_order;    /* a row's bits may depend on the other rows of a */
    int32_t precision; /* enum opaq_precision: the lowest accuracy that is accepted with a tiled b */
};

#endif

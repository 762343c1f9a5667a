/* support_product.h: expected products: operands that tests quantize and dequantize themselves, multiplied in
 * double. Depends on support_tensor.h and opaq/op.h. */
#ifndef SUPPORT_PRODUCT_H
#define SUPPORT_PRODUCT_H

#include <stdbool.h>

#include "opaq/op.h"
#include "support_tensor.h"

/* An operand of a product; its rows run along the dimension that is summed over. */
struct product_matrix {
    int64_t rows, columns;
    double *value;
};

/* A tensor read along its rows or its columns: from the copy of that direction or, if absent, from the other
 * one. */
struct product_matrix product_matrix_of(const struct tensor *tensor, enum opaq_usage usage);

/* The dequantized tensor, read along its rows or its columns. */
struct product_matrix product_matrix_whole(const struct tensor *tensor, enum opaq_usage usage);

/* The columnwise copy of an nvfp4+rht tensor, read along its columns, without undoing the transform. */
struct product_matrix product_matrix_transformed(const struct tensor *tensor);
void product_matrix_free(struct product_matrix *matrix);

/* Whether c = a b^T + bias + former, within the bound of gemm_run.h and the rounding to c's dtype. bias: N doubles;
 * former: like c; either may be NULL. */
bool product_check(const struct opaq_tensor *c, const struct product_matrix *a, const struct product_matrix *b,
                   const double *bias, const double *former, const char *what);

/* Checks that a contiguous float tensor has the sums of a matrix's rows, with the same kind of bound. */
bool product_check_sums(const struct opaq_tensor *sums, const struct product_matrix *matrix, const char *what);

/* Element i of a contiguous float tensor. */
double product_value(const struct opaq_tensor *tensor, int64_t i);

/* Maximum error of rounding a value to a dtype. */
double product_rounding(int32_t dtype, double value);

#endif

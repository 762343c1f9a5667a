/* support_product.c: expected products, in double. */
#include "support_product.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_quant.h"

static struct product_matrix matrix_make(int64_t rows, int64_t columns) {
    struct product_matrix matrix = {rows, columns, calloc((size_t)(rows * columns) + 1, sizeof(double))};
    if (matrix.value == NULL) {
        printf("  calloc: no memory\n");
        exit(1);
    }
    return matrix;
}

void product_matrix_free(struct product_matrix *matrix) {
    free(matrix->value);
    matrix->value = NULL;
}

static struct product_matrix matrix_of_plain(const struct tensor *plain, enum opaq_usage usage) {
    const int64_t rows = opaq_proto_rows(&plain->view.proto);
    const int64_t columns = opaq_proto_columns(&plain->view.proto);
    const bool turn = usage == OPAQ_COLUMNWISE;
    struct product_matrix matrix = turn ? matrix_make(columns, rows) : matrix_make(rows, columns);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            matrix.value[turn ? c * rows + r : r * columns + c] = (double)tensor_get(plain, r, c);
        }
    }
    return matrix;
}

struct product_matrix product_matrix_of(const struct tensor *tensor, enum opaq_usage usage) {
    if (!tensor->view.proto.is_quantized) {
        return matrix_of_plain(tensor, usage);
    }
    const bool is_there = (tensor->view.proto.spec.usage & (int)usage) != 0;
    struct tensor plain = dequantized(tensor, is_there ? (int)usage : 0);
    struct product_matrix matrix = matrix_of_plain(&plain, usage);
    tensor_free(&plain);
    return matrix;
}

struct product_matrix product_matrix_whole(const struct tensor *tensor, enum opaq_usage usage) {
    if (!tensor->view.proto.is_quantized) {
        return matrix_of_plain(tensor, usage);
    }
    struct tensor plain = dequantized(tensor, 0);
    struct product_matrix matrix = matrix_of_plain(&plain, usage);
    tensor_free(&plain);
    return matrix;
}

/* The same buffers as those of a tensor without a transform, in whole groups of 16 rows. */
struct product_matrix product_matrix_transformed(const struct tensor *tensor) {
    const int64_t shape[2] = {(opaq_proto_rows(&tensor->view.proto) + 15) / 16 * 16,
                              opaq_proto_columns(&tensor->view.proto)};
    struct opaq_spec spec = tensor->view.proto.spec;
    struct tensor as_it_is = {tensor->view};
    spec.options &= (uint16_t)~OPAQ_HADAMARD;
    spec.hadamard_mask = 0;
    spec.usage = OPAQ_COLUMNWISE;
    CHECK_EQ_INT(tensor->view.proto.spec.usage, OPAQ_COLUMNWISE);
    CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &as_it_is.view.proto, NULL), OPAQ_OK);
    return product_matrix_of(&as_it_is, OPAQ_COLUMNWISE);
}

double product_value(const struct opaq_tensor *tensor, int64_t i) {
    return tensor->dtype == OPAQ_DTYPE_F32 ? (double)((const float *)tensor->data)[i]
                                           : (double)opaq_element_decode((enum opaq_element)tensor->dtype,
                                                                         ((const uint16_t *)tensor->data)[i]);
}

double product_rounding(int32_t dtype, double value) {
    const double size = fabs(value);
    return dtype == OPAQ_DTYPE_F32    ? size * 0x1p-24
           : dtype == OPAQ_DTYPE_BF16 ? size * 0x1p-8
                                      : size * 0x1p-11 + 0x1p-24;
}

static bool within(const struct opaq_tensor *tensor, int64_t i, double exact, double terms, int64_t depth,
                   const char *what) {
    const int64_t blocks = (depth + 255) / 256;
    const double steps = (double)((depth < 256 ? depth : 256) + blocks + 2);
    const double error = steps * 0x1.01p-24 * terms;
    const double bound = error + product_rounding(tensor->dtype, fabs(exact) + error) + 0x1p-140;
    const double value = product_value(tensor, i);
    return fabs(value - exact) <= bound ? true
                                        : CHECK_FAIL("%s: element %lld is %.9g, expected %.9g within %.3g",
                                                     what, (long long)i, value, exact, bound);
}

bool product_check(const struct opaq_tensor *c, const struct product_matrix *a, const struct product_matrix *b,
                   const double *bias, const double *former, const char *what) {
    const int64_t depth = a->columns;
    bool good = CHECK_EQ_INT(b->columns, depth);
    for (int64_t i = 0; good && i < a->rows * b->rows; ++i) {
        const double *p = a->value + i / b->rows * depth;
        const double *q = b->value + i % b->rows * depth;
        double exact = (bias == NULL ? 0.0 : bias[i % b->rows]) + (former == NULL ? 0.0 : former[i]);
        double terms =
            (bias == NULL ? 0.0 : fabs(bias[i % b->rows])) + (former == NULL ? 0.0 : fabs(former[i]));
        for (int64_t t = 0; t < depth; ++t) {
            exact += p[t] * q[t];
            terms += fabs(p[t] * q[t]);
        }
        good = within(c, i, exact, terms, depth, what);
    }
    return good;
}

bool product_check_sums(const struct opaq_tensor *sums, const struct product_matrix *matrix, const char *what) {
    bool good = true;
    for (int64_t i = 0; good && i < matrix->rows; ++i) {
        double exact = 0.0;
        double terms = 0.0;
        for (int64_t t = 0; t < matrix->columns; ++t) {
            exact += matrix->value[i * matrix->columns + t];
            terms += fabs(matrix->value[i * matrix->columns + t]);
        }
        good = within(sums, i, exact, terms, matrix->columns, what);
    }
    return good;
}

/* support_numbers.c: matrices of doubles with bounds on the error of a float32 computation of them. */
#include "support_numbers.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_op.h"
#include "support_product.h"

struct numbers numbers_make(int64_t rows, int64_t columns) {
    const size_t count = (size_t)(rows * columns) + 1;
    struct numbers made = {rows, columns, calloc(count, sizeof(double)), calloc(count, sizeof(double))};
    if (made.value == NULL || made.error == NULL) {
        printf("  calloc: no memory\n");
        exit(1);
    }
    return made;
}

void numbers_free(struct numbers *numbers) {
    free(numbers->value);
    free(numbers->error);
    memset(numbers, 0, sizeof *numbers);
}

struct numbers numbers_rows(const struct tensor *tensor, int64_t first, int64_t rows) {
    struct numbers made = numbers_make(rows, opaq_proto_columns(&tensor->view.proto));
    for (int64_t i = 0; i < rows * made.columns; ++i) {
        made.value[i] = (double)tensor_get(tensor, first + i / made.columns, i % made.columns);
    }
    return made;
}

struct numbers numbers_of(const struct tensor *tensor) {
    return numbers_rows(tensor, 0, opaq_proto_rows(&tensor->view.proto));
}

struct numbers numbers_transposed(const struct numbers *from) {
    struct numbers made = numbers_make(from->columns, from->rows);
    for (int64_t i = 0; i < from->rows * from->columns; ++i) {
        const int64_t to = i % from->columns * from->rows + i / from->columns;
        made.value[to] = from->value[i];
        made.error[to] = from->error[i];
    }
    return made;
}

struct numbers numbers_product(const struct numbers *a, const struct numbers *b, const double *bias) {
    const int64_t depth = a->columns;
    const int64_t blocks = (depth + 255) / 256;
    const double steps = (double)((depth < 256 ? depth : 256) + blocks + 2);
    struct numbers c = numbers_make(a->rows, b->rows);
    for (int64_t i = 0; i < c.rows * c.columns; ++i) {
        const int64_t p = i / c.columns * depth;
        const int64_t q = i % c.columns * depth;
        double sum = bias == NULL ? 0.0 : bias[i % c.columns];
        double size = fabs(sum);
        double error = 0.0;
        for (int64_t k = 0; k < depth; ++k) {
            const double left = fabs(a->value[p + k]) + a->error[p + k];
            const double right = fabs(b->value[q + k]) + b->error[q + k];
            sum += a->value[p + k] * b->value[q + k];
            size += left * right;
            error += left * b->error[q + k] + right * a->error[p + k];
        }
        c.value[i] = sum;
        c.error[i] = error + steps * 0x1.01p-24 * size + 0x1p-140;
    }
    return c;
}

void numbers_round(struct numbers *numbers, enum opaq_element dtype) {
    for (int64_t i = 0; i < numbers->rows * numbers->columns; ++i) {
        numbers->error[i] += product_rounding((int32_t)dtype, fabs(numbers->value[i]) + numbers->error[i]);
    }
}

bool numbers_check(const struct opaq_tensor *tensor, const struct numbers *expected, const char *what) {
    bool good = CHECK_EQ_INT(op_tensor_elements(tensor), expected->rows * expected->columns);
    for (int64_t i = 0; good && i < expected->rows * expected->columns; ++i) {
        const double value = product_value(tensor, i);
        const double exact = expected->value[i];
        const double bound =
            expected->error[i] + product_rounding(tensor->dtype, fabs(exact) + expected->error[i]);
        good = fabs(value - exact) <= bound
                   ? true
                   : CHECK_FAIL("%s: element %lld, %lld is %.9g, expected %.9g within %.3g", what,
                                (long long)(i / expected->columns), (long long)(i % expected->columns), value,
                                exact, bound);
    }
    return good;
}

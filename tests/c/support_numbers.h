/* support_numbers.h: matrices of doubles with bounds on the error of a float32 computation of them. Depends on
 * support_tensor.h and opaq/op.h. */
#ifndef SUPPORT_NUMBERS_H
#define SUPPORT_NUMBERS_H

#include <stdbool.h>

#include "opaq/op.h"
#include "support_tensor.h"

struct numbers {
    int64_t rows, columns;
    double *value, *error; /* bound on the error of the float32 result */
};

/* Zeros; a tensor's numbers, which are exact; some of its rows; the transpose. */
struct numbers numbers_make(int64_t rows, int64_t columns);
struct numbers numbers_of(const struct tensor *tensor);
struct numbers numbers_rows(const struct tensor *tensor, int64_t first, int64_t rows);
struct numbers numbers_transposed(const struct numbers *from);
void numbers_free(struct numbers *numbers);

/* a b^T + bias (or NULL), summed as gemm_run.h describes: the operands' errors and one rounding for each
 * step. */
struct numbers numbers_product(const struct numbers *a, const struct numbers *b, const double *bias);

/* Adds the rounding to a dtype to the errors. */
void numbers_round(struct numbers *numbers, enum opaq_element dtype);

/* Checks that a contiguous float tensor has these numbers, rounded once to its dtype. */
bool numbers_check(const struct opaq_tensor *tensor, const struct numbers *expected, const char *what);

#endif

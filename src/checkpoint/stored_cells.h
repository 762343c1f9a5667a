/* checkpoint/stored_cells.h: strided tensors as matrices, to read and write checkpoints. Depends on
 * op_tensor.h. */
#ifndef OPAQ_CHECKPOINT_STORED_CELLS_H
#define OPAQ_CHECKPOINT_STORED_CELLS_H

#include "op/table/op_tensor.h"

/* A tensor as a matrix; steps in elements. Its memory may be unaligned. */
struct cells {
    char *data;
    int32_t dtype;
    int64_t rows;
    int64_t row_step;
    int64_t column_step;
    int64_t inner_rows; /* size of the innermost dimension of the rows */
};

static inline char *cell_at(const struct cells *cells, int64_t r, int64_t c) {
    return cells->data + (r * cells->row_step + c * cells->column_step) * dtype_bytes(cells->dtype);
}

/* An entry as a float: of f32, of bf16, or of u8, which is an e8m0. */
float cells_float(const struct cells *cells, int64_t r, int64_t c);

/* Checks that a tensor is present, on the CPU, and has memory. */
enum opaq_status cells_check(const char *operation, const char *what, const struct opaq_tensor *tensor,
                             struct opaq_error *error);

/* A tensor that was checked, as a matrix with that many columns: its last dimensions make a row, those before them the
 * rows. */
enum opaq_status cells_of(const char *operation, const char *what, const struct opaq_tensor *tensor,
                          int64_t columns, struct cells *cells, struct opaq_error *error);

#endif

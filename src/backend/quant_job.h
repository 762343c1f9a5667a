/* backend/quant_job.h: the arguments of a quantize or dequantize kernel. Depends on format.
 *
 * A kernel sees a tensor as one or two copies of an operand. The rowwise copy's operand is x itself; the
 * columnwise copy's is x transposed, without moving data: only the steps of its matrix are swapped. So every
 * kernel quantizes rows of an operand along its columns, and the steps of the output come from the format
 * table. */
#ifndef OPAQ_BACKEND_QUANT_JOB_H
#define OPAQ_BACKEND_QUANT_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "opaq/quant.h"

/* A matrix of f32, bf16 or f16; steps in elements. */
struct quant_matrix {
    void *data;
    enum opaq_element dtype;
    int64_t rows;
    int64_t columns;
    int64_t row_step;
    int64_t column_step;
};

/* The position of the block scale of operand element (r, c), in entries. */
struct scale_layout {
    int64_t row_per; /* rows that share an entry; a 2D block's scale is repeated for each of them */
    int64_t row_step;
    int64_t column_per;
    int64_t column_step;
    int64_t
        swizzled_columns;  /* 0: row-major with the steps above; else the columns of a matrix in 128x4 tiles */
    int64_t tiled_columns; /* 0, or the number of blocks of a matrix laid out by format/tile.h */
    int64_t tile_rows;
};

struct quant_copy {
    enum opaq_usage usage;
    struct quant_matrix operand;
    int64_t block_rows;    /* operand rows under one scale; "all rows" is resolved to their number */
    int64_t block_columns; /* at least 1 */
    uint8_t *data;
    int64_t data_row_step;    /* in codes */
    int64_t data_column_step; /* in codes */
    int64_t data_columns;     /* codes in an operand row of the buffer, including padding */
    bool is_packed;           /* two codes per byte, the even element in the low nibble */
    int64_t tile_rows;        /* 0, or the rows of a tile of format/tile.h */
    void *scale;
    int scale_bytes;           /* bytes of an entry */
    size_t scale_buffer_bytes; /* bytes of the whole buffer, including padding */
    struct scale_layout scale_layout;
    float *amax; /* NVFP4: one, or one per operand row; an input of the kernel. OPAQ_GLOBAL: the global scale */
    int64_t amax_step; /* 0 or 1 */
    bool is_hadamard;
};

struct quant_job {
    struct opaq_spec spec;
    int copy_count;
    struct quant_copy copy[2];
    float tensor_scale; /* fp8: the factor (or divisor) of the whole tensor, from scale_fp8 */
    struct opaq_random random;
};

/* The copies of a quantized tensor that `usage` names, over the plain tensor x. The views must have been
 * checked. */
void quant_job_make(const struct opaq_view *plain, const struct opaq_view *quantized, int usage,
                    struct quant_job *job);

/* The number of consecutive rows that share a scale or a tile: a copy can only be split at multiples of it. */
int64_t quant_copy_rows_together(const struct quant_copy *copy);

/* Restricts a copy to rows first to first + rows - 1 of its operand. Returns false and changes nothing if they
 * share a scale with other rows. The caller sets the operand's data. */
bool quant_copy_take_rows(struct quant_copy *copy, int64_t first, int64_t rows);

/* The matrix of a checked plain view. */
struct quant_matrix quant_matrix_make(const struct opaq_view *plain);

static inline struct quant_matrix quant_matrix_transposed(struct quant_matrix m) {
    return (struct quant_matrix){m.data, m.dtype, m.columns, m.rows, m.column_step, m.row_step};
}

/* The number of operand rows of a panel: a multiple of every block's rows, and even, so that no two panels
 * write to one byte. */
int64_t quant_panel_rows(const struct quant_copy *copy);

#endif

/* backend/quant_job.h: what a quantize or dequantize kernel is given. Depends on format.
 *
 * A kernel sees a tensor as one or two copies of an operand. The rowwise copy's operand is x itself; the
 * columnwise copy's is x transposed, which costs nothing: only the steps of its matrix are swapped. So every
 * kernel quantizes rows of an operand along its columns, and where the bytes go is steps taken from the format
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

/* Where the block scale of operand element (r, c) lies, in entries. */
struct scale_layout {
    int64_t row_per; /* rows that share an entry by the table; 2D blocks repeat it in each of theirs */
    int64_t row_step;
    int64_t column_per;
    int64_t column_step;
    int64_t swizzled_columns; /* 0: row-major with the steps above; else: 128x4 tiles over that many columns */
    int64_t tiled_columns;    /* 0, or: by format/tile.h, over that many blocks */
    int64_t tile_rows;
};

struct quant_copy {
    enum opaq_usage usage;
    struct quant_matrix operand;
    int64_t block_rows;    /* of the operand under one scale; whole dimensions are resolved to their sizes */
    int64_t block_columns; /* at least 1 */
    uint8_t *data;
    int64_t data_row_step;    /* in codes */
    int64_t data_column_step; /* in codes */
    int64_t data_columns;     /* codes in an operand row of the buffer, its padding included */
    bool is_packed;           /* two codes per byte, the even one low */
    int64_t tile_rows;        /* 0, or: codes lie by format/tile.h, in tiles of so many rows */
    void *scale;
    int scale_bytes;           /* of an entry */
    size_t scale_buffer_bytes; /* of the whole buffer, its padding included */
    struct scale_layout scale_layout;
    float *amax; /* NVFP4: one, or one per operand row; given to the kernel. OPAQ_GLOBAL: the global scale */
    int64_t amax_step; /* 0 or 1 */
    bool is_hadamard;
};

struct quant_job {
    struct opaq_spec spec;
    int copy_count;
    struct quant_copy copy[2];
    float tensor_scale; /* fp8: the factor (or divisor) that scale_fp8 gave for the whole tensor */
    struct opaq_random random;
};

/* The copies of a quantized tensor that `usage` names, over the plain tensor x. The view is a checked one. */
void quant_job_make(const struct opaq_view *plain, const struct opaq_view *quantized, int usage,
                    struct quant_job *job);

/* Rows that share a scale or a tile: only at multiples of so many can a copy be cut. */
int64_t quant_copy_rows_together(const struct quant_copy *copy);

/* Makes a copy of rows first to first + rows - 1 of its operand. False, and nothing changed, if those share a scale with
 * other rows. The operand's data are the caller's to set. */
bool quant_copy_take_rows(struct quant_copy *copy, int64_t first, int64_t rows);

/* The matrix of a checked plain view. */
struct quant_matrix quant_matrix_make(const struct opaq_view *plain);

static inline struct quant_matrix quant_matrix_transposed(struct quant_matrix m) {
    return (struct quant_matrix){m.data, m.dtype, m.columns, m.rows, m.column_step, m.row_step};
}

/* A kernel works on panels of this many operand rows: a multiple of every block's rows, and even, so that no two
 * panels write to one byte. */
int64_t quant_panel_rows(const struct quant_copy *copy);

#endif

/* cpu/gemm/gemm_decode.c: decodes operands to float32, with the values that dequantization gives. Without a
 * vector kernel, codes are decoded by table lookup, and a scale is looked up once per block. */
#include "cpu/gemm/gemm_decode.h"

#include "cpu/gemm/gemm_table.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/quant/through_rows.h"
#include "definition/operand_ref.h"

int64_t gemm_depth(const struct gemm_job *job) {
    return max_int64(operand_depth(&job->a), operand_depth(&job->b));
}

/* Decodes the operand as if the factor of all its elements were 1, where that is possible. */
static void set_factor_aside(struct gemm_decoder *decoder) {
    const enum opaq_format format = (enum opaq_format)decoder->spec->format;
    decoder->is_bf16 = format == OPAQ_MXFP8 || format == OPAQ_MXFP4;
    if (!bare_copy_make(decoder->spec, decoder->copy, &decoder->bare, &decoder->left_out)) {
        return;
    }
    decoder->is_bf16 = true;
    decoder->spec = &decoder->bare.spec;
    decoder->copy = &decoder->bare.copy;
}

static void begin(const struct gemm_operand *operand, struct gemm_decoder *decoder) {
    decoder->operand = operand;
    decoder->spec = operand->spec;
    decoder->copy = operand->copy;
    decoder->left_out = 1.0f;
    decoder->is_bf16 = false;
    decoder->kernel = decode_row_kernel();
}

/* Fills the tables, if there is no kernel. */
static void fill_tables(struct gemm_decoder *decoder) {
    const struct quant_copy *copy = decoder->copy;
    if (copy == NULL || decoder->kernel->run != NULL) {
        return;
    }
    const enum opaq_format format = (enum opaq_format)decoder->spec->format;
    const bool is_mx = format == OPAQ_MXFP8 || format == OPAQ_MXFP4;
    decoder->has_factors = is_mx || (format == OPAQ_NVFP4 && copy->amax_step == 0);
    for (uint32_t byte = 0; byte < 256; ++byte) {
        decoder->value[byte][0] = decode_element(decoder->spec, copy->is_packed ? byte & 15 : byte);
        decoder->value[byte][1] = copy->is_packed ? decode_element(decoder->spec, byte >> 4) : 0.0f;
    }
    for (uint32_t byte = 0; decoder->has_factors && byte < 256; ++byte) {
        decoder->factor[byte] =
            is_mx ? decode_e8m0(byte) : nvfp4_decode_factor(decoder->spec, byte, copy->amax[0]);
    }
}

void gemm_decoder_make(const struct gemm_operand *operand, struct gemm_decoder *decoder) {
    begin(operand, decoder);
    fill_tables(decoder);
}

void gemm_decoder_make_bare(const struct gemm_operand *operand, struct gemm_decoder *decoder) {
    begin(operand, decoder);
    set_factor_aside(decoder);
    fill_tables(decoder);
}

/* Prefetches the data after the block being read: rows are read one block at a time in turn, a pattern that
 * hardware prefetchers do not recognize. */
static inline void prefetch_next(const void *block, int64_t block_bytes, int64_t next_bytes) {
    for (int64_t i = 0; i < min_int64(next_bytes, block_bytes); i += 64) {
        __builtin_prefetch((const char *)block + block_bytes + i);
    }
}

static void decode_plain(const struct quant_matrix *plain, int64_t row, int rows, int64_t k, int n, float *to) {
    for (int i = 0; i < rows; ++i) {
        const int64_t start = (row + i) * plain->row_step + k * plain->column_step;
        if (plain->column_step == 1 && plain->dtype != OPAQ_F32) { /* blocks of float32 are long enough */
            prefetch_next((const char *)plain->data + plain_bytes(plain->dtype, start),
                          plain_bytes(plain->dtype, n), plain_bytes(plain->dtype, plain->columns - k - n));
        }
        plain_load(plain->data, plain->dtype, start, plain->column_step, n, to + i * GEMM_BLOCK);
    }
}

/* ---- copies ---- */

/* The bytes of codes [k, k + n) of `rows` rows, each row starting with a byte of its own. */
struct code_rows {
    const uint8_t *data;
    int64_t row_step;
};

/* Copies codes from tiles to row-major order. */
static void load_tiled(const struct quant_copy *copy, int64_t row, int rows, int64_t k, int n,
                       uint8_t *staged) {
    for (int i = 0; i < rows; ++i) {
        uint8_t codes[GEMM_BLOCK];
        uint8_t *const to = staged + i * GEMM_BLOCK;
        copy_load_codes(copy, row + i, k, n, codes);
        if (!copy->is_packed) {
            memcpy(to, codes, (size_t)n);
            continue;
        }
        for (int c = 0; c < n; c += 2) {
            to[c / 2] = (uint8_t)(codes[c] | (c + 1 < n ? codes[c + 1] << 4 : 0));
        }
    }
}

/* Returns the codes in place if they are contiguous along the row, else gathers them into `staged`. */
static struct code_rows load_codes(const struct quant_copy *copy, int64_t row, int rows, int64_t k, int n,
                                   uint8_t *staged) {
    const int64_t start = row * copy->data_row_step + k * copy->data_column_step;
    const int packing = copy->is_packed ? 2 : 1;
    if (copy->tile_rows != 0) {
        load_tiled(copy, row, rows, k, n, staged);
        return (struct code_rows){staged, GEMM_BLOCK};
    }
    if (copy->data_column_step == 1) {
        assert(copy->data_row_step % packing == 0);
        return (struct code_rows){copy->data + start / packing, copy->data_row_step / packing};
    }
    if (copy->is_packed) {
        memset(staged, 0, (size_t)rows * GEMM_BLOCK);
    }
    for (int c = 0; c < n; ++c) {
        const int ahead = c + 16 < n ? c + 16 : n - 1; /* in a wide tensor every step is in another page */
        __builtin_prefetch(&copy->data[(start + ahead * copy->data_column_step) / packing]);
        for (int i = 0; i < rows; ++i) {
            const int64_t index = start + c * copy->data_column_step + i * copy->data_row_step;
            if (copy->is_packed) {
                const int code = copy->data[index / 2] >> (index % 2 * 4) & 15;
                uint8_t *const pair = &staged[i * GEMM_BLOCK + c / 2];
                *pair = (uint8_t)(*pair | code << (c % 2 * 4));
            } else {
                staged[i * GEMM_BLOCK + c] = copy->data[index];
            }
        }
    }
    return (struct code_rows){staged, GEMM_BLOCK};
}

/* Callers pass a constant n where speed matters. */
static inline __attribute__((always_inline)) void scale_codes(const struct gemm_decoder *decoder,
                                                              bool is_packed, const uint8_t *restrict codes,
                                                              int n, float factor, float *restrict to) {
    for (int i = 0; i < n; ++i) {
        to[i] = decoder->value[codes[is_packed ? i / 2 : i]][is_packed ? i % 2 : 0] * factor;
    }
}

/* Codes under one scale. */
static inline __attribute__((always_inline)) void scale_block(const struct gemm_decoder *decoder,
                                                              bool is_packed, const uint8_t *codes, int n,
                                                              float factor, float *to) {
    const int step = 16;
    int i = 0;
    for (; i + step <= n; i += step) {
        scale_codes(decoder, is_packed, codes + (is_packed ? i / 2 : i), step, factor, to + i);
    }
    if (i < n) {
        scale_codes(decoder, is_packed, codes + (is_packed ? i / 2 : i), n - i, factor, to + i);
    }
}

/* n codes of a row of a copy from column k on. Scale entries follow each other block by block. */
static void decode_row(const struct gemm_decoder *decoder, const struct quant_copy *copy, int64_t row,
                       int64_t k, const uint8_t *codes, int n, float *to) {
    const struct scale_layout *layout = &copy->scale_layout;
    const int length = (int)min_int64(copy->block_columns, GEMM_BLOCK);
    const int64_t scale_row = row / layout->row_per;
    int64_t scale_column = layout->column_step == 0 ? 0 : k / layout->column_per;
    for (int c = 0; c < n; c += length) {
        const int64_t index =
            layout->tiled_columns != 0
                ? tile_scale_offset(scale_row, scale_column, layout->tiled_columns, layout->tile_rows)
            : layout->swizzled_columns != 0 ? swizzle_offset(scale_row, scale_column, layout->swizzled_columns)
                                            : scale_row * layout->row_step + scale_column * layout->column_step;
        const float factor = decoder->has_factors ? decoder->factor[((const uint8_t *)copy->scale)[index]]
                                                  : decode_factor_at(decoder->spec, copy, row, index);
        const int count = (int)min_int64(length, n - c);
        if (copy->is_packed) {
            scale_block(decoder, true, codes + c / 2, count, factor, to + c);
        } else {
            scale_block(decoder, false, codes + c, count, factor, to + c);
        }
        ++scale_column;
    }
}

/* Decodes with the vector kernel, if there is one. */
static inline void decode_codes_of(const struct gemm_decoder *decoder, const struct quant_copy *copy,
                                   int64_t row, int64_t k, const uint8_t *codes, int n, float *to) {
    if (decoder->kernel->run != NULL) {
        decoder->kernel->run(decoder->spec, copy, row, k, codes, n, to);
    } else {
        decode_row(decoder, copy, row, k, codes, n, to);
    }
}

static void decode_copy(const struct gemm_decoder *decoder, int64_t row, int rows, int64_t k, int n,
                        float *to) {
    uint8_t staged[GEMM_DECODE_ROWS * GEMM_BLOCK];
    const struct gemm_operand *operand = decoder->operand;
    const struct quant_copy *copy = operand->copy;
    /* a Hadamard group is transformed back as a whole; columns beyond the end are then zeroed again */
    const bool transform = copy->is_hadamard && operand->undo_hadamard;
    const int n_stored = transform ? (int)round_up(n, HADAMARD_SIZE) : n;
    const struct code_rows codes = load_codes(copy, row, rows, k, n_stored, staged);
    assert(k + n_stored <= copy->data_columns);
    for (int i = 0; i < rows; ++i) {
        float *const values = to + i * GEMM_BLOCK;
        const uint8_t *const from = codes.data + i * codes.row_step;
        if (copy->data_column_step == 1 && copy->tile_rows == 0) {
            const int packing = copy->is_packed ? 2 : 1;
            prefetch_next(from, n_stored / packing, (copy->data_columns - k - n_stored) / packing);
        }
        decode_codes_of(decoder, copy, row + i, k, from, n_stored, values);
        for (int c = 0; transform && c < n_stored; c += HADAMARD_SIZE) {
            hadamard_inverse(values + c, operand->spec->hadamard_mask);
        }
    }
}

void gemm_decode(const struct gemm_decoder *decoder, int64_t row, int rows, int64_t k, int n, float *to) {
    const struct gemm_operand *operand = decoder->operand;
    const int inside = (int)max_int64(min_int64(n, operand_depth(operand) - k), 0);
    assert(!operand->is_across && rows <= GEMM_DECODE_ROWS && n <= GEMM_BLOCK && k % GEMM_BLOCK == 0);
    if (inside > 0 && operand->copy == NULL) {
        decode_plain(&operand->plain, row, rows, k, inside, to);
    } else if (inside > 0) {
        decode_copy(decoder, row, rows, k, inside, to);
    }
    for (int i = 0; i < rows; ++i) {
        memset(to + i * GEMM_BLOCK + inside, 0, (size_t)(n - inside) * sizeof *to);
    }
}

/* ---- across rows ---- */

/* Consecutive rows of a copy. */
struct copy_rows {
    const struct quant_copy *copy;
    int64_t row, column; /* in the copy */
};

static void take_rows(const struct gemm_decoder *decoder, const struct copy_rows *from, int rows, int inside,
                      void (*take)(void *argument, int place, const float *values), void *argument) {
    enum { AHEAD = 16 }; /* prefetch distance, in rows, which are not contiguous with each other */
    _Alignas(64) float values[2][GEMM_ACROSS] = {{0}};
    const struct quant_copy *copy = from->copy;
    const int packing = copy->is_packed ? 2 : 1;
    const int64_t row_bytes = copy->data_row_step / packing;
    const uint8_t *codes = copy->data + (from->row * copy->data_row_step + from->column) / packing;
    const int64_t last = copy->operand.rows - 1 - from->row;
    for (int i = 0; i < rows; ++i, codes += row_bytes) {
        const uint8_t *const ahead = codes + (min_int64(i + AHEAD, last) - i) * row_bytes;
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + GEMM_ACROSS / packing - 1);
        decode_codes_of(decoder, copy, from->row + i, from->column, codes, inside, values[i % 2]);
        take(argument, i, values[i % 2]);
    }
    if (rows % 2 != 0) {
        memset(values[1], 0, sizeof values[1]);
        take(argument, rows, values[1]);
    }
}

void gemm_decode_across(const struct gemm_decoder *decoder, int64_t row, int64_t k, int n,
                        void (*take)(void *argument, int place, const float *values), void *argument) {
    const struct quant_copy *copy = decoder->copy;
    const int inside = (int)min_int64(GEMM_ACROSS, copy->operand.columns - row);
    struct copy_rows from = {copy, k, row};
    struct tile_region region;
    struct quant_copy untiled;
    assert(row % GEMM_ACROSS == 0 && k % GEMM_BLOCK == 0 && n <= GEMM_BLOCK && !copy->is_hadamard);
    assert(copy->tile_rows != 0 || copy->data_column_step == 1);
    if (copy->tile_rows != 0) {
        untiled = tile_region_rows(copy, &region, k, n, row, inside);
        from = (struct copy_rows){&untiled, 0, 0};
    }
    take_rows(decoder, &from, n, inside, take, argument);
}

/* cpu/gemm/packed_rows.c: activations as packed kernels read them: floats, or integers with scales. */
#include "cpu/gemm/packed_rows.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/float_bits.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "cpu/gemm/gemm_decode.h"
#include "cpu/gemm/gemm_table.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/plain_convert.h"
#include "definition/decode_ref.h"

static size_t rounded(int64_t bytes) { return (size_t)round_up(bytes, 64); }

static bool has_row_scale(enum packed_precision precision) {
    return precision == PACKED_NEAR || precision == PACKED_FAST;
}

/* Of a row: blocks that have a scale. CODES have as many as the finer weight needs. */
static int64_t block_scales(enum packed_precision precision, int64_t padded) {
    return precision == PACKED_FAST32 ? padded / 32 : precision == PACKED_CODES ? padded / 16 : 0;
}

/* The same, as rows for a weight of that format have them. */
static int64_t row_scales(enum packed_precision precision, enum packed_format format, int64_t padded) {
    return precision == PACKED_CODES && format == PACKED_MXFP4 ? padded / 32 : block_scales(precision, padded);
}

static bool has_correction(enum packed_precision precision) {
    return precision == PACKED_FAST || precision == PACKED_FAST32 || precision == PACKED_CODES;
}

size_t packed_rows_bytes(enum packed_precision precision, int64_t rows, int64_t padded) {
    return rounded(rows * padded * packed_element_bytes(precision)) +
           rounded(has_correction(precision) ? rows * (padded / 16) * 4 : 0) +
           rounded(rows * block_scales(precision, padded) * 4) + rounded(rows * 4);
}

/* What all rows share. */
struct rows_task {
    const struct gemm_operand *operand;
    struct gemm_decoder decoder;
    const struct packed_prepare *prepare;
    enum packed_format format;
    int64_t first;
    const int64_t *source; /* or NULL: consecutive rows, from the first one on */
    struct packed_rows *made;
    char *elements;
    int32_t *correction;
    float *block_scale;
    float *row_scale;
};

/* ---- floats to integers ---- */

/* Returns amax / largest, 0 for zeros, and sets the factor of x. If that would not be finite, all integers are 0. */
static float scale_of(float amax, float largest, float *inverse) {
    const float scale = amax / largest;
    *inverse = largest / amax;
    if (!(float_is_finite(*inverse))) {
        *inverse = 0.0f;
    }
    return scale;
}

/* ---- rows ---- */

/* The row of the operand that is converted to a row. */
static int64_t source_of(const struct rows_task *task, int64_t row) {
    return task->source == NULL ? task->first + row : task->source[row];
}

/* n values of a row of the operand from column k on, at most GEMM_BLOCK; zeros beyond the columns. */
static void decode_block(const struct rows_task *task, int64_t row, int64_t k, int n, float *to) {
    const struct gemm_operand *operand = task->operand;
    const struct quant_matrix *plain = &operand->plain;
    if (operand->copy != NULL) {
        gemm_decode(&task->decoder, source_of(task, row), 1, k, n, to);
        return;
    }
    const int inside = (int)max_int64(min_int64(n, plain->columns - k), 0);
    if (inside > 0) {
        plain_load(plain->data, plain->dtype, source_of(task, row) * plain->row_step + k * plain->column_step,
                   plain->column_step, inside, to);
    }
    memset(to + inside, 0, (size_t)(n - inside) * sizeof *to);
}

static void decode_floats(const struct rows_task *task, int64_t row, float *to) {
    const int64_t padded = task->made->padded;
    for (int64_t k = 0; k < padded; k += GEMM_BLOCK) {
        decode_block(task, row, k, (int)min_int64(GEMM_BLOCK, padded - k), to + k);
    }
}

/* A row of a bf16 operand as it is. */
static void copy_bf16(const struct rows_task *task, int64_t row, uint16_t *to) {
    const struct quant_matrix *plain = &task->operand->plain;
    const uint16_t *from = (const uint16_t *)plain->data + source_of(task, row) * plain->row_step;
    const int64_t step = plain->column_step;
    if (step == 1) {
        memcpy(to, from, (size_t)plain->columns * sizeof *to);
    }
    for (int64_t k = 0; step != 1 && k < plain->columns; ++k) {
        to[k] = from[k * step];
    }
    memset(to + plain->columns, 0, (size_t)(task->made->padded - plain->columns) * sizeof *to);
}

/* Converts a row to integers, in segments of the columns under one scale, without storing it as floats: a segment
 * is decoded twice if it is longer than a block. */
static void make_integers(const struct rows_task *task, int64_t row) {
    const struct packed_rows *made = task->made;
    const int64_t padded = made->padded;
    const float largest = made->precision == PACKED_NEAR ? 32767.0f : 127.0f;
    const bool in_blocks = made->precision == PACKED_FAST32;
    float block[GEMM_BLOCK];
    float inverse = 0.0f;
    float amax = 0.0f;
    for (int64_t k = 0; !in_blocks && k < padded; k += GEMM_BLOCK) {
        const int n = (int)min_int64(GEMM_BLOCK, padded - k);
        decode_block(task, row, k, n, block);
        const float here = task->prepare->finite_amax(block, n);
        amax = here > amax || float_is_nan(here) ? here : amax;
        if (float_is_nan(amax)) {
            break;
        }
    }
    task->row_scale[row] = scale_of(amax, largest, &inverse);
    for (int64_t k = 0; k < padded; k += GEMM_BLOCK) {
        const int n = (int)min_int64(GEMM_BLOCK, padded - k);
        const int step = in_blocks ? 32 : n;
        decode_block(task, row, k, n, block);
        for (int i = 0; i < n; i += step) {
            const int64_t at = row * padded + k + i;
            if (in_blocks) {
                task->block_scale[row * (padded / 32) + (k + i) / 32] =
                    scale_of(task->prepare->finite_amax(block + i, 32), largest, &inverse);
            }
            if (float_is_nan(amax) ||
                inverse == 0.0f) { /* the row's result depends on its scale only; store zeros */
                memset(task->elements + at * packed_element_bytes(made->precision), 0,
                       (size_t)step * (size_t)packed_element_bytes(made->precision));
            } else if (made->precision == PACKED_NEAR) {
                task->prepare->to_int16(block + i, step, inverse, (int16_t *)(void *)task->elements + at);
            } else {
                task->prepare->to_int8(block + i, step, inverse, (int8_t *)task->elements + at);
            }
        }
    }
}

static float factor_of_codes(const struct rows_task *task, int64_t row, int64_t k) {
    const struct quant_copy *copy = task->operand->copy;
    if (task->decoder.has_factors) {
        return task->decoder.factor[((const uint8_t *)copy->scale)[scale_index(copy, row, k)]];
    }
    return decode_factor(task->operand->spec, copy, row, k);
}

/* Codes of a row in pairs, from an even column on; zero beyond the buffer's row. */
static void load_pairs(const struct quant_copy *copy, int64_t row, int64_t k, int count, uint8_t *pairs) {
    if (copy->tile_rows == 0 && copy->data_column_step == 1 && copy->data_row_step % 2 == 0) {
        const int inside = (int)max_int64(min_int64(count, ceil_div(copy->data_columns - k, 2)), 0);
        memcpy(pairs, copy->data + (row * copy->data_row_step + k) / 2, (size_t)inside);
        memset(pairs + inside, 0, (size_t)(count - inside));
        return;
    }
    uint8_t codes[GEMM_BLOCK] = {0};
    copy_load_codes(copy, row, k, 2 * count, codes);
    for (int i = 0; i < count; ++i) {
        pairs[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

/* 4-bit codes as integers, their values times 2, and their scales as floats. */
static void make_codes(const struct rows_task *task, int64_t row) {
    const struct quant_copy *copy = task->operand->copy;
    const int64_t padded = task->made->padded;
    const int per = task->format == PACKED_NVFP4 ? 16 : 32;
    const int64_t columns = copy->operand.columns;
    int8_t *const q = (int8_t *)task->elements + row * padded;
    float *const scales = task->block_scale + row * (padded / per);
    for (int64_t k = 0; k < padded; k += GEMM_BLOCK) {
        uint8_t pairs[GEMM_BLOCK / 2] = {0};
        const int n = (int)min_int64(GEMM_BLOCK, padded - k);
        if (k < columns) {
            load_pairs(copy, source_of(task, row), k, n / 2, pairs);
        }
        task->prepare->codes_to_int8(pairs, n / 2, q + k);
    }
    memset(q + columns, 0, (size_t)(padded - columns));
    for (int64_t k = 0; k < padded; k += per) {
        scales[k / per] = k < columns ? factor_of_codes(task, source_of(task, row), k) : 0.0f;
    }
}

static void make_row(const struct rows_task *task, int64_t row) {
    const struct packed_rows *made = task->made;
    if (made->precision == PACKED_EXACT) {
        decode_floats(task, row, (float *)(void *)task->elements + row * made->padded);
    } else if (made->precision == PACKED_BF16) {
        copy_bf16(task, row, (uint16_t *)(void *)task->elements + row * made->padded);
    } else if (made->precision == PACKED_CODES) {
        make_codes(task, row);
    } else {
        make_integers(task, row);
    }
    if (has_correction(made->precision)) {
        task->prepare->correct((const int8_t *)task->elements + row * made->padded, made->padded / 16,
                               task->correction + row * (made->padded / 16));
    }
}

/* Copies the n elements of `size` bytes of the previous row. */
static void repeat(void *row_of_all, int64_t row, int64_t n, size_t size) {
    char *const to = (char *)row_of_all + row * n * (int64_t)size;
    memcpy(to, to - n * (int64_t)size, (size_t)n * size);
}

/* Copies all parts of the previous row. */
static void repeat_row(const struct rows_task *task, int64_t row) {
    const enum packed_precision precision = task->made->precision;
    const int64_t padded = task->made->padded;
    repeat(task->elements, row, padded, (size_t)packed_element_bytes(precision));
    repeat(task->correction, row, has_correction(precision) ? padded / 16 : 0, sizeof *task->correction);
    repeat(task->block_scale, row, row_scales(precision, task->format, padded), sizeof *task->block_scale);
    repeat(task->row_scale, row, has_row_scale(precision) ? 1 : 0, sizeof *task->row_scale);
}

static void make_rows(void *argument, int64_t begin, int64_t end) {
    const struct rows_task *task = argument;
    for (int64_t row = begin; row < end; ++row) {
        if (row > begin && source_of(task, row) == source_of(task, row - 1)) {
            repeat_row(task, row);
        } else {
            make_row(task, row);
        }
    }
}

static void make_all(struct rows_task task, int64_t rows, int64_t padded, enum packed_precision precision,
                     void *memory, const struct opaq_parallel *parallel) {
    struct packed_rows *const made = task.made;
    char *at = memory;
    assert(padded % 64 == 0);
    task.prepare = packed_prepare_best();
    const uint64_t saved = fp_environment_enter();
    gemm_decoder_make(task.operand, &task.decoder);
    fp_environment_leave(saved);
    task.elements = at;
    at += rounded(rows * padded * packed_element_bytes(precision));
    task.correction = (int32_t *)(void *)at;
    at += rounded(has_correction(precision) ? rows * (padded / 16) * 4 : 0);
    task.block_scale = (float *)(void *)at;
    at += rounded(rows * block_scales(precision, padded) * 4);
    task.row_scale = (float *)(void *)at;
    *made = (struct packed_rows){.precision = precision,
                                 .rows = rows,
                                 .padded = padded,
                                 .f32 = (const float *)(void *)task.elements,
                                 .bf16 = (const uint16_t *)(void *)task.elements,
                                 .q16 = (const int16_t *)(void *)task.elements,
                                 .q8 = (const int8_t *)task.elements,
                                 .correction = task.correction,
                                 .row_scale = has_row_scale(precision) ? task.row_scale : NULL,
                                 .block_scale = task.block_scale};
    const struct opaq_body body = {make_rows, &task};
    parallel_run(parallel_if_worth(parallel, rows * padded), rows, &body);
}

void packed_rows_make(const struct gemm_operand *operand, int64_t first, int64_t rows, int64_t padded,
                      enum packed_format format, enum packed_precision precision, void *memory,
                      const struct opaq_parallel *parallel, struct packed_rows *made) {
    const struct rows_task task = {.operand = operand, .format = format, .first = first, .made = made};
    make_all(task, rows, padded, precision, memory, parallel);
}

void packed_rows_gather(const struct gemm_operand *operand, const int64_t *source, int64_t rows, int64_t padded,
                        enum packed_format format, enum packed_precision precision, void *memory,
                        const struct opaq_parallel *parallel, struct packed_rows *made) {
    const struct rows_task task = {.operand = operand, .format = format, .source = source, .made = made};
    make_all(task, rows, padded, precision, memory, parallel);
}

struct packed_rows packed_rows_slice(const struct packed_rows *all, enum packed_format format, int64_t first,
                                     int64_t rows) {
    struct packed_rows slice = *all;
    const int64_t scales = row_scales(all->precision, format, all->padded);
    slice.rows = rows;
    if (all->precision == PACKED_EXACT) {
        slice.f32 += first * all->padded;
    } else if (all->precision == PACKED_BF16) {
        slice.bf16 += first * all->padded;
    } else if (all->precision == PACKED_NEAR) {
        slice.q16 += first * all->padded;
    } else {
        slice.q8 += first * all->padded;
        slice.correction += first * (all->padded / 16);
        slice.block_scale += first * scales;
    }
    if (all->row_scale != NULL) {
        slice.row_scale += first;
    }
    return slice;
}

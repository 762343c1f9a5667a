/* cpu/gemm/x86/packed_words_avx512.h: 4-bit tiled weights times rows of 16-bit numbers, written once: an instruction
 * multiplies two columns for each row of a tile. Depends on packed_avx512.h.
 *
 * The file that includes it defines:
 *     NAME(format)     the kernel's name: packed_nvfp4_near_avx512
 *     ROUNDS           how a round of a stream is compiled: PACKED_INLINE or PACKED_APART
 *     HALVINGS         0 if words_table() has the weights' values, 1 if these times 2
 *     sums             a vector of sums
 *     words_table()    the weights by their code, twice
 *     words_of()       the rows of x
 *     sums_zero(), sums_add(), sums_value()    arithmetic on sums
 * and gets NAME(nvfp4), NAME(mxfp4). */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_WORDS_AVX512_H
#define OPAQ_CPU_GEMM_X86_PACKED_WORDS_AVX512_H

#include "cpu/gemm/x86/packed_avx512.h"
#include "cpu/gemm/x86/packed_kernels_avx512.h"

#include "base/checked.h"

enum {
    STEP = 2,       /* columns in one instruction */
    HALF_STEPS = 4, /* of the half of a group of codes */
    MOST_BLOCKS = 4,
    ROW_BYTES = TILE4_COLUMNS * 2,
    PANEL_COLUMNS = 3
};

/* All functions for both formats take is_nvfp4, constant wherever it is used. */
PACKED_INLINE int blocks_of(bool is_nvfp4) { return is_nvfp4 ? 4 : 2; }

PACKED_INLINE int steps_of(bool is_nvfp4) { return TILE4_COLUMNS / STEP / blocks_of(is_nvfp4); }

PACKED_INLINE int64_t scale_bytes_of(bool is_nvfp4) { return (int64_t)TILE4_ROWS * blocks_of(is_nvfp4); }

/* ---- rows of x: [row][64], columns in the order of decode_words: 0, 2, 1, 3, 4, 6, 5, 7 of each eight ---- */

static void records_make(const struct packed_rows *x, int64_t m, int rows, int64_t first, int64_t count,
                         uint8_t *to) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int64_t column = first; column < first + count; ++column) {
        for (int r = 0; r < rows; ++r) {
            const int64_t from = min_int64(m + r, x->rows - 1);
            const uint8_t *words = words_of(x) + (from * x->padded + column * TILE4_COLUMNS) * 2;
            for (int i = 0; i < ROW_BYTES; i += LINE) {
                const __m512i natural = _mm512_loadu_si512(words + i);
                _mm512_storeu_si512(to + i, _mm512_shuffle_epi8(natural, order));
            }
            to += ROW_BYTES;
        }
    }
}

PACKED_INLINE __m512i words_at(const uint8_t *record, int row, int step) {
    return broadcast_integers(record + row * ROW_BYTES + step * STEP * 2);
}

/* ---- scales and totals ---- */

/* Of a block, with the 1/2 of its weights if they are doubled; but nvfp4's is times 2^-8 and without that. */
PACKED_INLINE struct scale_pair decode_scale(bool is_nvfp4, bool is_regular, const uint8_t *codes) {
    if (is_nvfp4) {
        const __m512 scale = is_regular ? decode_regular_scale_e4m3(codes) : decode_scale_e4m3(codes);
        return (struct scale_pair){scale, scale};
    }
    if (is_regular) {
        const __m512 scale = decode_regular_scale_e8m0(codes, HALVINGS);
        return (struct scale_pair){scale, scale};
    }
    return decode_scale_e8m0(codes, HALVINGS);
}

/* A block's sum, times its scale, is added. */
PACKED_INLINE __m512 add_block(bool has_rest, sums sum, struct scale_pair scale, __m512 total) {
    const __m512 value = sums_value(sum);
    return _mm512_fmadd_ps(has_rest ? _mm512_mul_ps(value, scale.rest) : value, scale.main, total);
}

/* ---- few rows: the weight is streamed ---- */

/* One block of all tiles, half by half, so that few decoded weights occupy registers. */
PACKED_INLINE void stream_block(bool is_nvfp4, bool is_regular, const struct stream_job *job,
                                const uint8_t *data, const uint8_t *scale, const uint8_t *data_ahead,
                                const uint8_t *record, int block, int streams, int rows,
                                __m512 total[STREAMS][FEW_ROWS]) {
    const __m512i table = words_table();
    const int steps = steps_of(is_nvfp4);
    sums sum[STREAMS][FEW_ROWS];
    PACKED_UNROLL
    for (int i = 0; i < streams * rows; ++i) {
        sum[i / rows][i % rows] = sums_zero();
    }
    PACKED_UNROLL
    for (int h = 0; h < steps / HALF_STEPS; ++h) {
        PACKED_UNROLL
        for (int t = 0; t < streams; ++t) {
            __m512i w[HALF_STEPS];
            prefetch(data_ahead + t * job->data_step + h * LINE);
            decode_words(table, data + t * job->data_step + h * LINE, w);
            PACKED_UNROLL
            for (int r = 0; r < rows; ++r) {
                PACKED_UNROLL
                for (int s = 0; s < HALF_STEPS; ++s) {
                    const __m512i x = words_at(record, r, block * steps + h * HALF_STEPS + s);
                    sum[t][r] = sums_add(sum[t][r], w[s], x);
                }
            }
        }
    }
    PACKED_UNROLL
    for (int t = 0; t < streams; ++t) {
        const struct scale_pair factor = decode_scale(is_nvfp4, is_regular, scale + t * job->scale_step);
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            total[t][r] = add_block(!is_nvfp4 && !is_regular, sum[t][r], factor, total[t][r]);
        }
    }
}

/* A column of tiles. */
PACKED_INLINE void stream_column(bool is_nvfp4, bool is_regular, const struct stream_job *job,
                                 const uint8_t *data, const uint8_t *scale, const uint8_t *data_ahead,
                                 const uint8_t *record, int streams, int rows,
                                 __m512 total[STREAMS][FEW_ROWS]) {
    const int64_t block_bytes = (int64_t)steps_of(is_nvfp4) / HALF_STEPS * LINE;
    for (int b = 0; b < blocks_of(is_nvfp4); ++b) {
        stream_block(is_nvfp4, is_regular, job, data, scale, data_ahead, record, b, streams, rows, total);
        data += block_bytes;
        data_ahead += block_bytes;
        scale += TILE4_ROWS;
    }
}

/* As stream_ahead(), but with two rows of words multiplying takes as long as loading. */
PACKED_INLINE int64_t tiles_ahead(int rows) { return rows == 1 ? 2 : 4; }

PACKED_INLINE void stream(bool is_nvfp4, const struct stream_job *job, int streams, int rows) {
    const uint8_t *data = job->data;
    const uint8_t *scale = job->scale;
    const uint8_t *record = job->record;
    const uint8_t *data_ahead = data + tiles_ahead(rows) * TILE4_BYTES;
    const uint8_t *scale_ahead = scale + tiles_ahead(rows) * scale_bytes_of(is_nvfp4);
    __m512 total[STREAMS][FEW_ROWS];
    PACKED_UNROLL
    for (int i = 0; i < streams * rows; ++i) {
        total[i / rows][i % rows] = _mm512_load_ps(job->total + i * LANES);
    }
    for (int64_t left = job->count; left > 0; --left) {
        if (left == tiles_ahead(rows)) {
            data_ahead += job->jump * TILE4_BYTES;
            scale_ahead += job->jump * scale_bytes_of(is_nvfp4);
        }
        PACKED_UNROLL
        for (int t = 0; t < streams; ++t) {
            prefetch(scale_ahead + t * job->scale_step);
        }
        const bool is_regular = is_nvfp4 ? is_regular_e4m3(scale, job->scale_step, streams)
                                         : is_regular_e8m0(scale, job->scale_step, streams, HALVINGS);
        if (is_regular) {
            stream_column(is_nvfp4, true, job, data, scale, data_ahead, record, streams, rows, total);
        } else {
            stream_column(is_nvfp4, false, job, data, scale, data_ahead, record, streams, rows, total);
        }
        data += TILE4_BYTES;
        data_ahead += TILE4_BYTES;
        scale += scale_bytes_of(is_nvfp4);
        scale_ahead += scale_bytes_of(is_nvfp4);
        record += rows * ROW_BYTES;
    }
    PACKED_UNROLL
    for (int i = 0; i < streams * rows; ++i) {
        _mm512_store_ps(job->total + i * LANES, total[i / rows][i % rows]);
    }
}

/* ---- many rows: the weight is decoded, two tiles and a panel of columns at a time ---- */

/* Block by block: the weights [step][tile], the scales [tile], the second factors of these [tile]. */
struct panel {
    bool has_rest; /* whether any of the second factors is not 1 */
    uint8_t blocks[PANEL_COLUMNS * MOST_BLOCKS * (8 + 2) * PANEL_TILES * LINE] __attribute__((aligned(LINE)));
};

PACKED_INLINE int64_t block_bytes(bool is_nvfp4) {
    return (int64_t)(steps_of(is_nvfp4) + 2) * PANEL_TILES * LINE;
}

PACKED_INLINE int vector_offset(int step, int tile) { return (step * PANEL_TILES + tile) * LINE; }

PACKED_INLINE void panel_make(bool is_nvfp4, const struct packed_weight *weight, const int64_t *tile,
                              int64_t first, int64_t count, struct panel *panel) {
    const __m512i table = words_table();
    const int steps = steps_of(is_nvfp4);
    panel->has_rest = false;
    for (int t = 0; t < PANEL_TILES; ++t) {
        const int64_t at = tile[t] * weight->tile_columns + first;
        const uint8_t *data = weight->data + at * TILE4_BYTES;
        const uint8_t *scale = weight->scale + at * scale_bytes_of(is_nvfp4);
        for (int64_t i = 0; i < count * blocks_of(is_nvfp4); ++i) {
            uint8_t *const block = panel->blocks + i * block_bytes(is_nvfp4);
            for (int h = 0; h < steps / HALF_STEPS; ++h) {
                __m512i w[HALF_STEPS];
                decode_words(table, data, w);
                data += LINE;
                PACKED_UNROLL
                for (int s = 0; s < HALF_STEPS; ++s) {
                    _mm512_store_si512(block + vector_offset(h * HALF_STEPS + s, t), w[s]);
                }
            }
            const struct scale_pair factor = decode_scale(is_nvfp4, false, scale + i * TILE4_ROWS);
            _mm512_store_ps(block + vector_offset(steps, t), factor.main);
            _mm512_store_ps(block + vector_offset(steps + 1, t), factor.rest);
        }
        for (int64_t i = 0; i < count && !is_nvfp4; ++i) {
            panel->has_rest |= !is_regular_e8m0(scale + i * scale_bytes_of(is_nvfp4), 0, 1, HALVINGS);
        }
    }
}

/* The sums of all rows stay in registers while the weights of a block are loaded one after another; the totals are in
 * memory. */
PACKED_INLINE void sweep_block(bool is_nvfp4, bool has_rest, const uint8_t *block, const uint8_t *x, int rows,
                               float *total) {
    const int steps = steps_of(is_nvfp4);
    sums sum[PANEL_TILES][FEW_ROWS];
    PACKED_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[0][r] = sums_zero();
        sum[1][r] = sums_zero();
    }
    for (int half = 0; half < steps; half += HALF_STEPS) {
        PACKED_UNROLL
        for (int s = half; s < half + HALF_STEPS; ++s) {
            const __m512i w[PANEL_TILES] = {_mm512_load_si512(block + vector_offset(s, 0)),
                                            _mm512_load_si512(block + vector_offset(s, 1))};
            PACKED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512i q = words_at(x, r, s);
                sum[0][r] = sums_add(sum[0][r], w[0], q);
                sum[1][r] = sums_add(sum[1][r], w[1], q);
            }
        }
    }
    PACKED_UNROLL
    for (int t = 0; t < PANEL_TILES; ++t) {
        const struct scale_pair factor = {_mm512_load_ps(block + vector_offset(steps, t)),
                                          _mm512_load_ps(block + vector_offset(steps + 1, t))};
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            float *const place = total + (t * rows + r) * LANES;
            _mm512_store_ps(place, add_block(has_rest, sum[t][r], factor, _mm512_load_ps(place)));
        }
    }
}

PACKED_INLINE void sweep_panel(bool is_nvfp4, bool has_rest, const struct sweep_job *job, int rows) {
    const uint8_t *block = ((const struct panel *)job->panel)->blocks;
    const uint8_t *record = job->record;
    for (int64_t i = 0; i < job->count; ++i) {
        for (int b = 0; b < blocks_of(is_nvfp4); ++b) {
            sweep_block(is_nvfp4, has_rest, block, record + b * steps_of(is_nvfp4) * STEP * 2, rows,
                        job->total);
            block += block_bytes(is_nvfp4);
        }
        record += rows * ROW_BYTES;
    }
}

PACKED_INLINE void sweep(bool is_nvfp4, const struct sweep_job *job, int rows) {
    if (((const struct panel *)job->panel)->has_rest) {
        sweep_panel(is_nvfp4, true, job, rows);
    } else {
        sweep_panel(is_nvfp4, false, job, rows);
    }
}

/* ---- the kernels ---- */

_Static_assert(WAYS_BYTES + sizeof(struct panel) <= PACKED_SCRATCH_AVX512, "scratch memory of a task");

/* The loops above for one format, and its kernel. */
#define KERNEL(name, is_nvfp4)                                                                       \
    STREAM_ROUNDS(ROUNDS, stream_##name##_1, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 1)       \
    STREAM_ROUNDS(ROUNDS, stream_##name##_2, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 2)       \
    STREAM_ROUNDS(ROUNDS, stream_##name##_4, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 2, 4)       \
    STREAM_ROUNDS(ROUNDS, stream_##name##_8, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 1, 8)       \
    static void panel_##name(const struct packed_weight *weight, const int64_t *tile, int64_t first, \
                             int64_t count, void *panel) {                                           \
        panel_make(is_nvfp4, weight, tile, first, count, panel);                                     \
    }                                                                                                \
    static void sweep_##name##_8(const struct sweep_job *job) { sweep(is_nvfp4, job, 8); }           \
    static void sweep_##name##_4(const struct sweep_job *job) { sweep(is_nvfp4, job, 4); }           \
    void NAME(name)(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,  \
                    int64_t end, float *y, int64_t y_step, void *panel) {                            \
        static const struct packed_ways ways = {                                                     \
            .row_bytes = ROW_BYTES,                                                                  \
            .records_make = records_make,                                                            \
            .stream = {stream_##name##_1, stream_##name##_2, stream_##name##_4, stream_##name##_8},  \
            .streams = {4, 4, 2, 1},                                                                 \
            .panel_make = panel_##name,                                                              \
            .sweep = {sweep_##name##_8, sweep_##name##_4},                                           \
            .panel_columns = PANEL_COLUMNS,                                                          \
            .scale_bytes = TILE4_ROWS * ((is_nvfp4) ? 4 : 2),                                        \
            .power = (is_nvfp4) ? (HALVINGS == 1 ? 128.0f : 256.0f) : 1.0f};                         \
        packed_run_avx512(&ways, weight, x, begin, end, y, y_step, panel);                           \
    }

KERNEL(nvfp4, true)
KERNEL(mxfp4, false)

#endif

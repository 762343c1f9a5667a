/* cpu/gemm/x86/packed_int8_avx512.c: 4-bit tiled weights times rows of int8 (fast, fast32, codes), with vpdpbusd: four
 * products of an unsigned and a signed byte for each row of a tile. Weights become unsigned by adding 12 to twice
 * their value; sums begin with the correction for that. Depends on packed_avx512.h. */
#include "cpu/gemm/x86/packed_kernels_avx512.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx512.h"

#include "base/checked.h"

/* What differs between the kernels; constant wherever it is used. */
struct kind {
    bool is_nvfp4;
    bool has_block_scale; /* of x, for every block of the weight */
};

enum {
    STEP = 4, /* columns in one instruction */
    MOST_STEPS = 8,
    MOST_BLOCKS = 4, /* in the columns of a tile */
    PANEL_COLUMNS = 6
};

PACKED_INLINE int kind_blocks(struct kind kind) { return kind.is_nvfp4 ? 4 : 2; }

PACKED_INLINE int kind_steps(struct kind kind) { return TILE4_COLUMNS / STEP / kind_blocks(kind); }

PACKED_INLINE int64_t kind_scale_bytes(struct kind kind) { return (int64_t)TILE4_ROWS * kind_blocks(kind); }

/* ---- rows of x: the integers [row][64], the corrections [row][block], and the scales [row][block] if there are ---- */

PACKED_INLINE int64_t row_bytes(struct kind kind) {
    return TILE4_COLUMNS + kind_blocks(kind) * (kind.has_block_scale ? 8 : 4);
}

PACKED_INLINE const uint8_t *integers_at(const uint8_t *record, int row, int column) {
    return record + row * TILE4_COLUMNS + column;
}

PACKED_INLINE const uint8_t *correction_at(struct kind kind, const uint8_t *record, int rows, int row,
                                           int block) {
    return record + rows * TILE4_COLUMNS + (row * kind_blocks(kind) + block) * 4;
}

PACKED_INLINE const uint8_t *scale_at(struct kind kind, const uint8_t *record, int rows, int row, int block) {
    return correction_at(kind, record, rows, rows + row, block);
}

/* Of block b of row m, counted over all columns. With codes, q is twice a value. With nvfp4, the 2^8 that a decoded
 * scale lacks and the 1/2 of a decoded weight are in it. */
static float scale_of(const struct packed_rows *x, struct kind kind, int64_t m, int64_t b) {
    const float power = kind.is_nvfp4 ? 128.0f : 1.0f;
    if (x->precision == PACKED_CODES) {
        return 0.5f * power * x->block_scale[m * (x->padded / (kind.is_nvfp4 ? 16 : 32)) + b];
    }
    return power * x->block_scale[m * (x->padded / 32) + (kind.is_nvfp4 ? b / 2 : b)];
}

PACKED_INLINE void records_make(struct kind kind, const struct packed_rows *x, int64_t m, int rows,
                                int64_t first, int64_t count, uint8_t *to) {
    const int blocks = kind_blocks(kind);
    for (int64_t column = first; column < first + count; ++column) {
        uint8_t *correction = to + rows * TILE4_COLUMNS;
        uint8_t *scale = correction + rows * blocks * 4;
        for (int r = 0; r < rows; ++r) {
            const int64_t from = min_int64(m + r, x->rows - 1);
            const int64_t later = min_int64(from + rows, x->rows - 1);
            prefetch((const uint8_t *)x->q8 + later * x->padded + column * TILE4_COLUMNS);
            const int32_t *sums = x->correction + from * (x->padded / 16) + column * 4;
            memcpy(to + r * TILE4_COLUMNS, x->q8 + from * x->padded + column * TILE4_COLUMNS, TILE4_COLUMNS);
            for (int b = 0; b < blocks; ++b) {
                const int32_t sum = kind.is_nvfp4 ? sums[b] : sums[2 * b] + sums[2 * b + 1];
                memcpy(correction + (r * blocks + b) * 4, &sum, sizeof sum);
                if (kind.has_block_scale) {
                    const float value = scale_of(x, kind, from, column * blocks + b);
                    memcpy(scale + (r * blocks + b) * 4, &value, sizeof value);
                }
            }
        }
        to += rows * row_bytes(kind);
    }
}

/* ---- few rows: the weight is streamed ---- */

/* Of a block, with the 1/2 of its weights; but nvfp4's is times 2^-7 of that. */
PACKED_INLINE struct scale_pair decode_scale(struct kind kind, bool is_regular, const uint8_t *codes) {
    if (kind.is_nvfp4) {
        const __m512 scale = is_regular ? decode_regular_scale_e4m3(codes) : decode_scale_e4m3(codes);
        return (struct scale_pair){scale, scale};
    }
    if (is_regular) {
        const __m512 scale = decode_regular_scale_e8m0(codes, 1);
        return (struct scale_pair){scale, scale};
    }
    return decode_scale_e8m0(codes, 1);
}

/* A block's sum, times its scales, is added. */
PACKED_INLINE __m512 add_block(struct kind kind, bool has_rest, __m512i sum, const uint8_t *scale_of_x,
                               struct scale_pair scale, __m512 total) {
    __m512 value = _mm512_cvtepi32_ps(sum);
    value = kind.has_block_scale ? _mm512_mul_ps(value, broadcast(scale_of_x)) : value;
    value = has_rest ? _mm512_mul_ps(value, scale.rest) : value;
    return _mm512_fmadd_ps(value, scale.main, total);
}

/* One block of `tiles` tiles. Their instructions alternate, so that they do not wait for each other. */
PACKED_INLINE void stream_block(struct kind kind, bool is_regular, const uint8_t *data, int64_t data_step,
                                const uint8_t *scale, int64_t scale_step, const uint8_t *record, int block,
                                int tiles, int rows, __m512 total[][FEW_ROWS]) {
    const __m512i table = table_of_bytes();
    const int steps = kind_steps(kind);
    __m512i w[STREAMS][MOST_STEPS];
    struct scale_pair factor[STREAMS];
    PACKED_UNROLL
    for (int t = 0; t < tiles; ++t) {
        PACKED_UNROLL
        for (int h = 0; h < steps / 2; ++h) {
            decode_bytes(table, data + t * data_step + h * LINE, w[t] + 2 * h);
        }
        factor[t] = decode_scale(kind, is_regular, scale + t * scale_step);
    }
    PACKED_UNROLL
    for (int r = 0; r < rows; ++r) {
        __m512i sum[STREAMS];
        PACKED_UNROLL
        for (int t = 0; t < tiles; ++t) {
            sum[t] = broadcast_integers(correction_at(kind, record, rows, r, block));
        }
        PACKED_UNROLL
        for (int s = 0; s < steps; ++s) {
            const __m512i x = broadcast_integers(integers_at(record, r, (block * steps + s) * STEP));
            PACKED_UNROLL
            for (int t = 0; t < tiles; ++t) {
                sum[t] = _mm512_dpbusd_epi32(sum[t], w[t][s], x);
            }
        }
        PACKED_UNROLL
        for (int t = 0; t < tiles; ++t) {
            total[t][r] = add_block(kind, !kind.is_nvfp4 && !is_regular, sum[t],
                                    scale_at(kind, record, rows, r, block), factor[t], total[t][r]);
        }
    }
}

/* A column of tiles. Prefetches are spread over it. */
PACKED_INLINE void stream_column(struct kind kind, bool is_regular, const uint8_t *data, int64_t data_step,
                                 const uint8_t *scale, int64_t scale_step, const uint8_t *data_ahead,
                                 const uint8_t *record, int streams, int rows,
                                 __m512 total[STREAMS][FEW_ROWS]) {
    const int steps = kind_steps(kind);
    const int together = kind.is_nvfp4 ? streams : 2;
    for (int b = 0; b < kind_blocks(kind); ++b) {
        PACKED_UNROLL
        for (int t = 0; t < streams; t += together) {
            PACKED_UNROLL
            for (int h = 0; h < together * steps / 2; ++h) {
                prefetch(data_ahead + (t + h / (steps / 2)) * data_step + h % (steps / 2) * LINE);
            }
            stream_block(kind, is_regular, data + t * data_step, data_step, scale + t * scale_step, scale_step,
                         record, b, together, rows, total + t);
        }
        data += steps / 2 * LINE;
        data_ahead += steps / 2 * LINE;
        scale += TILE4_ROWS;
    }
}

PACKED_INLINE void stream(struct kind kind, const struct stream_job *job, int streams, int rows) {
    const int64_t scale_bytes = kind_scale_bytes(kind);
    const int64_t data_step = job->data_step;
    const int64_t scale_step = job->scale_step;
    const uint8_t *data = job->data;
    const uint8_t *scale = job->scale;
    const uint8_t *record = job->record;
    const uint8_t *data_ahead = data + stream_ahead(rows) * TILE4_BYTES;
    const uint8_t *scale_ahead = scale + stream_ahead(rows) * scale_bytes;
    __m512 total[STREAMS][FEW_ROWS];
    PACKED_UNROLL
    for (int t = 0; t < streams; ++t) {
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            total[t][r] = _mm512_load_ps(job->total + (t * rows + r) * LANES);
        }
    }
    for (int64_t left = job->count; left > 0; --left) {
        if (left == stream_ahead(rows)) {
            data_ahead += job->jump * TILE4_BYTES;
            scale_ahead += job->jump * scale_bytes;
        }
        PACKED_UNROLL
        for (int t = 0; t < streams; ++t) {
            prefetch(scale_ahead + t * scale_step);
        }
        const bool is_regular = kind.is_nvfp4 ? is_regular_e4m3(scale, scale_step, streams)
                                              : is_regular_e8m0(scale, scale_step, streams, 1);
        if (is_regular) {
            stream_column(kind, true, data, data_step, scale, scale_step, data_ahead, record, streams, rows,
                          total);
        } else {
            stream_column(kind, false, data, data_step, scale, scale_step, data_ahead, record, streams, rows,
                          total);
        }
        data += TILE4_BYTES;
        data_ahead += TILE4_BYTES;
        scale += scale_bytes;
        scale_ahead += scale_bytes;
        record += rows * row_bytes(kind);
    }
    PACKED_UNROLL
    for (int t = 0; t < streams; ++t) {
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm512_store_ps(job->total + (t * rows + r) * LANES, total[t][r]);
        }
    }
}

/* ---- many rows: the weight is decoded, two tiles and a panel of columns at a time ---- */

/* Block by block: the weights [step][tile], the scales [tile], and the second factors of these [tile] unless it is
 * nvfp4. */
struct panel {
    bool has_rest; /* whether any of the second factors is not 1 */
    uint8_t blocks[PANEL_COLUMNS * (MOST_BLOCKS * (4 + 1) * PANEL_TILES * LINE)] __attribute__((aligned(LINE)));
};

PACKED_INLINE int64_t block_bytes(struct kind kind) {
    return (kind_steps(kind) + (kind.is_nvfp4 ? 1 : 2)) * PANEL_TILES * LINE;
}

PACKED_INLINE int vector_offset(int step, int tile) { return (step * PANEL_TILES + tile) * LINE; }

PACKED_INLINE void panel_make(struct kind kind, const struct packed_weight *weight, const int64_t *tile,
                              int64_t first, int64_t count, struct panel *panel) {
    const __m512i table = table_of_bytes();
    const int blocks = kind_blocks(kind);
    const int steps = kind_steps(kind);
    panel->has_rest = false;
    for (int t = 0; t < PANEL_TILES; ++t) {
        const int64_t at = tile[t] * weight->tile_columns + first;
        const uint8_t *data = weight->data + at * TILE4_BYTES;
        const uint8_t *scale = weight->scale + at * kind_scale_bytes(kind);
        for (int64_t i = 0; i < count * blocks; ++i) {
            uint8_t *const block = panel->blocks + i * block_bytes(kind);
            PACKED_UNROLL
            for (int s = 0; s < steps; s += 2) {
                __m512i w[2];
                decode_bytes(table, data + (i * steps + s) / 2 * LINE, w);
                _mm512_store_si512(block + vector_offset(s, t), w[0]);
                _mm512_store_si512(block + vector_offset(s + 1, t), w[1]);
            }
            const struct scale_pair factor = decode_scale(kind, false, scale + i * TILE4_ROWS);
            _mm512_store_ps(block + vector_offset(steps, t), factor.main);
            if (!kind.is_nvfp4) {
                _mm512_store_ps(block + vector_offset(steps + 1, t), factor.rest);
            }
        }
        for (int64_t i = 0; i < count && !kind.is_nvfp4; ++i) {
            panel->has_rest |= !is_regular_e8m0(scale + i * kind_scale_bytes(kind), 0, 1, 1);
        }
    }
}

/* Few steps: the weights stay in registers for all rows. */
PACKED_INLINE void sweep_short(struct kind kind, const uint8_t *block, const uint8_t *record, int rows, int b,
                               __m512 total[PANEL_TILES][FEW_ROWS]) {
    const int steps = kind_steps(kind);
    __m512i w[PANEL_TILES][MOST_STEPS];
    struct scale_pair factor[PANEL_TILES];
    PACKED_UNROLL
    for (int t = 0; t < PANEL_TILES; ++t) {
        PACKED_UNROLL
        for (int s = 0; s < steps; ++s) {
            w[t][s] = _mm512_load_si512(block + vector_offset(s, t));
        }
        factor[t].main = _mm512_load_ps(block + vector_offset(steps, t));
        factor[t].rest = factor[t].main;
    }
    PACKED_UNROLL
    for (int r = 0; r < rows; ++r) {
        __m512i sum[PANEL_TILES];
        PACKED_UNROLL
        for (int t = 0; t < PANEL_TILES; ++t) {
            sum[t] = broadcast_integers(correction_at(kind, record, rows, r, b));
        }
        PACKED_UNROLL
        for (int s = 0; s < steps; ++s) {
            const __m512i x = broadcast_integers(integers_at(record, r, (b * steps + s) * STEP));
            PACKED_UNROLL
            for (int t = 0; t < PANEL_TILES; ++t) {
                sum[t] = _mm512_dpbusd_epi32(sum[t], w[t][s], x);
            }
        }
        PACKED_UNROLL
        for (int t = 0; t < PANEL_TILES; ++t) {
            total[t][r] =
                add_block(kind, false, sum[t], scale_at(kind, record, rows, r, b), factor[t], total[t][r]);
        }
    }
}

/* Many steps: the sums of all rows stay in registers while the weights are loaded one after another; the totals are
 * in memory. */
PACKED_INLINE void sweep_long(struct kind kind, bool has_rest, const uint8_t *block, const uint8_t *record,
                              int rows, int b, float *total) {
    const int steps = kind_steps(kind);
    __m512i sum[PANEL_TILES][FEW_ROWS];
    PACKED_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[0][r] = broadcast_integers(correction_at(kind, record, rows, r, b));
        sum[1][r] = sum[0][r];
    }
    PACKED_UNROLL
    for (int s = 0; s < steps; ++s) {
        const __m512i w[PANEL_TILES] = {_mm512_load_si512(block + vector_offset(s, 0)),
                                        _mm512_load_si512(block + vector_offset(s, 1))};
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            const __m512i x = broadcast_integers(integers_at(record, r, (b * steps + s) * STEP));
            sum[0][r] = _mm512_dpbusd_epi32(sum[0][r], w[0], x);
            sum[1][r] = _mm512_dpbusd_epi32(sum[1][r], w[1], x);
        }
    }
    PACKED_UNROLL
    for (int t = 0; t < PANEL_TILES; ++t) {
        const struct scale_pair factor = {_mm512_load_ps(block + vector_offset(steps, t)),
                                          _mm512_load_ps(block + vector_offset(steps + 1, t))};
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            float *const place = total + (t * rows + r) * LANES;
            _mm512_store_ps(place, add_block(kind, has_rest, sum[t][r], scale_at(kind, record, rows, r, b),
                                             factor, _mm512_load_ps(place)));
        }
    }
}

PACKED_INLINE void sweep_nvfp4(struct kind kind, const struct sweep_job *job, int rows) {
    const uint8_t *block = ((const struct panel *)job->panel)->blocks;
    const uint8_t *record = job->record;
    __m512 total[PANEL_TILES][FEW_ROWS];
    PACKED_UNROLL
    for (int i = 0; i < PANEL_TILES * rows; ++i) {
        total[i / rows][i % rows] = _mm512_load_ps(job->total + i * LANES);
    }
    for (int64_t i = 0; i < job->count; ++i) {
        for (int b = 0; b < kind_blocks(kind); ++b) {
            sweep_short(kind, block, record, rows, b, total);
            block += block_bytes(kind);
        }
        record += rows * row_bytes(kind);
    }
    PACKED_UNROLL
    for (int i = 0; i < PANEL_TILES * rows; ++i) {
        _mm512_store_ps(job->total + i * LANES, total[i / rows][i % rows]);
    }
}

PACKED_INLINE void sweep_mxfp4(struct kind kind, bool has_rest, const struct sweep_job *job, int rows) {
    const uint8_t *block = ((const struct panel *)job->panel)->blocks;
    const uint8_t *record = job->record;
    for (int64_t i = 0; i < job->count; ++i) {
        for (int b = 0; b < kind_blocks(kind); ++b) {
            sweep_long(kind, has_rest, block, record, rows, b, job->total);
            block += block_bytes(kind);
        }
        record += rows * row_bytes(kind);
    }
}

PACKED_INLINE void sweep(struct kind kind, const struct sweep_job *job, int rows) {
    if (kind.is_nvfp4) {
        sweep_nvfp4(kind, job, rows);
    } else if (((const struct panel *)job->panel)->has_rest) {
        sweep_mxfp4(kind, true, job, rows);
    } else {
        sweep_mxfp4(kind, false, job, rows);
    }
}

/* ---- the kernels ---- */

_Static_assert(WAYS_BYTES + sizeof(struct panel) <= PACKED_SCRATCH_AVX512, "scratch memory of a task");

/* The loops above for one kind, and its kernel. */
#define KERNEL(name, is_nvfp4, has_block_scale)                                                                \
    static const struct kind kind_##name = {is_nvfp4, has_block_scale};                                        \
    static void records_##name(const struct packed_rows *x, int64_t m, int rows, int64_t first, int64_t count, \
                               uint8_t *to) {                                                                  \
        records_make(kind_##name, x, m, rows, first, count, to);                                               \
    }                                                                                                          \
    STREAM_ROUNDS(PACKED_INLINE, stream_##name##_1, kind_##name, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 1)       \
    STREAM_ROUNDS(PACKED_INLINE, stream_##name##_2, kind_##name, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 2)       \
    STREAM_ROUNDS(PACKED_INLINE, stream_##name##_4, kind_##name, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 4)       \
    STREAM_ROUNDS(PACKED_INLINE, stream_##name##_8, kind_##name, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 2, 8)       \
    static void panel_##name(const struct packed_weight *weight, const int64_t *tile, int64_t first,           \
                             int64_t count, void *panel) {                                                     \
        panel_make(kind_##name, weight, tile, first, count, panel);                                            \
    }                                                                                                          \
    static void sweep_##name##_8(const struct sweep_job *job) { sweep(kind_##name, job, 8); }                  \
    static void sweep_##name##_4(const struct sweep_job *job) { sweep(kind_##name, job, 4); }                  \
    void packed_##name##_avx512(const struct packed_weight *weight, const struct packed_rows *x,               \
                                int64_t begin, int64_t end, float *y, int64_t y_step, void *panel) {           \
        static const struct packed_ways ways = {                                                               \
            .row_bytes = TILE4_COLUMNS + ((is_nvfp4) ? 4 : 2) * ((has_block_scale) ? 8 : 4),                   \
            .records_make = records_##name,                                                                    \
            .stream = {stream_##name##_1, stream_##name##_2, stream_##name##_4, stream_##name##_8},            \
            .streams = {4, 4, 4, 2},                                                                           \
            .panel_make = panel_##name,                                                                        \
            .sweep = {sweep_##name##_8, sweep_##name##_4},                                                     \
            .panel_columns = PANEL_COLUMNS,                                                                    \
            .scale_bytes = TILE4_ROWS * ((is_nvfp4) ? 4 : 2),                                                  \
            .power = (is_nvfp4) && !(has_block_scale) ? 128.0f : 1.0f};                                        \
        packed_run_avx512(&ways, weight, x, begin, end, y, y_step, panel);                                     \
    }

KERNEL(nvfp4_fast, true, false)
KERNEL(nvfp4_fast32, true, true)
KERNEL(mxfp4_fast, false, false)
KERNEL(mxfp4_fast32, false, true)
#endif

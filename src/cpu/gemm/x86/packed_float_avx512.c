/* cpu/gemm/x86/packed_float_avx512.c: 4-bit tiled weights times rows of float32 (exact). Products of 16 columns are
 * added in order, their sum times the block's scale to the total. Depends on packed_avx512.h. */
#include "cpu/gemm/x86/packed_kernels_avx512.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx512.h"

#include "base/checked.h"

enum { GROUPS = TILE4_COLUMNS / TILE4_GROUP, ROW_BYTES = TILE4_COLUMNS * 4, PANEL_COLUMNS = 2 };

/* All functions for both formats take is_nvfp4, constant wherever it is used. */
PACKED_INLINE int64_t scale_bytes_of(bool is_nvfp4) { return TILE4_ROWS * (is_nvfp4 ? 4 : 2); }

/* The scales of group g of a tile's columns. */
PACKED_INLINE const uint8_t *scale_of_group(bool is_nvfp4, const uint8_t *scale, int g) {
    return scale + (is_nvfp4 ? g : g / 2) * TILE4_ROWS;
}

/* ---- rows of x: [row][64] ---- */

static void records_make(const struct packed_rows *x, int64_t m, int rows, int64_t first, int64_t count,
                         uint8_t *to) {
    for (int64_t column = first; column < first + count; ++column) {
        for (int r = 0; r < rows; ++r) {
            const int64_t from = min_int64(m + r, x->rows - 1);
            const int64_t later = min_int64(from + rows, x->rows - 1);
            for (int i = 0; i < TILE4_COLUMNS; i += LINE / 4) {
                prefetch((const uint8_t *)(x->f32 + later * x->padded + column * TILE4_COLUMNS + i));
            }
            memcpy(to, x->f32 + from * x->padded + column * TILE4_COLUMNS, ROW_BYTES);
            to += ROW_BYTES;
        }
    }
}

PACKED_INLINE __m512 float_at(const uint8_t *record, int row, int column) {
    return broadcast(record + row * ROW_BYTES + column * 4);
}

/* ---- scales and totals ---- */

PACKED_INLINE struct scale_pair decode_scale(bool is_nvfp4, bool is_regular, const uint8_t *codes) {
    if (is_nvfp4) {
        const __m512 scale = is_regular ? decode_normal_scale_e4m3(codes)
                                        : _mm512_mul_ps(decode_scale_e4m3(codes), _mm512_set1_ps(256.0f));
        return (struct scale_pair){scale, scale};
    }
    if (is_regular) {
        const __m512 scale = decode_regular_scale_e8m0(codes, 0);
        return (struct scale_pair){scale, scale};
    }
    return decode_scale_e8m0(codes, 0);
}

PACKED_INLINE void add_group(bool has_rest, __m512 sum, struct scale_pair scale, float *total) {
    const __m512 value = has_rest ? _mm512_mul_ps(sum, scale.rest) : sum;
    _mm512_store_ps(total, _mm512_fmadd_ps(value, scale.main, _mm512_load_ps(total)));
}

/* ---- few rows: the weight is streamed ---- */

enum {
    STEP = 4,
    STEPS = TILE4_GROUP / STEP
}; /* columns whose values are looked up ahead of the multiplication */

/* The next STEP columns of all tiles: the vectors with their codes, and the values that were looked up. */
struct ahead {
    __m512i codes[STREAMS];
    __m512i pair[2][STREAMS];
};

PACKED_INLINE void load_ahead(const struct stream_job *job, const uint8_t *half, int streams,
                              struct ahead *ahead) {
    PACKED_UNROLL
    for (int t = 0; t < streams; ++t) {
        ahead->codes[t] = load_codes(half + t * job->data_step);
    }
}

/* Part i of 2 * streams of looking up the columns from `column` of a half on. */
PACKED_INLINE void look_up_ahead(__m512i table, int column, int i, int streams, struct ahead *ahead) {
    const int t = i % streams;
    ahead->pair[i / streams][t] = look_up_pair(table, ahead->codes[t], column + i / streams);
    __asm__("" : "+v"(ahead->pair[i / streams][t])); /* here, between the multiplications */
}

/* 16 columns of all tiles, whose instructions alternate, so that they do not wait for each other. `next` is the start
 * of the following columns. */
PACKED_INLINE void stream_group(bool is_nvfp4, bool is_regular, const struct stream_job *job,
                                const uint8_t *data, const uint8_t *next, const uint8_t *scale,
                                const uint8_t *data_ahead, const uint8_t *x, int streams, int rows,
                                struct ahead *ahead) {
    const __m512i table = table_of_floats();
    __m512 sum[STREAMS][FEW_ROWS];
    PACKED_UNROLL
    for (int i = 0; i < streams * rows; ++i) {
        sum[i / rows][i % rows] = _mm512_setzero_ps();
    }
    PACKED_UNROLL
    for (int s = 0; s < STEPS; ++s) {
        const struct ahead now = *ahead;
        if (s % 2 == 1) {
            PACKED_UNROLL
            for (int t = 0; t < streams; ++t) {
                prefetch(data_ahead + t * job->data_step + s / 2 * LINE);
            }
            load_ahead(job, s == 1 ? data + LINE : next, streams, ahead);
        }
        PACKED_UNROLL
        for (int c = 0; c < STEP; ++c) {
            __m512 w[STREAMS];
            PACKED_UNROLL
            for (int t = 0; t < streams; ++t) {
                w[t] = c < 2 ? first_of_pair(now.pair[c][t]) : second_of_pair(now.pair[c - 2][t]);
                if (t % 2 == 0) {
                    look_up_ahead(table, (s + 1) % 2 * STEP, (c * streams + t) / 2, streams, ahead);
                }
            }
            PACKED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512 value = float_at(x, r, s * STEP + c);
                PACKED_UNROLL
                for (int t = 0; t < streams; ++t) {
                    sum[t][r] = _mm512_fmadd_ps(w[t], value, sum[t][r]);
                }
            }
        }
    }
    PACKED_UNROLL
    for (int t = 0; t < streams; ++t) {
        const struct scale_pair factor = decode_scale(is_nvfp4, is_regular, scale + t * job->scale_step);
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            add_group(!is_nvfp4 && !is_regular, sum[t][r], factor, job->total + (t * rows + r) * LANES);
        }
    }
}

/* A column of tiles. `last` is the job's last group, which has none after it. */
PACKED_INLINE void stream_column(bool is_nvfp4, bool is_regular, const struct stream_job *job,
                                 const uint8_t *data, const uint8_t *last, const uint8_t *scale,
                                 const uint8_t *data_ahead, const uint8_t *record, int streams, int rows,
                                 struct ahead *ahead) {
    for (int g = 0; g < GROUPS; ++g) {
        const uint8_t *const next = data == last ? data : data + TILE4_GROUP_BYTES;
        stream_group(is_nvfp4, is_regular, job, data, next, scale_of_group(is_nvfp4, scale, g), data_ahead,
                     record + g * TILE4_GROUP * 4, streams, rows, ahead);
        data += TILE4_GROUP_BYTES;
        data_ahead += TILE4_GROUP_BYTES;
    }
}

PACKED_INLINE void stream(bool is_nvfp4, const struct stream_job *job, int streams, int rows) {
    if (job->count == 0) {
        return;
    }
    const uint8_t *data = job->data;
    const uint8_t *const last = data + job->count * TILE4_BYTES - TILE4_GROUP_BYTES;
    const uint8_t *scale = job->scale;
    const uint8_t *record = job->record;
    const uint8_t *data_ahead = data + stream_ahead(rows) * TILE4_BYTES;
    const uint8_t *scale_ahead = scale + stream_ahead(rows) * scale_bytes_of(is_nvfp4);
    struct ahead ahead;
    load_ahead(job, data, streams, &ahead);
    PACKED_UNROLL
    for (int i = 0; i < 2 * streams; ++i) {
        look_up_ahead(table_of_floats(), 0, i, streams, &ahead);
    }
    for (int64_t left = job->count; left > 0; --left) {
        if (left == stream_ahead(rows)) {
            data_ahead += job->jump * TILE4_BYTES;
            scale_ahead += job->jump * scale_bytes_of(is_nvfp4);
        }
        PACKED_UNROLL
        for (int t = 0; t < streams; ++t) {
            prefetch(scale_ahead + t * job->scale_step);
        }
        const bool is_regular = is_nvfp4 ? is_normal_e4m3(scale, job->scale_step, streams)
                                         : is_regular_e8m0(scale, job->scale_step, streams, 0);
        if (is_regular) {
            stream_column(is_nvfp4, true, job, data, last, scale, data_ahead, record, streams, rows, &ahead);
        } else {
            stream_column(is_nvfp4, false, job, data, last, scale, data_ahead, record, streams, rows, &ahead);
        }
        data += TILE4_BYTES;
        data_ahead += TILE4_BYTES;
        scale += scale_bytes_of(is_nvfp4);
        scale_ahead += scale_bytes_of(is_nvfp4);
        record += rows * ROW_BYTES;
    }
}

/* ---- many rows: the weight is decoded, two tiles and a panel of columns at a time ---- */

/* Group by group of 16 columns: the weights [column][tile], the scales [tile], the second factors of these [tile]. */
enum { GROUP_VECTORS = (TILE4_GROUP + 2) * PANEL_TILES };

struct panel {
    bool has_rest; /* whether any of the second factors is not 1 */
    float groups[PANEL_COLUMNS * GROUPS][GROUP_VECTORS][LANES] __attribute__((aligned(LINE)));
};

PACKED_INLINE void panel_make(bool is_nvfp4, const struct packed_weight *weight, const int64_t *tile,
                              int64_t first, int64_t count, struct panel *panel) {
    const __m512i table = table_of_floats();
    panel->has_rest = false;
    for (int t = 0; t < PANEL_TILES; ++t) {
        const int64_t at = tile[t] * weight->tile_columns + first;
        const uint8_t *data = weight->data + at * TILE4_BYTES;
        const uint8_t *scale = weight->scale + at * scale_bytes_of(is_nvfp4);
        for (int64_t i = 0; i < count * GROUPS; ++i) {
            for (int h = 0; h < 2; ++h) {
                const __m512i codes = load_codes(data);
                data += LINE;
                PACKED_UNROLL
                for (int k = 0; k < HALF_COLUMNS; k += k % 4 == 1 ? 3 : 1) { /* 0, 1, 4, 5 */
                    const __m512i pair = look_up_pair(table, codes, k);
                    float *const to = panel->groups[i][(h * HALF_COLUMNS + k) * PANEL_TILES + t];
                    _mm512_store_ps(to, first_of_pair(pair));
                    _mm512_store_ps(to + 2 * PANEL_TILES * LANES, second_of_pair(pair));
                }
            }
            const struct scale_pair factor =
                decode_scale(is_nvfp4, false, scale_of_group(is_nvfp4, scale, (int)i));
            _mm512_store_ps(panel->groups[i][TILE4_GROUP * PANEL_TILES + t], factor.main);
            _mm512_store_ps(panel->groups[i][(TILE4_GROUP + 1) * PANEL_TILES + t], factor.rest);
        }
        for (int64_t i = 0; i < count && !is_nvfp4; ++i) {
            panel->has_rest |= !is_regular_e8m0(scale + i * scale_bytes_of(is_nvfp4), 0, 1, 0);
        }
    }
}

/* The sums of all rows stay in registers while the weights of 16 columns are loaded one after another; the totals are
 * in memory. */
PACKED_INLINE void sweep_group(bool has_rest, const float w[GROUP_VECTORS][LANES], const uint8_t *x, int rows,
                               float *total) {
    __m512 sum[PANEL_TILES][FEW_ROWS];
    PACKED_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[0][r] = _mm512_setzero_ps();
        sum[1][r] = _mm512_setzero_ps();
    }
    for (int half = 0; half < TILE4_GROUP; half += HALF_COLUMNS) {
        PACKED_UNROLL
        for (int k = half; k < half + HALF_COLUMNS; ++k) {
            const __m512 w0 = _mm512_load_ps(w[k * PANEL_TILES]);
            const __m512 w1 = _mm512_load_ps(w[k * PANEL_TILES + 1]);
            PACKED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512 value = float_at(x, r, k);
                sum[0][r] = _mm512_fmadd_ps(w0, value, sum[0][r]);
                sum[1][r] = _mm512_fmadd_ps(w1, value, sum[1][r]);
            }
        }
    }
    PACKED_UNROLL
    for (int t = 0; t < PANEL_TILES; ++t) {
        const struct scale_pair factor = {_mm512_load_ps(w[TILE4_GROUP * PANEL_TILES + t]),
                                          _mm512_load_ps(w[(TILE4_GROUP + 1) * PANEL_TILES + t])};
        PACKED_UNROLL
        for (int r = 0; r < rows; ++r) {
            add_group(has_rest, sum[t][r], factor, total + (t * rows + r) * LANES);
        }
    }
}

PACKED_INLINE void sweep_panel(bool has_rest, const struct sweep_job *job, int rows) {
    const struct panel *panel = job->panel;
    for (int64_t i = 0; i < job->count * GROUPS; ++i) {
        sweep_group(has_rest, panel->groups[i],
                    job->record + i / GROUPS * rows * ROW_BYTES + i % GROUPS * TILE4_GROUP * 4, rows,
                    job->total);
    }
}

PACKED_INLINE void sweep(const struct sweep_job *job, int rows) {
    if (((const struct panel *)job->panel)->has_rest) {
        sweep_panel(true, job, rows);
    } else {
        sweep_panel(false, job, rows);
    }
}

static void sweep_8(const struct sweep_job *job) { sweep(job, 8); }

static void sweep_4(const struct sweep_job *job) { sweep(job, 4); }

/* ---- the kernels ---- */

_Static_assert(WAYS_BYTES + sizeof(struct panel) <= PACKED_SCRATCH_AVX512, "scratch memory of a task");

/* The loops above for one format, and its kernel. */
#define KERNEL(name, is_nvfp4)                                                                             \
    STREAM_ROUNDS(PACKED_APART, stream_##name##_1, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 1)       \
    STREAM_ROUNDS(PACKED_APART, stream_##name##_2, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 4, 2)       \
    STREAM_ROUNDS(PACKED_APART, stream_##name##_4, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 2, 4)       \
    STREAM_ROUNDS(PACKED_APART, stream_##name##_8, is_nvfp4, TILE4_ROWS *((is_nvfp4) ? 4 : 2), 2, 8)       \
    static void panel_##name(const struct packed_weight *weight, const int64_t *tile, int64_t first,       \
                             int64_t count, void *panel) {                                                 \
        panel_make(is_nvfp4, weight, tile, first, count, panel);                                           \
    }                                                                                                      \
    void packed_##name##_exact_avx512(const struct packed_weight *weight, const struct packed_rows *x,     \
                                      int64_t begin, int64_t end, float *y, int64_t y_step, void *panel) { \
        static const struct packed_ways ways = {                                                           \
            .row_bytes = ROW_BYTES,                                                                        \
            .records_make = records_make,                                                                  \
            .stream = {stream_##name##_1, stream_##name##_2, stream_##name##_4, stream_##name##_8},        \
            .streams = {4, 4, 2, 2},                                                                       \
            .panel_make = panel_##name,                                                                    \
            .sweep = {sweep_8, sweep_4},                                                                   \
            .panel_columns = PANEL_COLUMNS,                                                                \
            .scale_bytes = TILE4_ROWS * ((is_nvfp4) ? 4 : 2),                                              \
            .power = 1.0f};                                                                                \
        packed_run_avx512(&ways, weight, x, begin, end, y, y_step, panel);                                 \
    }

KERNEL(nvfp4, true)
KERNEL(mxfp4, false)
#endif

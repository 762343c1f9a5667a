/* cpu/gemm/x86/packed_avx2.c: the loops of the AVX2 kernels over the tiles of a 4-bit weight, scales to float32, and
 * the kernels' table. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <string.h>

#include "base/checked.h"
#include "cpu/gemm/x86/packed_avx2.h"

enum {
    AHEAD = 4, /* prefetch distance, in tiles along K */
    PANEL_TILES =
        16, /* tiles whose pieces are decoded together; each row of x is loaded into the cache once for all of them */
    PANEL_BLOCKS = 64,
    PANEL_BYTES = 16384 /* of a piece's weights, half of a first-level cache of 32 KB; x and y use the rest */
};

struct panel {
    _Alignas(64) uint8_t weights[PANEL_TILES][PANEL_BYTES];
    float scale[PANEL_TILES][PANEL_BLOCKS * TILE4_ROWS];
    float lift[PANEL_TILES][PANEL_BLOCKS * TILE4_ROWS];
    float x[PACKED_SWEEP_ROWS][PACKED_SWEEP_COLUMNS];
};

static const struct packed_avx2_parts *const parts_of[PACKED_PRECISION_COUNT] = {
    packed_exact_parts_avx2, packed_near_parts_avx2, packed_fast_parts_avx2, packed_fast32_parts_avx2,
    packed_codes_parts_avx2};

/* ---- results ---- */

/* The destination of a tile's product; the other members are set for each piece. */
static struct packed_piece piece_of_tile(const struct packed_weight *weight, const struct packed_rows *x,
                                         int64_t tile, float *factor, float *y, int64_t y_step) {
    const int64_t n = tile * TILE4_ROWS;
    const int64_t rows = min_int64(TILE4_ROWS, weight->rows - n);
    for (int64_t i = 0; i < TILE4_ROWS; ++i) {
        factor[i] =
            weight->factor * (weight->row_factor == NULL || i >= rows ? 1.0f : weight->row_factor[n + i]);
    }
    return (struct packed_piece){
        .x = x, .factor = factor, .y = y + n, .y_step = y_step, .rows = rows, .is_first = true};
}

/* ---- few rows of x ---- */

/* 64 columns; of each 4 the middle ones change places. */
static void load_swapped(const int16_t *from, int16_t *to) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int i = 0; i < TILE4_COLUMNS; i += 16) {
        const __m256i some = _mm256_loadu_si256((const __m256i *)(from + i));
        _mm256_store_si256((__m256i *)(to + i), _mm256_shuffle_epi8(some, order));
    }
}

static void load_few(const struct packed_weight *weight, const struct packed_rows *x, int64_t tile_column,
                     struct packed_few *few) {
    const int64_t column = tile_column * TILE4_COLUMNS;
    const int64_t per = packed_block_columns(weight->format);
    const int64_t scale_per = x->precision == PACKED_FAST32 ? 32 : per;
    for (int64_t m = 0; m < x->rows; ++m) {
        const int64_t at = m * x->padded + column;
        if (x->precision == PACKED_EXACT) {
            memcpy(few->f32[m], x->f32 + at, sizeof few->f32[m]);
            continue;
        }
        if (x->precision == PACKED_NEAR) {
            load_swapped(x->q16 + at, few->q16[m]);
            continue;
        }
        memcpy(few->q8[m], x->q8 + at, sizeof few->q8[m]);
        const int32_t *const correction = x->correction + at / TILE4_GROUP;
        for (int b = 0; b < TILE4_COLUMNS / per; ++b) {
            few->correction[m][b] = per == 16 ? correction[b] : correction[2 * b] + correction[2 * b + 1];
            const bool has_scale = x->precision != PACKED_FAST && column + b * per < weight->columns;
            few->scale[m][b] = has_scale ? x->block_scale[(at + b * per) / scale_per] : 0.0f;
        }
    }
}

/* Tiles that are read in parallel, at most PACKED_STREAMS; the next ones are `next` tiles further, unless that is 0.
 * */
struct streamed_tiles {
    int64_t first, step, count, next;
};

/* Prefetch distance at `tile_column`, in tiles: in the same rows, or at the beginning of the next ones. */
static int64_t tiles_ahead(const struct streamed_tiles *tiles, int64_t columns, int64_t tile_column) {
    if (tile_column + AHEAD < columns) {
        return AHEAD;
    }
    return tiles->next == 0 ? 0 : AHEAD + (tiles->next - 1) * columns;
}

static void run_few(const struct packed_avx2_parts *parts, const struct packed_weight *weight,
                    const struct packed_rows *x, const struct streamed_tiles *tiles, float *y, int64_t y_step) {
    const int64_t columns = weight->tile_columns;
    const int64_t tile_scales = TILE4_COLUMNS / packed_block_columns(weight->format) * TILE4_ROWS;
    __m256 total[PACKED_STREAMS][PACKED_FEW][PACKED_HALVES];
    struct packed_few few;
    struct packed_step step = {.codes = weight->data + tiles->first * columns * TILE4_BYTES,
                               .scales = weight->scale + tiles->first * columns * tile_scales,
                               .codes_step = tiles->step * columns * TILE4_BYTES,
                               .scales_step = tiles->step * columns * tile_scales,
                               .x = &few,
                               .rows = x->rows,
                               .tiles = tiles->count,
                               .total = total};
    const bool is_line = x->rows == 1 && tiles->count == PACKED_STREAMS && parts->line != NULL;
    const int64_t whole =
        is_line ? weight->columns / TILE4_COLUMNS : 0; /* x may have no scales after its columns */
    const struct packed_line line = {.codes = step.codes,
                                     .scales = step.scales,
                                     .codes_step = step.codes_step,
                                     .scales_step = step.scales_step,
                                     .codes_next = tiles->next * columns * TILE4_BYTES,
                                     .scales_next = tiles->next * columns * tile_scales,
                                     .x = x,
                                     .total = total};
    memset(total, 0, sizeof total);
    for (int64_t c = 0; c < columns; ++c) {
        c = c < whole ? parts->line(&line, c, whole) : c;
        if (c == columns) {
            break;
        }
        const int64_t ahead = tiles_ahead(tiles, columns, c);
        load_few(weight, x, c, &few);
        step.codes = line.codes + c * TILE4_BYTES;
        step.scales = line.scales + c * tile_scales;
        step.codes_ahead = ahead * TILE4_BYTES;
        step.scales_ahead = ahead * tile_scales;
        parts->step(&step);
    }
    for (int64_t i = 0; i < tiles->count; ++i) {
        float factor[TILE4_ROWS];
        struct packed_piece piece = piece_of_tile(weight, x, tiles->first + i * tiles->step, factor, y, y_step);
        piece.is_last = true;
        for (int64_t m = 0; m < x->rows; ++m) {
            const __m256 step_factor = _mm256_set1_ps(parts->step_factor);
            total[i][m][0] = _mm256_mul_ps(total[i][m][0], step_factor);
            total[i][m][1] = _mm256_mul_ps(total[i][m][1], step_factor);
            packed_totals_store(&piece, m, total[i][m]);
        }
    }
}

/* ---- many rows of x ---- */

/* Pieces from tile column c on of all tiles. */
static void decode_pieces(const struct packed_avx2_parts *parts, const struct packed_weight *weight,
                          int64_t tile, int64_t tiles, int64_t c, struct panel *panel,
                          struct packed_piece *piece) {
    const int64_t per = packed_block_columns(weight->format);
    const int64_t begin = c * TILE4_COLUMNS / per;
    const int64_t blocks =
        min_int64(parts->piece_tiles * TILE4_COLUMNS / per, ceil_div(weight->columns, per) - begin);
    const int64_t tile_scales = TILE4_COLUMNS / per * TILE4_ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t at = (tile + i) * weight->tile_columns + c;
        const bool has_lift =
            parts->decode_scales(weight->scale + at * tile_scales, blocks, panel->scale[i], panel->lift[i]);
        parts->decode(weight->data + at * TILE4_BYTES, blocks * per / TILE4_GROUP, panel->weights[i]);
        piece[i].lift = has_lift ? panel->lift[i] : NULL;
        piece[i].column = c * TILE4_COLUMNS;
        piece[i].blocks = blocks;
        piece[i].is_first = c == 0;
        piece[i].is_last = c + parts->piece_tiles >= weight->tile_columns;
    }
}

/* A contiguous copy of the floats of rows [m, m + rows): in x itself they may all map to the same few cache sets. */
static void copy_rows(const struct packed_rows *x, int64_t m, int64_t rows, int64_t column,
                      struct panel *panel) {
    const int64_t columns = min_int64(PACKED_SWEEP_COLUMNS, x->padded - column);
    for (int64_t i = 0; i < rows; ++i) {
        memcpy(panel->x[i], x->f32 + (m + i) * x->padded + column, (size_t)columns * sizeof(float));
    }
}

/* Prefetches part `part` of PANEL_TILES of the next rows, from m on. Inline, because compilers remove calls of a
 * function that only prefetches. */
PACKED_INLINE void prefetch_rows(const struct packed_avx2_parts *parts, const struct packed_rows *x, int64_t m,
                                 int64_t part, int64_t c) {
    const int64_t bytes = packed_element_bytes(x->precision);
    const int64_t rows = min_int64(parts->sweep_rows, x->rows - m);
    const int64_t columns = parts->piece_tiles * TILE4_COLUMNS / PANEL_TILES;
    for (int64_t i = 0; i < rows; ++i) {
        const uint8_t *const row = packed_elements(x, m + i, c * TILE4_COLUMNS);
        for (int64_t k = part * columns * bytes; k < (part + 1) * columns * bytes; k += 64) {
            _mm_prefetch(row + k, _MM_HINT_T0);
        }
    }
}

/* The tiles [tile, tile + tiles), at most PANEL_TILES. */
static void run_many(const struct packed_avx2_parts *parts, const struct packed_weight *weight,
                     const struct packed_rows *x, int64_t tile, int64_t tiles, float *y, int64_t y_step,
                     struct panel *panel) {
    float factor[PANEL_TILES][TILE4_ROWS];
    struct packed_piece piece[PANEL_TILES];
    for (int64_t i = 0; i < tiles; ++i) {
        piece[i] = piece_of_tile(weight, x, tile + i, factor[i], y, y_step);
        piece[i].weights = panel->weights[i];
        piece[i].scale = panel->scale[i];
        piece[i].copy = panel->x[0];
    }
    for (int64_t c = 0; c == 0 || c < weight->tile_columns; c += parts->piece_tiles) {
        decode_pieces(parts, weight, tile, tiles, c, panel, piece);
        for (int64_t m = 0; m < x->rows; m += parts->sweep_rows) {
            const int64_t rows = min_int64(parts->sweep_rows, x->rows - m);
            if (x->precision == PACKED_EXACT) {
                copy_rows(x, m, rows, c * TILE4_COLUMNS, panel);
            }
            for (int64_t i = 0; i < tiles; ++i) {
                prefetch_rows(parts, x, m + rows, i, c);
                parts->sweep(&piece[i], m, rows);
            }
        }
    }
}

/* ---- kernels ---- */

/* With one row of x, which is memory-bound, the tiles that are read in parallel are as far apart as possible, so that memory
 * is read in a few long streams; with more rows they are adjacent. */
static void run_few_tiles(const struct packed_avx2_parts *parts, const struct packed_weight *weight,
                          const struct packed_rows *x, int64_t begin, int64_t end, float *y, int64_t y_step) {
    const int64_t times = (end - begin) / PACKED_STREAMS;
    const int64_t step = x->rows == 1 ? times : 1;
    const int64_t next = x->rows == 1 ? 1 : PACKED_STREAMS;
    const struct streamed_tiles rest = {begin + times * PACKED_STREAMS, 1, (end - begin) % PACKED_STREAMS, 0};
    for (int64_t i = 0; i < times; ++i) {
        const struct streamed_tiles tiles = {begin + i * next, step, PACKED_STREAMS, i + 1 < times ? next : 0};
        run_few(parts, weight, x, &tiles, y, y_step);
    }
    if (rest.count > 0) {
        run_few(parts, weight, x, &rest, y, y_step);
    }
}

static void run_avx2(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                     int64_t end, float *y, int64_t y_step, void *panel) {
    const struct packed_avx2_parts *parts = &parts_of[x->precision][weight->format];
    if (x->rows == 0) {
        return;
    }
    if (x->rows <= PACKED_FEW) {
        run_few_tiles(parts, weight, x, begin, end, y, y_step);
        return;
    }
    for (int64_t tile = begin; tile < end; tile += PANEL_TILES) {
        run_many(parts, weight, x, tile, min_int64(PANEL_TILES, end - tile), y, y_step, panel);
    }
}

/* clang-format off */
#define AVX2(format, precision) \
    {"packed_" #format "_" #precision "_avx2", run_avx2, (int64_t)sizeof(struct panel), 0, PACKED_STREAMS}
#define NONE {NULL, NULL, 0, 0, 0}

const struct packed_table packed_table_avx2 = {
    "avx2", OPAQ_CPU_AVX2, {
        {AVX2(nvfp4, exact), AVX2(nvfp4, near), AVX2(nvfp4, fast), AVX2(nvfp4, fast32), AVX2(nvfp4, codes)},
        {AVX2(mxfp4, exact), AVX2(mxfp4, near), AVX2(mxfp4, fast), AVX2(mxfp4, fast32), AVX2(mxfp4, codes)},
        {NONE, NONE, NONE, NONE, NONE},
        {NONE, NONE, NONE, NONE, NONE},
        {NONE, NONE, NONE, NONE, NONE},
    },
};
/* clang-format on */
#endif

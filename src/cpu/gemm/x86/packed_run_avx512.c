/* cpu/gemm/x86/packed_run_avx512.c: the loops around the innermost ones of the AVX-512 kernels for 4-bit tiled
 * weights. Depends on packed_avx512.h. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_avx512.h"

#include "base/checked.h"
#include "cpu/gemm/x86/packed_kernels_avx512.h"

enum {
    RECORD_ROWS = 256, /* rows of x whose records are prepared together, at most */
    STREAM_SUMS = 128  /* maximum number of vectors of sums kept until the end of a job */
};
_Static_assert(RECORDS_BYTES - PACKED_FEW_SCRATCH_AVX512 == 0, "few rows need records only");

/* The destination of the sums of one tile. */
struct tile_place {
    float *y;
    __mmask16 mask; /* rows of the weight that there are */
    __m512 factor;
};

/* `is_counted` false: a tile that is read again with others. */
static struct tile_place tile_place_make(const struct packed_weight *weight, int64_t tile, float *y,
                                         bool is_counted) {
    const int64_t n = tile * TILE4_ROWS;
    const int64_t rows = is_counted ? min_int64(weight->rows - n, TILE4_ROWS) : 0;
    const __mmask16 mask = (__mmask16)((1u << rows) - 1);
    const __m512 factor = _mm512_set1_ps(weight->factor);
    return (struct tile_place){
        y + n, mask,
        weight->row_factor == NULL
            ? factor
            : _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(mask, weight->row_factor + n))};
}

/* A task, and the columns that it is processing. */
struct task {
    const struct packed_ways *ways;
    const struct packed_weight *weight;
    const struct packed_rows *x;
    float *y;
    int64_t y_step;
    int64_t begin, end;   /* tiles along the rows */
    int64_t first, count; /* tiles along the columns */
    uint8_t *records;
    float *sums; /* [two tiles][FEW_ROWS rows][tile][row][LANES] */
    void *panel;
};

static bool is_first(const struct task *task) { return task->first == 0; }

static bool is_last(const struct task *task) { return task->first + task->count == task->weight->tile_columns; }

/* Sums of rows [m, m + rows) with one tile: none before the first columns, from y later. */
static void totals_begin(const struct task *task, const struct tile_place *place, int64_t m, int rows,
                         float *total) {
    for (int r = 0; r < rows; ++r) {
        const bool is_there = !is_first(task) && m + r < task->x->rows;
        _mm512_store_ps(total + r * LANES,
                        is_there ? _mm512_maskz_loadu_ps(place->mask, place->y + (m + r) * task->y_step)
                                 : _mm512_setzero_ps());
    }
}

/* Back to y; with their factors after the last columns. */
static void totals_end(const struct task *task, const struct tile_place *place, int64_t m, int rows,
                       float *total) {
    const float *row_scale = task->x->row_scale;
    for (int r = 0; r < rows && m + r < task->x->rows; ++r) {
        __m512 sum = _mm512_load_ps(total + r * LANES);
        if (is_last(task)) {
            sum = _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_set1_ps(task->ways->power)), place->factor);
            sum = row_scale == NULL ? sum : _mm512_mul_ps(sum, _mm512_set1_ps(row_scale[m + r]));
        }
        _mm512_mask_storeu_ps(place->y + (m + r) * task->y_step, place->mask, sum);
    }
}

/* ---- few rows ---- */

/* Tiles that are read in parallel, from `first` on and `step` apart, for `rounds` rows of tiles. The
 * first `skipped` of them are read again and not counted. */
struct streamed_tiles {
    int64_t first, step;
    int skipped;
    int64_t rounds;
};

/* Those that follow when `tiles` of a task's tiles are done. They are as far apart as possible, so
 * that each round begins in memory where the previous one ends. The last tiles are read together with tiles
 * before them; if there are none, all streams read the same tile. */
static struct streamed_tiles streamed_tiles_at(const struct task *task, int64_t tiles, int streams,
                                               int64_t most_rounds) {
    const int64_t all = task->end - task->begin;
    const int64_t apart = all / streams;
    const int64_t done = tiles / streams;
    if (done < apart) {
        return (struct streamed_tiles){task->begin + done, apart, 0, min_int64(apart - done, most_rounds)};
    }
    if (apart > 0) {
        return (struct streamed_tiles){task->end - streams, 1, streams - (int)(all - tiles), 1};
    }
    return (struct streamed_tiles){task->begin + tiles, 0, streams - 1, 1};
}

/* Sums of each round and tile: before its columns are read, or after. */
static void streamed_totals(const struct task *task, const struct streamed_tiles *tiles, int streams, int rows,
                            float *total,
                            void (*each)(const struct task *task, const struct tile_place *place, int64_t m,
                                         int rows, float *total)) {
    for (int64_t round = 0; round < tiles->rounds; ++round) {
        for (int t = 0; t < streams; ++t) {
            const struct tile_place place = tile_place_make(
                task->weight, tiles->first + round + t * tiles->step, task->y, t >= tiles->skipped);
            each(task, &place, 0, rows, total + (round * streams + t) * rows * LANES);
        }
    }
}

/* Multiplies tiles with `rows` rows of x, and prefetches the next ones while it reads the last columns. */
static void stream_together(const struct task *task, const struct streamed_tiles *tiles,
                            const struct streamed_tiles *next, int kind, int rows) {
    float total[STREAM_SUMS * LANES] __attribute__((aligned(LINE)));
    const struct packed_ways *ways = task->ways;
    const int streams = ways->streams[kind];
    const int64_t columns = task->weight->tile_columns;
    const int64_t at = tiles->first * columns + task->first;
    const struct stream_job job = {.data = task->weight->data + at * TILE4_BYTES,
                                   .scale = task->weight->scale + at * ways->scale_bytes,
                                   .data_step = tiles->step * columns * TILE4_BYTES,
                                   .scale_step = tiles->step * columns * ways->scale_bytes,
                                   .count = task->count,
                                   .rounds = tiles->rounds,
                                   .gap = columns - task->count,
                                   .jump =
                                       (next->first - tiles->first - tiles->rounds + 1) * columns - task->count,
                                   .record = task->records,
                                   .total = total};
    streamed_totals(task, tiles, streams, rows, total, totals_begin);
    ways->stream[kind](&job);
    streamed_totals(task, tiles, streams, rows, total, totals_end);
}

/* All tiles, times the columns whose records are prepared. */
static void stream_tiles(const struct task *task, int kind, int rows) {
    const int streams = task->ways->streams[kind];
    const int64_t most_rounds = STREAM_SUMS / (streams * rows);
    const int64_t all = task->end - task->begin;
    struct streamed_tiles now = streamed_tiles_at(task, 0, streams, most_rounds);
    for (int64_t tiles = 0; tiles < all;) {
        const int64_t done = tiles + streams * now.rounds - now.skipped;
        const struct streamed_tiles next =
            done < all ? streamed_tiles_at(task, done, streams, most_rounds) : now;
        stream_together(task, &now, &next, kind, rows);
        now = next;
        tiles = done;
    }
}

/* All rows of x at once. As many columns as there is memory for records. */
static void run_few(struct task *task) {
    const int64_t columns = task->weight->tile_columns;
    const int64_t m = task->x->rows;
    const int kind = m == 1 ? 0 : m == 2 ? 1 : m <= 4 ? 2 : 3;
    const int rows = 1 << kind;
    const int64_t at_once = RECORDS_BYTES / (task->ways->row_bytes * rows);
    for (task->first = 0; is_first(task) || task->first < columns; task->first += at_once) {
        task->count = min_int64(columns - task->first, at_once);
        task->ways->records_make(task->x, 0, rows, task->first, task->count, task->records);
        stream_tiles(task, kind, rows);
    }
}

/* ---- many rows ---- */

/* Prefetches part i of n of the source of the next panel: the next tiles' columns, or the next columns of the first
 * tiles. */
PACKED_INLINE void prefetch_next(const struct task *task, int64_t tile, int64_t i, int64_t n) {
    const bool is_there = tile + PANEL_TILES < task->end;
    const int64_t first = is_there ? task->first : task->first + task->count;
    const int64_t count = min_int64(task->weight->tile_columns - first, task->count);
    const int64_t lines = count * TILE4_BYTES / LINE;
    const int64_t scale_lines = ceil_div(count * task->ways->scale_bytes, LINE);
    const int64_t next = is_there ? tile + PANEL_TILES : task->begin;
    for (int64_t t = next; t < min_int64(next + PANEL_TILES, task->end); ++t) {
        const int64_t at = t * task->weight->tile_columns + first;
        const uint8_t *data = task->weight->data + at * TILE4_BYTES;
        const uint8_t *scale = task->weight->scale + at * task->ways->scale_bytes;
        for (int64_t line = lines * i / n; line < lines * (i + 1) / n; ++line) {
            prefetch(data + line * LINE);
        }
        for (int64_t line = scale_lines * i / n; line < scale_lines * (i + 1) / n; ++line) {
            prefetch(scale + line * LINE);
        }
    }
}

/* Rows of x that are multiplied together; the last ones may be half as many. */
static int rows_at_once(int64_t left) { return left <= FEW_ROWS / 2 ? FEW_ROWS / 2 : FEW_ROWS; }

/* Prefetches the source of the next records, for the rows from m on; a part of it with every two tiles. */
PACKED_INLINE void prefetch_rows(const struct task *task, int64_t tile, int64_t m) {
    const int64_t pairs = ceil_div(task->end - task->begin, PANEL_TILES);
    const int64_t pair = (tile - task->begin) / PANEL_TILES;
    const int64_t next = task->first + task->count;
    const int64_t bytes = min_int64(task->weight->tile_columns - next, task->count) * TILE4_COLUMNS *
                          packed_element_bytes(task->x->precision);
    const int64_t end = min_int64(m + FEW_ROWS * (pair + 1) / pairs, task->x->rows);
    for (int64_t r = m + FEW_ROWS * pair / pairs; r < end; ++r) {
        const uint8_t *const row = packed_elements(task->x, r, next * TILE4_COLUMNS);
        for (int64_t i = 0; i < bytes; i += LINE) {
            prefetch(row + i);
        }
    }
}

/* The sums of the FEW_ROWS rows from r on with two tiles, the first of which is `tile`. */
static float *sums_of(const struct task *task, int64_t tile, int64_t rows, int64_t r) {
    return task->sums + ((tile - task->begin) * round_up(rows, FEW_ROWS) + r * PANEL_TILES) * LANES;
}

/* Rows [m, m + rows) of x, whose records are prepared, times two tiles. */
static void sweep_tiles(const struct task *task, int64_t tile, int64_t m, int64_t rows) {
    int64_t tiles[PANEL_TILES];
    const int64_t sweeps = ceil_div(rows, FEW_ROWS);
    for (int t = 0; t < PANEL_TILES; ++t) {
        tiles[t] = min_int64(tile + t, task->end - 1);
    }
    task->ways->panel_make(task->weight, tiles, task->first, task->count, task->panel);
    for (int64_t r = 0; r < rows; r += FEW_ROWS) {
        const int few_rows = rows_at_once(rows - r);
        const struct sweep_job job = {task->panel, task->count,
                                      task->records + r * task->ways->row_bytes * task->count,
                                      sums_of(task, tile, rows, r)};
        prefetch_next(task, tile, r / FEW_ROWS, sweeps);
        prefetch_rows(task, tile, m + r);
        if (is_first(task)) {
            memset(job.total, 0, (size_t)(few_rows * PANEL_TILES * LANES) * sizeof(float));
        }
        task->ways->sweep[few_rows < FEW_ROWS](&job);
    }
}

/* The finished sums of rows [m, m + rows), to y: some rows with all tiles at a time, so that stores to a row are
 * consecutive. */
static void write_sums(const struct task *task, int64_t m, int64_t rows) {
    for (int64_t r = 0; r < rows; r += FEW_ROWS) {
        const int few_rows = rows_at_once(rows - r);
        for (int64_t tile = task->begin; tile < task->end; ++tile) {
            const int64_t t = (tile - task->begin) % PANEL_TILES;
            const struct tile_place place = tile_place_make(task->weight, tile, task->y, true);
            totals_end(task, &place, m + r, few_rows, sums_of(task, tile - t, rows, r) + t * few_rows * LANES);
        }
    }
}

/* Rows [m, m + rows) of x with tiles [task->begin, task->end). */
static void sweep_part(struct task *task, int64_t m, int64_t rows) {
    const struct packed_ways *ways = task->ways;
    const int64_t columns = task->weight->tile_columns;
    for (task->first = 0; is_first(task) || task->first < columns; task->first += ways->panel_columns) {
        task->count = min_int64(columns - task->first, ways->panel_columns);
        for (int64_t r = 0; r < rows; r += FEW_ROWS) {
            ways->records_make(task->x, m + r, rows_at_once(rows - r), task->first, task->count,
                               task->records + r * ways->row_bytes * task->count);
        }
        for (int64_t tile = task->begin; tile < task->end; tile += PANEL_TILES) {
            sweep_tiles(task, tile, m, rows);
        }
        if (is_last(task)) {
            write_sums(task, m, rows);
        }
    }
}

/* Processes as many rows of x at a time as the records' memory holds, and as many tiles as the sums' memory
 * holds. */
static void run_many(const struct task *task) {
    const int64_t few_bytes = task->ways->row_bytes * FEW_ROWS * task->ways->panel_columns;
    const int64_t at_once = min_int64(RECORDS_BYTES / few_bytes * FEW_ROWS, RECORD_ROWS);
    for (int64_t m = 0; m < task->x->rows; m += at_once) {
        const int64_t rows = min_int64(task->x->rows - m, at_once);
        const int64_t pairs = SUMS_BYTES / (PANEL_TILES * LINE * round_up(rows, FEW_ROWS));
        for (int64_t tile = task->begin; tile < task->end; tile += pairs * PANEL_TILES) {
            struct task part = *task;
            part.begin = tile;
            part.end = min_int64(tile + pairs * PANEL_TILES, task->end);
            sweep_part(&part, m, rows);
        }
    }
}

void packed_run_avx512(const struct packed_ways *ways, const struct packed_weight *weight,
                       const struct packed_rows *x, int64_t begin, int64_t end, float *y, int64_t y_step,
                       void *scratch) {
    struct task task = {.ways = ways,
                        .weight = weight,
                        .x = x,
                        .y = y,
                        .y_step = y_step,
                        .begin = begin,
                        .end = end,
                        .records = scratch,
                        .sums = (float *)(void *)((uint8_t *)scratch + RECORDS_BYTES),
                        .panel = (uint8_t *)scratch + RECORDS_BYTES + SUMS_BYTES};
    if (x->rows <= FEW_ROWS) {
        run_few(&task);
    } else {
        run_many(&task);
    }
}
#endif

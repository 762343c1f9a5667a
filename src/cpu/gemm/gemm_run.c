/* cpu/gemm/gemm_run.c: splits a product into tiles and tasks. The arithmetic is specified in gemm_run.h.
 *
 * Many rows of a: c is computed in panels of columns. The rows of b for a panel are decoded once, by all
 * threads, into the workspace; then each task decodes a few rows of a, block by block on its stack, and
 * multiplies.
 *
 * Few rows of a: a is decoded once into the workspace, and each task decodes its own rows of b on its stack, so
 * that no large buffer is written and read again.
 *
 * An operand b that is read across the rows of its copy (a weight's, for the gradient of its input) is decoded
 * GEMM_ACROSS adjacent rows of b at a time, so nothing is transposed. If a is bf16 and b's values are exact in
 * bf16, kernels may process two steps at once (gemm_pairs): a float then holds two numbers, the earlier step in
 * its upper half. */
#include "cpu/gemm/gemm_run.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/forced_kernels.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "cpu/gemm/gemm_across.h"
#include "cpu/gemm/gemm_decode.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/gemm/transpose.h"

enum {
    TASK_ROWS = GEMM_DECODE_ROWS, /* of a */
    PANEL_COLUMNS = 512,          /* of c, at most */
    TASKS_WANTED = 16             /* for each panel, so that every thread has some */
};
static const int64_t panel_bytes = (int64_t)8 << 20;  /* the most memory of a panel of more than one tile */
static const int64_t across_bytes = (int64_t)4 << 20; /* the same where b is read across rows */

/* What all tasks of a panel share. */
struct gemm_schedule {
    const struct gemm_job *job;
    const struct gemm_table *table;
    bool has_pairs; /* the table is one of gemm_pairs */
    struct gemm_decoder a;
    struct gemm_decoder b;
    int64_t depth;
    int64_t block_count;
    float *workspace;
    int64_t panel; /* the first column of the panel */
    int64_t panel_tiles;
    int64_t task_tiles; /* of one task */
};

static bool has_few_rows(const struct gemm_job *job) { return job->c.rows <= TASK_ROWS; }

/* Columns of c that are decoded together. */
static int64_t columns_together(const struct gemm_job *job) {
    return job->b.is_across ? GEMM_ACROSS : GEMM_TILE_COLUMN_LIMIT;
}

static int64_t panel_limit(const struct gemm_job *job) {
    return (job->b.is_across ? across_bytes : panel_bytes) / (int64_t)sizeof(float);
}

static int64_t panel_columns(const struct gemm_job *job, int64_t depth) {
    const int64_t unit = columns_together(job);
    const int64_t whole = max_int64(panel_limit(job) / max_int64(depth, 1) / unit, 1) * unit;
    return min_int64(min_int64(whole, PANEL_COLUMNS), round_up(job->c.columns, unit));
}

/* An upper bound on what run_tiles and run_panels use that never decreases when a size grows. The columns of a panel are
 * cut to whole tiles and may decrease, so the limit of a panel is used instead. */
size_t gemm_workspace_bytes(const struct gemm_job *job) {
    const int64_t depth = gemm_depth(job);
    if (job->c.rows == 0 || job->c.columns == 0) {
        return 0;
    }
    const int64_t few = min_int64(job->c.rows, TASK_ROWS) * round_up(depth, GEMM_BLOCK);
    const int64_t columns = min_int64(PANEL_COLUMNS, round_up(job->c.columns, columns_together(job)));
    const int64_t limit = max_int64(panel_limit(job), columns_together(job) * depth);
    const int64_t floats = has_few_rows(job) ? few : max_int64(few, min_int64(columns * depth, limit));
    return (size_t)floats * sizeof(float);
}

static int block_depth(const struct gemm_schedule *schedule, int64_t block) {
    return (int)min_int64(schedule->depth - block * GEMM_BLOCK, GEMM_BLOCK);
}

/* ---- decoding ---- */

/* Steps of the tile kernels in a block, or in a part of it. */
static int tile_steps(const struct gemm_schedule *schedule, int depth) {
    return schedule->has_pairs ? (depth + 1) / 2 : depth;
}

/* Rows of a, one block deep, as the tile kernels read them. */
static void decode_a(const struct gemm_schedule *schedule, int64_t row, int rows, int64_t block, float *to) {
    if (schedule->has_pairs) {
        pairs_of_rows(&schedule->job->a.plain, row, rows, block * GEMM_BLOCK, block_depth(schedule, block), to);
    } else {
        gemm_decode(&schedule->a, row, rows, block * GEMM_BLOCK, block_depth(schedule, block), to);
    }
}

/* The rows of b behind one tile of c, one block deep, transposed; zeros beyond the last one. */
static void decode_b(const struct gemm_schedule *schedule, int64_t column, int64_t block, float *to) {
    float rows[GEMM_TILE_COLUMN_LIMIT * GEMM_BLOCK];
    const int width = schedule->table->tile_columns;
    const int depth = block_depth(schedule, block);
    const int inside = (int)min_int64(width, schedule->job->c.columns - column);
    gemm_decode(&schedule->b, column, inside, block * GEMM_BLOCK, depth, rows);
    memset(rows + inside * GEMM_BLOCK, 0, (size_t)(width - inside) * GEMM_BLOCK * sizeof *rows);
    for (int j = 0; j < width; j += TRANSPOSE_SIZE) {
        transpose_rows(rows + j * GEMM_BLOCK, depth, to + j, width);
    }
}

/* The same for GEMM_ACROSS columns of c, tile by tile, where b is read across rows. */
static void decode_b_across(const struct gemm_schedule *schedule, int64_t column, int64_t block, int64_t tiles,
                            float *to) {
    const int depth = block_depth(schedule, block);
    struct across_target target = {.width = schedule->table->tile_columns,
                                   .tile_step = schedule->table->tile_columns * tile_steps(schedule, depth),
                                   .tiles = (int)tiles,
                                   .to = to};
    if (schedule->has_pairs) {
        gemm_decode_across(&schedule->b, column, block * GEMM_BLOCK, depth, across_take_pair, &target);
    } else {
        gemm_decode_across(&schedule->b, column, block * GEMM_BLOCK, depth, across_take, &target);
    }
}

/* The position of a panel's tile in the workspace: ordered by block, then by tile. */
static float *decoded_b(const struct gemm_schedule *schedule, int64_t block, int64_t tile) {
    const int width = schedule->table->tile_columns;
    return schedule->workspace + block * tile_steps(schedule, GEMM_BLOCK) * schedule->panel_tiles * width +
           tile * width * tile_steps(schedule, block_depth(schedule, block));
}

/* ---- results ---- */

static void add(const float *restrict from, int n, float *restrict to) {
    for (int i = 0; i < n; ++i) {
        to[i] += from[i];
    }
}

/* Finishes n totals of one row, at most PANEL_COLUMNS. */
static void store_row(const struct gemm_schedule *schedule, int64_t row, int64_t column, int n, float *total) {
    float other[PANEL_COLUMNS];
    const struct gemm_job *job = schedule->job;
    const struct quant_matrix *c = &job->c;
    const int64_t start = row * c->row_step + column * c->column_step;
    const int inside = (int)min_int64(n, c->columns - column);
    if (schedule->b.left_out != 1.0f) {
        for (int i = 0; i < inside; ++i) {
            total[i] *= schedule->b.left_out;
        }
    }
    if (job->bias != NULL) {
        plain_load(job->bias, job->bias_dtype, column, 1, inside, other);
        add(other, inside, total);
    }
    if (job->accumulate) {
        plain_load(c->data, c->dtype, start, c->column_step, inside, other);
        add(other, inside, total);
    }
    plain_store(c->data, c->dtype, start, c->column_step, inside, total);
}

/* ---- many rows of a ---- */

/* Unit: one block of one tile of the panel. */
static void decode_panel(void *argument, int64_t begin, int64_t end) {
    const struct gemm_schedule *schedule = argument;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t block = unit / schedule->panel_tiles;
        const int64_t tile = unit % schedule->panel_tiles;
        decode_b(schedule, schedule->panel + tile * schedule->table->tile_columns, block,
                 decoded_b(schedule, block, tile));
    }
}

/* Unit: one block of GEMM_ACROSS columns of the panel. */
static void decode_panel_across(void *argument, int64_t begin, int64_t end) {
    const struct gemm_schedule *schedule = argument;
    const int64_t together = GEMM_ACROSS / schedule->table->tile_columns;
    const int64_t wide_tiles = ceil_div(schedule->panel_tiles, together);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t block = unit / wide_tiles;
        const int64_t tile = unit % wide_tiles * together;
        decode_b_across(schedule, schedule->panel + tile * schedule->table->tile_columns, block,
                        min_int64(together, schedule->panel_tiles - tile), decoded_b(schedule, block, tile));
    }
}

static void multiply_task(const struct gemm_schedule *schedule, int64_t row, int64_t tile, int64_t tile_end) {
    _Alignas(64) float total[TASK_ROWS * PANEL_COLUMNS];
    _Alignas(64) float a[TASK_ROWS * GEMM_BLOCK];
    const int width = schedule->table->tile_columns;
    const int rows = (int)min_int64(TASK_ROWS, schedule->job->c.rows - row);
    const int columns = (int)(tile_end - tile) * width;
    memset(total, 0, (size_t)(rows * columns) * sizeof total[0]);
    for (int64_t block = 0; block < schedule->block_count; ++block) {
        decode_a(schedule, row, rows, block, a);
        for (int64_t t = tile; t < tile_end; ++t) {
            schedule->table->run(a, rows, decoded_b(schedule, block, t),
                                 tile_steps(schedule, block_depth(schedule, block)), total + (t - tile) * width,
                                 columns);
        }
    }
    for (int i = 0; i < rows; ++i) {
        store_row(schedule, row + i, schedule->panel + tile * width, columns, total + i * columns);
    }
}

/* Unit: TASK_ROWS rows of a times task_tiles tiles of the panel. */
static void multiply_panel(void *argument, int64_t begin, int64_t end) {
    const struct gemm_schedule *schedule = argument;
    const int64_t tasks = ceil_div(schedule->panel_tiles, schedule->task_tiles);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t tile = unit % tasks * schedule->task_tiles;
        multiply_task(schedule, unit / tasks * TASK_ROWS, tile,
                      min_int64(tile + schedule->task_tiles, schedule->panel_tiles));
    }
}

static void run_panels(struct gemm_schedule *schedule, const struct opaq_parallel *parallel) {
    const struct gemm_job *job = schedule->job;
    const int width = schedule->table->tile_columns;
    const int64_t columns = panel_columns(job, schedule->depth);
    const int64_t row_blocks = ceil_div(job->c.rows, TASK_ROWS);
    const int64_t tiles_together = job->b.is_across ? GEMM_ACROSS / width : 1;
    const struct opaq_body decode = {job->b.is_across ? decode_panel_across : decode_panel, schedule};
    const struct opaq_body multiply = {multiply_panel, schedule};
    for (schedule->panel = 0; schedule->panel < job->c.columns; schedule->panel += columns) {
        schedule->panel_tiles = ceil_div(min_int64(columns, job->c.columns - schedule->panel), width);
        const int64_t tasks = min_int64(ceil_div(TASKS_WANTED, row_blocks), schedule->panel_tiles);
        schedule->task_tiles = ceil_div(schedule->panel_tiles, tasks);
        parallel_run(parallel, ceil_div(schedule->panel_tiles, tiles_together) * schedule->block_count,
                     &decode);
        parallel_run(parallel, row_blocks * ceil_div(schedule->panel_tiles, schedule->task_tiles), &multiply);
    }
}

/* ---- few rows of a ---- */

/* Where a block of a lies in the workspace. */
static float *decoded_a(const struct gemm_schedule *schedule, int64_t block) {
    return schedule->workspace + block * schedule->job->c.rows * GEMM_BLOCK;
}

/* Unit: one block. */
static void decode_all_a(void *argument, int64_t begin, int64_t end) {
    const struct gemm_schedule *schedule = argument;
    for (int64_t block = begin; block < end; ++block) {
        decode_a(schedule, 0, (int)schedule->job->c.rows, block, decoded_a(schedule, block));
    }
}

/* Unit: one tile of columns. */
static void multiply_tiles(void *argument, int64_t begin, int64_t end) {
    _Alignas(64) float total[TASK_ROWS * GEMM_TILE_COLUMN_LIMIT];
    _Alignas(64) float b[GEMM_BLOCK * GEMM_TILE_COLUMN_LIMIT];
    const struct gemm_schedule *schedule = argument;
    const int width = schedule->table->tile_columns;
    const int rows = (int)schedule->job->c.rows;
    for (int64_t tile = begin; tile < end; ++tile) {
        memset(total, 0, sizeof total);
        for (int64_t block = 0; block < schedule->block_count; ++block) {
            decode_b(schedule, tile * width, block, b);
            schedule->table->run(decoded_a(schedule, block), rows, b, block_depth(schedule, block), total,
                                 width);
        }
        for (int i = 0; i < rows; ++i) {
            store_row(schedule, i, tile * width, width, total + i * width);
        }
    }
}

/* Unit: GEMM_ACROSS columns. */
static void multiply_across(void *argument, int64_t begin, int64_t end) {
    _Alignas(64) float total[TASK_ROWS * GEMM_ACROSS];
    _Alignas(64) float b[GEMM_BLOCK * GEMM_ACROSS];
    const struct gemm_schedule *schedule = argument;
    const int width = schedule->table->tile_columns;
    const int rows = (int)schedule->job->c.rows;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t column = unit * GEMM_ACROSS;
        const int64_t inside = min_int64(GEMM_ACROSS, schedule->job->c.columns - column);
        const int tiles = (int)ceil_div(inside, width);
        memset(total, 0, (size_t)rows * GEMM_ACROSS * sizeof total[0]);
        for (int64_t block = 0; block < schedule->block_count; ++block) {
            const int steps = tile_steps(schedule, block_depth(schedule, block));
            decode_b_across(schedule, column, block, tiles, b);
            for (int tile = 0; tile < tiles; ++tile) {
                schedule->table->run(decoded_a(schedule, block), rows, b + tile * width * steps, steps,
                                     total + tile * width, GEMM_ACROSS);
            }
        }
        for (int i = 0; i < rows; ++i) {
            store_row(schedule, i, column, (int)inside, total + i * GEMM_ACROSS);
        }
    }
}

static void run_tiles(struct gemm_schedule *schedule, const struct opaq_parallel *parallel) {
    const struct opaq_body decode = {decode_all_a, schedule};
    const bool is_across = schedule->job->b.is_across;
    const struct opaq_body multiply = {is_across ? multiply_across : multiply_tiles, schedule};
    const int64_t unit = is_across ? GEMM_ACROSS : schedule->table->tile_columns;
    parallel_run(parallel, schedule->block_count, &decode);
    parallel_run(parallel, ceil_div(schedule->job->c.columns, unit), &multiply);
}

/* Whether the product is so small that waking threads would cost more than it saves. Decoding an element costs
 * about as much as 16 multiply-adds. */
static bool is_small(const struct gemm_schedule *schedule) {
    const double rows = (double)schedule->job->c.rows;
    const double columns = (double)schedule->job->c.columns;
    const double worth = 1 << 19; /* some 0.01 ms */
    return (rows * columns + 16.0 * (rows + columns)) * (double)schedule->depth < worth;
}

void gemm_run_with(const struct gemm_table *table, const struct gemm_table *pairs, const struct gemm_job *job,
                   void *workspace, const struct opaq_parallel *parallel) {
    const int64_t depth = gemm_depth(job);
    struct gemm_schedule schedule = {.job = job,
                                     .table = table,
                                     .depth = depth,
                                     .block_count = ceil_div(depth, GEMM_BLOCK),
                                     .workspace = workspace};
    assert(job->a.plain.rows == job->c.rows && job->b.plain.rows == job->c.columns);
    assert(job->a.plain.columns == job->b.plain.columns);
    if (job->c.rows == 0 || job->c.columns == 0) {
        return;
    }
    const uint64_t saved = fp_environment_enter();
    gemm_decoder_make(&job->a, &schedule.a);
    if (leaves_factor_out(&job->a, &job->b)) {
        gemm_decoder_make_bare(&job->b, &schedule.b);
    } else {
        gemm_decoder_make(&job->b, &schedule.b);
    }
    fp_environment_leave(saved);
    if (pairs != NULL && schedule.b.is_bf16) {
        schedule.table = pairs;
        schedule.has_pairs = true;
    }
    parallel = is_small(&schedule) ? NULL : parallel;
    if (has_few_rows(job)) {
        run_tiles(&schedule, parallel);
    } else {
        run_panels(&schedule, parallel);
    }
}

void gemm_run(const struct gemm_job *job, void *workspace, const struct opaq_parallel *parallel) {
    const struct gemm_table *const table = gemm_table_best();
    const struct gemm_table *const pairs = gemm_pairs_best();
    const bool can_pair = pairs != NULL && (!kernel_is_forced(table->name) || kernel_is_forced(pairs->name));
    gemm_run_with(table, can_pair ? pairs : NULL, job, workspace, parallel);
}

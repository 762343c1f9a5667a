/* cpu/gemm/packed_batch.c: rows of one matrix times several tiled weights, in one run over all their tiles.
 *
 * The tiles of all members form one sequence, which is split into shares of about equal work; a share runs on
 * one thread and may span several members. */
#include "cpu/gemm/packed_batch.h"

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/gemm/packed_rows.h"
#include "cpu/gemm/packed_weight.h"

enum {
    SHARE_LIMIT = 64,
    READING = 4 /* the number of rows whose multiplication takes as long as reading the weight */
};

/* Sizes common to all members. */
struct batch_sizes {
    const struct packed_kernel *kernel;
    enum packed_precision precision;
    enum packed_format format;
    int64_t tile_rows;
    int64_t tiles; /* of a member; with a partner, of its first half */
    int64_t units; /* of a member */
    int64_t shares;
    int64_t panel_bytes;
    size_t row_factors, panels, all; /* where they begin in the workspace */
};

bool packed_batch_can_pair(const struct gemm_operand *b, int64_t partner) {
    return b->plain.rows == 2 * partner && partner % packed_tile_rows(packed_format_of(b->spec)) == 0;
}

static struct batch_sizes sizes_of(const struct packed_batch *batch) {
    const struct gemm_operand *b = &batch->members[0].b;
    const struct gemm_job job = {.a = batch->a, .b = *b};
    struct batch_sizes sizes = {.precision = packed_precision_of(&job, batch->wanted),
                                .format = packed_format_of(b->spec)};
    sizes.kernel = packed_kernel(sizes.format, sizes.precision);
    sizes.tile_rows = packed_tile_rows(sizes.format);
    sizes.tiles = ceil_div(batch->partner != 0 ? batch->partner : b->plain.rows, sizes.tile_rows);
    sizes.units = ceil_div(sizes.tiles, sizes.kernel->unit);
    sizes.shares = min_int64(SHARE_LIMIT, batch->count * sizes.units);
    sizes.panel_bytes = round_up(packed_panel_bytes(sizes.kernel, batch->rows), 64);
    sizes.row_factors = packed_rows_bytes(sizes.precision, batch->rows, packed_padded_columns(b));
    sizes.panels = sizes.row_factors + (size_t)(batch->count * packed_row_factor_bytes(b));
    sizes.all = sizes.panels + (size_t)(sizes.shares * sizes.panel_bytes);
    return sizes;
}

static bool is_empty(const struct packed_batch *batch) {
    return batch->count == 0 || batch->rows == 0 || batch->members[0].b.plain.rows == 0;
}

size_t packed_batch_bytes(const struct packed_batch *batch) {
    return is_empty(batch) ? 0 : sizes_of(batch).all;
}

/* ---- running ---- */

struct batch_task {
    const struct packed_batch *batch;
    const struct batch_sizes *sizes;
    const struct packed_rows *x;
    char *row_factors;
    char *panels;
    int64_t work; /* of all members */
};

/* The cost of a unit in a member of `rows` rows. */
static int64_t unit_work(int64_t rows) { return READING + rows; }

/* Tiles [begin, end) of a member's weight. */
static void run_tiles(const struct batch_task *task, int64_t index, const struct packed_rows *x, int64_t begin,
                      int64_t end, void *panel) {
    const struct packed_member *member = &task->batch->members[index];
    const int64_t columns = member->b.plain.rows;
    const int64_t tile_rows = task->sizes->tile_rows;
    float *const row_factors =
        (float *)(void *)(task->row_factors + index * packed_row_factor_bytes(&member->b));
    const struct packed_weight weight = packed_weight_of(&member->b, row_factors);
    packed_row_factors(&member->b, begin * tile_rows, min_int64(end * tile_rows, columns), row_factors);
    task->sizes->kernel->run(&weight, x, begin, end, task->batch->y + member->first * task->batch->y_step,
                             task->batch->y_step, panel);
}

/* Units [begin, end) of a member. */
static void run_units(const struct batch_task *task, int64_t index, int64_t begin, int64_t end, void *panel) {
    const struct packed_batch *batch = task->batch;
    const struct packed_member *member = &batch->members[index];
    const struct batch_sizes *sizes = task->sizes;
    const struct packed_rows x = packed_rows_slice(task->x, sizes->format, member->first, member->rows);
    const int64_t first = begin * sizes->kernel->unit;
    const int64_t last = min_int64(end * sizes->kernel->unit, sizes->tiles);
    const int64_t columns = batch->partner != 0 ? batch->partner : member->b.plain.rows;
    const int64_t ahead = batch->partner / sizes->tile_rows;
    if (last - first == ahead) { /* partner tiles are adjacent */
        run_tiles(task, index, &x, first, last + ahead, panel);
    } else {
        run_tiles(task, index, &x, first, last, panel);
        if (batch->partner != 0) {
            run_tiles(task, index, &x, first + ahead, last + ahead, panel);
        }
    }
    if (batch->finish != NULL) {
        batch->finish(batch->argument, member, first * sizes->tile_rows,
                      min_int64(last * sizes->tile_rows, columns));
    }
}

/* Unit: a share, which consists of the units whose work begins in it. */
static void run_shares(void *argument, int64_t begin, int64_t end) {
    const struct batch_task *task = argument;
    const struct batch_sizes *sizes = task->sizes;
    void *const panel = task->panels + begin * sizes->panel_bytes;
    const int64_t from = task->work / sizes->shares * begin;
    const int64_t to = end == sizes->shares ? task->work : task->work / sizes->shares * end;
    int64_t done = 0;
    for (int64_t i = 0; i < task->batch->count && done < to; ++i) {
        const int64_t work = unit_work(task->batch->members[i].rows);
        const int64_t first = ceil_div(max_int64(from - done, 0), work);
        const int64_t last = min_int64(ceil_div(to - done, work), sizes->units);
        if (first < last) {
            run_units(task, i, first, last, panel);
        }
        done += work * sizes->units;
    }
}

void packed_batch_run(const struct packed_batch *batch, void *workspace, const struct opaq_parallel *parallel) {
    if (is_empty(batch)) {
        return;
    }
    const double worth = 1 << 18; /* products; some 0.01 ms */
    const struct batch_sizes sizes = sizes_of(batch);
    const struct gemm_operand *b = &batch->members[0].b;
    char *const memory = workspace;
    struct packed_rows x;
    struct batch_task task = {batch, &sizes, &x, memory + sizes.row_factors, memory + sizes.panels, 0};
    int64_t rows = 0;
    for (int64_t i = 0; i < batch->count; ++i) {
        task.work += unit_work(batch->members[i].rows) * sizes.units;
        rows += batch->members[i].rows;
    }
    if (batch->source != NULL) {
        packed_rows_gather(&batch->a, batch->source, batch->rows, packed_padded_columns(b), sizes.format,
                           sizes.precision, memory, parallel, &x);
    } else {
        packed_rows_make(&batch->a, batch->first, batch->rows, packed_padded_columns(b), sizes.format,
                         sizes.precision, memory, parallel, &x);
    }
    const struct opaq_body body = {run_shares, &task};
    const bool is_small = (double)rows * (double)b->plain.rows * (double)b->plain.columns < worth;
    parallel_run(is_small ? NULL : parallel, sizes.shares, &body);
}

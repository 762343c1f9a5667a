/* cpu/quant/through_rows.c: quantizes into tiles, and dequantizes from them, with kernels that support
 * row-major codes only: one region of the tensor at a time is kept in row-major order, in a buffer that fits
 * the cache. */
#include "cpu/quant/through_rows.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "cpu/quant/remap_rows.h"
#include "definition/segment_ref.h"
#include "format/tile.h"

/* Rows and columns of a region: whole blocks and, along the columns, whole tiles. */
struct region_size {
    int64_t rows, columns;
};

static int64_t tile_columns(const struct quant_copy *copy) {
    return copy->is_packed ? TILE4_COLUMNS : TILE8_COLUMNS;
}

/* Scales per row need whole rows. 0 rows: they are too long. */
static struct region_size region_size(const struct quant_copy *copy) {
    const int64_t panel = quant_panel_rows(copy);
    const int64_t columns = round_up(copy->operand.columns, tile_columns(copy));
    if (copy->block_columns < copy->operand.columns) {
        return (struct region_size){
            panel, min_int64(columns, TILE_REGION_CODES / panel / TILE_REGION_ALIGN * TILE_REGION_ALIGN)};
    }
    return (struct region_size){min_int64(panel, TILE_REGION_CODES / columns), columns};
}

bool through_rows_can_run(const struct quant_job *job, const struct quant_copy *copy, bool is_quantizing) {
    const bool is_random = is_quantizing && (job->spec.options & OPAQ_STOCHASTIC) != 0;
    return copy->tile_rows != 0 && copy->operand.columns > 0 && !is_random && region_size(copy).rows > 0;
}

static bool has_tiled_scales(const struct quant_copy *copy) { return copy->scale_layout.tiled_columns != 0; }

/* A region of a tiled copy as a separate copy whose codes are in row-major order in the buffer. Tiled scales are
 * in the buffer too, others stay in place. */
static struct quant_copy region_copy(const struct quant_copy *tiled, struct tile_region *region, int64_t r,
                                     int64_t rows, int64_t c, int64_t columns) {
    const struct scale_layout *layout = &tiled->scale_layout;
    const struct quant_matrix *operand = &tiled->operand;
    const int64_t first = r * operand->row_step + c * operand->column_step;
    struct quant_copy copy = *tiled;
    if (operand->data != NULL) {
        copy.operand.data = (char *)operand->data + first * (operand->dtype == OPAQ_F32 ? 4 : 2);
    }
    copy.operand.rows = rows;
    copy.operand.columns = columns;
    copy.data = region->codes;
    copy.data_columns = round_up(columns, tile_columns(tiled));
    copy.data_row_step = copy.data_columns;
    copy.data_column_step = 1;
    copy.tile_rows = 0;
    if (has_tiled_scales(tiled)) {
        copy.scale = region->scales;
        copy.scale_layout = (struct scale_layout){.row_per = layout->row_per,
                                                  .row_step = copy.data_columns / tiled->block_columns,
                                                  .column_per = layout->column_per,
                                                  .column_step = 1};
    } else {
        copy.scale = (char *)tiled->scale +
                     (r / layout->row_per * layout->row_step + c / layout->column_per * layout->column_step) *
                         tiled->scale_bytes;
    }
    if (copy.amax != NULL) {
        copy.amax += r * copy.amax_step;
    }
    return copy;
}

/* Calls `work` for each region. */
typedef void region_function(const struct quant_kernel *kernel, const struct quant_job *job,
                             const struct quant_copy *tiled, const struct quant_copy *rows, int64_t r,
                             int64_t c);

static void each_region(region_function *work, const struct quant_kernel *kernel, const struct quant_job *job,
                        const struct quant_copy *copy, int64_t r, int64_t r_end) {
    struct tile_region region;
    const struct region_size size = region_size(copy);
    for (int64_t row = r; row < r_end; row += size.rows) {
        for (int64_t c = 0; c < copy->operand.columns; c += size.columns) {
            const struct quant_copy rows = region_copy(copy, &region, row, min_int64(size.rows, r_end - row), c,
                                                       min_int64(size.columns, copy->operand.columns - c));
            work(kernel, job, copy, &rows, row, c);
        }
    }
}

/* ---- to tiles ---- */

/* Zeroes the columns beyond the last one. */
static void clear_padding(const struct quant_copy *rows, bool has_scales) {
    if (rows->operand.columns < rows->data_columns) {
        const int64_t codes = rows->operand.rows * rows->data_row_step;
        memset(rows->data, 0, (size_t)(rows->is_packed ? codes / 2 : codes));
        memset(rows->scale, 0, has_scales ? (size_t)(rows->operand.rows * rows->scale_layout.row_step) : 0);
    }
}

static void quantize_region(const struct quant_kernel *kernel, const struct quant_job *job,
                            const struct quant_copy *tiled, const struct quant_copy *rows, int64_t r,
                            int64_t c) {
    const struct remap remap = {.from = rows,
                                .to = tiled,
                                .row_offset = -r,
                                .column_offset = -c,
                                .column = c,
                                .column_end = c + rows->data_columns,
                                .scale_bytes = has_tiled_scales(tiled) ? tiled->scale_bytes : 0};
    clear_padding(rows, has_tiled_scales(tiled));
    kernel->run(job, rows, 0, rows->operand.rows);
    remap_rows(&remap, r, r + rows->operand.rows);
}

void quantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                           const struct quant_copy *copy, int64_t r, int64_t r_end) {
    const int64_t left = r_end % copy->tile_rows;
    if (left != 0) { /* the last tiles have rows beyond the tensor's end */
        copy_clear(copy, r_end - left, left);
    }
    each_region(quantize_region, kernel, job, copy, r, r_end);
}

/* ---- from tiles ---- */

/* Copies a region of the tiled tensor into the buffer. */
static void read_region(const struct quant_copy *tiled, const struct quant_copy *rows, int64_t r, int64_t c) {
    const struct remap remap = {.from = tiled,
                                .to = rows,
                                .row_offset = r,
                                .column_offset = c,
                                .column_end = rows->data_columns,
                                .scale_bytes = has_tiled_scales(tiled) ? tiled->scale_bytes : 0};
    remap_rows(&remap, 0, rows->operand.rows);
}

static void dequantize_region(const struct quant_kernel *kernel, const struct quant_job *job,
                              const struct quant_copy *tiled, const struct quant_copy *rows, int64_t r,
                              int64_t c) {
    read_region(tiled, rows, r, c);
    kernel->run(job, rows, 0, rows->operand.rows);
}

struct quant_copy tile_region_rows(const struct quant_copy *tiled, struct tile_region *region, int64_t r,
                                   int64_t rows, int64_t c, int64_t columns) {
    const struct quant_copy copy = region_copy(tiled, region, r, rows, c, columns);
    assert(copy.operand.rows * copy.data_columns <= TILE_REGION_CODES);
    read_region(tiled, &copy, r, c);
    return copy;
}

void dequantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                             const struct quant_copy *copy, int64_t r, int64_t r_end) {
    each_region(dequantize_region, kernel, job, copy, r, r_end);
}

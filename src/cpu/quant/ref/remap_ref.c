/* cpu/quant/ref/remap_ref.c: reference for copying codes and scales between copies. */
#include "cpu/quant/remap_rows.h"

#include "definition/remap_element.h"

/* Copies codes from column `first` of the target on. */
static void move_codes(const struct remap *remap, int64_t r, int64_t first) {
    for (int64_t c = first; c < remap_code_end(remap); ++c) {
        remap_code(remap, r, c);
    }
}

static void move_scales(const struct remap *remap, int64_t r) {
    /* a row without elements still has an entry */
    const bool per_row = remap->to->scale_layout.column_step == 0;
    int64_t c = remap->column;
    for (; c < remap->column_end || (per_row && c == remap->column); c += remap->to->block_columns) {
        remap_scale(remap, r, c);
    }
}

void remap_rest_ref(const struct remap *remap, int64_t r, int64_t r_end, int64_t column, bool has_scales) {
    for (int64_t row = r; row < r_end; ++row) {
        move_codes(remap, row, column);
        if (has_scales) {
            move_scales(remap, row);
        }
    }
}

void remap_ref(const struct remap *remap, int64_t r, int64_t r_end) {
    remap_rest_ref(remap, r, r_end, remap->column, remap->scale_bytes != 0);
}

/* cpu/quant/ref/remap_ref.c: reference for moving codes and scales between copies. */
#include "cpu/quant/ref/remap_ref.h"

#include "cpu/quant/ref/segment_ref.h"

/* One code of the source, by the target's coordinates. */
static uint8_t source_code(const struct remap *remap, int64_t r, int64_t c) {
    const struct quant_copy *from = remap->from;
    const int64_t row = remap->is_transposed ? c : r + remap->row_offset;
    const int64_t column = remap->is_transposed ? r : c + remap->column_offset;
    uint8_t code;
    copy_load_codes(from, row, column, 1, &code);
    return code;
}

/* From column `first` of the target on. */
static void move_codes(const struct remap *remap, int64_t r, int64_t first) {
    const struct quant_copy *to = remap->to;
    /* a Hadamard group reaches over the operand's end, and its codes there count */
    const int64_t end = to->is_hadamard ? round_up(remap->column_end, HADAMARD_SIZE) : remap->column_end;
    for (int64_t c = first; c < end; ++c) {
        const uint8_t code = source_code(remap, r, c);
        copy_store(to, r, c, 1, &code);
    }
}

static void move_scales(const struct remap *remap, int64_t r) {
    const struct quant_copy *to = remap->to;
    const struct quant_copy *from = remap->from;
    /* a row without elements has its entry too */
    const bool per_row = to->scale_layout.column_step == 0;
    int64_t c = remap->column;
    for (; c < remap->column_end || (per_row && c == remap->column); c += to->block_columns) {
        const int64_t row = remap->is_transposed ? c : r + remap->row_offset;
        const int64_t column = remap->is_transposed ? r : c + remap->column_offset;
        const size_t bytes = (size_t)remap->scale_bytes;
        memcpy((char *)to->scale + (size_t)scale_index(to, r, c) * bytes,
               (const char *)from->scale + (size_t)scale_index(from, row, column) * bytes, bytes);
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

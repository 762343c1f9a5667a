/* definition/remap_element.h: copies one code or one scale between copies. Depends on segment_ref.h,
 * backend/remap.h. */
#ifndef OPAQ_DEFINITION_REMAP_ELEMENT_H
#define OPAQ_DEFINITION_REMAP_ELEMENT_H

#include "backend/remap.h"
#include "definition/segment_ref.h"

/* The source element of target element (r, c). */
OPAQ_DEVICE static inline int64_t remap_source_row(const struct remap *remap, int64_t r, int64_t c) {
    return remap->is_transposed ? c : r + remap->row_offset;
}

OPAQ_DEVICE static inline int64_t remap_source_column(const struct remap *remap, int64_t r, int64_t c) {
    return remap->is_transposed ? r : c + remap->column_offset;
}

/* The end of the codes to copy: the last Hadamard group extends beyond the operand, with nonzero codes. */
OPAQ_DEVICE static inline int64_t remap_code_end(const struct remap *remap) {
    return remap->to->is_hadamard ? round_up(remap->column_end, HADAMARD_SIZE) : remap->column_end;
}

OPAQ_DEVICE static inline void remap_code(const struct remap *remap, int64_t r, int64_t c) {
    uint8_t code;
    copy_load_codes(remap->from, remap_source_row(remap, r, c), remap_source_column(remap, r, c), 1, &code);
    copy_store(remap->to, r, c, 1, &code);
}

/* Copies the scale of the block at (r, c). */
OPAQ_DEVICE static inline void remap_scale(const struct remap *remap, int64_t r, int64_t c) {
    const struct quant_copy *to = remap->to;
    const struct quant_copy *from = remap->from;
    const int64_t source = scale_index(from, remap_source_row(remap, r, c), remap_source_column(remap, r, c));
    const size_t bytes = (size_t)remap->scale_bytes;
    memcpy((char *)to->scale + (size_t)scale_index(to, r, c) * bytes,
           (const char *)from->scale + (size_t)source * bytes, bytes);
}

#endif

/* cpu/quant/simd/region_vec.h: a region of x, and the copies that are made of it. Depends on encode_vec.h and
 * quant_job.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_REGION_VEC_H
#define OPAQ_CPU_QUANT_SIMD_REGION_VEC_H

#include "backend/quant_job.h"
#include "cpu/quant/simd/encode_vec.h"

/* Rows [row, row_end) and columns [c, c_end) of x. At least one copy is not NULL. */
struct quant_region {
    const struct quant_copy *rowwise;
    const struct quant_copy *columnwise;
    int64_t row;
    int64_t row_end;
    int64_t c;
    int64_t c_end;
};

/* Operand rows [r, r_end) of a copy, which are rows or columns of x. */
VEC_INLINE struct quant_region region_of_copy(const struct quant_copy *copy, bool is_along_x, int64_t r,
                                              int64_t r_end) {
    return is_along_x ? (struct quant_region){copy, NULL, r, r_end, 0, copy->operand.columns}
                      : (struct quant_region){NULL, copy, 0, copy->operand.columns, r, r_end};
}

/* Rows [r, r_end) of x, for a job with both copies. */
VEC_INLINE struct quant_region region_of_both(const struct quant_job *job, int64_t r, int64_t r_end) {
    return (struct quant_region){&job->copy[0], &job->copy[1], r, r_end, 0, job->copy[0].operand.columns};
}

/* Prefetch distances along a row, of long blocks and of short ones, and the size from which on codes bypass the caches;
 * in bytes. */
enum { AHEAD_BYTES = 8192, SHORT_AHEAD_BYTES = 6144, STREAMED_BYTES = 4 << 20 };

/* Prefetch distance in bytes: `rows` rows of x; if that is one, a few lines, or where short rows have gaps between
 * them, two rows. */
VEC_INLINE int64_t ahead_bytes(const struct quant_copy *rowwise, int64_t rows) {
    const struct quant_matrix *x = &rowwise->operand;
    const int64_t bytes = element_bytes(x->dtype);
    const bool has_gaps = x->columns < x->row_step && x->columns * bytes < SHORT_AHEAD_BYTES;
    return rows > 1 ? rows * x->row_step * bytes : has_gaps ? 2 * x->row_step * bytes : SHORT_AHEAD_BYTES;
}

/* Whether stores of codes bypass the caches: of a large tensor whose rows are whole vectors. */
VEC_INLINE bool codes_stream(const struct quant_copy *copy) {
    const int packing = copy->is_packed ? 2 : 1;
    const int64_t step = (copy->data_column_step == 1 ? copy->data_row_step : copy->data_column_step) / packing;
    const int64_t bytes = copy->operand.rows * copy->operand.columns / packing;
    return bytes >= STREAMED_BYTES && step % VEC_BYTES == 0 && (uintptr_t)copy->data % VEC_BYTES == 0;
}

/* The same for codes that gain only where a vector is a whole line. */
VEC_INLINE bool lines_stream(const struct quant_copy *copy) { return VEC_BYTES == 64 && codes_stream(copy); }

VEC_INLINE void prefetch_run(const char *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(x + i);
    }
}

/* Orders streaming stores before later ones. */
VEC_INLINE void finish_streams(void) { _mm_sfence(); }

#endif

/* cpu/gemm/x86/packed_kernels_avx2.h: the AVX2 kernels of a precision for 4-bit tiles, made of its primitives. Depends
 * on packed_avx2.h.
 *
 * The file that includes it has defined, with arguments that are constants where they are called:
 *     SWEEP_ROWS         rows of x that are multiplied with a decoded piece at once, a macro: 2 or 6
 *     halvings_of()      log2 of the factor in products of integers, which scales take away
 *     step_rows()        a step of 1 to PACKED_FEW rows of x
 *     sweep_rows()       1 to SWEEP_ROWS rows of x over a piece
 *     line_all()         a line, if the precision has any
 * PACKED_FUNCTIONS() and PACKED_LINE() make the functions of struct packed_avx2_parts of them. */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_KERNELS_AVX2_H
#define OPAQ_CPU_GEMM_X86_PACKED_KERNELS_AVX2_H

#include "cpu/gemm/x86/packed_avx2.h"

PACKED_INLINE void step_all(enum packed_format format, enum packed_precision precision,
                            const struct packed_step *step) {
    switch (step->rows) {
    case 1:
        step_rows(format, precision, 1, step);
        break;
    case 2:
        step_rows(format, precision, 2, step);
        break;
    case 3:
        step_rows(format, precision, 3, step);
        break;
    case 4:
        step_rows(format, precision, 4, step);
        break;
    case 5:
        step_rows(format, precision, 5, step);
        break;
    case 6:
        step_rows(format, precision, 6, step);
        break;
    case 7:
        step_rows(format, precision, 7, step);
        break;
    default:
        step_rows(format, precision, 8, step);
    }
}

/* As many rows at once as possible, then the rest. */
PACKED_INLINE void sweep_lifted(enum packed_format format, enum packed_precision precision, bool has_lift,
                                const struct packed_piece *piece, int64_t m, int64_t end) {
    for (; m + SWEEP_ROWS <= end; m += SWEEP_ROWS) {
        sweep_rows(format, precision, has_lift, SWEEP_ROWS, piece, m);
    }
    switch (end - m) {
    case 1:
        sweep_rows(format, precision, has_lift, 1, piece, m);
        break;
#if SWEEP_ROWS > 2
    case 2:
        sweep_rows(format, precision, has_lift, 2, piece, m);
        break;
    case 3:
        sweep_rows(format, precision, has_lift, 3, piece, m);
        break;
    case 4:
        sweep_rows(format, precision, has_lift, 4, piece, m);
        break;
    case 5:
        sweep_rows(format, precision, has_lift, 5, piece, m);
        break;
#endif
    default:
        break;
    }
}

PACKED_INLINE void sweep_all(enum packed_format format, enum packed_precision precision,
                             const struct packed_piece *piece, int64_t m, int64_t rows) {
    if (format == PACKED_MXFP4 && piece->lift != NULL) {
        sweep_lifted(format, precision, true, piece, m, m + rows);
    } else {
        sweep_lifted(format, precision, false, piece, m, m + rows);
    }
}

/* The functions of a format, with the signatures of the table's entries. */
#define PACKED_FUNCTIONS(name, format, precision)                                                  \
    static void step_##name(const struct packed_step *step) { step_all(format, precision, step); } \
    static bool scales_##name(const uint8_t *codes, int64_t blocks, float *scale, float *lift) {   \
        return packed_decode_scales(format, halvings_of(precision), codes, blocks, scale, lift);   \
    }                                                                                              \
    static void sweep_##name(const struct packed_piece *piece, int64_t m, int64_t rows) {          \
        sweep_all(format, precision, piece, m, rows);                                              \
    }

/* The same for lines, of precisions that have them. */
#define PACKED_LINE(name, format, precision)                                                 \
    static int64_t line_##name(const struct packed_line *line, int64_t begin, int64_t end) { \
        return line_all(format, precision, line, begin, end);                                \
    }

#endif

/* cpu/gemm/packed.h: products with a tiled weight, y = x w^T: arguments of their kernels, and the choice among them.
 * Depends on format/tile.h.
 *
 * Precisions, by what the activations (rows of x) are converted to:
 *     exact    float32 as they are
 *     bf16     the same with bfloat16, where processors multiply these faster (plans call both exact)
 *     near     int16, one scale for each row: s = amax / 32767, q = round(x / s)
 *     fast     int8, one scale for each row: s = amax / 127
 *     fast32   int8, one scale for each 32 columns
 *     codes    e2m1 codes with their own scales, one for each 16 (nvfp4) or 32 (mxfp4) columns; q is the
 *              code's value times 2, an integer from -12 to 12
 * Sums of integers within a block of the weight are exact, and are multiplied with the activations' scale of the block
 * where there is one; blocks are added in float32, in the order of the columns, with one fused multiply-add each. With
 * floats, a block is 16 columns of 4-bit weights (mxfp4 too, unless x is bf16) or 32 columns of 8-bit ones (fp8blk
 * too). Each element of y is computed by one task, so results do not depend on threads.
 *
 * With bf16, the order within such a block is the kernel's, and subnormal numbers may count as 0, in x and in the sums
 * of a block. With w the weights without scales, that changes an element of y by less than
 *     2^-126 |factor| sum over blocks (|scale| sum over its columns (|w| + 1)),
 * and a subnormal x times an infinite weight is NaN. */
#ifndef OPAQ_CPU_GEMM_PACKED_H
#define OPAQ_CPU_GEMM_PACKED_H

#include <stdbool.h>
#include <stdint.h>

#include "format/tile.h"

/* For functions of kernels whose arguments are constants where they are called: every such call is a kernel of its
 * own. */
#define PACKED_INLINE static inline __attribute__((always_inline))

/* Before a loop over an array of vectors, so that these are registers. */
#if defined(__clang__)
#define PACKED_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PACKED_UNROLL _Pragma("GCC unroll 16")
#endif

enum packed_format {
    PACKED_NVFP4 = 0, /* 4-bit tiles, e4m3 scales for 16 columns */
    PACKED_MXFP4 = 1, /* 4-bit tiles, e8m0 scales for 32 columns */
    PACKED_MXFP8 = 2, /* 8-bit tiles, e8m0 scales for 32 columns */
    PACKED_FP8 = 3,   /* 8-bit tiles, no scales in blocks (fp8, fp8row) */
    PACKED_FP8BLK = 4 /* 8-bit tiles, f32 scales for 128 rows x 128 columns */
};
#define PACKED_FORMAT_COUNT 5

static inline bool packed_is_4_bit(enum packed_format format) { return format <= PACKED_MXFP4; }

/* Columns of a block in the 4-bit formats and MXFP8. */
static inline int64_t packed_block_columns(enum packed_format format) {
    return format == PACKED_NVFP4 ? 16 : 32;
}

/* Rows of the weight in a tile. */
static inline int64_t packed_tile_rows(enum packed_format format) {
    return packed_is_4_bit(format) ? TILE4_ROWS : TILE8_ROWS;
}

enum packed_precision {
    PACKED_EXACT = 0,
    PACKED_NEAR = 1,
    PACKED_FAST = 2,
    PACKED_FAST32 = 3,
    PACKED_CODES = 4,
    PACKED_BF16 = 5
};
#define PACKED_PRECISION_COUNT 6

/* A tiled weight, N rows x K columns. Memory of codes is aligned to 64, padding is zero in codes and scales. */
struct packed_weight {
    enum packed_format format;
    bool is_e5m2;         /* of 8-bit codes, else e4m3 */
    int64_t rows;         /* N */
    int64_t columns;      /* K */
    int64_t tile_columns; /* tiles along K */
    const uint8_t *data;
    const uint8_t *scale;     /* NVFP4, MXFP4, MXFP8: by tile_scale_offset */
    const float *block_scale; /* FP8BLK: [ceil(N/128)][block_scale_step] */
    int64_t block_scale_step;
    const float *row_factor; /* y's columns are multiplied with factor * row_factor[n]; or NULL: 1 */
    float factor;
};

/* Rows of x, prepared. Columns are padded with zeros to whole tiles: `padded` of them. */
struct packed_rows {
    enum packed_precision precision;
    int64_t rows; /* M */
    int64_t padded;
    const float *f32;     /* EXACT: [M][padded] */
    const uint16_t *bf16; /* BF16: [M][padded], aligned to 4 */
    const int16_t *q16;   /* NEAR: [M][padded] */
    const int8_t *q8;     /* FAST, FAST32, CODES: [M][padded] */
    /* 4-bit weights with int8: -12 times the sum of q8 over each 16 columns, [M][padded / 16]: kernels that add 12 to
     * the weights' values (times 2), so that these are not negative, begin their sums with it. */
    const int32_t *correction;
    const float *row_scale; /* NEAR, FAST: [M]; else NULL */
    /* FAST32: [M][padded / 32]. CODES: [M][padded / 16] with NVFP4 weights, [M][padded / 32] with MXFP4 ones. */
    const float *block_scale;
};

static inline int64_t packed_element_bytes(enum packed_precision precision) {
    return precision == PACKED_EXACT ? 4 : precision == PACKED_NEAR || precision == PACKED_BF16 ? 2 : 1;
}

/* Where the elements of row m from a column on are. */
static inline const uint8_t *packed_elements(const struct packed_rows *x, int64_t m, int64_t column) {
    const void *const all = x->precision == PACKED_EXACT  ? (const void *)x->f32
                            : x->precision == PACKED_BF16 ? (const void *)x->bf16
                            : x->precision == PACKED_NEAR ? (const void *)x->q16
                                                          : (const void *)x->q8;
    return (const uint8_t *)all + (m * x->padded + column) * packed_element_bytes(x->precision);
}

/* Tiles [begin, end) of the weight's rows (16 or 32 each) times all rows of x, into float32 y[m * y_step + n]; only n
 * below the weight's rows are written. `panel` is scratch of packed_panel_bytes, aligned to 64. The result
 * includes all scales and factors. */
struct packed_kernel {
    const char *name; /* "packed_nvfp4_fast_avx512" */
    void (*run)(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin, int64_t end,
                float *y, int64_t y_step, void *panel);
    int64_t panel_bytes; /* for each task */
    int64_t few_bytes;   /* the same where x has few rows */
    int64_t unit; /* minimum number of tiles per task, a power of two: that many streams are read in parallel */
};

enum { PACKED_FEW_ROWS = 8 };

/* Scratch memory of a task whose x has `rows` rows. Keep it small: allocators return large blocks to the
 * system, which then maps them again page by page in every call. */
static inline int64_t packed_panel_bytes(const struct packed_kernel *kernel, int64_t rows) {
    return rows <= PACKED_FEW_ROWS ? kernel->few_bytes : kernel->panel_bytes;
}

/* One for each instruction set; entries may be empty, the reference's are not. */
struct packed_table {
    const char *name;  /* "ref", "avx2", "neon", ... */
    uint32_t features; /* bits of enum opaq_cpu_feature that it needs */
    struct packed_kernel kernel[PACKED_FORMAT_COUNT][PACKED_PRECISION_COUNT];
};

/* The kernel for this machine; NULL where the combination does not exist (integers with 8-bit weights). */
const struct packed_kernel *packed_kernel(enum packed_format format, enum packed_precision precision);

/* Whether it is one of the reference's, which are there to be compared with: they are slow. */
bool packed_is_reference(const struct packed_kernel *kernel);

/* All tables that this build has, fastest first. */
const struct packed_table *const *packed_tables(int *count);

extern const struct packed_table packed_table_ref;
#if defined(__x86_64__)
extern const struct packed_table packed_table_avx512;
extern const struct packed_table packed_table_avx512_bf16;
extern const struct packed_table packed_table_avx2;
extern const struct packed_table packed_table_avx512_8bit;
extern const struct packed_table packed_table_avx512_8bit_bf16;
extern const struct packed_table packed_table_avx2_8bit;
#elif defined(__aarch64__)
extern const struct packed_table packed_table_dotprod;
extern const struct packed_table packed_table_neon_exact;
extern const struct packed_table packed_table_neon_near;
extern const struct packed_table packed_table_neon_fast;
extern const struct packed_table packed_table_neon_8bit;
#endif

#endif

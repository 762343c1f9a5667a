/* cpu/gemm/x86/packed_avx512.h: what the AVX-512 kernels for 4-bit tiled weights share: decoding codes and scales, and
 * the loops around their innermost ones. Depends on packed.h; for files compiled with F, BW, DQ, VL, VBMI and VNNI.
 *
 * Rows of the weight are lanes, so each element of y is one lane's sum, in the order that packed.h gives, whatever the
 * loops around it.
 *
 * There are two ways through a product. Few rows of x: the weight is streamed once, some tiles side by side, decoded
 * into registers and multiplied with all rows. Many: two tiles, a panel of columns at a time, are decoded into the
 * first-level cache and multiplied with FEW_ROWS rows after another; sums wait in scratch memory from one panel to
 * the next. */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_AVX512_H
#define OPAQ_CPU_GEMM_X86_PACKED_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "cpu/gemm/packed.h"

enum {
    LANES = 16,
    FEW_ROWS = PACKED_FEW_ROWS, /* rows of x that are multiplied at once, at most */
    FEW_KINDS = 4,              /* 1, 2, 4 or 8 rows have a loop of their own */
    STREAMS = 4,                /* maximum number of tiles that are streamed in parallel */
    PANEL_TILES = 2,            /* tiles that are decoded into a panel together */
    LINE = 64,                  /* bytes of a cache line, and of a vector */
    HALF_COLUMNS = 8            /* of a half of a group of codes: one line */
};
_Static_assert(TILE4_ROWS - LANES == 0, "a tile's rows are the lanes");

/* ---- the loops around the kernels ---- */

/* Tiles that are read in parallel, at equal distances, and the sums of each with the rows of x. In the next round each
 * stream continues with the tiles of the next rows. */
struct stream_job {
    const uint8_t *data;
    const uint8_t *scale;
    int64_t data_step; /* from one tile to the next */
    int64_t scale_step;
    int64_t count;  /* along the columns */
    int64_t rounds; /* at least one */
    int64_t gap;    /* tiles between two rounds */
    int64_t jump;   /* tiles from the end of the last round to the next job's, which is prefetched */
    const uint8_t *record;
    float *total; /* [round][stream][row][LANES] */
};

/* A decoded panel of PANEL_TILES tiles, and at most FEW_ROWS rows. */
struct sweep_job {
    const void *panel;
    int64_t count; /* tiles along the columns */
    const uint8_t *record;
    float *total; /* [tile][row][LANES] */
};

/* A kernel's innermost loops.
 *
 * Rows of x are copied into records, so that the addresses of rows differ by constants: a record is the
 * columns of one tile for at most FEW_ROWS rows, and belongs to the kernel but for its size, which is `row_bytes` for each
 * row. */
struct packed_ways {
    int64_t row_bytes;
    /* Columns of tiles [first, first + count) of the rows from m on; beyond the last row it is repeated. */
    void (*records_make)(const struct packed_rows *x, int64_t m, int rows, int64_t first, int64_t count,
                         uint8_t *records);
    void (*stream[FEW_KINDS])(const struct stream_job *job);
    int streams[FEW_KINDS];
    /* Tiles `tile` and `other`, `columns` columns of tiles from `first` on. */
    void (*panel_make)(const struct packed_weight *weight, const int64_t *tile, int64_t first, int64_t count,
                       void *panel);
    void (*sweep[2])(const struct sweep_job *job); /* FEW_ROWS or half as many rows */
    int64_t panel_columns;                         /* tiles along the columns in a panel, at most */
    int64_t scale_bytes;                           /* of a tile */
    float power;                                   /* sums are to be multiplied with this power of two */
};

/* Bytes of a task's records and sums, which should stay in the second-level cache; a panel follows. */
enum { RECORDS_BYTES = 128 << 10, SUMS_BYTES = 512 << 10, WAYS_BYTES = RECORDS_BYTES + SUMS_BYTES };

/* Iterates over the rounds of a job, as jobs of one round. Little is done in between: while a load waits, the processor
 * runs only a few hundred instructions ahead, and later loads would start too late. */
PACKED_INLINE struct stream_job stream_first(const struct stream_job *job) {
    struct stream_job round = *job;
    round.jump = job->rounds == 1 ? job->jump : job->gap;
    return round;
}

PACKED_INLINE void stream_next(const struct stream_job *job, int64_t scale_bytes, int sums,
                               struct stream_job *round) {
    --round->rounds;
    round->data += (job->count + job->gap) * TILE4_BYTES;
    round->scale += (job->count + job->gap) * scale_bytes;
    round->total += sums * LANES;
    round->jump = round->rounds == 1 ? job->jump : job->gap;
}

/* Defines function `name`, which runs all rounds of a job with `stream`, inlined or not according to `how`
 * (PACKED_INLINE or PACKED_APART): compilers allocate registers better in one or the other. */
#define PACKED_APART static __attribute__((noinline))
#define STREAM_ROUNDS(how, name, kind, scale_bytes, streams, rows)                                \
    how void name##_round(const struct stream_job *round) { stream(kind, round, streams, rows); } \
    static void name(const struct stream_job *job) {                                              \
        for (struct stream_job round = stream_first(job); round.rounds > 0;                       \
             stream_next(job, scale_bytes, (streams) * (rows), &round)) {                         \
            name##_round(&round);                                                                 \
        }                                                                                         \
    }

/* packed_kernel.run with these loops. */
void packed_run_avx512(const struct packed_ways *ways, const struct packed_weight *weight,
                       const struct packed_rows *x, int64_t begin, int64_t end, float *y, int64_t y_step,
                       void *scratch);

/* ---- codes ---- */

/* For vpermb, which uses six bits of an index: four copies, so that the nibble above does not matter. Twice the value
 * plus 12. */
PACKED_INLINE __m512i table_of_bytes(void) {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* For vpermw, which uses five: two copies. Twice the value. */
PACKED_INLINE __m512i table_of_words(void) {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

/* The table for the upper halves of the values as floats, whose lower halves are zero. */
PACKED_INLINE __m512i table_of_floats(void) {
    const __m128i magnitude = _mm_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0);
    const __m128i negative = _mm_or_si128(magnitude, _mm_set1_epi16(INT16_MIN));
    return _mm512_broadcast_i64x4(_mm256_set_m128i(negative, magnitude));
}

/* Codes of a half, loaded once, however often they are used. */
PACKED_INLINE __m512i load_codes(const uint8_t *half) {
    __m512i codes = _mm512_load_si512(half);
    __asm__("" : "+v"(codes));
    return codes;
}

/* Of a half: columns 0 to 3 and 4 to 7 of each row, as bytes. */
PACKED_INLINE void decode_bytes(__m512i table, const uint8_t *half, __m512i *w) {
    const __m512i codes = load_codes(half);
    w[0] = _mm512_permutexvar_epi8(codes, table);
    w[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
}

/* Of a half: columns 0 and 2, 1 and 3, 4 and 6, 5 and 7 of each row, as words. */
PACKED_INLINE void decode_words(__m512i table, const uint8_t *half, __m512i *w) {
    const __m512i codes = load_codes(half);
    w[0] = _mm512_permutexvar_epi16(codes, table);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
}

/* Of a half: columns c and c + 2 of each row, as words of a lane; c is 0, 1, 4 or 5. */
PACKED_INLINE __m512i look_up_pair(__m512i table, __m512i codes, int c) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, (unsigned)(c % 4 * 8 + c / 4 * 4)), table);
}

/* The first or the second of these, as floats. */
PACKED_INLINE __m512 first_of_pair(__m512i pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }

PACKED_INLINE __m512 second_of_pair(__m512i pair) {
    return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-0x10000)));
}

/* ---- scales ---- */

PACKED_INLINE __m128i load_scale_codes(const uint8_t *codes) {
    return _mm_loadu_si128((const __m128i *)(const void *)codes);
}

/* e4m3 times 2^-8, as halves, whose exponents are the 16 lowest: subnormal scales are right as well. A code shifted by
 * 7 has its sign in bit 14, too; that bit becomes 1 for NaN alone, the only code that carries so far when one more is
 * added. */
PACKED_INLINE __m512 decode_scale_e4m3(const uint8_t *codes) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_scale_codes(codes)), 7);
    const __m256i next = _mm256_add_epi16(shifted, _mm256_set1_epi16(0x80));
    return _mm512_cvtph_ps(_mm256_ternarylogic_epi32(shifted, next, _mm256_set1_epi16(0x4000), 0x78));
}

/* The same where no scale is negative or NaN. */
PACKED_INLINE __m512 decode_regular_scale_e4m3(const uint8_t *codes) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_scale_codes(codes)), 7));
}

/* The value itself where all scales are positive and normal in their format. */
PACKED_INLINE __m512 decode_normal_scale_e4m3(const uint8_t *codes) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_scale_codes(codes)), 20);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32((127 - 7) << 23)));
}

/* e8m0 as two factors, of which the second is 1 unless the scale is too small for a normal float: no product has a
 * subnormal factor, which some processors are slow at. */
struct scale_pair {
    __m512 main;
    __m512 rest;
};

/* 2^(code - 127 - halvings), 0xFF is NaN; halvings is 0 or 1. */
PACKED_INLINE struct scale_pair decode_scale_e8m0(const uint8_t *codes, int halvings) {
    const __m512i code = _mm512_cvtepu8_epi32(load_scale_codes(codes));
    const __m512i normal = _mm512_max_epi32(code, _mm512_set1_epi32(1 + halvings));
    const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(normal, _mm512_set1_epi32(halvings)), 23);
    const __m512i below = _mm512_slli_epi32(_mm512_sub_epi32(normal, code), 23);
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(0xFF));
    return (struct scale_pair){
        _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, is_nan, _mm512_set1_epi32(0x7FC00000))),
        _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(127 << 23), below))};
}

/* The same where all scales are normal floats and numbers. */
PACKED_INLINE __m512 decode_regular_scale_e8m0(const uint8_t *codes, int halvings) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_scale_codes(codes)), 23);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_set1_epi32(halvings << 23)));
}

/* Whether the scales of a column of `tiles` tiles, `step` bytes apart, are regular: positive numbers whose shorter
 * decoding is exact. */
PACKED_INLINE bool is_regular_e4m3(const uint8_t *scale, int64_t step, int tiles) {
    __m512i largest = _mm512_loadu_si512(scale);
    PACKED_UNROLL
    for (int t = 1; t < tiles; ++t) {
        largest = _mm512_max_epu8(largest, _mm512_loadu_si512(scale + t * step));
    }
    return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(0x7F)) == 0;
}

/* Whether they are positive and normal in their format. */
PACKED_INLINE bool is_normal_e4m3(const uint8_t *scale, int64_t step, int tiles) {
    const __m512i lowest = _mm512_set1_epi8(8);
    __m512i largest = _mm512_setzero_si512();
    PACKED_UNROLL
    for (int t = 0; t < tiles; ++t) { /* smaller codes wrap around to large ones */
        largest = _mm512_max_epu8(largest, _mm512_sub_epi8(_mm512_loadu_si512(scale + t * step), lowest));
    }
    return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(0x7F - 8)) == 0;
}

PACKED_INLINE bool is_regular_e8m0(const uint8_t *scale, int64_t step, int tiles, int halvings) {
    const __m256i lowest = _mm256_set1_epi8((char)(1 + halvings));
    __m256i largest = _mm256_setzero_si256();
    PACKED_UNROLL
    for (int t = 0; t < tiles; ++t) {
        const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)(scale + t * step));
        largest = _mm256_max_epu8(largest,
                                  _mm256_sub_epi8(codes, lowest)); /* smaller codes wrap around to large ones */
    }
    return _mm256_cmpge_epu8_mask(largest, _mm256_set1_epi8((char)(0xFE - halvings))) == 0;
}

/* ---- rows of x ---- */

typedef int32_t int32_alias __attribute__((may_alias));

/* In assembly, because the instruction for floats, which compilers prefer, needs a shuffle on some processors. */
PACKED_INLINE __m512 broadcast(const uint8_t *from) {
    __m512 vector;
    __asm__("vpbroadcastd %1, %0" : "=v"(vector) : "m"(*(const int32_alias *)(const void *)from));
    return vector;
}

PACKED_INLINE __m512i broadcast_integers(const uint8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return _mm512_set1_epi32(value);
}

/* ---- prefetching ---- */

/* Prefetch distance, in tiles along the columns. Products with one row of bytes are bound by memory, and gain nothing
 * from more. */
PACKED_INLINE int64_t stream_ahead(int rows) { return rows <= 2 ? 2 : 4; }

/* Prefetches into the second-level cache, which allows more lines in flight than the first one. A function that only
 * prefetches must be PACKED_INLINE too: compilers remove calls of it. */
PACKED_INLINE void prefetch(const uint8_t *line) { _mm_prefetch((const char *)line, _MM_HINT_T1); }

#endif

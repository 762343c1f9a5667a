/* cpu/quant/simd/transpose_vec.h: a square of bytes to its transpose, in vectors. Depends on nothing; vec_avx512.h or
 * vec_avx2.h comes before it. */
#ifndef OPAQ_CPU_QUANT_SIMD_TRANSPOSE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_TRANSPOSE_VEC_H

/* The square has this many rows and columns: a row is a vector. */
enum { TILE = VEC_BYTES };

/* In each lane a square of 16 x 16. Interleaving the bytes of rows i and i + 8 makes the highest bit of the row's
 * number the lowest of the column's, and the highest of the column's the lowest of the row's; after four times rows are
 * columns. */
VEC_INLINE void transpose_lanes(vec32 row[16]) {
    vec32 other[16];
    for (int round = 0; round < 4; ++round) {
        vec32 *const from = round % 2 == 0 ? row : other;
        vec32 *const to = round % 2 == 0 ? other : row;
        for (int i = 0; i < 8; ++i) {
            to[2 * i] = bytes_first(from[i], from[i + 8]);
            to[2 * i + 1] = bytes_second(from[i], from[i + 8]);
        }
    }
}

/* Lane l of each of LANES vectors, `step` apart, in column[l]. */
VEC_INLINE void gather_lanes(const vec32 *from, int step, vec32 column[LANES]) {
    if (LANES == 2) {
        column[0] = lanes_even(from[0], from[step]);
        column[1] = lanes_odd(from[0], from[step]);
        return;
    }
    const vec32 even[2] = {lanes_even(from[0], from[step]), lanes_even(from[2 * step], from[3 * step])};
    const vec32 odd[2] = {lanes_odd(from[0], from[step]), lanes_odd(from[2 * step], from[3 * step])};
    column[0] = lanes_even(even[0], even[1]);
    column[1] = lanes_even(odd[0], odd[1]);
    column[2] = lanes_odd(even[0], even[1]);
    column[3] = lanes_odd(odd[0], odd[1]);
}

/* Numbers of 8 bytes: as many vectors as there are in one, to their transpose. Column 2 * l + h is put in
 * column[h * LANES + l]. */
enum { QUADS = 2 * LANES };
VEC_INLINE void transpose_quads(const vec32 row[QUADS], vec32 column[QUADS]) {
    vec32 pair[2][LANES];
    for (int i = 0; i < LANES; ++i) {
        pair[0][i] = quads_first(row[2 * i], row[2 * i + 1]);
        pair[1][i] = quads_second(row[2 * i], row[2 * i + 1]);
    }
    gather_lanes(pair[0], 1, column);
    gather_lanes(pair[1], 1, column + LANES);
}

/* Whether columns are written past the caches: whole lines only. */
VEC_INLINE bool transpose_streams(const uint8_t *to, int64_t to_step, int64_t bytes) {
    const int64_t large = 4 << 20;
    return VEC_BYTES == 64 && bytes >= large && (uintptr_t)to % VEC_BYTES == 0 && to_step % VEC_BYTES == 0;
}

VEC_INLINE void transpose_whole(const uint8_t *from, int64_t from_step, int64_t rows, int64_t columns,
                                uint8_t *to, int64_t to_step, bool streams) {
    vec32 part[TILE];
    for (int group = 0; group < LANES; ++group) {
        vec32 row[16];
        for (int i = 0; i < 16; ++i) {
            row[i] = vec_load(from + (group * 16 + i) * from_step);
        }
        transpose_lanes(row);
        for (int i = 0; i < 16; ++i) {
            part[group * 16 + i] = row[i];
        }
    }
    for (int i = 0; i < 16; ++i) {
        vec32 column[LANES];
        gather_lanes(part + i, 16, column);
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t c = lane * 16 + i;
            if (c < columns && rows == TILE) {
                if (streams) {
                    vec_stream(to + c * to_step, column[lane]);
                } else {
                    vec_store(to + c * to_step, column[lane]);
                }
            } else if (c < columns) {
                memcpy(to + c * to_step, &column[lane], (size_t)rows);
            }
        }
    }
}

/* Transposes a tile of `rows` x `columns`, up to TILE of each: column c is written to to + c * to_step. Bytes
 * beyond the tile may be read if `may_read_beyond`. */
static inline void transpose_tile(const uint8_t *from, int64_t from_step, int64_t rows, int64_t columns,
                                  bool may_read_beyond, uint8_t *to, int64_t to_step, bool streams) {
    uint8_t staged[TILE * TILE];
    if (!may_read_beyond && (rows < TILE || columns < TILE)) {
        memset(staged, 0, sizeof staged);
        for (int64_t i = 0; i < rows; ++i) {
            memcpy(staged + i * TILE, from + i * from_step, (size_t)columns);
        }
        from = staged;
        from_step = TILE;
    }
    transpose_whole(from, from_step, rows, columns, to, to_step, streams);
}

#endif

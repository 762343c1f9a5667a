/* cuda/quant/quantize_tiles.cu: copies of contiguous bf16 tensors that read columns or square blocks, rowwise and columnwise in one
 * pass: tiles of 128 x 128 values go through shared memory (tile_parts.h). Which copies: takes_tiles(). */
#include "cuda/quant/tile_parts.h"

struct tile_arguments {
    struct quant_arguments quant; /* its copy is the columnwise one, if there is one */
    struct quant_copy rowwise;
    struct quant_matrix x;
    bool has_rowwise, has_columnwise;
    int square; /* side of a square block: 16, 32 or 128; or 0 */
};

/* The amaxes of a tile's square blocks. */
struct square_blocks {
    uint32_t bits[BANDS * BANDS];
};

static __device__ OPAQ_INLINE uint32_t *square_of(struct square_blocks *squares, int side, int row,
                                                  int column) {
    return &squares->bits[row / side * (TILE / side) + column / side];
}

/* The part of row `row` of the tile at `at`. */
template <int KIND>
static __device__ OPAQ_INLINE void quantize_row_part(const struct tile_arguments *job, float tensor_apply,
                                                     struct tile_place at, int row, bool is_inside,
                                                     uint32_t square_bits, const uint32_t words[PART_WORDS]) {
    enum { LANES = threads_of_block(KIND) };
    const int part = part_of_thread();
    const int64_t r = at.r + row;
    const int64_t c = at.c + part * PART;
    uint32_t codes[code_words(KIND)];
    float apply = tensor_apply;
    if constexpr (KIND != PART_FP8) {
        uint32_t amax = square_bits;
        if (job->square == 0) {
            amax = neighbours_max<LANES>(
                magnitude_bits(pair_magnitudes<PART_WORDS>(words, job->quant.job.spec.rule == OPAQ_RULE_TE)));
        }
        const bool stores = is_inside && part % LANES == 0 && r % job->rowwise.scale_layout.row_per == 0;
        apply = settle_scale<KIND>(&job->quant, &job->rowwise, is_inside ? r : 0,
                                   c / (LANES * PART) * (LANES * PART), amax, stores);
    }
    if (is_inside) {
        part_codes<KIND>(&job->quant, &job->rowwise, words, r, c, apply, codes);
        store_part<KIND>(&job->rowwise, r, c, codes);
    }
}

/* The columns' codes where neighbours in memory are neighbours along the operand's rows, as in x: mxfp8 and mxfp4. */
template <int KIND>
static __device__ OPAQ_INLINE void store_columns_along_rows(const struct quant_copy *copy, int64_t column,
                                                            int64_t row,
                                                            const uint32_t codes[2][code_words(KIND)]) {
    const int inside = (int)min_int64(PART, copy->operand.columns - row);
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        if (i < inside) {
            uint8_t *const to =
                copy->data + ((row + i) * copy->data_column_step + column) / (is_4_bit(KIND) ? 2 : 1);
            if constexpr (is_4_bit(KIND)) {
                *to =
                    (uint8_t)((codes[0][i / 8] >> i % 8 * 4 & 15u) | (codes[1][i / 8] >> i % 8 * 4 & 15u) << 4);
            } else {
                *(uint16_t *)to = (uint16_t)((codes[0][i / 4] >> i % 4 * 8 & 0xFFu) |
                                             (codes[1][i / 4] >> i % 4 * 8 & 0xFFu) << 8);
            }
        }
    }
}

/* The parts of two columns of the tile at `at`, in one band of it. */
template <int KIND>
static __device__ OPAQ_INLINE void quantize_column_parts(const struct tile_arguments *job, float tensor_apply,
                                                         struct tile_place at, struct column_part place,
                                                         const struct tile *tile,
                                                         struct square_blocks *squares) {
    enum { LANES = threads_of_block(KIND), IS_ALONG_ROWS = KIND == PART_MX8 || KIND == PART_MX4 };
    const struct quant_copy *copy = &job->quant.copy;
    const bool drop_nan = job->quant.job.spec.rule == OPAQ_RULE_TE;
    const int64_t row = at.r + place.band * PART;
    uint32_t words[2][PART_WORDS];
    uint32_t codes[2][code_words(KIND)];
    read_column_parts(tile, place, words[0], words[1]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int64_t column = at.c + 2 * place.pair + n;
        const bool is_inside = row < job->x.rows && column < job->x.columns;
        float apply = tensor_apply;
        if (KIND == PART_NVFP4 && copy->is_hadamard) {
            part_hadamard(words[n], job->quant.job.spec.hadamard_mask);
        }
        if constexpr (KIND != PART_FP8) {
            uint32_t amax =
                job->square == 0
                    ? neighbours_max<LANES>(magnitude_bits(pair_magnitudes<PART_WORDS>(words[n], drop_nan)))
                    : *square_of(squares, job->square, place.band * PART, 2 * place.pair + n);
            const bool stores =
                is_inside && place.band % LANES == 0 && column % copy->scale_layout.row_per == 0;
            apply = settle_scale<KIND>(&job->quant, copy, is_inside ? column : 0,
                                       row / (LANES * PART) * (LANES * PART), amax, stores);
        }
        part_codes<KIND>(&job->quant, copy, words[n], column, row, apply, codes[n]);
        if (!IS_ALONG_ROWS && is_inside) {
            store_part<KIND>(copy, column, row, codes[n]);
        }
    }
    if (IS_ALONG_ROWS && row < job->x.rows && at.c + 2 * place.pair < job->x.columns) {
        store_columns_along_rows<KIND>(copy, at.c + 2 * place.pair, row, codes);
    }
}

template <int KIND>
static __global__ void __launch_bounds__(THREADS, 3) quantize_tiles_kernel(struct tile_arguments job) {
    enum {
        IS_MX = KIND == PART_MX8 || KIND == PART_MX4,
        LANES = IS_MX
                    ? 2
                    : 8, /* neighbours along columns: those of a block, or as many as make stores contiguous */
        AT_ONCE = IS_MX ? 2 : PASSES /* passes whose loads are in flight together: with more, registers spill */
    };
    __shared__ struct tile tile;
    __shared__ struct square_blocks squares;
    const bool drop_nan = job.quant.job.spec.rule == OPAQ_RULE_TE;
    const float tensor_apply = KIND == PART_FP8 ? fp8_tensor_scale(&job.quant).apply : 0.0f;
    const uint32_t count = (uint32_t)(ceil_div(job.x.rows, TILE) * ceil_div(job.x.columns, TILE));
    for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
        const struct tile_place at = tile_place_of(index, job.x.columns);
        __syncthreads(); /* all threads have read the previous tile and its blocks' amaxes */
        if (job.square != 0) {
            if (threadIdx.x < BANDS * BANDS) {
                squares.bits[threadIdx.x] = 0;
            }
            __syncthreads(); /* the blocks' amaxes are 0 */
        }
#pragma unroll AT_ONCE
        for (int pass = 0; pass < PASSES; ++pass) {
            const int row = row_of_thread(pass);
            const int part = part_of_thread();
            uint32_t words[PART_WORDS];
            const bool is_inside = load_row_part(&job.x, at.r + row, at.c + part * PART, words);
            write_row_part(&tile, row, part, words);
            if (job.square != 0) {
                (void)atomicMax(square_of(&squares, job.square, row, part * PART),
                                magnitude_bits(pair_magnitudes<PART_WORDS>(words, drop_nan)));
            } else if (job.has_rowwise) {
                quantize_row_part<KIND>(&job, tensor_apply, at, row, is_inside, 0, words);
            }
        }
        __syncthreads(); /* the tile is there */
        if (job.square != 0 && job.has_rowwise) {
#pragma unroll 1
            for (int pass = 0; pass < PASSES; ++pass) {
                const int row = row_of_thread(pass);
                const int part = part_of_thread();
                uint32_t words[PART_WORDS];
                read_row_part(&tile, row, part, words);
                quantize_row_part<KIND>(&job, tensor_apply, at, row,
                                        at.r + row < job.x.rows && at.c + part * PART < job.x.columns,
                                        *square_of(&squares, job.square, row, part * PART), words);
            }
        }
        if (job.has_columnwise) {
#pragma unroll 1
            for (int pass = 0; pass < COLUMN_PASSES; ++pass) {
                quantize_column_parts<KIND>(&job, tensor_apply, at, column_part_of_thread<LANES>(pass), &tile,
                                            &squares);
            }
        }
    }
}

/* ---- launcher ---- */

/* Whether the columnwise copy, or one with square blocks, has a form that the kernel takes. */
static bool takes_copy(const struct quant_job *job, const struct quant_copy *copy) {
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    const bool is_columnwise = copy->usage == OPAQ_COLUMNWISE;
    const bool is_mx = format == OPAQ_MXFP8 || format == OPAQ_MXFP4;
    const int64_t rows = is_columnwise ? copy->operand.columns : copy->operand.rows; /* of x */
    const bool has_square_blocks = copy->block_rows == copy->block_columns;
    if (!takes_parts(job, copy) || format == OPAQ_FP8ROW) {
        return false;
    }
    if (format ==
        OPAQ_FP8) { /* random bits of the transposed copy are those of the rowwise one, not a part's */
        return !is_columnwise || (rows % PART == 0 && (job->spec.options & OPAQ_STOCHASTIC) == 0);
    }
    return (copy->block_rows == 1 || has_square_blocks) && (!is_columnwise || is_mx || rows % PART == 0);
}

bool takes_tiles(const struct quant_job *job) {
    for (int i = 0; i < job->copy_count; ++i) {
        if (!takes_copy(job, &job->copy[i])) {
            return false;
        }
    }
    const struct quant_matrix x = plain_operand(&job->copy[0]);
    return x.rows > 0 && x.columns > 0 && tile_count(&x) < INT32_MAX;
}

enum opaq_status quantize_tiles(const struct quant_arguments *arguments, const struct quant_job *job,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    struct tile_arguments tiles;
    memset(&tiles, 0, sizeof tiles);
    tiles.quant = *arguments;
    tiles.x = plain_operand(&job->copy[0]);
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_copy *copy = &job->copy[i];
        if (copy->usage == OPAQ_ROWWISE) {
            tiles.rowwise = *copy;
            tiles.has_rowwise = true;
        } else {
            tiles.quant.copy = *copy;
            tiles.has_columnwise = true;
        }
        if (copy->block_rows > 1 && job->spec.format != OPAQ_FP8) {
            tiles.square = (int)copy->block_columns;
        }
    }
    if (!tiles.has_columnwise) {
        tiles.quant.copy = tiles.rowwise;
    }
    static void (*const kernels[])(struct tile_arguments) = {
        quantize_tiles_kernel<PART_FP8>, quantize_tiles_kernel<PART_FP8_BLOCK>, quantize_tiles_kernel<PART_MX8>,
        quantize_tiles_kernel<PART_MX4>, quantize_tiles_kernel<PART_NVFP4>};
    return launch("quantize_tiles", kernels[part_kind_of(&job->spec)], blocks_for(tile_count(&tiles.x), 1),
                  THREADS, tiles, execution, error);
}

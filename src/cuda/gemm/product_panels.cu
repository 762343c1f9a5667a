/* cuda/gemm/product_panels.cu: products of more tokens than product_stream.cu takes, on tensor cores (mma.sync). The arithmetic is that of
 * product_mma.cu: the same terms in the same mma, sums of 128 terms that are added in order, so results have the same bits.
 *
 * Has run on the emulated GPU only, so OPAQ_CUDA_PRODUCT=stream has to select it.
 *
 * A block computes a tile of 64 RT rows of weights by 16 TT tokens; its eight warps have 16 RT rows by 8 TT tokens each. Chunks of
 * 64 terms go to shared memory as they are stored, by asynchronous copies three chunks ahead. Weights are decoded in registers, by
 * the two warps that need them. The order in which decoded 4-bit codes lie (mma_operand.h) is given to the tokens once, before
 * the product, in the workspace, instead of in each block.
 *
 * What bounds a warp in a chunk of 128 x 128, estimated and not measured: 64 mma, which take tensor cores 256 cycles at their rate;
 * 16 loads of 512 bytes of tokens, 64 cycles of shared memory; and about 370 instructions. A scheduler has two warps. */
#include "cuda/gemm/product_stream.h"
#include "cuda/gemm/stream_operand.h"

enum { WARPS_DOWN = 4, WARPS_ACROSS = WARPS / WARPS_DOWN }; /* along weights, along tokens */

template <int SOURCE, int RT, int TT> struct panel_shape {
    enum {
        DOWN = WARPS_DOWN * MMA_ROWS * RT,
        ACROSS = WARPS_ACROSS * MMA_COLUMNS * TT,
        CODE_BYTES = code_bytes_of(SOURCE),
        TOKEN_BYTES = CHUNK * 2,
        SCALES_AT = DOWN * CODE_BYTES,
        TOKENS_AT = SCALES_AT + (SOURCE == SOURCE_BF16 ? 0 : DOWN * 4),
        STAGE = TOKENS_AT + ACROSS * TOKEN_BYTES,
        STAGES = 4,
        BYTES = STAGES * STAGE
    };
    static_assert(TOKENS_AT % 128 == 0 && STAGE % 128 == 0, "rows are aligned");
    static_assert(DOWN + ACROSS <= THREADS, "a thread loads a factor");
    static_assert(BYTES + 2 * (DOWN + ACROSS) * (int)sizeof(float) <= (int)STREAM_MEMORY,
                  "a block's memory fits");
};

/* ---- copies ---- */

/* What a thread copies of every chunk. The addresses move on from chunk to chunk. */
template <int SOURCE, int RT, int TT> struct panel_source {
    typedef panel_shape<SOURCE, RT, TT> shape;
    enum {
        CODE_PIECES = shape::CODE_BYTES / PIECE, /* of a row */
        CODES = shape::DOWN * CODE_PIECES / THREADS > 0 ? shape::DOWN *CODE_PIECES / THREADS
                                                        : 1, /* copies of a thread */
        TOKEN_PIECES = shape::TOKEN_BYTES / PIECE,
        TOKENS = shape::ACROSS * TOKEN_PIECES / THREADS
    };
    const uint8_t *codes;
    int code_offset[CODES];
    const uint8_t *scales;
    const uint8_t *tokens;
    int token_offset[TOKENS];
};

/* Rows beyond the last one are the last one: what comes of them is not stored. */
template <int SOURCE, int RT, int TT>
static __device__ __forceinline__ struct panel_source<SOURCE, RT, TT> panel_source_at(
    const struct stream_arguments &job, int rows, int token, int weight) {
    typedef panel_source<SOURCE, RT, TT> source;
    const int thread = (int)threadIdx.x;
    const int last_weight = job.weights - 1 - weight;
    const int last_token = rows - 1 - token;
    source from;
    from.codes = job.codes + weight * job.code_step;
    from.tokens = job.tokens + token * job.token_step;
#pragma unroll
    for (int i = 0; i < source::CODES; ++i) {
        const int row = (i * THREADS + thread) / source::CODE_PIECES;
        from.code_offset[i] =
            (row < last_weight ? row : last_weight) * (int)job.code_step + thread % source::CODE_PIECES * PIECE;
    }
#pragma unroll
    for (int i = 0; i < source::TOKENS; ++i) {
        const int row = (i * THREADS + thread) / source::TOKEN_PIECES;
        from.token_offset[i] =
            (row < last_token ? row : last_token) * (int)job.token_step + thread % source::TOKEN_PIECES * PIECE;
    }
    from.scales = stream_scales_at(job.scales, weight + (thread < last_weight ? thread : last_weight));
    return from;
}

/* Starts the copies of the next chunk, which is the first or the second of its sum block. */
template <int SOURCE, int RT, int TT>
static __device__ __forceinline__ void panel_fetch(const struct stream_arguments &job,
                                                   struct panel_source<SOURCE, RT, TT> *from, bool is_first,
                                                   uint8_t *stage) {
    typedef panel_shape<SOURCE, RT, TT> shape;
    typedef panel_source<SOURCE, RT, TT> source;
    const int thread = (int)threadIdx.x;
#pragma unroll
    for (int i = 0; i < source::CODES; ++i) {
        const int piece = i * THREADS + thread;
        if (shape::DOWN * source::CODE_PIECES % THREADS == 0 || piece < shape::DOWN * source::CODE_PIECES) {
            copy_async(stage + code_place<SOURCE>(piece / source::CODE_PIECES, piece % source::CODE_PIECES),
                       from->codes + from->code_offset[i]);
        }
    }
    from->codes += shape::CODE_BYTES;
    if (SOURCE != SOURCE_BF16 && (SOURCE != SOURCE_CODES8 || job.scales.first != NULL)) {
        if (thread < shape::DOWN) {
            copy_async_word(stage + shape::SCALES_AT + thread * 4, from->scales);
        }
        from->scales += SOURCE == SOURCE_NVFP4 || !is_first ? job.scales.four : 0;
    }
#pragma unroll
    for (int i = 0; i < source::TOKENS; ++i) {
        const int piece = i * THREADS + thread;
        copy_async(
            stage + shape::TOKENS_AT +
                piece_place(piece / source::TOKEN_PIECES, piece % source::TOKEN_PIECES, shape::TOKEN_BYTES),
            from->tokens + from->token_offset[i]);
    }
    from->tokens += shape::TOKEN_BYTES;
}

/* ---- a chunk ---- */

/* The words of parts j of rows `row` and `row` + 8 of the weights, decoded. */
template <int SOURCE, int RT, int TT>
static __device__ __forceinline__ void panel_weights(const struct stream_arguments &job, const uint8_t *stage,
                                                     int row, int j, int scale_byte,
                                                     uint32_t weights[2][PART_WORDS]) {
    typedef panel_shape<SOURCE, RT, TT> shape;
    struct mma_raw<SOURCE> raw[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = row + i * MMA_COLUMNS;
        if constexpr (SOURCE == SOURCE_BF16) {
            read_four(stage + code_place<SOURCE>(at, 2 * j), raw[i].word);
            read_four(stage + code_place<SOURCE>(at, 2 * j + 1), raw[i].word + 4);
        } else {
            stream_read<SOURCE>(job, stage, shape::SCALES_AT, at, j, scale_byte, &raw[i]);
        }
    }
    stream_decode<SOURCE>(job, raw, weights);
}

/* Adds a chunk to the warp's sums; k is the place of its first term in the sum block. Every mma has another sum than the ones just before
 * it, so that they need not wait for one another. */
template <int SOURCE, int RT, int TT>
static __device__ __forceinline__ void panel_multiply(const struct stream_arguments &job, const uint8_t *stage,
                                                      int k, int weight_of_warp, int token_of_warp, int lane,
                                                      float sums[RT][TT][4]) {
    typedef panel_shape<SOURCE, RT, TT> shape;
    const int g = lane / 4;
    const int j = lane % 4;
    const int scale_byte = SOURCE == SOURCE_NVFP4 ? j : (k + PART * j) >> job.scale_shift & 3;
    uint32_t weights[RT][2][PART_WORDS];
#pragma unroll
    for (int rt = 0; rt < RT; ++rt) {
        panel_weights<SOURCE, RT, TT>(job, stage, weight_of_warp + rt * MMA_ROWS + g, j, scale_byte,
                                      weights[rt]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t tokens[TT][4];
#pragma unroll
        for (int tt = 0; tt < TT; ++tt) {
            read_four(stage + shape::TOKENS_AT +
                          piece_place(token_of_warp + tt * MMA_COLUMNS + g, 2 * j + half, shape::TOKEN_BYTES),
                      tokens[tt]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int s = 2 * half + step;
#pragma unroll
            for (int rt = 0; rt < RT; ++rt) {
                const uint32_t rows[4] = {weights[rt][0][2 * s], weights[rt][1][2 * s],
                                          weights[rt][0][2 * s + 1], weights[rt][1][2 * s + 1]};
#pragma unroll
                for (int tt = 0; tt < TT; ++tt) {
                    mma_bf16(sums[rt][tt], rows, tokens[tt] + 2 * step);
                }
            }
        }
    }
}

/* ---- results ---- */

/* Stores the tile, TT times eight tokens of each warp after another, through shared memory, so that stores are contiguous along a row of
 * c. `factors` are those of the tile's weights, then of its tokens. */
template <int RT, int TT>
static __device__ __forceinline__ void panel_store(const struct stream_arguments &job, int rows, int token,
                                                   int weight, const float *factors,
                                                   const float total[RT][TT][4], float *memory) {
    enum { DOWN = WARPS_DOWN * MMA_ROWS * RT, PITCH = DOWN + 4 };
    const int thread = (int)threadIdx.x;
    const int g = thread % WARP / 4;
    const int j = thread % 4;
    const int weight_of_warp = thread / WARP % WARPS_DOWN * (MMA_ROWS * RT);
    const int warp_across = thread / WARP / WARPS_DOWN;
    const bool is_simple = job.target.bias == NULL && !job.target.accumulate &&
                           job.target.c.dtype == OPAQ_BF16 && job.target.c.column_step == 1;
    const int64_t first = first_row(&job.target);
#pragma unroll
    for (int tt = 0; tt < TT; ++tt) {
        __syncthreads(); /* the last chunk, or the last results, have been read */
#pragma unroll
        for (int i = 0; i < RT * 4; ++i) {
            memory[(warp_across * MMA_COLUMNS + 2 * j + i % 2) * PITCH + weight_of_warp + i / 4 * MMA_ROWS + g +
                   i % 4 / 2 * 8] = total[i / 4][tt][i % 4];
        }
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < WARPS_ACROSS * MMA_COLUMNS * DOWN; i += THREADS) {
            const int column = i % DOWN;
            const int slot = i / DOWN;
            const int row = slot / MMA_COLUMNS * (MMA_COLUMNS * TT) + tt * MMA_COLUMNS + slot % MMA_COLUMNS;
            if (token + row >= rows || weight + column >= job.weights) {
                continue;
            }
            const float sum = memory[slot * PITCH + column];
            const float result =
                job.has_block_factors ? sum : scaled(sum, job.constant, factors[column], factors[DOWN + row]);
            if (is_simple) {
                ((uint16_t *)
                     job.target.c.data)[(first + token + row) * job.target.c.row_step + weight + column] =
                    (uint16_t)encode_bf16_ieee(result);
            } else {
                store_result(&job.target, first + token + row, weight + column, result);
            }
        }
    }
    __syncthreads(); /* the results have been read */
}

/* ---- the kernel ---- */

template <int SOURCE, int RT, int TT>
static __global__ void __launch_bounds__(THREADS, RT == 1 ? 2 : 1)
    product_panels_kernel(struct stream_arguments job) {
    typedef panel_shape<SOURCE, RT, TT> shape;
    __shared__ float factors[2][shape::DOWN + shape::ACROSS]; /* of this sum block and the next */
    uint8_t *const memory = dynamic_shared_memory();
    const int rows = (int)rows_of_group(&job.target.group, job.rows);
    const int chunks = job.blocks * CHUNKS_OF_BLOCK;
    const int64_t down = ceil_div(rows, shape::ACROSS); /* tiles of c */
    const int64_t across = ceil_div(job.weights, shape::DOWN);
    const int thread = (int)threadIdx.x;
    const int lane = thread % WARP;
    const int weight_of_warp = thread / WARP % WARPS_DOWN * (MMA_ROWS * RT);
    const int token_of_warp = thread / WARP / WARPS_DOWN * (MMA_COLUMNS * TT);
    const bool is_of_weight = thread < shape::DOWN; /* whose factor the thread loads */
    for (int64_t tile = blockIdx.x; tile < down * across; tile += gridDim.x) {
        int64_t token_tile;
        int64_t weight_tile;
        tile_place(tile, down, across, &token_tile, &weight_tile);
        const int token = (int)token_tile * shape::ACROSS;
        const int weight = (int)weight_tile * shape::DOWN;
        struct panel_source<SOURCE, RT, TT> from = panel_source_at<SOURCE, RT, TT>(job, rows, token, weight);
#pragma unroll
        for (int chunk = 0; chunk < shape::STAGES - 1; ++chunk) {
            if (chunk < chunks) {
                panel_fetch<SOURCE, RT, TT>(job, &from, chunk % CHUNKS_OF_BLOCK == 0,
                                            memory + chunk * shape::STAGE);
            }
            copy_async_end_group();
        }
        const int factor_row = is_of_weight ? (int)min_int64(weight + thread, job.weights - 1)
                                            : (int)min_int64(token + thread - shape::DOWN, rows - 1);
        if (thread < shape::DOWN + shape::ACROSS) {
            factors[0][thread] =
                stream_factor(is_of_weight ? job.weight_factors : job.token_factors, 0, factor_row, 0);
        }
        float total[RT][TT][4] = {};
#pragma unroll 1
        for (int block = 0; block < job.blocks; ++block) {
            float sums[RT][TT][4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS_OF_BLOCK; ++c) {
                const int chunk = block * CHUNKS_OF_BLOCK + c;
                copy_async_wait<shape::STAGES - 2>();
                __syncthreads(); /* this chunk is there, and all threads have read the previous one */
                if (chunk + shape::STAGES - 1 < chunks) {
                    panel_fetch<SOURCE, RT, TT>(job, &from, (c + shape::STAGES - 1) % CHUNKS_OF_BLOCK == 0,
                                                memory +
                                                    (chunk + shape::STAGES - 1) % shape::STAGES * shape::STAGE);
                }
                copy_async_end_group();
                if (c == 0 && job.has_block_factors && block + 1 < job.blocks &&
                    thread <
                        shape::DOWN + shape::ACROSS) { /* into those of the last block, which have been read */
                    factors[(block + 1) % 2][thread] = stream_factor(
                        is_of_weight ? job.weight_factors : job.token_factors, 0, factor_row, block + 1);
                }
                panel_multiply<SOURCE, RT, TT>(job, memory + chunk % shape::STAGES * shape::STAGE, c * CHUNK,
                                               weight_of_warp, token_of_warp, lane, sums);
            }
            const float *const factor = factors[block % 2];
#pragma unroll
            for (int i = 0; i < RT * TT * 4; ++i) {
                float sum = sums[i / (TT * 4)][i / 4 % TT][i % 4];
                if (job.has_block_factors) {
                    sum = scaled(
                        sum, job.constant,
                        factor[weight_of_warp + i / (TT * 4) * MMA_ROWS + lane / 4 + i % 4 / 2 * 8],
                        factor[shape::DOWN + token_of_warp + i / 4 % TT * MMA_COLUMNS + lane % 4 * 2 + i % 2]);
                }
                total[i / (TT * 4)][i / 4 % TT][i % 4] += sum;
            }
        }
        copy_async_wait<0>(); /* what is left are empty groups */
        panel_store<RT, TT>(job, rows, token, weight, factors[0], total, (float *)memory);
    }
}

/* ---- the order of tokens ---- */

struct order_arguments {
    const uint8_t *from;
    uint8_t *to;
    int64_t from_step, to_step; /* bytes of a row */
    int64_t rows;
    int parts; /* of a row */
    struct group_part group;
};

/* Brings each part into the order of decoded 4-bit codes; `to` may be `from`. */
static __global__ void __launch_bounds__(THREADS) order_rows(struct order_arguments job) {
    const int64_t count = rows_of_group(&job.group, job.rows) * job.parts;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const int64_t row = i / job.parts;
        const int64_t at = i % job.parts * (PART * 2);
        uint32_t words[PART_WORDS];
        read_four(job.from + row * job.from_step + at, words);
        read_four(job.from + row * job.from_step + at + 16, words + 4);
        order_tokens<SOURCE_NVFP4>(words);
        store_four(words, job.to + row * job.to_step + at);
        store_four(words + 4, job.to + row * job.to_step + at + 16);
    }
}

static enum opaq_status order(struct stream_arguments *arguments, void *workspace,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const int parts = arguments->blocks * (SUM_BLOCK / PART);
    const struct order_arguments job = {arguments->tokens,         (uint8_t *)workspace, arguments->token_step,
                                        (int64_t)parts * PART * 2, arguments->rows,      parts,
                                        arguments->target.group};
    arguments->tokens = job.to;
    arguments->token_step = job.to_step;
    return launch("to order tokens", order_rows, blocks_for(job.rows * parts, THREADS), THREADS, job, execution,
                  error);
}

/* ---- launcher ---- */

bool product_panels_takes(const struct gemm_job *job, enum product_part part,
                          const struct mma_arguments *arguments, const struct opaq_execution *execution) {
    return job->c.rows > MMA_COLUMNS && stream_takes(job, part, arguments, execution);
}

template <int SOURCE, int RT, int TT>
static enum opaq_status run(const struct stream_arguments *arguments, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    typedef panel_shape<SOURCE, RT, TT> shape;
    static struct shared_limit limit;
    const int64_t tiles = ceil_div(arguments->rows, shape::ACROSS) * ceil_div(arguments->weights, shape::DOWN);
    return launch_with_memory("product", product_panels_kernel<SOURCE, RT, TT>, blocks_for(tiles, 1), THREADS,
                              shape::BYTES, &limit, *arguments, execution, error);
}

typedef enum opaq_status run_function(const struct stream_arguments *arguments, CUDA_RUN);
static run_function *const runs[][2] = {{run<SOURCE_BF16, 1, 4>, run<SOURCE_BF16, 2, 8>},
                                        {run<SOURCE_NVFP4, 1, 4>, run<SOURCE_NVFP4, 2, 8>},
                                        {run<SOURCE_MXFP4, 1, 4>, run<SOURCE_MXFP4, 2, 8>},
                                        {run<SOURCE_CODES8, 1, 4>, run<SOURCE_CODES8, 2, 8>}};

enum opaq_status product_panels(const struct mma_arguments *product, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    const enum source source = product->b_form.source;
    struct stream_arguments arguments = stream_arguments_of(product);
    if (is_codes4(source)) {
        TRY(order(&arguments, workspace, execution, error));
    }
    const bool is_large = ceil_div(arguments.rows, 128) * ceil_div(arguments.weights, 128) >= MULTIPROCESSORS;
    return runs[source][is_large](&arguments, execution, error);
}

/* cuda/gemm/product_mma.cu: c = a b^T on tensor cores (mma.sync on bf16, float32 sums), for pairs of operands whose decoded values
 * bf16 holds exactly: plain bf16 and every format, each without its scales in float32. In an ordinary linear layer a holds tokens
 * and b is the weight; these names are used here.
 *
 * Arithmetic. The terms of a sum are taken in blocks of 128. A block is eight mma of 16 terms, one after another into one accumulator
 * that starts from 0; it is multiplied with the factors of its row of b and its row of a if these change from block to block
 * (fp8blk1, fp8blk2). The blocks' sums are added in order to a total that starts from 0. Factors that do not change are applied
 * to the total, then bias and previous c as in product.cu. Every kernel here does just that: b's rows are the rows of the mma and
 * a's rows its columns, and a term has the same place in the same mma. So a result depends on its row of a and its row of b only:
 * not on the number of rows, the kernel, the grid or the GPU's size.
 *
 * How an mma adds up its 16 products and the accumulator is the hardware's: the products are exact, sums may be truncated
 * instead of rounded. So the bytes are not the CPU's. Its bound, (min(K, 256) + ceil(K / 256) + 2) 2^-24 times the sum of the
 * terms' magnitudes (gemm_run.h), leaves more than 30 2^-24 for each of a block's eight mma if K is 256 or more.
 *
 * Layout. 64 terms are a chunk; lane 4 g + j of a warp holds terms 16 j to 16 j + 15 of row g of an operand: one part
 * (mma_operand.h), which for nvfp4 has one scale. Words 2 s and 2 s + 1 of the part go to mma number s of the chunk's four:
 *
 *     terms of the chunk      0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . . | 16 ...
 *     lane's j, mma's number  0     0 | 0     1 | 0     2 | 0     3 |  1     0
 *     mma's columns           0 1 8 9 | 0 1 8 9 | 0 1 8 9 | 0 1 8 9 |  2 3 10 11
 *
 * So a part of a weight goes from global memory to a lane's registers in one load and is decoded there, and a part of the
 * tokens comes from shared memory with two loads of 16 bytes (ldmatrix would need the terms in another order). Rows of tokens
 * in shared memory are 144 bytes apart: the eight lanes of a quarter of such a load, or of such a store, meet all 32 banks. */
#include "cuda/gemm/mma_chunk.h"
#include "cuda/gemm/product_stream.h"

enum {
    PITCH = CHUNK * 2 + 16, /* bytes from a row of tokens to the next */
    FEW = 2 * MMA_COLUMNS   /* tokens, at most, for product_few */
};

/* ---- many tokens: 64 RT rows of weights by 16 TT tokens a block ---- */

enum { WARPS_DOWN = 4, WARPS_ACROSS = WARPS / WARPS_DOWN }; /* along weights, along tokens */

/* What a thread copies of each chunk: 16 bytes of every COPIES_APART-th token. */
enum { PIECES = CHUNK / 8, COPIES_APART = THREADS / PIECES };

struct staged {
    const uint8_t *first;
    int64_t step; /* bytes to the next */
    int rows;     /* of the operand, from the first on; negative or 0 if there is none */
};

static __device__ __forceinline__ struct staged staged_from(const struct mma_form &form,
                                                            const struct mma_side &side, int64_t token) {
    const int64_t row = token + (int)threadIdx.x / PIECES;
    return {mma_row_at(form, side, row).data + (int)threadIdx.x % PIECES * 16,
            side.operand.gemm.plain.row_step * (2 * COPIES_APART), (int)(side.rows - row)};
}

/* Starts to copy the terms from k on of COUNT tokens to shared memory; what is not there is zero. */
template <int COUNT>
static __device__ __forceinline__ void stage_tokens(const struct staged &staged, const struct mma_side &side,
                                                    int k, uint8_t *stage) {
    const uint32_t zeros[4] = {0, 0, 0, 0};
    const bool is_inside = k + 8 * ((int)threadIdx.x % PIECES) < side.depth;
    stage += (int)threadIdx.x / PIECES * PITCH + (int)threadIdx.x % PIECES * 16;
#pragma unroll
    for (int i = 0; i < COUNT / COPIES_APART; ++i) {
        if (is_inside && i * COPIES_APART < staged.rows) {
            copy_async(stage + i * COPIES_APART * PITCH, staged.first + i * staged.step + 2 * (int64_t)k);
        } else {
            store_four(zeros, stage + i * COPIES_APART * PITCH);
        }
    }
}

template <int SOURCE, int RT, int TT>
static __global__ void __launch_bounds__(THREADS) product_tiles(struct mma_arguments job) {
    enum { DOWN = WARPS_DOWN * MMA_ROWS * RT, ACROSS = WARPS_ACROSS * MMA_COLUMNS * TT };
    /* A chunk of a small tile takes less time than memory: several are on their way, of tokens and of weights. */
    enum { STAGES = TT == 4 ? 4 : 2, AHEAD = TT == 4 && SOURCE != SOURCE_BF16 ? 2 : 1 };
    __shared__ struct mma_side sides[2];
    alignas(16) __shared__ uint8_t stages[STAGES][ACROSS * PITCH]; /* tokens, this chunk and the next ones */
    __shared__ float factors[2][DOWN + ACROSS];                    /* of this block of terms and the next */
    static_assert(DOWN + ACROSS <= THREADS, "a thread loads a factor");
    sides_make(&job, sides);
    const struct mma_side &a = sides[0];
    const struct mma_side &b = sides[1];
    const bool has_block_factors = job.a_form.has_block_factors || job.b_form.has_block_factors;
    const int chunks = (int)ceil_div(max_int64(a.depth, b.depth), CHUNK);
    const int64_t down = ceil_div(a.rows, ACROSS); /* tiles of c */
    const int64_t across = ceil_div(job.target.c.columns, DOWN);
    const int thread = (int)threadIdx.x;
    const int g = thread % WARP / 4;
    const int j = thread % 4;
    const int weight_of_warp = thread / WARP % WARPS_DOWN * (MMA_ROWS * RT);
    const int token_of_warp = thread / WARP / WARPS_DOWN * (MMA_COLUMNS * TT);
    for (int64_t tile = blockIdx.x; tile < down * across; tile += gridDim.x) {
        int64_t token;
        int64_t weight;
        tile_place(tile, down, across, &token, &weight);
        token *= ACROSS;
        weight *= DOWN;
        struct mma_row rows[RT][2];
        struct mma_raw<SOURCE> raw[AHEAD][RT][2];
        float total[RT][TT][4] = {};
        float sums[RT][TT][4] = {};
        const struct mma_form &own_form = thread < DOWN ? job.b_form : job.a_form; /* whose factor is loaded */
        const struct mma_side &own_side = thread < DOWN ? b : a;
        const struct mma_factors own =
            factors_at(own_form, own_side, thread < DOWN ? weight + thread : token + thread - DOWN);
        const struct staged staged = staged_from(job.a_form, a, token);
        __syncthreads(); /* all threads have stored the previous tile */
#pragma unroll
        for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
            if (chunk < chunks) {
                stage_tokens<ACROSS>(staged, a, chunk * CHUNK, stages[chunk]);
            }
            copy_async_end_group();
        }
        if (thread < DOWN + ACROSS) {
            factors[0][thread] = factor_of(own_form, own_side, own, 0);
        }
#pragma unroll
        for (int i = 0; i < RT * 2; ++i) {
            rows[i / 2][i % 2] = mma_row_at(job.b_form, b, weight + weight_of_warp + MMA_COLUMNS * i + g);
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                load_part<SOURCE>(job.b_form, b, rows[i / 2][i % 2], ahead * CHUNK + PART * j,
                                  &raw[ahead][i / 2][i % 2]);
            }
        }
#pragma unroll 1
        for (int first = 0; first < chunks; first += AHEAD) {
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) {
                const int chunk = first + turn;
                if (chunk >= chunks) {
                    break;
                }
                const int next = (chunk + 1) * CHUNK;
                const int staging = chunk + STAGES - 1;
                copy_async_wait<STAGES - 2>();
                __syncthreads(); /* this chunk's tokens are there, and all threads have read those of the previous one */
                if (staging < chunks) {
                    stage_tokens<ACROSS>(staged, a, staging * CHUNK, stages[staging % STAGES]);
                }
                copy_async_end_group();
                if (chunk + 1 < chunks && has_block_factors && next % SUM_BLOCK == 0 &&
                    thread < DOWN + ACROSS) {
                    factors[next / SUM_BLOCK % 2][thread] =
                        factor_of(own_form, own_side, own, next / SUM_BLOCK);
                }
                uint32_t weights[RT][2][PART_WORDS];
#pragma unroll
                for (int i = 0; i < RT * 2; ++i) {
                    decode_weights<SOURCE>(job.b_form, raw[turn][i / 2][i % 2], weights[i / 2][i % 2]);
                    load_part<SOURCE>(job.b_form, b, rows[i / 2][i % 2], (chunk + AHEAD) * CHUNK + PART * j,
                                      &raw[turn][i / 2][i % 2]);
                }
                const uint8_t *const stage =
                    stages[chunk % STAGES] + (token_of_warp + g) * PITCH + j * PART * 2;
#pragma unroll
                for (int tt = 0; tt < TT; ++tt) {
                    uint32_t tokens[PART_WORDS];
                    read_four(stage + tt * MMA_COLUMNS * PITCH, tokens);
                    read_four(stage + tt * MMA_COLUMNS * PITCH + 16, tokens + 4);
                    order_tokens<SOURCE>(tokens);
                    multiply_chunk<RT, TT>(weights, tokens, tt, sums);
                }
                if ((chunk + 1) % CHUNKS_OF_BLOCK != 0 && chunk + 1 < chunks) {
                    continue;
                }
                const float *const factor = factors[chunk / CHUNKS_OF_BLOCK % 2];
#pragma unroll
                for (int i = 0; i < RT * TT * 4; ++i) {
                    float *const sum = &sums[i / (TT * 4)][i / 4 % TT][i % 4];
                    if (has_block_factors) {
                        *sum = scaled(*sum, job.constant,
                                      factor[weight_of_warp + i / (TT * 4) * MMA_ROWS + g + i % 4 / 2 * 8],
                                      factor[DOWN + token_of_warp + i / 4 % TT * MMA_COLUMNS + 2 * j + i % 2]);
                    }
                    total[i / (TT * 4)][i / 4 % TT][i % 4] += *sum;
                    *sum = 0.0f;
                }
            }
        }
        copy_async_wait<0>(); /* all groups are empty */
        /* results go through shared memory, 16 tokens at a time, so that stores are contiguous along a row of c */
        float(*const results)[DOWN + 4] = (float(*)[DOWN + 4]) stages;
        static_assert(sizeof stages >= WARPS_ACROSS * MMA_COLUMNS * sizeof results[0], "results fit");
#pragma unroll
        for (int tt = 0; tt < TT; ++tt) {
            __syncthreads(); /* the tokens, or the last results, have been read */
#pragma unroll
            for (int i = 0; i < RT * 4; ++i) {
                results[thread / WARP / WARPS_DOWN * MMA_COLUMNS + 2 * j + i % 2]
                       [weight_of_warp + i / 4 * MMA_ROWS + g + i % 4 / 2 * 8] = total[i / 4][tt][i % 4];
            }
            __syncthreads();
#pragma unroll 1
            for (int i = thread; i < WARPS_ACROSS * MMA_COLUMNS * DOWN; i += THREADS) {
                const int column = i % DOWN;
                const int slot = i / DOWN;
                const int row = slot / MMA_COLUMNS * (MMA_COLUMNS * TT) + tt * MMA_COLUMNS + slot % MMA_COLUMNS;
                if (token + row < a.rows && weight + column < job.target.c.columns) {
                    const float sum = results[slot][column];
                    store_result(&job.target, first_row(&job.target) + token + row, weight + column,
                                 has_block_factors
                                     ? sum
                                     : scaled(sum, job.constant, factors[0][column], factors[0][DOWN + row]));
                }
            }
        }
    }
}

/* ---- up to 16 tokens: 16 RT rows of weights a block, whose warps take turns at the blocks of terms ---- */

template <int SOURCE, int TT>
static __global__ void __launch_bounds__(THREADS, 2) product_few(struct mma_arguments job) {
    enum {
        RT = is_codes4(SOURCE) && TT == 1 ? 2 : 1,
        RESULTS = RT * TT * 128,
        EACH = (RESULTS + THREADS - 1) / THREADS
    };
    __shared__ struct mma_side sides[2];
    alignas(16) __shared__ float sums_of[2][WARPS][RESULTS]; /* of this round's blocks and the last one's */
    sides_make(&job, sides);
    const struct mma_side &a = sides[0];
    const struct mma_side &b = sides[1];
    const bool has_block_factors = job.a_form.has_block_factors || job.b_form.has_block_factors;
    const int blocks = (int)ceil_div(max_int64(a.depth, b.depth), SUM_BLOCK);
    const int64_t down = ceil_div(a.rows, MMA_COLUMNS * TT);
    const int64_t across = ceil_div(job.target.c.columns, MMA_ROWS * RT);
    const int thread = (int)threadIdx.x;
    const int warp = thread / WARP;
    const int lane = thread % WARP;
    const int g = lane / 4;
    const int j = lane % 4;
    for (int64_t tile = blockIdx.x; tile < down * across; tile += gridDim.x) {
        const int64_t token = tile / across * (MMA_COLUMNS * TT);
        const int64_t weight = tile % across * (MMA_ROWS * RT);
        struct mma_row rows[RT][2];
        struct mma_row token_rows[TT];
        struct mma_raw<SOURCE> raw[CHUNKS_OF_BLOCK][RT][2];
        float total[EACH] = {};
        const struct mma_factors b_factors = factors_at(job.b_form, b, weight + lane % (MMA_ROWS * RT));
        const struct mma_factors a_factors = factors_at(job.a_form, a, token + lane % (MMA_COLUMNS * TT));
#pragma unroll
        for (int tt = 0; tt < TT; ++tt) {
            token_rows[tt] = mma_row_at(job.a_form, a, token + MMA_COLUMNS * tt + g);
        }
#pragma unroll
        for (int i = 0; i < RT * 2; ++i) {
            rows[i / 2][i % 2] = mma_row_at(job.b_form, b, weight + MMA_COLUMNS * i + g);
#pragma unroll
            for (int c = 0; c < CHUNKS_OF_BLOCK; ++c) {
                load_part<SOURCE>(job.b_form, b, rows[i / 2][i % 2], warp * SUM_BLOCK + c * CHUNK + PART * j,
                                  &raw[c][i / 2][i % 2]);
            }
        }
        __syncthreads(); /* all threads have read the previous tile's sums */
#pragma unroll 1
        for (int first = 0; first < blocks; first += WARPS) {
            const int k = (first + warp) * SUM_BLOCK + PART * j;
            float(*const round)[RESULTS] = sums_of[first / WARPS % 2];
            float sums[RT][TT][4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS_OF_BLOCK; ++c) {
                struct mma_raw<SOURCE_BF16> tokens[TT]; /* on their way while weights are decoded */
#pragma unroll
                for (int tt = 0; tt < TT; ++tt) {
                    load_part<SOURCE_BF16>(job.a_form, a, token_rows[tt], k + c * CHUNK, &tokens[tt]);
                }
#pragma unroll
                for (int rt = 0; rt < RT; ++rt) {
                    uint32_t weights[1][2][PART_WORDS];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        decode_weights<SOURCE>(job.b_form, raw[c][rt][i], weights[0][i]);
                        load_part<SOURCE>(job.b_form, b, rows[rt][i], k + WARPS * SUM_BLOCK + c * CHUNK,
                                          &raw[c][rt][i]);
                    }
#pragma unroll
                    for (int tt = 0; tt < TT; ++tt) {
                        if (rt == 0) {
                            order_tokens<SOURCE>(tokens[tt].word);
                        }
                        multiply_chunk<1, TT>(weights, tokens[tt].word, tt, &sums[rt]);
                    }
                }
            }
            if (has_block_factors) { /* a lane loads a row's factors for all */
                const float b_factor = factor_of(job.b_form, b, b_factors, first + warp);
                const float a_factor = factor_of(job.a_form, a, a_factors, first + warp);
#pragma unroll
                for (int i = 0; i < RT * TT * 4; ++i) {
                    float *const sum = &sums[i / (TT * 4)][i / 4 % TT][i % 4];
                    *sum =
                        scaled(*sum, job.constant,
                               __shfl_sync(0xFFFFFFFFu, b_factor, i / (TT * 4) * MMA_ROWS + g + i % 4 / 2 * 8),
                               __shfl_sync(0xFFFFFFFFu, a_factor, i / 4 % TT * MMA_COLUMNS + 2 * j + i % 2));
                }
            }
#pragma unroll
            for (int i = 0; i < RT * TT; ++i) {
                float *const to = &round[warp][(i * WARP + lane) * 4];
                for (int n = 0; n < 4; ++n) {
                    to[n] = sums[i / TT][i % TT][n];
                }
            }
            __syncthreads();
            const int count = blocks - first < WARPS ? blocks - first : WARPS;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                if (RESULTS % THREADS == 0 || thread < RESULTS) {
                    for (int w = 0; w < count; ++w) {
                        total[e] += round[w][thread + e * THREADS];
                    }
                }
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = thread + e * THREADS; /* its place among an mma's results */
            const int64_t row = token + i / 128 % TT * MMA_COLUMNS + i / 4 % 4 * 2 + i % 2;
            const int64_t column = weight + i / 128 / TT * MMA_ROWS + i % 128 / 16 + i % 4 / 2 * 8;
            if (i < RESULTS && row < a.rows && column < job.target.c.columns) {
                store_result(&job.target, first_row(&job.target) + row, column,
                             has_block_factors
                                 ? total[e]
                                 : scaled(total[e], job.constant,
                                          factor_of(job.b_form, b, factors_at(job.b_form, b, column), 0),
                                          factor_of(job.a_form, a, factors_at(job.a_form, a, row), 0)));
            }
        }
    }
}

/* ---- launcher ---- */

typedef void product_kernel_function(struct mma_arguments job);

/* Tiles of up to 8 and 16 tokens, and of 64 x 64 and 128 x 128 results. */
enum shape { SHAPE_8, SHAPE_16, SHAPE_64, SHAPE_128, SHAPE_COUNT };
static const struct {
    int tokens, weights;
} shape_sizes[SHAPE_COUNT] = {{MMA_COLUMNS, MMA_ROWS}, {FEW, MMA_ROWS}, {64, 64}, {128, 128}};
#define KERNELS_OF(source) \
    { product_few<source, 1>, product_few<source, 2>, product_tiles<source, 1, 4>, product_tiles<source, 2, 8> }
static product_kernel_function *const kernels[SOURCE_ANY][SHAPE_COUNT] = {
    KERNELS_OF(SOURCE_BF16), KERNELS_OF(SOURCE_NVFP4), KERNELS_OF(SOURCE_MXFP4), KERNELS_OF(SOURCE_CODES8)};

static int64_t tiles_of(enum shape shape, const struct quant_matrix *c) {
    return ceil_div(c->rows, shape_sizes[shape].tokens) * ceil_div(c->columns, shape_sizes[shape].weights);
}

static enum shape shape_of(const struct quant_matrix *c) {
    return c->rows <= MMA_COLUMNS                     ? SHAPE_8
           : c->rows <= FEW                           ? SHAPE_16
           : tiles_of(SHAPE_128, c) < MULTIPROCESSORS ? SHAPE_64
                                                      : SHAPE_128;
}

/* The slice of c from column `first` on. */
static enum opaq_status multiply_slice(const struct gemm_job *job, const struct group_part *group,
                                       enum product_part part, int64_t first, void *workspace,
                                       const struct opaq_execution *execution, struct opaq_error *error) {
    struct mma_arguments arguments = mma_arguments_of(job, group, part);
    TRY(mma_prepare(job, part, first, &arguments, workspace, execution, error));
    mma_arguments_settle(&arguments);
    if (product_stream_takes(job, part, &arguments, execution)) {
        return product_stream(&arguments, execution, error);
    }
    if (product_panels_takes(job, part, &arguments, execution)) {
        return product_panels(&arguments, workspace, execution, error);
    }
    const struct quant_matrix *const c = &arguments.target.c;
    const enum shape shape = shape_of(c);
    return launch("product", kernels[arguments.b_form.source][shape], blocks_for(tiles_of(shape, c), 1),
                  THREADS, arguments, execution, error);
}

enum opaq_status product_mma(const struct gemm_job *job, const struct group_part *group, enum product_part part,
                             void *workspace, const struct opaq_execution *execution,
                             struct opaq_error *error) {
    const int64_t columns = mma_slice(job, part);
    for (int64_t first = 0; first < job->c.columns; first += columns) {
        TRY(multiply_slice(job, group, part, first, workspace, execution, error));
    }
    return OPAQ_OK;
}

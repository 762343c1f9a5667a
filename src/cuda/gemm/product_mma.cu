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
#include "cuda/gemm/mma_operand.h"

enum {
    CHUNK = 64,
    STEPS = CHUNK / 16, /* mma of a chunk */
    SUM_BLOCK = 128,    /* terms of one sum */
    CHUNKS_OF_BLOCK = SUM_BLOCK / CHUNK,
    WARPS = THREADS / WARP,
    PITCH = CHUNK * 2 + 16, /* bytes from a row of tokens to the next */
    MMA_ROWS = 16,
    MMA_COLUMNS = 8,
    FEW = 2 * MMA_COLUMNS /* tokens, at most, for product_few */
};

struct mma_arguments {
    struct product_operand a, b;
    struct mma_form a_form, b_form;
    float constant; /* of all elements: 1 / (6 * 448) for each nvfp4 tensor without a global scale */
    struct product_target target;
};

/* ---- shared by the kernels ---- */

static __device__ void side_make(const struct product_operand *operand, const struct product_target *target,
                                 bool is_a, struct mma_side *side) {
    place_operand(operand, target, is_a, &side->operand);
    side->rows = (int)side->operand.gemm.plain.rows;
    side->depth = (int)operand_depth(&side->operand.gemm);
}

/* Fills sides[0] with a and sides[1] with b. */
static __device__ void sides_make(const struct mma_arguments *job, struct mma_side sides[2]) {
    if (threadIdx.x < 2) {
        side_make(threadIdx.x == 0 ? &job->a : &job->b, &job->target, threadIdx.x == 0, &sides[threadIdx.x]);
    }
    __syncthreads();
}

/* The order of multiplications with factors, the same everywhere. */
static __device__ __forceinline__ float scaled(float sum, float constant, float b_factor, float a_factor) {
    return sum * constant * b_factor * a_factor;
}

/* One chunk of the sums of 16 RT rows of weights by eight tokens, sums[..][tt]. */
template <int RT, int TT>
static __device__ __forceinline__ void multiply_chunk(const uint32_t weights[RT][2][PART_WORDS],
                                                      const uint32_t tokens[PART_WORDS], int tt,
                                                      float sums[RT][TT][4]) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int rt = 0; rt < RT; ++rt) {
            const uint32_t rows[4] = {weights[rt][0][2 * s], weights[rt][1][2 * s], weights[rt][0][2 * s + 1],
                                      weights[rt][1][2 * s + 1]};
            mma_bf16(sums[rt][tt], rows, tokens + 2 * s);
        }
    }
}

/* ---- operands that are decoded beforehand ---- */

struct decode_arguments {
    struct product_operand operand;
    struct mma_form form;
    struct product_target target;
    bool is_a;
    uint8_t *to; /* rows of bf16 */
    int64_t row_bytes;
};

static __global__ void __launch_bounds__(THREADS, 2) decode_operand(struct decode_arguments job) {
    __shared__ struct mma_side side;
    if (threadIdx.x == 0) {
        side_make(&job.operand, &job.target, job.is_a, &side);
    }
    __syncthreads();
    const int64_t parts = ceil_div(side.depth, PART); /* of a row; values beyond the depth are zeros */
    for (int64_t i = thread_index(); i < parts * side.rows; i += thread_count()) {
        const int64_t row = job.form.is_across_memory ? i % side.rows : i / parts;
        const int64_t part = job.form.is_across_memory ? i / side.rows : i % parts;
        uint32_t words[PART_WORDS];
        uint8_t *const to = job.to + row * job.row_bytes + part * PART * 2;
        const int k = (int)part * PART;
        if (is_codes4(job.form.source)) {
            read_part<SOURCE_NVFP4>(job.form, side, mma_row_at(job.form, side, row), k, words); /* or mxfp4's */
        } else if (job.form.source == SOURCE_CODES8) {
            read_part<SOURCE_CODES8>(job.form, side, mma_row_at(job.form, side, row), k, words);
        } else {
            any_part(job.form, side, (int)row, k, words);
        }
        store_four(words, to);
        store_four(words + 4, to + 16);
    }
}

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

/* The place of a tile: eight rows of tiles are passed through together, so that both operands stay in the cache. */
static __device__ void tile_place(int64_t tile, int64_t down, int64_t across, int64_t *token_tile,
                                  int64_t *weight_tile) {
    const int64_t band = 8;
    const int64_t first = tile / (band * across) * band;
    const int64_t height = min_int64(band, down - first);
    *token_tile = first + tile % (band * across) % height;
    *weight_tile = tile % (band * across) / height;
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

/* Whether bf16 holds the operand's values exactly, without factors that are constant in a row, or in 128 terms of it. */
static bool is_exact(const struct gemm_operand *operand) {
    if (operand->copy == NULL) {
        return operand->plain.dtype == OPAQ_BF16;
    }
    switch ((enum opaq_format)operand->spec->format) {
    case OPAQ_FP8:
    case OPAQ_FP8BLK2:
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        return true;
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1: /* across the rows each term has a factor of its own */
        return !operand->is_across;
    case OPAQ_NVFP4:
        return !(operand->copy->is_hadamard && operand->undo_hadamard) &&
               !(operand->is_across && operand->copy->amax_step != 0);
    }
    return false;
}

/* How the operand's layout permits to read it. Depends on no address: while a workspace is measured there is none. */
static enum source source_of_layout(const struct gemm_operand *operand, enum product_part part) {
    const struct quant_copy *copy = operand->copy;
    if (part == PRODUCT_TERMS || operand_depth(operand) % PART != 0) {
        return SOURCE_ANY; /* there may be a part of a part */
    }
    if (copy == NULL) {
        return operand->plain.column_step == 1 && operand->plain.row_step % 8 == 0 ? SOURCE_BF16 : SOURCE_ANY;
    }
    if (operand->is_across || copy->tile_rows != 0 || copy->scale_layout.tiled_columns != 0 ||
        copy->data_column_step != 1 || copy->data_row_step % PART != 0) {
        return SOURCE_ANY;
    }
    return !copy->is_packed ? SOURCE_CODES8 : operand->spec->format == OPAQ_NVFP4 ? SOURCE_NVFP4 : SOURCE_MXFP4;
}

/* Whether the address is one that every source but ANY needs. */
static bool is_aligned(const struct gemm_operand *operand) {
    const void *data = operand->copy == NULL ? operand->plain.data : operand->copy->data;
    return (uintptr_t)data % 16 == 0;
}

static enum source source_of(const struct gemm_operand *operand, enum product_part part) {
    return is_aligned(operand) ? source_of_layout(operand, part) : SOURCE_ANY;
}

static int shift_of(int64_t size) {
    int shift = 0;
    while (((int64_t)1 << shift) < size) {
        ++shift;
    }
    return shift;
}

/* How an operand is read; multiplies *constant with what is common to all its elements. */
static struct mma_form form_of(const struct gemm_operand *operand, enum product_part part, float *constant) {
    struct mma_form form;
    memset(&form, 0, sizeof form);
    form.source = source_of(operand, part);
    if (operand->copy == NULL) {
        form.is_across_memory = operand->plain.column_step != 1;
        return form;
    }
    form.is_across_memory = operand->is_across != (operand->copy->data_column_step != 1);
    const struct opaq_spec *spec = operand->spec;
    const struct scale_layout *layout = &operand->copy->scale_layout;
    form.is_e5m2 = spec->element == OPAQ_E5M2;
    form.is_swizzled = layout->swizzled_columns != 0;
    form.scale_shift = shift_of(layout->column_per);
    form.scale_step = layout->column_step;
    switch ((enum opaq_format)spec->format) {
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        form.scale = SCALE_E8M0;
        break;
    case OPAQ_NVFP4:
        form.scale = SCALE_E4M3;
        form.factor = (spec->options & OPAQ_GLOBAL) == 0 || spec->rule == OPAQ_RULE_MODELOPT ? FACTOR_AMAX
                                                                                             : FACTOR_INVERSE;
        *constant *= (spec->options & OPAQ_GLOBAL) != 0 ? 1.0f : 1.0f / (6.0f * (float)spec->e4m3_max);
        break;
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        form.has_block_factors = true;
        form.factor = FACTOR_SCALE;
        break;
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
        form.factor = FACTOR_SCALE;
        break;
    }
    return form;
}

/* OPAQ_CUDA_PRODUCT=fma selects the kernel of product.cu for everything. */
static bool is_refused(void) {
    static int state;
    return variable_is("OPAQ_CUDA_PRODUCT", "fma", &state);
}

/* A row of a may have any address in one batch and an aligned one in another, so both go to the same kernel. A weight keeps its
 * address: one that is not aligned goes to the kernel of product.cu, because scratch memory for all weights would be needed
 * to decode it here. */
bool product_mma_takes(const struct gemm_job *job, enum product_part part) {
    const int64_t limit = INT32_MAX - 4096; /* rows and terms are counted in 32 bits */
    const bool is_weight_aligned = is_aligned(&job->b) || source_of_layout(&job->b, part) == SOURCE_ANY;
    return is_exact(&job->a) && is_exact(&job->b) && is_weight_aligned && job->a.plain.rows < limit &&
           job->b.plain.rows < limit && job->a.plain.columns < limit && job->b.plain.columns < limit &&
           !is_refused();
}

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

/* Large tiles where they occupy a GPU of about this many multiprocessors; an emulated one runs them often. */
#if defined(OPAQ_CUDA_EMULATION)
enum { MULTIPROCESSORS = 2 };
#else
enum { MULTIPROCESSORS = 128 };
#endif

static enum shape shape_of(const struct quant_matrix *c) {
    return c->rows <= MMA_COLUMNS                     ? SHAPE_8
           : c->rows <= FEW                           ? SHAPE_16
           : tiles_of(SHAPE_128, c) < MULTIPROCESSORS ? SHAPE_64
                                                      : SHAPE_128;
}

/* Whether an operand is decoded beforehand, and how many bytes a row of it then has. */
static bool is_decoded(const struct gemm_operand *operand, enum product_part part, bool is_a) {
    const enum source source = source_of(operand, part);
    return is_a ? source != SOURCE_BF16 : source == SOURCE_ANY;
}

static int64_t decoded_row_bytes(const struct gemm_operand *operand) {
    return round_up(operand_depth(operand), PART) * 2;
}

/* The memory for it: for a always, because its address is not known while a workspace is measured. */
static size_t decoded_bytes(const struct gemm_operand *operand, enum product_part part, bool is_a) {
    return is_a || source_of_layout(operand, part) == SOURCE_ANY
               ? (size_t)round_up(operand->plain.rows * decoded_row_bytes(operand), 64)
               : 0;
}

size_t product_mma_workspace(const struct gemm_job *job, enum product_part part) {
    return product_mma_takes(job, part)
               ? decoded_bytes(&job->a, part, true) + decoded_bytes(&job->b, part, false)
               : 0;
}

/* Decodes the operand to the workspace and makes it plain, where that is to be done. */
static enum opaq_status prepare(struct product_operand *operand, struct mma_form *form,
                                const struct product_target *target, bool is_a, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    struct gemm_operand *gemm = &operand->gemm;
    if (!is_decoded(gemm, target->part, is_a)) {
        return OPAQ_OK;
    }
    const struct decode_arguments arguments = {
        *operand, *form, *target, is_a, (uint8_t *)workspace, decoded_row_bytes(gemm)};
    const int64_t parts = arguments.row_bytes / (PART * 2) * gemm->plain.rows;
    gemm->plain.data = workspace;
    gemm->plain.row_step = arguments.row_bytes / 2;
    form->source = SOURCE_BF16;
    return parts == 0 ? OPAQ_OK
                      : launch("to decode an operand", decode_operand, blocks_for(parts, THREADS), THREADS,
                               arguments, execution, error);
}

enum opaq_status product_mma(const struct gemm_job *job, const struct group_part *group, enum product_part part,
                             void *workspace, const struct opaq_execution *execution,
                             struct opaq_error *error) {
    struct mma_arguments arguments;
    const enum shape shape = shape_of(&job->c);
    memset(&arguments, 0, sizeof arguments);
    arguments.a = product_operand_of(&job->a);
    arguments.b = product_operand_of(&job->b);
    arguments.constant = 1.0f;
    arguments.a_form = form_of(&job->a, part, &arguments.constant);
    arguments.b_form = form_of(&job->b, part, &arguments.constant);
    arguments.target = product_target_of(job, group, part);
    TRY(prepare(&arguments.a, &arguments.a_form, &arguments.target, true, workspace, execution, error));
    TRY(prepare(&arguments.b, &arguments.b_form, &arguments.target, false,
                (char *)workspace + decoded_bytes(&job->a, part, true), execution, error));
    if (arguments.b_form.source == SOURCE_NVFP4) {
        arguments.constant *= (float)(1 << NVFP4_POWER);
    }
    return launch("product", kernels[arguments.b_form.source][shape], blocks_for(tiles_of(shape, &job->c), 1),
                  THREADS, arguments, execution, error);
}

/* ---- operands for other libraries ---- */

struct factor_arguments {
    struct mma_arguments product;
    float added; /* what is added to the product is multiplied with it */
    float *factors;
};

static __global__ void write_factors(struct factor_arguments job) {
    __shared__ struct mma_side sides[2];
    sides_make(&job.product, sides);
    if (threadIdx.x == 0) {
        const float b_factor =
            factor_of(job.product.b_form, sides[1], factors_at(job.product.b_form, sides[1], 0), 0);
        const float a_factor =
            factor_of(job.product.a_form, sides[0], factors_at(job.product.a_form, sides[0], 0), 0);
        job.factors[0] = scaled(1.0f, job.product.constant, b_factor, a_factor);
        job.factors[1] = job.added;
    }
}

static bool has_one_factor(const struct gemm_operand *operand) {
    if (operand->copy == NULL) {
        return true;
    }
    const enum opaq_format format = (enum opaq_format)operand->spec->format;
    return format == OPAQ_FP8 || format == OPAQ_MXFP8 || format == OPAQ_MXFP4 ||
           (format == OPAQ_NVFP4 && operand->copy->amax_step == 0);
}

bool product_mma_decodes(const struct gemm_job *job) {
    return product_mma_takes(job, PRODUCT_WHOLE) && has_one_factor(&job->a) && has_one_factor(&job->b);
}

struct gemm_operand product_mma_decoded(const struct gemm_operand *operand, void *memory) {
    struct gemm_operand decoded;
    memset(&decoded, 0, sizeof decoded);
    decoded.plain = {
        memory, OPAQ_BF16, operand->plain.rows, operand_depth(operand), decoded_row_bytes(operand) / 2, 1};
    return decoded;
}

static const struct group_part no_group = {NULL, 0};

enum opaq_status product_mma_decode(const struct gemm_job *job, bool is_a, void *to,
                                    const struct opaq_execution *execution, struct opaq_error *error) {
    const struct gemm_operand *const operand = is_a ? &job->a : &job->b;
    float constant = 1.0f;
    const struct decode_arguments arguments = {product_operand_of(operand),
                                               form_of(operand, PRODUCT_WHOLE, &constant),
                                               product_target_of(job, &no_group, PRODUCT_WHOLE),
                                               is_a,
                                               (uint8_t *)to,
                                               decoded_row_bytes(operand)};
    const int64_t parts = arguments.row_bytes / (PART * 2) * operand->plain.rows;
    return parts == 0 ? OPAQ_OK
                      : launch("to decode an operand", decode_operand, blocks_for(parts, THREADS), THREADS,
                               arguments, execution, error);
}

enum opaq_status product_mma_factors(const struct gemm_job *job, float *factors,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    struct factor_arguments arguments;
    memset(&arguments, 0, sizeof arguments);
    arguments.product.a = product_operand_of(&job->a);
    arguments.product.b = product_operand_of(&job->b);
    arguments.product.constant = 1.0f;
    arguments.product.a_form = form_of(&job->a, PRODUCT_WHOLE, &arguments.product.constant);
    arguments.product.b_form = form_of(&job->b, PRODUCT_WHOLE, &arguments.product.constant);
    arguments.product.target = product_target_of(job, &no_group, PRODUCT_WHOLE);
    arguments.added = job->accumulate ? 1.0f : 0.0f;
    arguments.factors = factors;
    return launch("the factors of a product", write_factors, 1, WARP, arguments, execution, error);
}

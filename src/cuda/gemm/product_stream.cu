/* cuda/gemm/product_stream.cu: products of few tokens by packed weights, for GPUs' memory: weights, their scales and tokens go to
 * shared memory by asynchronous copies, several chunks ahead. The arithmetic is that of product_mma.cu: the same terms in the
 * same mma, sums of 128 terms that are added in order, so results have the same bits.
 *
 * Has run on the emulated GPU only, so OPAQ_CUDA_PRODUCT=stream has to select it.
 *
 * A block computes 32 rows of weights by 8 TT tokens. Its eight warps take every eighth sum block. Each warp has a separate ring of
 * slots, so a warp waits for its own copies and for no other warp. A slot holds a chunk of 64 terms:
 *
 *     codes   32 rows of 32 bytes (4-bit codes) or 64
 *     scales  32 rows of four bytes, in which the chunk's scales are
 *     tokens  8 TT rows of 128 bytes
 *
 * Rows of 64 and 128 bytes have their pieces of 16 bytes exchanged (piece p of row r is at p ^ r, as far as the row has pieces),
 * so that the lanes of a load meet all banks.
 *
 * A sum block's results go to shared memory; every few rounds, when it is full, the block's threads add them to their totals in
 * order. Copies go on during that. With few tokens, results of the columns that no token has are not kept, so that there are
 * fewer such stops. */
#include "cuda/gemm/product_stream.h"

#include "cuda/gemm/stream_operand.h"

enum { ROW_TILES = 2, TILE_ROWS = ROW_TILES * MMA_ROWS };

/* The shared memory of a block. Of 4-bit codes two blocks fit a multiprocessor of an A100 or H200; 8-bit codes need more registers
 * than that leaves. */
template <int SOURCE, int TT> struct stream_shape {
    enum {
        CODE_BYTES = is_codes4(SOURCE) ? CHUNK / 2 : CHUNK, /* of a row */
        TOKEN_BYTES = CHUNK * 2,
        TOKENS = TT * MMA_COLUMNS,
        SCALES_AT = TILE_ROWS * CODE_BYTES,
        TOKENS_AT = SCALES_AT + TILE_ROWS * 4,
        SLOT = TOKENS_AT + TOKENS * TOKEN_BYTES,
        BLOCKS = is_codes4(SOURCE) ? 2 : 1,
        SLOTS = (is_codes4(SOURCE) ? 5 : 6) - TT,
        KEPT = WARPS * TILE_ROWS * TOKENS, /* results of one round */
        BYTES = WARPS * SLOTS * SLOT + KEPT * (int)sizeof(float)
    };
    static_assert(SLOT % 128 == 0, "slots are aligned");
    static_assert(SLOTS >= 2, "a slot is filled while another one is read");
    static_assert((int)BYTES <= (int)STREAM_MEMORY, "a block's memory fits");
};

/* ---- copies ---- */

/* A block's tile: tokens of a group from `token` on and rows of its weight from `weight` on. The group has `rows` tokens, the first
 * of which is row `first` of all. */
struct stream_tile {
    int group, token, weight, rows;
    int64_t first;
};

/* What a lane copies of every chunk: pieces of the weights' rows, one row's scales, and pieces of tokens. The addresses move on
 * from chunk to chunk. */
template <int SOURCE, int TT> struct stream_source {
    typedef stream_shape<SOURCE, TT> shape;
    enum {
        CODE_PIECES = shape::CODE_BYTES / PIECE, /* of a row */
        CODES = TILE_ROWS * CODE_PIECES / WARP,  /* copies of a lane */
        TOKEN_PIECES = shape::TOKEN_BYTES / PIECE,
        TOKEN_COPIES = shape::TOKENS * TOKEN_PIECES / WARP,
        SCALE_WORDS = SOURCE == SOURCE_NVFP4 ? 2 : 1 /* of a row in a sum block */
    };
    const uint8_t *codes;   /* of the tile's first row */
    int code_offset[CODES]; /* to the lane's pieces */
    const uint8_t *scales;
    const uint8_t *tokens; /* of the lane's first piece */
    int64_t token_step;    /* bytes to the lane's next piece */
    int tokens_left;       /* from the lane's first one on */
    int code_to, token_to; /* where the lane's first pieces go in a slot; the next ones 512 bytes further */
};

/* Rows of weights beyond the last one are the last one: what comes of them is not stored. */
template <int SOURCE, int TT>
static __device__ __forceinline__ struct stream_source<SOURCE, TT> stream_source_at(
    const struct stream_arguments &job, const struct stream_tile &tile, int tokens, int lane, int block) {
    typedef stream_source<SOURCE, TT> source;
    const int weight = tile.weight;
    const int last = job.weights - 1 - weight;
    source from;
    from.codes = job.codes + tile.group * job.groups.code_step + weight * job.code_step +
                 block * (SUM_BLOCK / CHUNK * source::shape::CODE_BYTES);
#pragma unroll
    for (int i = 0; i < source::CODES; ++i) {
        const int row = (i * WARP + lane) / source::CODE_PIECES;
        from.code_offset[i] =
            (row < last ? row : last) * (int)job.code_step + lane % source::CODE_PIECES * PIECE;
    }
    from.scales = tile.group * job.groups.scale_step +
                  stream_scales_at(job.scales, weight + (lane < last ? lane : last)) +
                  block * source::SCALE_WORDS * (int64_t)job.scales.four;
    from.tokens = job.tokens + (tile.first + tile.token + lane / source::TOKEN_PIECES) * job.token_step +
                  block * (SUM_BLOCK * 2) + lane % source::TOKEN_PIECES * PIECE;
    from.token_step = job.token_step * (WARP / source::TOKEN_PIECES);
    from.tokens_left = tokens - lane / source::TOKEN_PIECES;
    from.code_to = code_place<SOURCE>(lane / source::CODE_PIECES, lane % source::CODE_PIECES);
    from.token_to =
        source::shape::TOKENS_AT +
        piece_place(lane / source::TOKEN_PIECES, lane % source::TOKEN_PIECES, source::shape::TOKEN_BYTES);
    return from;
}

/* Starts the copies of the next chunk, which is the first or the second of its sum block. Tokens that do not exist are not copied. */
template <int SOURCE, int TT>
static __device__ __forceinline__ void stream_fetch(const struct stream_arguments &job,
                                                    struct stream_source<SOURCE, TT> *from, bool is_first,
                                                    int lane, uint8_t *slot) {
    typedef stream_shape<SOURCE, TT> shape;
    typedef stream_source<SOURCE, TT> source;
    enum {
        FAR = (WARPS - 1) * CHUNKS_OF_BLOCK + 1
    }; /* chunks from the second one to the warp's next sum block */
#pragma unroll
    for (int i = 0; i < source::CODES; ++i) {
        copy_async_once(slot + from->code_to + i * (WARP * PIECE), from->codes + from->code_offset[i]);
    }
    from->codes += (is_first ? 1 : FAR) * shape::CODE_BYTES;
    if (SOURCE != SOURCE_CODES8 || job.scales.first != NULL) {
        copy_async_word(slot + shape::SCALES_AT + lane * 4, from->scales);
        from->scales += (source::SCALE_WORDS == 2 ? (is_first ? 1 : FAR) : (is_first ? 0 : WARPS)) *
                        (int64_t)job.scales.four;
    }
#pragma unroll
    for (int i = 0; i < source::TOKEN_COPIES; ++i) {
        if (i * (WARP / source::TOKEN_PIECES) <
            from->tokens_left) { /* four rows further, pieces are four further */
            copy_async(slot + (from->token_to ^ i % 2 * (4 * PIECE)) + i * (WARP * PIECE),
                       from->tokens + i * from->token_step);
        }
    }
    from->tokens += (is_first ? 1 : FAR) * shape::TOKEN_BYTES;
}

/* ---- a chunk ---- */

/* Adds a chunk to the warp's sums; k is the place of its first term in the sum block. */
template <int SOURCE, int TT>
static __device__ __forceinline__ void stream_multiply(const struct stream_arguments &job, const uint8_t *slot,
                                                       int k, const int token_row[TT], int lane,
                                                       float sums[ROW_TILES][TT][4]) {
    typedef stream_shape<SOURCE, TT> shape;
    const int g = lane / 4;
    const int j = lane % 4;
    const int scale_byte = SOURCE == SOURCE_NVFP4 ? j : (k + PART * j) >> job.scale_shift & 3;
    uint32_t tokens[TT][PART_WORDS];
#pragma unroll
    for (int tt = 0; tt < TT; ++tt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            read_four(slot + shape::TOKENS_AT + piece_place(token_row[tt], 2 * j + half, shape::TOKEN_BYTES),
                      tokens[tt] + 4 * half);
        }
        order_tokens<SOURCE>(tokens[tt]);
    }
#pragma unroll
    for (int rt = 0; rt < ROW_TILES; ++rt) {
        struct mma_raw<SOURCE> raw[2];
        uint32_t weights[1][2][PART_WORDS];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            stream_read<SOURCE>(job, slot, shape::SCALES_AT, rt * MMA_ROWS + i * MMA_COLUMNS + g, j, scale_byte,
                                &raw[i]);
        }
        stream_decode<SOURCE>(job, raw, weights[0]);
#pragma unroll
        for (int tt = 0; tt < TT; ++tt) {
            multiply_chunk<1, TT>(weights, tokens[tt], tt, &sums[rt]);
        }
    }
}

/* ---- tiles ---- */

enum { GROUP_LIMIT = THREADS };

/* Sums up the groups' tiles of tokens: before[n] are those of groups 0 to n. */
template <int TOKENS>
static __device__ __forceinline__ void count_tiles(const struct stream_groups &groups,
                                                   int before[GROUP_LIMIT]) {
    const int thread = (int)threadIdx.x;
    int count = 0;
    if (thread < groups.count) {
        count = (int)ceil_div(groups.first[thread + 1] - groups.first[thread], TOKENS);
    }
    before[thread] = count;
    __syncthreads();
    for (int step = 1; step < groups.count; step *= 2) {
        const int more = thread >= step ? before[thread - step] : 0;
        __syncthreads();
        before[thread] += more;
        __syncthreads();
    }
}

/* The group that has tile `tile` of tokens. */
static __device__ __forceinline__ int group_of_tile(const int before[GROUP_LIMIT], int count, int tile) {
    int low = 0;
    int high = count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        low = before[middle] > tile ? low : middle + 1;
        high = before[middle] > tile ? middle : high;
    }
    return low;
}

/* Tile `index` of the product, of `down` tiles of tokens; neighbours read the same weights. Of groups there are few tokens, and
 * neighbours read neighbouring rows of a weight. */
template <int TOKENS>
static __device__ __forceinline__ struct stream_tile tile_at(const struct stream_arguments &job,
                                                             const int before[GROUP_LIMIT], unsigned index,
                                                             unsigned down, unsigned across) {
    if (job.groups.first == NULL) {
        return {0, (int)(index % down) * TOKENS, (int)(index / down) * TILE_ROWS,
                (int)rows_of_group(&job.target.group, job.rows), 0};
    }
    const int token_tile = (int)(index / across);
    const int group = group_of_tile(before, job.groups.count, token_tile);
    const int64_t first = job.groups.first[group];
    return {group, (token_tile - (group == 0 ? 0 : before[group - 1])) * TOKENS,
            (int)(index % across) * TILE_ROWS, (int)(job.groups.first[group + 1] - first), first};
}

/* ---- the kernel ---- */

template <int SOURCE, int TT>
static __global__ void __launch_bounds__(THREADS, stream_shape<SOURCE, TT>::BLOCKS)
    product_stream_kernel(struct stream_arguments job) {
    typedef stream_shape<SOURCE, TT> shape;
    uint8_t *const memory = dynamic_shared_memory();
    float *const kept = (float *)(memory + WARPS * shape::SLOTS * shape::SLOT);
    __shared__ int before[GROUP_LIMIT];
    if (job.groups.first != NULL) {
        count_tiles<shape::TOKENS>(job.groups, before);
    }
    const int blocks = job.blocks;
    const int rounds = (blocks + WARPS - 1) / WARPS;
    const unsigned down = job.groups.first != NULL
                              ? (unsigned)before[job.groups.count - 1]
                              : (unsigned)ceil_div(rows_of_group(&job.target.group, job.rows), shape::TOKENS);
    const unsigned across = (unsigned)(job.weights + TILE_ROWS - 1) / TILE_ROWS;
    const int thread = (int)threadIdx.x;
    const int warp = thread / WARP;
    const int lane = thread % WARP;
    const int g = lane / 4;
    const int j = lane % 4;
    const int chunks = (blocks - warp + WARPS - 1) / WARPS * CHUNKS_OF_BLOCK; /* of this warp */
    uint8_t *const ring = memory + warp * (shape::SLOTS * shape::SLOT);
    uint8_t *const ring_end = ring + (shape::SLOTS - 1) * shape::SLOT; /* its last slot */
    for (unsigned index = blockIdx.x; index < down * across; index += gridDim.x) {
        const struct stream_tile tile = tile_at<shape::TOKENS>(job, before, index, down, across);
        const int tokens = tile.rows - tile.token < shape::TOKENS ? tile.rows - tile.token : (int)shape::TOKENS;
        struct stream_source<SOURCE, TT> from = stream_source_at<SOURCE, TT>(job, tile, tokens, lane, warp);
        int next = 0; /* the chunk to copy next */
#pragma unroll
        for (; next < shape::SLOTS - 1; ++next) {
            if (next < chunks) {
                stream_fetch<SOURCE, TT>(job, &from, next % CHUNKS_OF_BLOCK == 0, lane,
                                         ring + next * shape::SLOT);
            }
            copy_async_end_group();
        }
        const int width = (tokens + 1) / 2 * 2; /* results that are kept of a row */
        const int rounds_kept = shape::KEPT / (WARPS * TILE_ROWS) / width;
        int token_row[TT]; /* of columns that no token has, the last token's */
        float total[TT] = {};
#pragma unroll
        for (int tt = 0; tt < TT; ++tt) {
            token_row[tt] = tt * MMA_COLUMNS + g < tokens ? tt * MMA_COLUMNS + g : tokens - 1;
        }
        const uint8_t *slot = ring; /* of the chunk to multiply */
        uint8_t *free_slot = ring + (shape::SLOTS - 1) * shape::SLOT;
#pragma unroll 1
        for (int first = 0; first < rounds; first += rounds_kept) {
            const int end = first + rounds_kept < rounds ? first + rounds_kept : rounds;
#pragma unroll 1
            for (int round = first; round < end && round * WARPS + warp < blocks; ++round) {
                const int block = round * WARPS + warp;
                float sums[ROW_TILES][TT][4] = {};
                float b_factor = 1.0f;
                float a_factor = 1.0f;
                if (job.has_block_factors) { /* a lane loads a row's factors for all */
                    const int last = job.weights - 1;
                    b_factor = stream_factor(job.weight_factors, tile.group * job.groups.factor_step,
                                             tile.weight + lane < last ? tile.weight + lane : last, block);
                    a_factor = stream_factor(job.token_factors, 0,
                                             tile.token + (lane < tokens ? lane : tokens - 1), block);
                }
#pragma unroll
                for (int c = 0; c < CHUNKS_OF_BLOCK; ++c) {
                    copy_async_wait<shape::SLOTS - 2>();
                    warp_wait(); /* all lanes' copies are there, and all lanes have read the slot that is filled now */
                    if (next < chunks) {
                        stream_fetch<SOURCE, TT>(job, &from, (c + shape::SLOTS - 1) % CHUNKS_OF_BLOCK == 0,
                                                 lane, free_slot);
                    }
                    copy_async_end_group();
                    ++next;
                    stream_multiply<SOURCE, TT>(job, slot, c * CHUNK, token_row, lane, sums);
                    free_slot = free_slot == ring_end ? ring : free_slot + shape::SLOT;
                    slot = slot == ring_end ? ring : slot + shape::SLOT;
                }
                float *const results = kept + ((round - first) * WARPS + warp) * (TILE_ROWS * width);
#pragma unroll
                for (int i = 0; i < ROW_TILES * TT * 2; ++i) { /* pairs of neighbouring tokens */
                    const int row = i / (TT * 2) * MMA_ROWS + i % 2 * MMA_COLUMNS + g;
                    const int column = i / 2 % TT * MMA_COLUMNS + 2 * j;
                    float *const pair = &sums[i / (TT * 2)][i / 2 % TT][i % 2 * 2];
                    if (job.has_block_factors) {
                        const float of_row = __shfl_sync(0xFFFFFFFFu, b_factor, row);
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            pair[n] = scaled(pair[n], job.constant, of_row,
                                             __shfl_sync(0xFFFFFFFFu, a_factor, column + n));
                        }
                    }
                    if (column < width) {
                        store_two(pair, results + row * width + column);
                    }
                }
            }
            __syncthreads(); /* all sums of these rounds are there */
            const int count = (end * WARPS < blocks ? end * WARPS : blocks) - first * WARPS;
#pragma unroll
            for (int e = 0; e < TT; ++e) {
                const int i = thread + e * THREADS;
                if (i < TILE_ROWS * width) {
#pragma unroll 4
                    for (int n = 0; n < count; ++n) {
                        total[e] += kept[n * (TILE_ROWS * width) + i];
                    }
                }
            }
            __syncthreads(); /* and have been read */
        }
#pragma unroll
        for (int e = 0; e < TT; ++e) {
            const int i = thread + e * THREADS;
            const int row = tile.token + i % width;
            const int column = tile.weight + i / width;
            if (i < TILE_ROWS * width && row < tile.rows && column < job.weights) {
                const int64_t group_factors = tile.group * job.groups.factor_step;
                store_result(&job.target, first_row(&job.target) + tile.first + row, column,
                             job.has_block_factors
                                 ? total[e]
                                 : scaled(total[e], job.constant,
                                          stream_factor(job.weight_factors, group_factors, column, 0),
                                          stream_factor(job.token_factors, 0, row, 0)),
                             tile.group * job.groups.bias_step);
            }
        }
        copy_async_wait<0>(); /* what is left are empty groups */
    }
}

/* ---- which products ---- */

enum { TOKEN_LIMIT = 64 }; /* more are faster in large tiles */

bool product_stream_takes(const struct gemm_job *job, enum product_part part,
                          const struct mma_arguments *arguments, const struct opaq_execution *execution) {
    const enum source source = arguments->b_form.source;
    return job->c.rows <= TOKEN_LIMIT && (is_codes4(source) || source == SOURCE_CODES8) &&
           stream_takes(job, part, arguments, execution);
}

/* ---- launcher ---- */

template <int SOURCE, int TT>
static enum opaq_status run(const struct stream_arguments *arguments, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    static struct shared_limit limit;
    /* groups begin a tile of tokens each, if they have any */
    const int64_t begun = min_int64(arguments->rows, arguments->groups.count);
    const int64_t tiles = (ceil_div(arguments->rows, stream_shape<SOURCE, TT>::TOKENS) + begun) *
                          ceil_div(arguments->weights, TILE_ROWS);
    return launch_with_memory("product", product_stream_kernel<SOURCE, TT>, blocks_for(tiles, 1), THREADS,
                              stream_shape<SOURCE, TT>::BYTES, &limit, *arguments, execution, error);
}

typedef enum opaq_status run_function(const struct stream_arguments *arguments, CUDA_RUN);
static run_function *const runs[][2] = {{run<SOURCE_NVFP4, 1>, run<SOURCE_NVFP4, 2>},
                                        {run<SOURCE_MXFP4, 1>, run<SOURCE_MXFP4, 2>},
                                        {run<SOURCE_CODES8, 1>, run<SOURCE_CODES8, 2>}};

enum opaq_status product_stream(const struct mma_arguments *product, const struct opaq_execution *execution,
                                struct opaq_error *error) {
    const struct stream_arguments arguments = stream_arguments_of(product);
    const bool has_few = arguments.rows <= MMA_COLUMNS;
    return runs[product->b_form.source - SOURCE_NVFP4][has_few ? 0 : 1](&arguments, execution, error);
}

/* ---- groups ---- */

static const struct group_part no_group = {NULL, 0};

bool product_stream_groups_takes(const struct gemm_job *job, int64_t count,
                                 const struct opaq_execution *execution) {
    const struct mma_arguments product = mma_arguments_of(job, &no_group, PRODUCT_WHOLE);
    const enum source source = product.b_form.source;
    return count > 1 && count <= GROUP_LIMIT && job->a.copy == NULL && product.a_form.source == SOURCE_BF16 &&
           job->a.plain.rows <= TOKEN_LIMIT * count && (is_codes4(source) || source == SOURCE_CODES8) &&
           product_mma_takes(job, PRODUCT_WHOLE) && stream_takes(job, PRODUCT_WHOLE, &product, execution);
}

/* Elements between two addresses. */
static int64_t step_between(const void *first, const void *second, int bytes) {
    return first == NULL ? 0 : ((const char *)second - (const char *)first) / bytes;
}

enum opaq_status product_stream_groups(const struct gemm_job *job, const struct gemm_operand *next,
                                       const void *next_bias, const int64_t *first, int64_t count,
                                       const struct opaq_execution *execution, struct opaq_error *error) {
    struct mma_arguments product = mma_arguments_of(job, &no_group, PRODUCT_WHOLE);
    mma_arguments_settle(&product);
    struct stream_arguments arguments = stream_arguments_of(&product);
    const struct quant_copy *copy = job->b.copy;
    const bool is_amax = product.b_form.factor == FACTOR_AMAX || product.b_form.factor == FACTOR_INVERSE;
    arguments.groups.first = first;
    arguments.groups.count = (int)count;
    arguments.groups.code_step = step_between(copy->data, next->copy->data, 1);
    arguments.groups.scale_step = step_between(copy->scale, next->copy->scale, 1);
    arguments.groups.factor_step = is_amax ? step_between(copy->amax, next->copy->amax, sizeof(float))
                                           : arguments.groups.scale_step / (int)sizeof(float);
    arguments.groups.bias_step = step_between(job->bias, next_bias, job->bias_dtype == OPAQ_F32 ? 4 : 2);
    const bool has_few = arguments.rows <= MMA_COLUMNS * count;
    return runs[product.b_form.source - SOURCE_NVFP4][has_few ? 0 : 1](&arguments, execution, error);
}

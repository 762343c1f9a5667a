/* cuda/gemm/product.cu: c = a b^T for every pair of operands, portable: tiles of 64 x 64 results, whose operands are decoded
 * to float32 in shared memory, 64 terms at a time.
 *
 * Arithmetic: that of the CPU's gemm_run.h, bit for bit. The terms of a sum are added in their order by fused
 * multiply-adds, in blocks of 256 that each start from 0; the blocks' sums are added in order. So a result depends on its
 * row of a and its row of b only. */
#include "cuda/cuda_functions.h"
#include "definition/operand_ref.h"

enum {
    TILE = 64,       /* rows and columns of c, and terms at a time */
    SUM_BLOCK = 256, /* terms of one sum */
    SIDE = 16,       /* threads along each side of a tile */
    EACH = TILE / SIDE,
    PARTS = TILE / OPERAND_PART,
    PITCH = TILE + 1 /* avoids bank conflicts along a column */
};

/* An operand with the structs it points to. */
struct product_operand {
    struct gemm_operand gemm;
    struct bare_copy of; /* its spec and copy */
};

struct product_arguments {
    struct product_operand a, b;
    struct quant_matrix c;
    const void *bias;
    enum opaq_element bias_dtype;
    bool accumulate;
    struct group_part group;
    enum product_part part;
};

/* A copy of an operand that points to its own parts, with the sizes of the group. */
static __device__ void place_operand(const struct product_operand *from, enum product_part part,
                                     const struct group_part *group, bool is_a, struct product_operand *to) {
    *to = *from;
    if (part == PRODUCT_TERMS) {
        to->gemm.plain.columns = rows_of_group(group, from->gemm.plain.columns);
        to->of.copy.operand.columns = to->gemm.plain.columns;
    } else if (part == PRODUCT_ROWS && is_a) {
        to->gemm.plain.rows = rows_of_group(group, from->gemm.plain.rows);
    }
    if (from->gemm.copy != NULL) {
        to->gemm.spec = &to->of.spec;
        to->gemm.copy = &to->of.copy;
    }
}

/* TILE rows of an operand from `row` on, TILE terms from k on; a thread decodes OPERAND_PART of them. */
static __device__ void load_tile(const struct gemm_operand *operand, int64_t row, int64_t k,
                                 float tile[TILE][PITCH]) {
    float values[OPERAND_PART];
    const int r = (int)threadIdx.x / PARTS;
    const int part = (int)threadIdx.x % PARTS * OPERAND_PART;
    for (int i = 0; i < OPERAND_PART; ++i) {
        values[i] = 0.0f;
    }
    if (row + r < operand->plain.rows) {
        operand_part(operand, row + r, k + part, values);
    }
    for (int i = 0; i < OPERAND_PART; ++i) {
        tile[r][part + i] = values[i];
    }
}

/* Adds bias and previous c, rounds and stores. */
static __device__ void store_result(const struct product_arguments *job, int64_t row, int64_t column,
                                    float total) {
    struct quant_matrix c = job->c;
    if (job->bias != NULL) {
        const struct quant_matrix bias = {(void *)job->bias, job->bias_dtype, 1, c.columns, 0, 1};
        total += matrix_at(&bias, column);
    }
    c.rows = row + 1;
    if (job->accumulate) {
        total += matrix_at(&c, row * c.row_step + column * c.column_step);
    }
    segment_store(&c, row, column, 1, &total);
}

static __global__ void __launch_bounds__(THREADS) product_kernel(struct product_arguments job) {
    __shared__ float a_tile[TILE][PITCH];
    __shared__ float b_tile[TILE][PITCH];
    __shared__ struct product_operand operands[2]; /* in shared memory, rather than one copy per thread */
    __shared__ float factor;                       /* the factor that decoding of b omits */
    if (threadIdx.x == 0) {
        place_operand(&job.a, job.part, &job.group, true, &operands[0]);
        place_operand(&job.b, job.part, &job.group, false, &operands[1]);
        factor = 1.0f;
        if (leaves_factor_out(&job.a.gemm, &job.b.gemm)) {
            (void)bare_copy_make(&job.b.of.spec, &job.b.of.copy, &operands[1].of, &factor);
        }
    }
    __syncthreads();
    const struct gemm_operand &a = operands[0].gemm;
    const struct gemm_operand &b = operands[1].gemm;
    const int64_t first = job.part == PRODUCT_ROWS ? first_of_group(&job.group) : 0; /* row of c */
    const int64_t depth = max_int64(operand_depth(&a), operand_depth(&b));
    const int64_t across = ceil_div(job.c.columns, TILE);
    const int64_t tiles = ceil_div(a.plain.rows, TILE) * across;
    const int y = (int)threadIdx.x / SIDE;
    const int x = (int)threadIdx.x % SIDE;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = tile / across * TILE;
        const int64_t column = tile % across * TILE;
        float total[EACH][EACH] = {};
        float sum[EACH][EACH] = {};
        for (int64_t k = 0; k < depth; k += TILE) {
            const int terms = (int)min_int64(TILE, depth - k);
            __syncthreads(); /* all threads have read the tiles */
            load_tile(&a, row, k, a_tile);
            load_tile(&b, column, k, b_tile);
            __syncthreads();
            for (int t = 0; t < terms; ++t) {
                for (int i = 0; i < EACH; ++i) {
                    for (int j = 0; j < EACH; ++j) {
                        sum[i][j] = __fmaf_rn(a_tile[y + SIDE * i][t], b_tile[x + SIDE * j][t], sum[i][j]);
                    }
                }
            }
            if ((k + TILE) % SUM_BLOCK == 0 || k + TILE >= depth) {
                for (int i = 0; i < EACH; ++i) {
                    for (int j = 0; j < EACH; ++j) {
                        total[i][j] += sum[i][j];
                        sum[i][j] = 0.0f;
                    }
                }
            }
        }
        for (int i = 0; i < EACH; ++i) {
            for (int j = 0; j < EACH; ++j) {
                const int64_t r = row + y + SIDE * i;
                const int64_t c = column + x + SIDE * j;
                if (r < a.plain.rows && c < job.c.columns) {
                    store_result(&job, first + r, c, factor == 1.0f ? total[i][j] : total[i][j] * factor);
                }
            }
        }
    }
}

static struct product_operand product_operand_of(const struct gemm_operand *gemm) {
    struct product_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.gemm = *gemm;
    if (gemm->copy != NULL) {
        operand.of.spec = *gemm->spec;
        operand.of.copy = *gemm->copy;
    }
    return operand;
}

enum opaq_status product_group(const struct gemm_job *job, const struct group_part *group,
                               enum product_part part, const struct opaq_execution *execution,
                               struct opaq_error *error) {
    const struct product_arguments arguments = {product_operand_of(&job->a),
                                                product_operand_of(&job->b),
                                                job->c,
                                                job->bias,
                                                job->bias_dtype,
                                                job->accumulate,
                                                *group,
                                                part};
    if (job->c.rows == 0 || job->c.columns == 0) {
        return OPAQ_OK;
    }
    return launch("product", product_kernel,
                  blocks_for(ceil_div(job->c.rows, TILE) * ceil_div(job->c.columns, TILE), 1), THREADS,
                  arguments, execution, error);
}

size_t cuda_product_workspace(const struct gemm_job *job) {
    (void)job;
    return 0;
}

enum opaq_status cuda_product(const struct gemm_job *job, void *workspace,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const struct group_part all = {NULL, 0};
    (void)workspace;
    return product_group(job, &all, PRODUCT_WHOLE, execution, error);
}

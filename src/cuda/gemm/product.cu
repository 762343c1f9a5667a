/* cuda/gemm/product.cu: c = a b^T for every pair of operands: the choice between tensor cores (product_mma.cu) and, for
 * operands that these cannot multiply exactly, the kernel here: tiles of 64 x 64 results, whose operands are decoded to float32 in
 * shared memory, 64 terms at a time.
 *
 * Arithmetic: that of the CPU's gemm_run.h, bit for bit. The terms of a sum are added in their order by fused
 * multiply-adds, in blocks of 256 that each start from 0; the blocks' sums are added in order. So a result depends on its
 * row of a and its row of b only. */
#include "cuda/gemm/product_cublaslt.h"
#include "cuda/gemm/product_operand.h"

enum {
    TILE = 64,       /* rows and columns of c, and terms at a time */
    SUM_BLOCK = 256, /* terms of one sum */
    SIDE = 16,       /* threads along each side of a tile */
    EACH = TILE / SIDE,
    PARTS = TILE / OPERAND_PART,
    PITCH = TILE + 1 /* avoids bank conflicts along a column */
};

struct product_arguments {
    struct product_operand a, b;
    struct product_target target;
};

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

static __global__ void __launch_bounds__(THREADS) product_kernel(struct product_arguments job) {
    __shared__ float a_tile[TILE][PITCH];
    __shared__ float b_tile[TILE][PITCH];
    __shared__ struct product_operand operands[2]; /* in shared memory, rather than one copy per thread */
    __shared__ float factor;                       /* the factor that decoding of b omits */
    if (threadIdx.x == 0) {
        place_operand(&job.a, &job.target, true, &operands[0]);
        place_operand(&job.b, &job.target, false, &operands[1]);
        factor = 1.0f;
        if (leaves_factor_out(&job.a.gemm, &job.b.gemm)) {
            (void)bare_copy_make(&job.b.of.spec, &job.b.of.copy, &operands[1].of, &factor);
        }
    }
    __syncthreads();
    const struct gemm_operand &a = operands[0].gemm;
    const struct gemm_operand &b = operands[1].gemm;
    const int64_t first = first_row(&job.target);
    const int64_t depth = max_int64(operand_depth(&a), operand_depth(&b));
    const int64_t across = ceil_div(job.target.c.columns, TILE);
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
                if (r < a.plain.rows && c < job.target.c.columns) {
                    store_result(&job.target, first + r, c,
                                 factor == 1.0f ? total[i][j] : total[i][j] * factor);
                }
            }
        }
    }
}

size_t product_group_workspace(const struct gemm_job *job, enum product_part part) {
    const size_t own = product_mma_workspace(job, part);
    const size_t library = part != PRODUCT_WHOLE                  ? 0
                           : product_cublaslt_workspace(job) != 0 ? product_cublaslt_workspace(job)
                                                                  : product_decoded_workspace(job);
    return own > library ? own : library;
}

enum opaq_status product_group(const struct gemm_job *job, const struct group_part *group,
                               enum product_part part, void *workspace, const struct opaq_execution *execution,
                               struct opaq_error *error) {
    if (job->c.rows == 0 || job->c.columns == 0) {
        return OPAQ_OK;
    }
    if (job->any_order && part == PRODUCT_WHOLE && group->first == NULL) {
        bool is_done;
        TRY(product_cublaslt(job, NULL, workspace, &is_done, execution, error));
        if (!is_done) {
            TRY(product_decoded(job, workspace, &is_done, execution, error));
        }
        if (is_done) {
            return OPAQ_OK;
        }
    }
    if (product_mma_takes(job, part)) {
        return product_mma(job, group, part, workspace, execution, error);
    }
    const struct product_arguments arguments = {product_operand_of(&job->a), product_operand_of(&job->b),
                                                product_target_of(job, group, part)};
    return launch("product", product_kernel,
                  blocks_for(ceil_div(job->c.rows, TILE) * ceil_div(job->c.columns, TILE), 1), THREADS,
                  arguments, execution, error);
}

size_t cuda_product_workspace(const struct gemm_job *job) {
    return product_group_workspace(job, PRODUCT_WHOLE);
}

enum opaq_status cuda_product(const struct gemm_job *job, void *workspace,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const struct group_part all = {NULL, 0};
    return product_group(job, &all, PRODUCT_WHOLE, workspace, execution, error);
}

/* cpu/gemm/packed_batch.h: rows of one matrix times several tiled weights of one format and shape, in one run over all
 * their tiles, as for the experts of a mixture. Depends on packed_run.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_BATCH_H
#define OPAQ_CPU_GEMM_PACKED_BATCH_H

#include "cpu/gemm/packed_run.h"

/* A member of a batch: its rows [first, first + rows) share one weight. */
struct packed_member {
    struct gemm_operand b; /* N x K */
    int64_t first, rows;
};

struct packed_batch {
    struct gemm_operand a; /* K columns, along its rows */
    int64_t first, rows;   /* of a */
    const int64_t *source; /* the rows of a, one by one, instead of those from the first on; or NULL */
    const struct packed_member *members;
    int64_t count;
    enum packed_precision wanted;
    float *y; /* rows x N, rows y_step apart */
    int64_t y_step;
    /* Distance between two columns that `finish` reads together: half of N, in whole tiles; 0: no such pairs. */
    int64_t partner;
    /* If not NULL, called when columns [begin, end) of a member's rows are computed (with a partner, also those from
     * begin + partner on), on the thread that computed them. */
    void (*finish)(void *argument, const struct packed_member *member, int64_t begin, int64_t end);
    void *argument;
};

/* Whether `partner` is a supported distance. */
bool packed_batch_can_pair(const struct gemm_operand *b, int64_t partner);

/* Bytes of scratch memory of packed_batch_run, aligned to 64. Reads only the b of the first member, which may have no
 * memory. */
size_t packed_batch_bytes(const struct packed_batch *batch);

void packed_batch_run(const struct packed_batch *batch, void *workspace, const struct opaq_parallel *parallel);

#endif

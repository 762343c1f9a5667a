/* cpu/gemm/packed_batch.h: rows of one matrix times several tiled weights of one format and shape, in one run over all their
 * tiles: what the experts of a mixture do. Depends on packed_run.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_BATCH_H
#define OPAQ_CPU_GEMM_PACKED_BATCH_H

#include "cpu/gemm/packed_run.h"

/* Rows [first, first + rows), counted from the batch's first one, times one weight. */
struct packed_segment {
    struct gemm_operand b; /* N x K */
    int64_t first, rows;
};

struct packed_batch {
    struct gemm_operand a; /* K columns, along its rows */
    int64_t first, rows;   /* of a */
    const int64_t *source; /* the rows of a, one by one, instead of those from the first on; or NULL */
    const struct packed_segment *segments;
    int64_t count;
    enum packed_precision wanted;
    float *y; /* rows x N, rows y_step apart */
    int64_t y_step;
    /* Columns from one to another that `finish` wants to have at once: half of N and whole tiles; 0: there is none. */
    int64_t partner;
    /* Called, where it is not NULL, on the thread that made them, for columns [begin, end) of a segment's rows and, with a
     * partner, as many from begin + partner on. */
    void (*finish)(void *argument, const struct packed_segment *segment, int64_t begin, int64_t end);
    void *argument;
};

/* Whether columns can be told to come with a partner so far away. */
bool packed_batch_can_pair(const struct gemm_operand *b, int64_t partner);

/* The scratch memory of packed_batch_run, aligned to 64. Of the segments only the first one's b is read, which may have no
 * memory. */
size_t packed_batch_bytes(const struct packed_batch *batch);

void packed_batch_run(const struct packed_batch *batch, void *workspace, const struct opaq_parallel *parallel);

#endif

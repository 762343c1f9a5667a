/* op/quantize/rearrange.h: what the operators share that move a quantized tensor's codes and scales without rounding anything
 * again: finding its copies, checking cuts, moving panels. Depends on quant. */
#ifndef OPAQ_OP_QUANTIZE_REARRANGE_H
#define OPAQ_OP_QUANTIZE_REARRANGE_H

#include "opaq/op.h"
#include "cpu/quant/remap.h"

/* A quantized tensor given as buffers, with the job that says where its copies lie. */
struct located {
    struct opaq_view view;
    struct quant_job job;
};

/* Where the copies of a checked view lie. */
void locate(const struct opaq_view *view, struct quant_job *job);

/* The source: buffers of the quantizer that `text` names over `shape`, with the dtype and device of `like`. */
enum opaq_status rearranged_from(const char *operation, const struct opaq_proto *like,
                                 const struct opaq_value *text, const int64_t *shape, int rank,
                                 const struct opaq_tensor *buffers, int64_t count, struct located *located,
                                 struct opaq_error *error);

/* The target: the outputs, which are the buffers of `proto`. */
enum opaq_status rearranged_to(const char *operation, const struct opaq_proto *proto,
                               const struct opaq_outputs *outputs, struct located *located,
                               struct opaq_error *error);

/* The copy of a usage; NULL if there is none. */
const struct quant_copy *located_copy(const struct quant_job *job, enum opaq_usage usage);

/* Zeroes every buffer of a target, which remaps then write over. */
void located_clear(const struct opaq_view *out);

int located_scale_bytes(const struct opaq_proto *proto, enum opaq_usage usage);

/* Whether rows [start, start + rows) of a tensor with `all` rows cut no block of any copy in two. */
enum opaq_status check_row_cut(const char *operation, const struct quant_job *job, int64_t start, int64_t rows,
                               int64_t all, struct opaq_error *error);

enum opaq_status check_same_columns(const char *operation, const struct opaq_proto *a,
                                    const struct opaq_proto *b, struct opaq_error *error);

/* Moves operand rows [row, row + rows) of the target, on all threads. */
void remap_run(const struct remap *remap, int64_t row, int64_t rows, const struct opaq_parallel *parallel);

/* The amaxes of a copy, from entry `offset` of the source's on where they are per row. */
void remap_amax(const struct quant_copy *from, const struct quant_copy *to, int64_t offset);

#endif

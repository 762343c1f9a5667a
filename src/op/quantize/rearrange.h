/* op/quantize/rearrange.h: shared by the operators that move a quantized tensor's codes and scales without rounding
 * again. Depends on op_table.h. */
#ifndef OPAQ_OP_QUANTIZE_REARRANGE_H
#define OPAQ_OP_QUANTIZE_REARRANGE_H

#include "op/table/op_table.h"

/* A quantized tensor given as buffers, with the job that locates its copies. */
struct located {
    struct opaq_view view;
    struct quant_job job;
};

/* Locates the copies of a checked view. */
void locate(const struct opaq_view *view, struct quant_job *job);

/* Checks the buffers of a prototype. */
enum opaq_status locate_buffers(const struct opaq_proto *proto, const struct opaq_tensor *buffers,
                                int64_t count, struct located *located, struct opaq_error *error);

/* The source: buffers of a quantizer over `shape`, with the dtype and device of `like`. */
enum opaq_status locate_source(const struct opaq_proto *like, const struct opaq_spec *spec,
                               const int64_t *shape, int rank, const struct opaq_tensor *buffers, int64_t count,
                               struct located *located, struct opaq_error *error);

/* The target: the outputs of a call. */
enum opaq_status locate_target(const struct op_call *call, struct located *located, struct opaq_error *error);

/* The copy of a usage; NULL if there is none. */
const struct quant_copy *located_copy(const struct quant_job *job, enum opaq_usage usage);

/* Zeroes every buffer of a target before remaps write to it. */
enum opaq_status located_clear(const struct work *work, const struct opaq_view *out, struct opaq_error *error);

int located_scale_bytes(const struct opaq_proto *proto, enum opaq_usage usage);

/* Whether rows [start, start + rows) of a tensor with `all` rows are whole blocks of every copy. */
enum opaq_status check_row_cut(const struct quant_job *job, int64_t start, int64_t rows, int64_t all,
                               struct opaq_error *error);

enum opaq_status check_same_columns(const struct opaq_proto *a, const struct opaq_proto *b,
                                    struct opaq_error *error);

/* The amaxes of a copy that are one for each operand row, or one for all. */
int64_t copy_amax_count(const struct quant_copy *copy);

#endif

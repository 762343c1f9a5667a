/* definition/sorted_rows.h: the rows of groups. Depends on backend/grouped.h. Reads device memory. */
#ifndef OPAQ_DEFINITION_SORTED_ROWS_H
#define OPAQ_DEFINITION_SORTED_ROWS_H

#include "backend/grouped.h"

/* The number of sorted rows; of a group's rows; the first of them. */
OPAQ_DEVICE static inline int64_t groups_total(const struct row_groups *groups) {
    return !groups->is_split ? groups->rows : groups->first[groups->count];
}

OPAQ_DEVICE static inline int64_t group_begin(const struct row_groups *groups, int64_t group) {
    return !groups->is_split ? 0 : groups->first[group];
}

OPAQ_DEVICE static inline int64_t group_rows(const struct row_groups *groups, int64_t group) {
    return !groups->is_split ? groups->rows : groups->first[group + 1] - groups->first[group];
}

/* The slot of sorted row i, and its row in a matrix of some order. */
OPAQ_DEVICE static inline int64_t slot_of(const struct row_groups *groups, int64_t i) {
    return !groups->is_routed ? i : groups->slot[i];
}

OPAQ_DEVICE static inline int64_t row_in_order(const struct row_groups *groups, int64_t i,
                                               enum row_order order) {
    return order == ROWS_SORTED    ? i
           : order == ROWS_BY_SLOT ? slot_of(groups, i)
                                   : slot_of(groups, i) / groups->choices;
}

/* The offset of element `index`, in row-major order, of a strided tensor. */
OPAQ_DEVICE static inline int64_t tensor_offset(const struct opaq_tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int i = tensor->rank - 1; i >= 0; --i) {
        offset += index % tensor->shape[i] * tensor->strides[i];
        index /= tensor->shape[i];
    }
    return offset;
}

/* An element of an int32 or int64 tensor. */
OPAQ_DEVICE static inline int64_t tensor_integer(const struct opaq_tensor *tensor, int64_t index) {
    const int64_t offset = tensor_offset(tensor, index);
    return tensor->dtype == OPAQ_DTYPE_I32 ? ((const int32_t *)tensor->data)[offset]
                                           : ((const int64_t *)tensor->data)[offset];
}

/* The group of an expert id; -1 if it has none here. */
OPAQ_DEVICE static inline int64_t route_group(const struct route_job *job, int64_t id) {
    const int64_t group = id - job->begin;
    return id >= 0 && id < job->total && group >= 0 && group < job->groups.count ? group : -1;
}

#endif

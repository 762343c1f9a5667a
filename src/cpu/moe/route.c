/* cpu/moe/route.c: assigns rows to groups. */
#include <string.h>

#include "cpu/cpu_functions.h"
#include "cpu/gemm/plain_convert.h"
#include "definition/sorted_rows.h"

enum opaq_status cpu_route(const struct route_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    const struct row_groups *groups = &job->groups;
    (void)execution;
    memset(groups->first, 0, (size_t)(groups->count + 1) * sizeof *groups->first);
    for (int64_t s = 0; s < groups->rows; ++s) {
        const int64_t id = tensor_integer(&job->ids, s);
        if (id < -1 || id > job->total) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                             "topk_ids has %lld at token %lld, choice %lld, expected 0 to %lld, or -1 or %lld "
                             "for no expert",
                             (long long)id, (long long)(s / groups->choices), (long long)(s % groups->choices),
                             (long long)job->total - 1, (long long)job->total);
        }
        const int64_t group = route_group(job, id);
        plain_load(job->weights.data, (enum opaq_element)job->weights.dtype, tensor_offset(&job->weights, s), 1,
                   1, &groups->weight[s]);
        if (group >= 0) {
            ++groups->first[group + 1];
        }
    }
    for (int64_t e = 0; e < groups->count; ++e) {
        groups->first[e + 1] += groups->first[e];
    }
    for (int64_t s = 0; s < groups->rows;
         ++s) { /* first[e] moves to the end of group e, which is the beginning of group e + 1 */
        const int64_t group = route_group(job, tensor_integer(&job->ids, s));
        if (group >= 0) {
            groups->slot[groups->first[group]++] = s;
        }
    }
    memmove(groups->first + 1, groups->first, (size_t)groups->count * sizeof *groups->first);
    groups->first[0] = 0;
    return OPAQ_OK;
}

enum opaq_status cpu_split(const struct split_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    const struct row_groups *groups = &job->groups;
    (void)execution;
    groups->first[0] = 0;
    for (int64_t e = 0; e < groups->count; ++e) {
        const int64_t split = tensor_integer(&job->splits, e);
        const int64_t left = groups->rows - groups->first[e];
        if (split < 0 || split > left) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "splits has %lld at %lld, expected 0 to %lld",
                             (long long)split, (long long)e, (long long)left);
        }
        groups->first[e + 1] = groups->first[e] + split;
    }
    if (groups->first[groups->count] != groups->rows) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "splits make %lld rows, expected the %lld of x",
                         (long long)groups->first[groups->count], (long long)groups->rows);
    }
    return OPAQ_OK;
}

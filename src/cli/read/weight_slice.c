/* cli/read/weight_slice.c: see weight_slice.h. */
#include "cli/read/weight_slice.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/read/json.h"

const char *const fused_projections[][FUSED_MOST] = {
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
    {"wq_a", "wkv_a_with_mqa"},
    {"wq", "wk", "wv"},
    {"query", "key", "value"},
    {"query_proj", "key_proj", "value_proj"},
};
const size_t fused_count = sizeof fused_projections / sizeof fused_projections[0];

enum {
    SLOT_DATA,
    SLOT_TRANSPOSED = 2
}; /* slots of row_memory: a transposed slice is plain, so the other slots are free */

/* ---- names ---- */

/* Names of the matrices in a stack: one for each expert, or two fused along the rows. */
static const struct {
    const char *stacked;
    const char *single[2];
} stacks[] = {
    {"gate_up_proj", {"gate_proj", "up_proj"}},
    {"down_proj", {"down_proj", NULL}},
    {"gate_proj", {"gate_proj", NULL}},
    {"up_proj", {"up_proj", NULL}},
    {"w13", {"w1", "w3"}},
    {"w1", {"w1", NULL}},
    {"w2", {"w2", NULL}},
    {"w3", {"w3", NULL}},
};

static yyjson_val *config_member(const struct model *model, const char *key) {
    if (model->config == NULL) {
        return NULL;
    }
    yyjson_val *const root = yyjson_doc_get_root(model->config);
    yyjson_val *const found = yyjson_obj_get(root, key);
    return found != NULL ? found : yyjson_obj_get(yyjson_obj_get(root, "text_config"), key);
}

/* Whether a matrix is stored transposed: the dimension of the hidden state is on the other side. */
static bool is_transposed(const struct model *model, const struct weight *weight, bool is_output) {
    uint64_t hidden = 0;
    json_natural(config_member(model, "hidden_size"), &hidden);
    const int64_t here = is_output ? weight->rows : weight->columns;
    const int64_t there = is_output ? weight->columns : weight->rows;
    if (here == there && (uint64_t)here == hidden) {
        const char *const type = yyjson_get_str(config_member(model, "model_type"));
        return type != NULL && strncmp(type, "llama4", strlen("llama4")) == 0;
    }
    return hidden != 0 && (uint64_t)here != hidden && (uint64_t)there == hidden;
}

bool model_is_gpt_oss(const struct model *model) {
    const char *const type = yyjson_get_str(config_member(model, "model_type"));
    return type != NULL && strcmp(type, "gpt_oss") == 0;
}

/* For "A.experts.gate_up_proj" or "A.experts.gate_up_proj.weight": the length of "A.experts", and the row of
 * the table; -1 if the name has another form. */
static int find_stack(const char *name, size_t *prefix) {
    static const char weight[] = ".weight";
    size_t length = strlen(name);
    if (length > strlen(weight) && strcmp(name + length - strlen(weight), weight) == 0) {
        length -= strlen(weight);
    }
    for (size_t i = 0; i < sizeof stacks / sizeof stacks[0]; ++i) {
        struct text end = {0};
        text_print(&end, ".experts.%s", stacks[i].stacked);
        const bool fits = length > end.length && memcmp(name + length - end.length, end.bytes, end.length) == 0;
        *prefix = length - end.length + strlen(".experts");
        text_free(&end);
        if (fits) {
            return (int)i;
        }
    }
    return -1;
}

size_t weight_slices(const struct model *model, const struct weight *weight, struct weight_slice **slices) {
    size_t prefix = 0;
    const int stack = find_stack(weight->name, &prefix);
    *slices = NULL;
    if (stack < 0 || weight->data->tensor->rank < 3 || weight->data->tensor->bytes == 0 ||
        weight->scheme != NULL || !weight_is_float(weight) || model_is_gpt_oss(model)) {
        return 0;
    }
    const bool is_output =
        strcmp(stacks[stack].single[0], "down_proj") == 0 || strcmp(stacks[stack].single[0], "w2") == 0;
    const bool transposed = is_transposed(model, weight, is_output);
    const int64_t all_rows = transposed ? weight->columns : weight->rows;
    const int64_t joined = stacks[stack].single[1] == NULL ? 1 : 2;
    if (all_rows % joined != 0) {
        return 0;
    }
    const size_t count = (size_t)(weight->stack * joined);
    struct weight_slice *const found = alloc_array(count, sizeof *found);
    for (size_t i = 0; i < count; ++i) {
        const int64_t half = (int64_t)i % joined;
        struct text name = {0};
        text_print(&name, "%.*s.%" PRId64 ".%s.weight", (int)prefix, weight->name, (int64_t)i / joined,
                   stacks[stack].single[half]);
        found[i] = (struct weight_slice){.name = name.bytes,
                                         .weight = weight,
                                         .matrix = (int64_t)i / joined,
                                         .first = half * (all_rows / joined),
                                         .rows = all_rows / joined,
                                         .columns = transposed ? weight->rows : weight->columns,
                                         .is_transposed = transposed};
    }
    *slices = found;
    return count;
}

void weight_slices_free(struct weight_slice *slices, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        free(slices[i].name);
    }
    free(slices);
}

struct weight_slice weight_whole(const struct weight *weight) {
    return (struct weight_slice){.name = copy_text(weight->name, strlen(weight->name)),
                                 .weight = weight,
                                 .rows = weight->rows,
                                 .columns = weight->columns};
}

bool is_gpt_oss_stack(const struct model *model, const struct weight *weight) {
    size_t prefix = 0;
    return model_is_gpt_oss(model) && weight_is_float(weight) && weight->data->tensor->rank == 3 &&
           weight->data->tensor->bytes != 0 && find_stack(weight->name, &prefix) >= 0;
}

struct weight_slice gpt_oss_slice(const struct weight *weight) {
    struct weight_slice slice = weight_whole(weight);
    slice.rows = weight->columns;
    slice.columns = weight->rows;
    slice.is_transposed = true;
    return slice;
}

/* ---- rows ---- */

/* In blocks that fit in the cache. */
void transpose_elements(const char *from, int64_t columns, int64_t count, int64_t bytes, char *to) {
    enum { TILE = 32 };
    for (int64_t c0 = 0; c0 < columns; c0 += TILE) {
        for (int64_t r0 = 0; r0 < count; r0 += TILE) {
            for (int64_t c = c0; c < columns && c < c0 + TILE; ++c) {
                for (int64_t r = r0; r < count && r < r0 + TILE; ++r) {
                    memcpy(to + (r * columns + c) * bytes, from + (c * count + r) * bytes, (size_t)bytes);
                }
            }
        }
    }
}

static enum opaq_status read_transposed_rows(const struct model *model, const struct weight_slice *slice,
                                             int64_t first, int64_t count, struct row_memory *memory,
                                             struct opaq_view *rows, struct opaq_error *error) {
    const struct weight *const weight = slice->weight;
    const enum st_dtype dtype = weight->data->tensor->dtype;
    const int64_t bytes = st_dtype_bits(dtype) / 8;
    const size_t all = (size_t)(count * slice->columns * bytes);
    char *const read = row_memory_take(memory, SLOT_DATA, all);
    char *const transposed = row_memory_take(memory, SLOT_TRANSPOSED, all);
    for (int64_t c = 0; c < slice->columns; ++c) {
        const int64_t at = (slice->matrix * weight->rows + c) * weight->columns + slice->first + first;
        CLI_TRY(model_read(model, weight->data, (uint64_t)(at * bytes), read + c * count * bytes,
                           (size_t)(count * bytes), error));
    }
    transpose_elements(read, slice->columns, count, bytes, transposed);
    const int64_t shape[2] = {count, slice->columns};
    return opaq_view_plain(shape, NULL, 2, (enum opaq_element)st_dtype_opaq(dtype),
                           (struct opaq_device){OPAQ_DEVICE_CPU, 0}, transposed, all, rows, error);
}

enum opaq_status weight_slice_rows(const struct model *model, const struct weight_slice *slice, int64_t first,
                                   int64_t count, struct row_memory *memory, struct opaq_view *rows,
                                   struct opaq_error *error) {
    return slice->is_transposed ? read_transposed_rows(model, slice, first, count, memory, rows, error)
                                : weight_rows(model, slice->weight, slice->matrix, slice->first + first, count,
                                              memory, rows, error);
}

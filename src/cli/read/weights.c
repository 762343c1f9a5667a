/* cli/read/weights.c: see weights.h. */
#include "cli/read/weights.h"

#include <stdlib.h>
#include <string.h>

#include "cli/read/config_values.h"
#include "cli/texts.h"

bool layout_is_written(const struct opaq_layout_row *scheme) {
    return scheme->layout != OPAQ_LAYOUT_MODELOPT || scheme->format != OPAQ_MXFP4;
}

bool weight_is_float(const struct weight *weight) {
    const enum st_dtype dtype = weight->data->tensor->dtype;
    return weight->scheme == NULL && (dtype == ST_F32 || dtype == ST_BF16 || dtype == ST_F16);
}

uint64_t weight_bytes(const struct weight *weight) {
    const struct model_tensor *const tensors[] = {weight->data, weight->scale, weight->global, weight->input};
    uint64_t bytes = 0;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; ++i) {
        bytes += tensors[i] == NULL ? 0 : tensors[i]->tensor->bytes;
    }
    return bytes;
}

const char *weight_kind(const struct weight *weight) {
    return weight->scheme != NULL ? opaq_format_row(weight->scheme->format)->name
                                  : st_dtype_name(weight->data->tensor->dtype);
}

/* ---- shapes ---- */

/* Sets the sizes from the shape of the data. Codes of too low a rank fit no scheme (scales_fit). */
static void set_shape(struct weight *weight) {
    enum { SOME_COLUMNS = 128 }; /* whole blocks in every format */
    const struct st_tensor *const data = weight->data->tensor;
    const struct opaq_layout_row *const scheme = weight->scheme;
    struct opaq_layout_shape row = {.rank = 2, .columns_dim = 1, .size = {1, SOME_COLUMNS}};
    if (scheme != NULL && data->rank >= (int)strlen(scheme->data_shape)) {
        opaq_layout_shape(scheme->data_shape, scheme->format, 1, SOME_COLUMNS, &row);
    }
    const int64_t columns_per_entry = SOME_COLUMNS / row.size[row.columns_dim];
    const int extra = data->rank - row.rank;
    weight->columns = data->rank == 0 ? 1 : data->shape[extra + row.columns_dim] * columns_per_entry;
    weight->rows = data->rank < 2 ? 1 : data->shape[extra + row.rows_dim];
    weight->stack = 1;
    for (int i = 0; i < extra; ++i) {
        weight->stack *= data->shape[i];
    }
}

/* Whether `tensor` has this shape after the dimensions of a stack. */
static bool has_shape(const struct weight *weight, const struct st_tensor *tensor,
                      const struct opaq_layout_shape *shape) {
    const int extra = tensor->rank - shape->rank;
    int64_t stack = 1;
    for (int i = 0; i < extra; ++i) {
        stack *= tensor->shape[i];
    }
    return extra >= 0 && stack == (extra == 0 ? 1 : weight->stack) && (extra != 0 || weight->stack == 1) &&
           memcmp(tensor->shape + extra, shape->size, (size_t)shape->rank * sizeof *shape->size) == 0;
}

/* Drops the dimensions of size 1. Returns the rank. */
static int squeeze(const int64_t *shape, int rank, int64_t *squeezed) {
    int count = 0;
    for (int i = 0; i < rank; ++i) {
        if (shape[i] != 1) {
            squeezed[count++] = shape[i];
        }
    }
    return count;
}

/* As has_shape, but ignores dimensions of size 1. */
static bool has_entries(const struct weight *weight, const struct st_tensor *tensor,
                        const struct opaq_layout_shape *shape) {
    int64_t found[ST_RANK_LIMIT];
    int64_t wanted[OPAQ_LAYOUT_RANK_LIMIT + 1];
    const int rank = squeeze(&weight->stack, 1, wanted);
    const int count = rank + squeeze(shape->size, shape->rank, wanted + rank);
    return squeeze(tensor->shape, tensor->rank, found) == count &&
           memcmp(wanted, found, (size_t)count * sizeof *wanted) == 0;
}

/* ---- grouping ---- */

static const struct model_tensor *sibling(const struct model *model, const char *weight, const char *ending) {
    struct text name = {0};
    text_print(&name, "%s%s", weight, ending);
    const struct model_tensor *const found = model_find(model, text_get(&name));
    text_free(&name);
    return found;
}

/* The input scale of the weight's module: one number, or one for each matrix. NULL if there is none that fits. */
static const struct model_tensor *input_of(const struct model *model, const struct weight *weight) {
    const char *const dot = strrchr(weight->name, '.');
    const char *const last = dot == NULL ? weight->name : dot + 1;
    if (*weight->scheme->input == '\0' || strcmp(last, "weight") != 0) {
        return NULL;
    }
    struct text name = {0};
    text_print(&name, "%.*s%s", (int)(last - weight->name), weight->name, weight->scheme->input);
    const struct model_tensor *const found = model_find(model, text_get(&name));
    text_free(&name);
    const uint64_t entry = found == NULL ? 0 : (uint64_t)st_dtype_bits(found->tensor->dtype) / 8;
    const bool fits =
        found != NULL && has_word(weight->scheme->input_dtypes, st_dtype_name(found->tensor->dtype)) &&
        (found->tensor->bytes == entry || found->tensor->bytes == entry * (uint64_t)weight->stack);
    return fits ? found : NULL;
}

/* Whether the first `length` characters of a name can be the name of a plain weight: "....weight", or a stack of
 * experts ("....experts.down_proj"), which has no such ending. */
static bool is_weight_name(const struct opaq_layout_row *scheme, const struct st_tensor *data, size_t length) {
    if (scheme->layout == OPAQ_LAYOUT_GPT_OSS) {
        return prefix_ends_with(data->name, length, "_proj");
    }
    return prefix_ends_with(data->name, length, "weight") ||
           (data->rank > 2 && strstr(data->name, ".experts.") != NULL);
}

/* Whether name, dtype and rank of `data` fit the codes of a scheme. */
static bool is_data(const struct opaq_layout_row *scheme, const struct st_tensor *data) {
    const size_t length = strlen(data->name);
    return prefix_ends_with(data->name, length, scheme->data) && data->rank >= 2 && data->rank <= 4 &&
           has_word(scheme->data_dtypes, st_dtype_name(data->dtype)) &&
           is_weight_name(scheme, data, length - strlen(scheme->data));
}

/* Collects the tensors of a weight with these codes; false if no tensor can be its scales. The caller releases the
 * name. */
static bool gather(const struct model *model, const struct opaq_layout_row *scheme,
                   const struct model_tensor *data, struct weight *weight) {
    if (!is_data(scheme, data->tensor)) {
        return false;
    }
    struct weight found = {.scheme = scheme, .data = data};
    found.name = copy_text(data->tensor->name, strlen(data->tensor->name) - strlen(scheme->data));
    found.scale = sibling(model, found.name, scheme->scale);
    if (found.scale == NULL || !has_word(scheme->scale_dtypes, st_dtype_name(found.scale->tensor->dtype))) {
        free(found.name);
        return false;
    }
    found.global = *scheme->global == '\0' ? NULL : sibling(model, found.name, scheme->global);
    set_shape(&found);
    found.input = input_of(model, &found);
    *weight = found;
    return true;
}

static bool scales_fit(const struct weight *weight, bool is_strict) {
    const struct st_tensor *const data = weight->data->tensor;
    const struct st_tensor *const scale = weight->scale->tensor;
    const struct opaq_layout_row *const scheme = weight->scheme;
    struct opaq_layout_shape codes;
    struct opaq_layout_shape shape;
    return opaq_layout_shape(scheme->data_shape, scheme->format, weight->rows, weight->columns, &codes) &&
           opaq_layout_shape(scheme->scale_shape, scheme->format, weight->rows, weight->columns, &shape) &&
           has_shape(weight, data, &codes) &&
           (has_shape(weight, scale, &shape) ||
            (!is_strict && data->bytes != 0 && has_entries(weight, scale, &shape)));
}

static bool global_fits(const struct weight *weight) {
    if (*weight->scheme->global == '\0') {
        return true;
    }
    const struct st_tensor *const global = weight->global == NULL ? NULL : weight->global->tensor;
    return global != NULL && has_word(weight->scheme->global_dtypes, st_dtype_name(global->dtype)) &&
           global->bytes * 8 == (uint64_t)st_dtype_bits(global->dtype) * (uint64_t)weight->stack;
}

/* As gather; also false if scales or global scale do not fit. */
static bool matches(const struct model *model, const struct opaq_layout_row *scheme,
                    const struct model_tensor *data, bool is_strict, struct weight *weight) {
    if (!gather(model, scheme, data, weight)) {
        return false;
    }
    if (!scales_fit(weight, is_strict) || !global_fits(weight)) {
        free(weight->name);
        return false;
    }
    return true;
}

static enum opaq_status refuse(const struct model *model, const struct weight *weight,
                               struct opaq_error *error) {
    struct text what = {0};
    text_print(&what, "%.160s is ", weight->data->tensor->name);
    st_describe(weight->data->tensor, &what);
    text_print(&what, " with scales ");
    st_describe(weight->scale->tensor, &what);
    if (!scales_fit(weight, false)) {
        text_print(&what, ", which matches no format that opaq supports");
    } else if (weight->global == NULL) {
        text_print(&what, ", but without weight%s", weight->scheme->global);
    } else {
        text_print(&what, " and weight%s ", weight->scheme->global);
        st_describe(weight->global->tensor, &what);
        text_print(&what, ", expected one %s for each matrix", weight->scheme->global_dtypes);
    }
    const enum opaq_status status = opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s", model->path, text_get(&what));
    text_free(&what);
    return status;
}

/* Codes whose scales do not fit are an error: as a plain tensor they would lose their scales. */
static enum opaq_status check_plain(const struct model *model, const struct model_tensor *data,
                                    struct opaq_error *error) {
    const struct opaq_layout_row *scheme = NULL;
    for (int i = 0; (scheme = opaq_layout_row(i)) != NULL; ++i) {
        struct weight weight;
        if (gather(model, scheme, data, &weight)) {
            const enum opaq_status status = refuse(model, &weight, error);
            free(weight.name);
            return status;
        }
    }
    return OPAQ_OK;
}

static bool find_row(const struct model *model, int preferred, const struct model_tensor *data,
                     struct weight *weight) {
    for (int pass = 0; pass < 4; ++pass) { /* the configuration's layout first, exact shapes first */
        const struct opaq_layout_row *scheme = NULL;
        for (int i = 0; (scheme = opaq_layout_row(i)) != NULL; ++i) {
            const bool is_preferred = preferred < 0 || (int)scheme->layout == preferred;
            if (is_preferred == (pass < 2) && matches(model, scheme, data, pass % 2 == 0, weight)) {
                return true;
            }
        }
    }
    return false;
}

/* The quantizer of a weight's scheme. */
static void set_spec(struct weight *weight) {
    struct opaq_config_scheme scheme = {0};
    for (int i = 0; scheme.row != weight->scheme; ++i) {
        if (!opaq_layout_scheme(weight->scheme->layout, i, &scheme)) {
            return; /* every row of the table has a scheme */
        }
    }
    weight->spec = scheme.weight;
}

static int compare_weights(const void *first, const void *second) {
    return strcmp(((const struct weight *)first)->name, ((const struct weight *)second)->name);
}

static void mark(const struct model *model, bool *is_taken, const struct model_tensor *tensor) {
    if (tensor != NULL) {
        is_taken[tensor - model->tensors] = true;
    }
}

/* Rejects two weights of one name, one plain and one packed. */
static enum opaq_status check_names(const struct weights *weights, struct opaq_error *error) {
    for (size_t i = 1; i < weights->count; ++i) {
        const struct weight *const a = &weights->items[i - 1];
        const struct weight *const b = &weights->items[i];
        if (strcmp(a->name, b->name) == 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has %.120s twice: as %.120s and as %.120s",
                             weights->model->path, a->name, a->data->tensor->name, b->data->tensor->name);
        }
    }
    return OPAQ_OK;
}

enum opaq_status weights_find(const struct model *model, struct weights *weights, struct opaq_error *error) {
    *weights = (struct weights){.model = model, .layout = -1};
    const int preferred = layout_of_config(model_quantization(model));
    bool *const is_taken = alloc_array(model->tensor_count, sizeof *is_taken);
    weights->items = alloc_array(model->tensor_count, sizeof *weights->items);
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 0; i < model->tensor_count && status == OPAQ_OK; ++i) {
        struct weight found;
        if (!is_taken[i] && find_row(model, preferred, &model->tensors[i], &found)) {
            mark(model, is_taken, found.data);
            mark(model, is_taken, found.scale);
            mark(model, is_taken, found.global);
            mark(model, is_taken, found.input);
            weights->layout = (int)found.scheme->layout;
            set_spec(&found);
            weights->items[weights->count++] = found;
        }
    }
    for (size_t i = 0; i < model->tensor_count && status == OPAQ_OK; ++i) {
        if (!is_taken[i]) {
            status = check_plain(model, &model->tensors[i], error);
            const char *const name = model->tensors[i].tensor->name;
            struct weight plain = {.name = copy_text(name, strlen(name)), .data = &model->tensors[i]};
            set_shape(&plain);
            weights->items[weights->count++] = plain;
        }
    }
    free(is_taken);
    if (weights->count != 0) {
        qsort(weights->items, weights->count, sizeof *weights->items, compare_weights);
    }
    if (status == OPAQ_OK) {
        status = check_names(weights, error);
    }
    if (status != OPAQ_OK) {
        weights_free(weights);
    }
    return status;
}

void weights_free(struct weights *weights) {
    for (size_t i = 0; i < weights->count; ++i) {
        free(weights->items[i].name);
    }
    free(weights->items);
    *weights = (struct weights){.layout = -1};
}

const struct weight *weights_named(const struct weights *weights, const char *name) {
    size_t low = 0;
    size_t high = weights->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(weights->items[middle].name, name);
        if (order == 0) {
            return &weights->items[middle];
        }
        low = order < 0 ? middle + 1 : low;
        high = order < 0 ? high : middle;
    }
    return NULL;
}

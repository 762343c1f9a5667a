/* cli/weights.c: see weights.h. */
#include "cli/weights.h"

#include <stdlib.h>
#include <string.h>

#include "cli/json.h"
#include "opaq/stored.h"

enum { GPT_OSS_BLOCK = 32, GPT_OSS_BYTES = 16 };

int layout_of_config(yyjson_val *quantization) {
    const char *const method = json_member_text(quantization, "quant_method");
    if (method == NULL) {
        return json_member_text(quantization, "quant_algo") == NULL ? -1 : OPAQ_LAYOUT_MODELOPT;
    }
    if (strcmp(method, "compressed-tensors") == 0) {
        return OPAQ_LAYOUT_COMPRESSED_TENSORS;
    }
    if (strncmp(method, "modelopt", strlen("modelopt")) == 0) {
        return OPAQ_LAYOUT_MODELOPT;
    }
    if (strcmp(method, "fp8") == 0 || strcmp(method, "mxfp8") == 0) {
        return OPAQ_LAYOUT_DEEPSEEK;
    }
    return strcmp(method, "mxfp4") == 0 ? OPAQ_LAYOUT_GPT_OSS : -1;
}

bool weight_is_float(const struct weight *weight) {
    const enum st_dtype dtype = weight->data->tensor->dtype;
    return weight->row == NULL && (dtype == ST_F32 || dtype == ST_BF16 || dtype == ST_F16);
}

uint64_t weight_bytes(const struct weight *weight) {
    const struct model_tensor *const parts[] = {weight->data, weight->scale, weight->global, weight->input};
    uint64_t bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; ++i) {
        bytes += parts[i] == NULL ? 0 : parts[i]->tensor->bytes;
    }
    return bytes;
}

const char *weight_kind(const struct weight *weight) {
    return weight->row != NULL ? opaq_format_row(weight->row->format)->name
                               : st_dtype_name(weight->data->tensor->dtype);
}

/* ---- shapes ---- */

static int64_t ceil_div(int64_t size, int64_t by) { return (size + by - 1) / by; }

static void set_shape(struct weight *weight) {
    const struct st_tensor *const data = weight->data->tensor;
    const bool is_packed = weight->row != NULL && data->dtype == ST_U8;
    int rank = data->rank;
    weight->columns = rank == 0 ? 1 : data->shape[rank - 1] * (is_packed ? 2 : 1);
    if (weight->row != NULL && weight->row->layout == OPAQ_LAYOUT_GPT_OSS && rank > 2) {
        --rank; /* blocks of a row have a dimension of their own */
        weight->columns = data->shape[rank - 1] * GPT_OSS_BLOCK;
    }
    weight->rows = rank < 2 ? 1 : data->shape[rank - 2];
    weight->stack = 1;
    for (int i = 0; i + 2 < rank; ++i) {
        weight->stack *= data->shape[i];
    }
}

/* Whether `tensor` is as the row writes it: its dimensions, after those of a stack. */
static bool has_shape(const struct weight *weight, const struct st_tensor *tensor, const char *letters) {
    const struct opaq_format_row *const format = opaq_format_row(weight->row->format);
    const int64_t block_rows = format->block_rows == 0 ? weight->rows : format->block_rows;
    const int64_t block_columns = format->block_columns == 0 ? weight->columns : format->block_columns;
    const int extra = tensor->rank - (int)strlen(letters);
    int64_t stack = 1;
    for (int i = 0; i < extra; ++i) {
        stack *= tensor->shape[i];
    }
    if (extra < 0 || stack != (extra == 0 ? 1 : weight->stack) || (extra == 0 && weight->stack != 1)) {
        return false;
    }
    for (int i = extra; i < tensor->rank; ++i) {
        const char letter = letters[i - extra];
        const int64_t wanted = letter == 'R'   ? weight->rows
                               : letter == 'r' ? ceil_div(weight->rows, block_rows)
                               : letter == 'c' ? ceil_div(weight->columns, block_columns)
                                               : 1;
        if (tensor->shape[i] != wanted) {
            return false;
        }
    }
    return true;
}

/* Whether it says the same with other dimensions of size 1: as many entries as it should have. */
static bool has_entries(const struct weight *weight, const struct st_tensor *tensor, const char *letters) {
    struct st_tensor squeezed = *tensor;
    squeezed.rank = 0;
    for (int i = 0; i < tensor->rank; ++i) {
        if (tensor->shape[i] != 1) {
            squeezed.shape[squeezed.rank++] = tensor->shape[i];
        }
    }
    const struct opaq_format_row *const format = opaq_format_row(weight->row->format);
    int64_t wanted[ST_RANK_LIMIT];
    int count = 0;
    const int64_t sizes[] = {weight->stack, *letters == 'R' ? weight->rows : 0,
                             *letters == 'r' ? ceil_div(weight->rows, format->block_rows) : 0,
                             strchr(letters, 'c') != NULL ? ceil_div(weight->columns, format->block_columns)
                                                          : 0};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        if (sizes[i] > 1) {
            wanted[count++] = sizes[i];
        }
    }
    return count == squeezed.rank && memcmp(wanted, squeezed.shape, (size_t)count * sizeof *wanted) == 0;
}

/* ---- which tensors belong together ---- */

static bool has_word(const char *words, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = strstr(words, word); at != NULL; at = strstr(at + 1, word)) {
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) {
            return true;
        }
    }
    return false;
}

static const struct model_tensor *sibling(const struct model *model, const char *weight, const char *ending) {
    struct text name = {0};
    text_print(&name, "%s%s", weight, ending);
    const struct model_tensor *const found = model_find(model, text_get(&name));
    text_free(&name);
    return found;
}

static const struct model_tensor *input_of(const struct model *model, const char *weight, const char *input) {
    const char *const dot = strrchr(weight, '.');
    struct text name = {0};
    text_print(&name, "%.*s%s", dot == NULL ? 0 : (int)(dot - weight + 1), weight, input);
    const struct model_tensor *const found = *input == '\0' ? NULL : model_find(model, text_get(&name));
    text_free(&name);
    return found;
}

static bool ends_with(const char *text, size_t length, const char *end) {
    const size_t end_length = strlen(end);
    return length >= end_length && memcmp(text + length - end_length, end, end_length) == 0;
}

/* Fills a weight whose codes are `data` by a row of the table, if they can be that. */
static bool matches(const struct model *model, const struct opaq_layout_row *row,
                    const struct model_tensor *data, bool is_strict, struct weight *weight) {
    const char *const name = data->tensor->name;
    const size_t length = strlen(name);
    const char *const plain_end = row->layout == OPAQ_LAYOUT_GPT_OSS ? "_proj" : "weight";
    if (!ends_with(name, length, row->data) || data->tensor->rank < 2 || data->tensor->rank > 4 ||
        !has_word(row->data_dtypes, st_dtype_name(data->tensor->dtype)) ||
        !ends_with(name, length - strlen(row->data), plain_end)) {
        return false;
    }
    struct weight found = {.row = row, .data = data};
    found.name = copy_text(name, length - strlen(row->data));
    found.scale = sibling(model, found.name, row->scale);
    found.global = *row->global == '\0' ? NULL : sibling(model, found.name, row->global);
    found.input = input_of(model, found.name, row->input);
    set_shape(&found);
    const bool is_gpt_oss = row->layout == OPAQ_LAYOUT_GPT_OSS;
    const bool fits =
        found.scale != NULL && has_word(row->scale_dtypes, st_dtype_name(found.scale->tensor->dtype)) &&
        (!is_gpt_oss || data->tensor->shape[data->tensor->rank - 1] == GPT_OSS_BYTES) &&
        (has_shape(&found, found.scale->tensor, row->scale_shape) ||
         (!is_strict && has_entries(&found, found.scale->tensor, row->scale_shape))) &&
        (*row->global == '\0' || (found.global != NULL && found.global->tensor->dtype == ST_F32 &&
                                  found.global->tensor->bytes == sizeof(float) * (uint64_t)found.stack));
    if (!fits) {
        free(found.name);
        return false;
    }
    *weight = found;
    return true;
}

static bool find_row(const struct model *model, int preferred, const struct model_tensor *data,
                     struct weight *weight) {
    for (int pass = 0; pass < 4; ++pass) { /* the configuration's layout first, exact shapes first */
        const struct opaq_layout_row *row = NULL;
        for (int i = 0; (row = opaq_layout_row(i)) != NULL; ++i) {
            const bool is_preferred = preferred < 0 || (int)row->layout == preferred;
            if (is_preferred == (pass < 2) && matches(model, row, data, pass % 2 == 0, weight)) {
                return true;
            }
        }
    }
    return false;
}

static enum opaq_status set_spec(struct weight *weight, struct opaq_error *error) {
    enum opaq_status status = opaq_spec_make(weight->row->format, &weight->spec, error);
    weight->spec.rule = (uint8_t)weight->row->rule;
    if (weight->row->format == OPAQ_NVFP4) {
        weight->spec.options |= OPAQ_GLOBAL;
    }
    return status != OPAQ_OK ? status : opaq_spec_check(&weight->spec, error);
}

static int compare_weights(const void *first, const void *second) {
    return strcmp(((const struct weight *)first)->name, ((const struct weight *)second)->name);
}

static void mark(const struct model *model, bool *is_taken, const struct model_tensor *tensor) {
    if (tensor != NULL) {
        is_taken[tensor - model->tensors] = true;
    }
}

/* Two weights of one name, one plain and one packed, cannot both be meant. */
static enum opaq_status check_names(const struct weights *weights, struct opaq_error *error) {
    for (size_t i = 1; i < weights->count; ++i) {
        const struct weight *const a = &weights->items[i - 1];
        const struct weight *const b = &weights->items[i];
        if (strcmp(a->name, b->name) == 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has %s twice: as %s and as %s",
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
            weights->layout = (int)found.row->layout;
            status = set_spec(&found, error);
            weights->items[weights->count++] = found;
        }
    }
    for (size_t i = 0; i < model->tensor_count && status == OPAQ_OK; ++i) {
        if (!is_taken[i]) {
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

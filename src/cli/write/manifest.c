/* cli/write/manifest.c: see manifest.h. */
#include "cli/write/manifest.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"

/* ---- entries ---- */

void manifest_begin(struct manifest *manifest, const struct weights *weights) {
    const struct model *const model = weights->model;
    *manifest = (struct manifest){.weights = weights, .file_count = model->file_count};
    manifest->files = alloc_array(model->file_count, sizeof *manifest->files);
    for (size_t i = 0; i < model->file_count; ++i) {
        const struct model_file *const from = &model->files[i];
        manifest->files[i].name = copy_text(from->name, strlen(from->name));
        for (size_t k = 0; k < from->header.metadata_count; ++k) {
            manifest_metadata(manifest, i, from->header.metadata[k].key, from->header.metadata[k].value);
        }
        if (from->header.metadata_count == 0) {
            manifest_metadata(manifest, i, "format", "pt"); /* transformers rejects files without it */
        }
    }
}

void manifest_free(struct manifest *manifest) {
    for (size_t i = 0; i < manifest->file_count; ++i) {
        struct manifest_file *const file = &manifest->files[i];
        for (size_t k = 0; k < file->count; ++k) {
            free(file->entries[k].name);
            free(file->entries[k].given);
        }
        free(file->entries);
        free(file->metadata);
        free(file->name);
        text_free(&file->header);
    }
    for (size_t i = 0; i < manifest->target_count; ++i) {
        free(manifest->targets[i].slice.name);
    }
    for (size_t i = 0; i < manifest->set_count; ++i) {
        free(manifest->sets[i].targets);
    }
    for (size_t i = 0; i < manifest->text_count; ++i) {
        free(manifest->texts[i]);
    }
    free(manifest->texts);
    free(manifest->files);
    free(manifest->targets);
    free(manifest->sets);
    *manifest = (struct manifest){0};
}

void manifest_metadata(struct manifest *manifest, size_t file, const char *key, const char *value) {
    struct manifest_file *const to = &manifest->files[file];
    to->metadata = grow_array(to->metadata, to->metadata_count, &to->metadata_capacity, sizeof *to->metadata);
    to->metadata[to->metadata_count++] = (struct st_pair){key, value};
}

void manifest_keep_text(struct manifest *manifest, char *text) {
    manifest->texts =
        grow_array(manifest->texts, manifest->text_count, &manifest->text_capacity, sizeof *manifest->texts);
    manifest->texts[manifest->text_count++] = text;
}

static size_t add_entry(struct manifest *manifest, size_t file, const char *name, enum st_dtype dtype,
                        const int64_t *shape, int rank) {
    struct manifest_file *const to = &manifest->files[file];
    to->entries = grow_array(to->entries, to->count, &to->capacity, sizeof *to->entries);
    struct manifest_entry entry = {.name = copy_text(name, strlen(name)), .dtype = dtype, .rank = rank};
    for (int i = 0; i < rank; ++i) {
        entry.shape[i] = shape[i];
    }
    st_bytes(dtype, shape, rank, &entry.bytes);
    to->entries[to->count] = entry;
    return to->count++;
}

void manifest_copy(struct manifest *manifest, const struct model_tensor *tensor, const char *name,
                   const int64_t *shape, int rank) {
    const struct st_tensor *const from = tensor->tensor;
    const size_t entry = add_entry(manifest, tensor->file, name == NULL ? from->name : name, from->dtype,
                                   shape == NULL ? from->shape : shape, shape == NULL ? from->rank : rank);
    manifest->files[tensor->file].entries[entry].copied = tensor;
}

void manifest_give(struct manifest *manifest, size_t file, const char *name, enum st_dtype dtype,
                   const int64_t *shape, int rank, const void *bytes) {
    const size_t number = add_entry(manifest, file, name, dtype, shape, rank);
    struct manifest_entry *const entry = &manifest->files[file].entries[number];
    entry->given = alloc_array(entry->bytes, 1);
    memcpy(entry->given, bytes, entry->bytes);
}

/* ---- targets ---- */

static struct manifest_target *add_target(struct manifest *manifest, struct weight_slice slice) {
    manifest->targets = grow_array(manifest->targets, manifest->target_count, &manifest->target_capacity,
                                   sizeof *manifest->targets);
    struct manifest_target *const target = &manifest->targets[manifest->target_count++];
    *target = (struct manifest_target){.slice = slice, .file = slice.weight->data->file, .set = NO_SET};
    return target;
}

static size_t add_suffixed(struct manifest *manifest, size_t file, const char *name, const char *suffix,
                           const char *dtypes, const int64_t *shape, int rank) {
    struct text full = {0};
    struct text dtype = {0};
    text_print(&full, "%s%s", name, suffix);
    text_print(&dtype, "%.*s", (int)strcspn(dtypes, " "), dtypes);
    const size_t entry =
        add_entry(manifest, file, text_get(&full), (enum st_dtype)st_dtype_find(text_get(&dtype)), shape, rank);
    text_free(&full);
    text_free(&dtype);
    return entry;
}

/* `inner` with the dimension of a stack in front if there is one. Returns the rank. */
static int stacked(int64_t stack, bool is_stack, const int64_t *inner, int rank, int64_t *shape) {
    const int extra = is_stack ? 1 : 0;
    shape[0] = stack;
    for (int i = 0; i < rank; ++i) {
        shape[i + extra] = inner[i];
    }
    return rank + extra;
}

/* Adds the entries of a quantized matrix or of a stack; `places` are those of the first matrix. */
static enum opaq_status add_quantized(struct manifest *manifest, const char *name, size_t file, int64_t stack,
                                      bool is_stack, int64_t rows, int64_t columns,
                                      const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                      struct manifest_target *places, struct opaq_error *error) {
    const int64_t matrix[2] = {rows, columns};
    struct opaq_proto proto;
    CLI_TRY(
        opaq_proto_make(matrix, 2, OPAQ_F32, spec, (struct opaq_device){OPAQ_DEVICE_CPU, 0}, &proto, error));
    struct opaq_layout_shape inner = {0};
    int64_t shape[ST_RANK_LIMIT];
    opaq_layout_shape(scheme->data_shape, scheme->format, rows, columns, &inner);
    int rank = stacked(stack, is_stack, inner.size, inner.rank, shape);
    places->data.entry = add_suffixed(manifest, file, name, scheme->data, scheme->data_dtypes, shape, rank);
    opaq_layout_shape(scheme->scale_shape, scheme->format, rows, columns, &inner);
    rank = stacked(stack, is_stack, inner.size, inner.rank, shape);
    places->scale.entry = add_suffixed(manifest, file, name, scheme->scale, scheme->scale_dtypes, shape, rank);
    if (*scheme->global != '\0') {
        opaq_layout_shape(scheme->global_shape, scheme->format, rows, columns, &inner);
        rank = stacked(stack, is_stack, inner.size, is_stack ? 0 : inner.rank, shape);
        places->global.entry =
            add_suffixed(manifest, file, name, scheme->global, scheme->global_dtypes, shape, rank);
    }
    const struct manifest_entry *const entries = manifest->files[file].entries;
    const uint64_t matrices = (uint64_t)(stack == 0 ? 1 : stack);
    const int64_t block_rows = opaq_format_row(scheme->format)->block_rows;
    const int64_t scale_rows = block_rows == 0 ? 1 : (rows + block_rows - 1) / block_rows;
    places->data_row_bytes = rows == 0 ? 0 : entries[places->data.entry].bytes / matrices / (uint64_t)rows;
    places->scale_row_bytes =
        scale_rows == 0 ? 0 : entries[places->scale.entry].bytes / matrices / (uint64_t)scale_rows;
    return OPAQ_OK;
}

enum opaq_status manifest_quantize(struct manifest *manifest, struct weight_slice slice,
                                   const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                   struct opaq_error *error) {
    struct manifest_target *const target = add_target(manifest, slice);
    target->scheme = scheme;
    target->spec = *spec;
    return add_quantized(manifest, slice.name, target->file, 1, false, slice.rows, slice.columns, scheme, spec,
                         target, error);
}

enum opaq_status manifest_quantize_stack(struct manifest *manifest, struct weight_slice first,
                                         const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                         struct opaq_error *error) {
    struct manifest_target places = {0};
    const struct weight *const weight = first.weight;
    const enum opaq_status status =
        add_quantized(manifest, weight->name, weight->data->file, weight->stack, true, first.rows,
                      first.columns, scheme, spec, &places, error);
    for (int64_t i = 0; i < weight->stack && status == OPAQ_OK; ++i) {
        struct weight_slice slice = first;
        slice.name = copy_text(first.name, strlen(first.name));
        slice.matrix = i;
        struct manifest_target *const target = add_target(manifest, slice);
        const struct manifest_entry *const entries = manifest->files[target->file].entries;
        const uint64_t count = (uint64_t)weight->stack;
        target->scheme = scheme;
        target->spec = *spec;
        target->data = (struct manifest_place){places.data.entry,
                                               (uint64_t)i * (entries[places.data.entry].bytes / count)};
        target->scale = (struct manifest_place){places.scale.entry,
                                                (uint64_t)i * (entries[places.scale.entry].bytes / count)};
        target->global = (struct manifest_place){places.global.entry, (uint64_t)i * sizeof(float)};
        target->data_row_bytes = places.data_row_bytes;
        target->scale_row_bytes = places.scale_row_bytes;
    }
    free(first.name);
    return status;
}

void manifest_decode(struct manifest *manifest, const struct weight *weight, enum opaq_element dtype) {
    const enum st_dtype stored = st_dtype_of_opaq((int)dtype);
    const struct st_tensor *const from = weight->data->tensor;
    const bool is_written_transposed = weight->scheme != NULL && weight->scheme->layout == OPAQ_LAYOUT_GPT_OSS;
    int64_t shape[ST_RANK_LIMIT] = {weight->rows, weight->columns};
    int rank = 2;
    if (weight->scheme == NULL) { /* floats keep their shape */
        rank = from->rank;
        memcpy(shape, from->shape, sizeof shape);
    } else if (weight->stack != 1 || from->rank > 2) {
        const int64_t inner[2] = {is_written_transposed ? weight->columns : weight->rows,
                                  is_written_transposed ? weight->rows : weight->columns};
        rank = stacked(weight->stack, true, inner, 2, shape);
    }
    const size_t entry = add_entry(manifest, weight->data->file, weight->name, stored, shape, rank);
    const uint64_t row_bytes = (uint64_t)weight->columns * (uint64_t)st_dtype_bits(stored) / 8;
    for (int64_t i = 0; i < weight->stack; ++i) {
        struct weight_slice slice = weight_whole(weight);
        slice.matrix = i;
        struct manifest_target *const target = add_target(manifest, slice);
        target->dtype = dtype;
        target->is_written_transposed = is_written_transposed;
        target->data = (struct manifest_place){entry, (uint64_t)(i * weight->rows) * row_bytes};
        target->data_row_bytes = row_bytes;
    }
}

/* ---- sets that share a scale ---- */

/* ModelOpt also shares the scale of fused projections in formats with one scale for the tensor. */
static bool shares(const struct manifest_target *target) {
    return target->spec.format == OPAQ_NVFP4 ||
           (target->spec.format == OPAQ_FP8 && target->scheme->layout == OPAQ_LAYOUT_MODELOPT);
}

/* A key that is equal for targets that share a scale: the parent module and the index of the fused projections. */
static char *shared_name(const struct manifest_target *target, size_t number) {
    struct text name = {0};
    const char *const plain = target->slice.name;
    const char *const end = strrchr(plain, '.');
    size_t module = end == NULL ? strlen(plain) : (size_t)(end - plain);
    size_t leaf = module;
    while (leaf > 0 && plain[leaf - 1] != '.') {
        --leaf;
    }
    for (size_t i = 0; i < fused_count && shares(target); ++i) {
        for (size_t k = 0; k < FUSED_MOST && fused_projections[i][k] != NULL; ++k) {
            const char *const projection = fused_projections[i][k];
            if (strlen(projection) == module - leaf && memcmp(plain + leaf, projection, module - leaf) == 0) {
                text_print(&name, "%.*s %zu", (int)leaf, plain, i);
                return name.bytes;
            }
        }
    }
    text_print(&name, " %zu", number);
    return name.bytes;
}

struct sharing {
    char *name;
    size_t target;
};

static int compare_sharing(const void *first, const void *second) {
    const struct sharing *const a = first;
    const struct sharing *const b = second;
    const int order = strcmp(a->name, b->name);
    return order != 0 ? order : (a->target > b->target) - (a->target < b->target);
}

static void find_sets(struct manifest *manifest) {
    struct sharing *const sharing = alloc_array(manifest->target_count, sizeof *sharing);
    size_t count = 0;
    for (size_t i = 0; i < manifest->target_count; ++i) {
        const struct manifest_target *const target = &manifest->targets[i];
        if (target->scheme != NULL && (target->spec.format == OPAQ_NVFP4 || target->spec.format == OPAQ_FP8)) {
            sharing[count++] = (struct sharing){shared_name(target, i), i};
        }
    }
    if (count != 0) {
        qsort(sharing, count, sizeof *sharing, compare_sharing);
    }
    manifest->sets = alloc_array(count, sizeof *manifest->sets);
    for (size_t i = 0; i < count; ++i) {
        if (i == 0 || strcmp(sharing[i - 1].name, sharing[i].name) != 0) {
            ++manifest->set_count;
        }
        struct manifest_set *const set = &manifest->sets[manifest->set_count - 1];
        set->targets = realloc_array(set->targets, set->count + 1, sizeof *set->targets);
        set->targets[set->count++] = sharing[i].target;
        manifest->targets[sharing[i].target].set = manifest->set_count - 1;
    }
    for (size_t i = 0; i < count; ++i) {
        free(sharing[i].name);
    }
    free(sharing);
}

/* ---- offsets ---- */

static int compare_entries(const void *first, const void *second) {
    return strcmp((*(const struct manifest_entry *const *)first)->name,
                  (*(const struct manifest_entry *const *)second)->name);
}

static int compare_tensors(const void *first, const void *second) {
    return strcmp(((const struct st_tensor *)first)->name, ((const struct st_tensor *)second)->name);
}

static void finish_file(struct manifest_file *file) {
    struct st_tensor *const tensors = alloc_array(file->count, sizeof *tensors);
    struct manifest_entry **const sorted = alloc_array(file->count, sizeof(struct manifest_entry *));
    for (size_t i = 0; i < file->count; ++i) {
        const struct manifest_entry *const entry = &file->entries[i];
        tensors[i] = (struct st_tensor){
            .name = entry->name, .dtype = entry->dtype, .rank = entry->rank, .bytes = entry->bytes};
        memcpy(tensors[i].shape, entry->shape, sizeof entry->shape);
        sorted[i] = &file->entries[i];
    }
    st_header_write(tensors, file->count, file->metadata, file->metadata_count, &file->header);
    if (file->count != 0) {
        qsort(tensors, file->count, sizeof *tensors, compare_tensors);
        qsort(sorted, file->count, sizeof(struct manifest_entry *), compare_entries);
    }
    file->bytes = file->header.length;
    for (size_t i = 0; i < file->count; ++i) {
        sorted[i]->begin = file->header.length + tensors[i].begin;
        file->bytes += sorted[i]->bytes;
    }
    free(tensors);
    free(sorted);
}

static enum opaq_status check_names(const struct manifest *manifest, struct opaq_error *error) {
    size_t count = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        count += manifest->files[i].count;
    }
    const struct manifest_entry **const all = alloc_array(count, sizeof(struct manifest_entry *));
    count = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        for (size_t k = 0; k < manifest->files[i].count; ++k) {
            all[count++] = &manifest->files[i].entries[k];
        }
    }
    if (count != 0) {
        qsort(all, count, sizeof(struct manifest_entry *), compare_entries);
    }
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 1; i < count && status == OPAQ_OK; ++i) {
        if (strcmp(all[i - 1]->name, all[i]->name) == 0) {
            status = opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                               "two tensors would be called %s: the source has one of that name already",
                               all[i]->name);
        }
    }
    free(all);
    return status;
}

enum opaq_status manifest_finish(struct manifest *manifest, struct opaq_error *error) {
    CLI_TRY(check_names(manifest, error));
    find_sets(manifest);
    for (size_t i = 0; i < manifest->file_count; ++i) {
        struct manifest_file *const file = &manifest->files[i];
        finish_file(file);
        if (file->header.length - ST_LENGTH_BYTES > ST_HEADER_LIMIT) {
            return opaq_fail(
                error, OPAQ_ERROR_LIMIT,
                "%s would have %zu tensors and a header of %zu bytes, but safetensors allows at most %d: "
                "split the source into more files",
                file->name, file->count, file->header.length - ST_LENGTH_BYTES, ST_HEADER_LIMIT);
        }
    }
    return OPAQ_OK;
}

uint64_t manifest_bytes(const struct manifest *manifest) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        bytes += manifest->files[i].bytes;
    }
    return bytes;
}

uint64_t manifest_tensor_bytes(const struct manifest *manifest) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        bytes += manifest->files[i].bytes - manifest->files[i].header.length;
    }
    return bytes;
}

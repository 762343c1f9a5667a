/* cli/report/model_diff.c: see model_diff.h. */
#include "cli/report/model_diff.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/console/interrupt.h"
#include "cli/console/number_text.h"
#include "cli/report/weight_compare.h"
#include "cli/texts.h"

enum { CHUNK_BYTES = 1 << 22 };

static struct tensor_difference *add_difference(struct model_diff *diff, const char *name,
                                                enum difference_kind kind) {
    diff->tensors = grow_array(diff->tensors, diff->count, &diff->capacity, sizeof *diff->tensors);
    struct tensor_difference *const added = &diff->tensors[diff->count++];
    *added = (struct tensor_difference){
        .name = copy_text(name, strlen(name)), .kind = kind, .largest = (double)NAN, .sqnr = (double)NAN};
    return added;
}

/* ---- bytes ---- */

static char *describe_tensor(const struct model_tensor *tensor) {
    struct text text = {0};
    st_describe(tensor->tensor, &text);
    return text.bytes;
}

static bool is_same_type(const struct st_tensor *a, const struct st_tensor *b) {
    return a->dtype == b->dtype && a->rank == b->rank &&
           memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

struct byte_memory {
    uint8_t *a;
    uint8_t *b;
};

static enum opaq_status count_bytes(const struct checkpoint *a, const struct model_tensor *of_a,
                                    const struct checkpoint *b, const struct model_tensor *of_b,
                                    const struct byte_memory *memory, struct progress *progress,
                                    uint64_t *different, struct opaq_error *error) {
    const uint64_t all = of_a->tensor->bytes;
    *different = 0;
    for (uint64_t done = 0; done < all && !interrupt_seen();) {
        const size_t count = all - done < CHUNK_BYTES ? (size_t)(all - done) : CHUNK_BYTES;
        CLI_TRY(model_read(&a->model, of_a, done, memory->a, count, error));
        CLI_TRY(model_read(&b->model, of_b, done, memory->b, count, error));
        if (memcmp(memory->a, memory->b, count) != 0) {
            for (size_t i = 0; i < count; ++i) {
                *different += memory->a[i] != memory->b[i];
            }
        }
        done += count;
        progress_add(progress, 2 * count);
    }
    return OPAQ_OK;
}

static enum opaq_status diff_pair(const struct checkpoint *a, const struct model_tensor *of_a,
                                  const struct checkpoint *b, const struct model_tensor *of_b,
                                  const struct byte_memory *memory, struct progress *progress,
                                  struct model_diff *diff, struct opaq_error *error) {
    ++diff->compared;
    if (!is_same_type(of_a->tensor, of_b->tensor)) {
        struct tensor_difference *const added = add_difference(diff, of_a->tensor->name, OTHER_TYPE);
        added->a = describe_tensor(of_a);
        added->b = describe_tensor(of_b);
        return OPAQ_OK;
    }
    uint64_t different = 0;
    CLI_TRY(count_bytes(a, of_a, b, of_b, memory, progress, &different, error));
    if (different != 0) {
        struct tensor_difference *const added = add_difference(diff, of_a->tensor->name, OTHER_CONTENT);
        added->a = describe_tensor(of_a);
        added->b = describe_tensor(of_b);
        added->different = different;
        added->all = of_a->tensor->bytes;
    }
    return OPAQ_OK;
}

/* Iterates over the names of both in order; a tensor that only one has is NULL for the other. */
struct walk {
    const struct model *a;
    const struct model *b;
    size_t at_a;
    size_t at_b;
};

static bool walk_on(struct walk *walk, const struct model_tensor **of_a, const struct model_tensor **of_b) {
    const bool has_a = walk->at_a < walk->a->tensor_count;
    const bool has_b = walk->at_b < walk->b->tensor_count;
    if (!has_a && !has_b) {
        return false;
    }
    const int order =
        !has_a   ? 1
        : !has_b ? -1
                 : strcmp(walk->a->tensors[walk->at_a].tensor->name, walk->b->tensors[walk->at_b].tensor->name);
    *of_a = order <= 0 ? &walk->a->tensors[walk->at_a++] : NULL;
    *of_b = order >= 0 ? &walk->b->tensors[walk->at_b++] : NULL;
    return true;
}

uint64_t diff_bytes(const struct checkpoint *a, const struct checkpoint *b) {
    struct walk walk = {.a = &a->model, .b = &b->model};
    const struct model_tensor *of_a = NULL;
    const struct model_tensor *of_b = NULL;
    uint64_t bytes = 0;
    while (walk_on(&walk, &of_a, &of_b)) {
        if (of_a != NULL && of_b != NULL && is_same_type(of_a->tensor, of_b->tensor)) {
            bytes += 2 * of_a->tensor->bytes;
        }
    }
    return bytes;
}

enum opaq_status diff_tensors(const struct checkpoint *a, const struct checkpoint *b, struct progress *progress,
                              struct model_diff *diff, bool *is_stopped, struct opaq_error *error) {
    struct walk walk = {.a = &a->model, .b = &b->model};
    const struct model_tensor *of_a = NULL;
    const struct model_tensor *of_b = NULL;
    const struct byte_memory memory = {alloc_aligned(CHUNK_BYTES), alloc_aligned(CHUNK_BYTES)};
    enum opaq_status status = OPAQ_OK;
    while (status == OPAQ_OK && walk_on(&walk, &of_a, &of_b)) {
        if (of_a != NULL && of_b != NULL) {
            status = diff_pair(a, of_a, b, of_b, &memory, progress, diff, error);
        } else if (of_a != NULL) {
            add_difference(diff, of_a->tensor->name, ONLY_IN_A)->a = describe_tensor(of_a);
        } else if (of_b != NULL) {
            add_difference(diff, of_b->tensor->name, ONLY_IN_B)->b = describe_tensor(of_b);
        }
        *is_stopped = interrupt_seen();
        if (*is_stopped && status == OPAQ_OK) {
            status = opaq_fail(error, OPAQ_ERROR_SYSTEM, "interrupted");
        }
    }
    free(memory.a);
    free(memory.b);
    return status;
}

/* ---- values ---- */

static char *describe_weight(const struct weight *weight) {
    struct text text = {0};
    int64_t shape[ST_RANK_LIMIT];
    const int rank = weight_shape(weight, shape);
    text_print(&text, "%s ", weight_kind(weight));
    shape_text_add(shape, rank, &text);
    return text.bytes;
}

static bool is_equal(const struct comparison *comparison) {
    return comparison->has_error ? comparison->different_elements == 0 : comparison->is_equal;
}

/* The same format in another layout, with differences by rounding only. */
static bool is_other_layout(const struct comparison *comparison) {
    const struct opaq_layout_row *const a = comparison->pair->original.weight->scheme;
    const struct opaq_layout_row *const b = comparison->pair->quantized.weight->scheme;
    return a != NULL && b != NULL && a != b && a->format == b->format && comparison->has_error &&
           comparison->different_elements == comparison->rounded_elements;
}

static void add_comparison(struct model_diff *diff, const struct comparison *comparison) {
    const struct weight_pair *const pair = comparison->pair;
    const struct weight *const a = pair->original.weight;
    const struct weight *const b = pair->quantized.weight;
    diff->compared += a != NULL && b != NULL;
    if (a != NULL && b != NULL && is_equal(comparison)) {
        return;
    }
    if (a != NULL && b != NULL && is_other_layout(comparison)) {
        ++diff->rounded;
        return;
    }
    const bool is_read = comparison->has_error || (a != NULL && b != NULL && pair_is_bytes(pair));
    struct tensor_difference *const added = add_difference(diff, pair->name,
                                                           b == NULL                          ? ONLY_IN_A
                                                           : a == NULL                        ? ONLY_IN_B
                                                           : pair->is_other_shape || !is_read ? OTHER_TYPE
                                                                                              : OTHER_CONTENT);
    added->a = a == NULL ? NULL : describe_weight(a);
    added->b = b == NULL ? NULL : describe_weight(b);
    if (added->kind == OTHER_CONTENT) {
        added->all = pair_elements(pair);
        added->different = comparison->different_elements;
        added->largest = comparison->has_error ? comparison->error.largest : (double)NAN;
        added->sqnr = comparison->has_error ? comparison->error.sqnr : (double)NAN;
    }
}

enum opaq_status diff_values(const struct checkpoint *a, const struct checkpoint *b, struct progress *progress,
                             struct model_diff *diff, bool *is_stopped, struct opaq_error *error) {
    struct opaq_pool *pool = NULL;
    CLI_TRY(opaq_pool_create(0, &pool, error));
    struct weight_pairs pairs;
    struct comparison *comparisons = NULL;
    weight_pairs_make(a, b, &pairs);
    diff->has_values = true;
    const enum opaq_status status = compare_weights(&pairs, pool, progress, &comparisons, is_stopped, error);
    for (size_t i = 0; i < pairs.count && status == OPAQ_OK; ++i) {
        add_comparison(diff, &comparisons[i]);
    }
    free(comparisons);
    weight_pairs_free(&pairs);
    opaq_pool_destroy(pool);
    return status;
}

/* ---- keys ---- */

static void add_key(struct key_differences *keys, const char *key, enum difference_kind kind) {
    keys->items = grow_array(keys->items, keys->count, &keys->capacity, sizeof *keys->items);
    keys->items[keys->count++] = (struct key_difference){copy_text(key, strlen(key)), kind};
}

struct member {
    const char *key;
    size_t length;
    yyjson_val *value;
};

static int compare_members(const void *first, const void *second) {
    const struct member *const a = first;
    const struct member *const b = second;
    const int order = memcmp(a->key, b->key, a->length < b->length ? a->length : b->length);
    return order != 0 ? order : (a->length > b->length) - (a->length < b->length);
}

/* An object's members, sorted by their keys; released with free(). An object may be NULL. */
static struct member *sorted_members(yyjson_val *object, size_t *count) {
    *count = yyjson_obj_size(object);
    struct member *const members = alloc_array(*count, sizeof *members);
    size_t index = 0;
    size_t all = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    if (*count != 0) { /* yyjson_obj_foreach does not accept NULL */
        yyjson_obj_foreach(object, index, all, key, value) {
            members[index] = (struct member){yyjson_get_str(key), yyjson_get_len(key), value};
        }
        qsort(members, *count, sizeof *members, compare_members);
    }
    return members;
}

/* Equal apart from the order of members, in time n log n: yyjson_equals is quadratic if the orders differ. There are no
 * duplicate keys, which json_read rejects. */
/* NOLINTNEXTLINE(misc-no-recursion): as deep as JSON_DEPTH_LIMIT */
static bool json_equal(yyjson_val *a, yyjson_val *b) {
    const size_t count = yyjson_get_len(a);
    if (!yyjson_is_ctn(a) || !yyjson_is_ctn(b)) {
        return yyjson_equals(a, b);
    }
    if (yyjson_get_type(a) != yyjson_get_type(b) || count != yyjson_get_len(b)) {
        return false;
    }
    bool equal = true;
    if (yyjson_is_arr(a)) {
        yyjson_arr_iter of_a = yyjson_arr_iter_with(a);
        yyjson_arr_iter of_b = yyjson_arr_iter_with(b);
        for (size_t i = 0; i < count && equal; ++i) {
            equal = json_equal(yyjson_arr_iter_next(&of_a), yyjson_arr_iter_next(&of_b));
        }
        return equal;
    }
    size_t members;
    struct member *const of_a = sorted_members(a, &members);
    struct member *const of_b = sorted_members(b, &members);
    for (size_t i = 0; i < count && equal; ++i) {
        equal = compare_members(&of_a[i], &of_b[i]) == 0 && json_equal(of_a[i].value, of_b[i].value);
    }
    free(of_a);
    free(of_b);
    return equal;
}

/* Adds the members of `from` that `other` lacks, or has with another value if `compares`. Both may be NULL. */
static void diff_members(yyjson_val *from, yyjson_val *other, bool compares, enum difference_kind only,
                         struct key_differences *keys) {
    size_t other_count = 0;
    struct member *const members = sorted_members(other, &other_count);
    size_t index = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    if (from != NULL) { /* yyjson_obj_foreach does not accept NULL */
        yyjson_obj_foreach(from, index, count, key, value) {
            const struct member wanted = {yyjson_get_str(key), yyjson_get_len(key), NULL};
            const struct member *const found =
                other_count == 0 ? NULL
                                 : bsearch(&wanted, members, other_count, sizeof wanted, compare_members);
            if (found == NULL || (compares && !json_equal(value, found->value))) {
                add_key(keys, yyjson_get_str(key), found == NULL ? only : OTHER_CONTENT);
            }
        }
    }
    free(members);
}

static void diff_objects(yyjson_val *a, yyjson_val *b, struct key_differences *keys) {
    diff_members(a, b, true, ONLY_IN_A, keys);
    diff_members(b, a, false, ONLY_IN_B, keys);
}

/* The metadata of all files by key, and of equal keys by file. */
struct metadata_entry {
    const struct st_pair *pair;
    size_t file;
};

struct metadata {
    struct metadata_entry *entries;
    size_t count;
};

static int compare_entries(const void *first, const void *second) {
    const struct metadata_entry *const a = first;
    const struct metadata_entry *const b = second;
    const int order = strcmp(a->pair->key, b->pair->key);
    return order != 0 ? order : (a->file > b->file) - (a->file < b->file);
}

/* Entries point into the model; released with free(). */
static struct metadata sorted_metadata(const struct model *model) {
    struct metadata all = {NULL, 0};
    for (size_t f = 0; f < model->file_count; ++f) {
        all.count += model->files[f].header.metadata_count;
    }
    all.entries = alloc_array(all.count, sizeof *all.entries);
    size_t at = 0;
    for (size_t f = 0; f < model->file_count; ++f) {
        const struct st_header *const header = &model->files[f].header;
        for (size_t i = 0; i < header->metadata_count; ++i) {
            all.entries[at++] = (struct metadata_entry){&header->metadata[i], f};
        }
    }
    if (all.count != 0) {
        qsort(all.entries, all.count, sizeof *all.entries, compare_entries);
    }
    return all;
}

/* The first file's value for a key; NULL if no file has it. */
static const char *metadata_value(const struct metadata *all, const char *key) {
    size_t low = 0; /* the first entry that is not before the key */
    for (size_t high = all->count; low < high;) {
        const size_t middle = low + (high - low) / 2;
        if (strcmp(all->entries[middle].pair->key, key) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const bool is_found = low < all->count && strcmp(all->entries[low].pair->key, key) == 0;
    return is_found ? all->entries[low].pair->value : NULL;
}

/* Adds the keys of `from` that `other` lacks or has with another value, each once. */
static void diff_metadata(const struct model *from, const struct model *other, enum difference_kind only,
                          struct text_set *seen, struct key_differences *keys) {
    const struct metadata others = sorted_metadata(other);
    for (size_t f = 0; f < from->file_count; ++f) {
        const struct st_header *const header = &from->files[f].header;
        for (size_t i = 0; i < header->metadata_count; ++i) {
            const char *const key = header->metadata[i].key;
            const char *const value = metadata_value(&others, key);
            if ((value == NULL || strcmp(value, header->metadata[i].value) != 0) && text_set_add(seen, key)) {
                add_key(keys, key, value == NULL ? only : OTHER_CONTENT);
            }
        }
    }
    free(others.entries);
}

void diff_keys(const struct checkpoint *a, const struct checkpoint *b, struct model_diff *diff) {
    yyjson_val *const a_quantization = model_quantization(&a->model);
    yyjson_val *const b_quantization = model_quantization(&b->model);
    diff->is_quantization_equal = a_quantization == NULL || b_quantization == NULL
                                      ? a_quantization == b_quantization
                                      : json_equal(a_quantization, b_quantization);
    diff_objects(yyjson_doc_get_root(a->model.config), yyjson_doc_get_root(b->model.config), &diff->config);
    struct text_set seen = {NULL, 0, 0};
    diff_metadata(&a->model, &b->model, ONLY_IN_A, &seen, &diff->metadata);
    diff_metadata(&b->model, &a->model, ONLY_IN_B, &seen, &diff->metadata);
    text_set_free(&seen);
}

static void free_keys(struct key_differences *keys) {
    for (size_t i = 0; i < keys->count; ++i) {
        free(keys->items[i].key);
    }
    free(keys->items);
}

void diff_free(struct model_diff *diff) {
    for (size_t i = 0; i < diff->count; ++i) {
        free(diff->tensors[i].name);
        free(diff->tensors[i].a);
        free(diff->tensors[i].b);
    }
    free(diff->tensors);
    free_keys(&diff->config);
    free_keys(&diff->metadata);
    *diff = (struct model_diff){0};
}

/* cli/read/st_header.c: see st_header.h. */
#include "cli/read/st_header.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/read/json.h"

int st_elements(const int64_t *shape, int rank, uint64_t *elements) {
    uint64_t product = 1;
    bool is_empty = false;
    for (int i = 0; i < rank; ++i) {
        is_empty |= shape[i] == 0;
        if (shape[i] != 0 && (uint64_t)shape[i] > ST_SIZE_LIMIT / product) {
            return 0;
        }
        product *= shape[i] == 0 ? 1 : (uint64_t)shape[i];
    }
    *elements = is_empty ? 0 : product;
    return 1;
}

int st_bytes(enum st_dtype dtype, const int64_t *shape, int rank, uint64_t *bytes) {
    uint64_t elements = 0;
    const uint64_t bits = (uint64_t)st_dtype_bits(dtype);
    if (!st_elements(shape, rank, &elements) || elements * bits % 8 != 0) {
        return 0;
    }
    *bytes = elements * bits / 8;
    return 1;
}

void st_describe(const struct st_tensor *tensor, struct text *text) {
    text_print(text, "%s [", st_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->rank; ++i) {
        text_print(text, "%s%" PRId64, i == 0 ? "" : ", ", tensor->shape[i]);
    }
    text_print(text, "]");
}

/* ---- reading ---- */

enum opaq_status st_header_length(const uint8_t first[ST_LENGTH_BYTES], uint64_t file_bytes, const char *file,
                                  uint64_t *length, struct opaq_error *error) {
    uint64_t found = 0;
    for (int i = 0; i < ST_LENGTH_BYTES; ++i) {
        found |= (uint64_t)first[i] << (8 * i);
    }
    if (found > ST_HEADER_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT,
                         "%s: its header would have %" PRIu64
                         " bytes, at most %d are allowed: not a safetensors file?",
                         file, found, ST_HEADER_LIMIT);
    }
    if (file_bytes < ST_LENGTH_BYTES || found > file_bytes - ST_LENGTH_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER,
                         "%s: its header would have %" PRIu64 " bytes, but the file has only %" PRIu64, file,
                         found, file_bytes);
    }
    *length = found;
    return OPAQ_OK;
}

struct reading {
    const char *file;
    uint64_t data_bytes;
    char *names; /* next free byte of header->names */
    struct opaq_error *error;
};

static char *keep_text(struct reading *reading, yyjson_val *value) {
    char *const copy = reading->names;
    const size_t length = yyjson_get_len(value);
    memcpy(copy, yyjson_get_str(value), length);
    copy[length] = '\0';
    reading->names += length + 1;
    return copy;
}

static enum opaq_status read_shape(const struct reading *reading, yyjson_val *value, struct st_tensor *tensor) {
    const size_t rank = yyjson_arr_size(value);
    if (!yyjson_is_arr(value) || rank > ST_RANK_LIMIT) {
        return opaq_fail(reading->error, OPAQ_ERROR_SHAPE, "%s: %.160s: its shape %s", reading->file,
                         tensor->name, yyjson_is_arr(value) ? "has more than 16 dimensions" : "is not a list");
    }
    tensor->rank = (int)rank;
    size_t index = 0;
    size_t count = 0;
    yyjson_val *size = NULL;
    yyjson_arr_foreach(value, index, count, size) {
        uint64_t number = 0;
        if (!json_natural(size, &number) || number > INT64_MAX) {
            return opaq_fail(reading->error, OPAQ_ERROR_SHAPE,
                             "%s: %.160s: size %zu of its shape is %.40s, expected a number from 0 to 2^63-1",
                             reading->file, tensor->name, index,
                             yyjson_is_raw(size) ? yyjson_get_raw(size) : "not a number");
        }
        tensor->shape[index] = (int64_t)number;
    }
    return OPAQ_OK;
}

static enum opaq_status read_offsets(const struct reading *reading, yyjson_val *value,
                                     struct st_tensor *tensor) {
    uint64_t begin = 0;
    uint64_t end = 0;
    if (yyjson_arr_size(value) != 2 || !json_natural(yyjson_arr_get(value, 0), &begin) ||
        !json_natural(yyjson_arr_get(value, 1), &end)) {
        return opaq_fail(reading->error, OPAQ_ERROR_TEXT,
                         "%s: %.160s: data_offsets must be two natural numbers, begin and end", reading->file,
                         tensor->name);
    }
    if (begin > end || end > reading->data_bytes) {
        return opaq_fail(reading->error, OPAQ_ERROR_BUFFER,
                         "%s: %.160s: its data_offsets are %" PRIu64 " to %" PRIu64
                         ", but the file has %" PRIu64 " bytes of data",
                         reading->file, tensor->name, begin, end, reading->data_bytes);
    }
    uint64_t bytes = 0;
    if (!st_bytes(tensor->dtype, tensor->shape, tensor->rank, &bytes)) {
        struct text what = {0};
        st_describe(tensor, &what);
        const enum opaq_status status =
            opaq_fail(reading->error, OPAQ_ERROR_OVERFLOW,
                      "%s: %.160s: %s has more than 2^56 elements or is not a whole number of bytes",
                      reading->file, tensor->name, text_get(&what));
        text_free(&what);
        return status;
    }
    if (end - begin != bytes) {
        struct text what = {0};
        st_describe(tensor, &what);
        const enum opaq_status status =
            opaq_fail(reading->error, OPAQ_ERROR_BUFFER,
                      "%s: %.160s: %s needs %" PRIu64 " bytes, but data_offsets give it %" PRIu64,
                      reading->file, tensor->name, text_get(&what), bytes, end - begin);
        text_free(&what);
        return status;
    }
    tensor->begin = begin;
    tensor->bytes = bytes;
    return OPAQ_OK;
}

static enum opaq_status read_tensor(struct reading *reading, yyjson_val *key, yyjson_val *value,
                                    struct st_tensor *tensor) {
    if (!json_is_clean(key) || yyjson_get_len(key) > ST_NAME_LIMIT) {
        return opaq_fail(reading->error, OPAQ_ERROR_TEXT,
                         "%s: the name of a tensor, \"%.100s\" of %zu bytes, %s", reading->file,
                         yyjson_get_str(key), yyjson_get_len(key),
                         json_is_clean(key) ? "is longer than 1000" : "is empty or has control characters");
    }
    tensor->name = keep_text(reading, key);
    if (!yyjson_is_obj(value)) {
        return opaq_fail(reading->error, OPAQ_ERROR_TEXT,
                         "%s: %.160s is not an object with dtype, shape and data_offsets", reading->file,
                         tensor->name);
    }
    size_t index = 0;
    size_t count = 0;
    yyjson_val *member = NULL;
    yyjson_val *inner = NULL;
    yyjson_obj_foreach(value, index, count, member, inner) {
        if (!yyjson_equals_str(member, "dtype") && !yyjson_equals_str(member, "shape") &&
            !yyjson_equals_str(member, "data_offsets")) {
            return opaq_fail(reading->error, OPAQ_ERROR_TEXT,
                             "%s: %.160s has a member \"%.100s\", expected dtype, shape and data_offsets only",
                             reading->file, tensor->name, yyjson_get_str(member));
        }
    }
    const char *const dtype = json_member_text(value, "dtype");
    const int found = dtype == NULL ? -1 : st_dtype_find(dtype);
    if (found < 0) {
        return opaq_fail(reading->error, OPAQ_ERROR_TEXT, "%s: %.160s: its dtype is %.100s%s", reading->file,
                         tensor->name, dtype == NULL ? "missing or not a string" : dtype,
                         dtype == NULL ? "" : ", which safetensors does not have");
    }
    tensor->dtype = (enum st_dtype)found;
    CLI_TRY(read_shape(reading, yyjson_obj_get(value, "shape"), tensor));
    return read_offsets(reading, yyjson_obj_get(value, "data_offsets"), tensor);
}

static int compare_pairs(const void *first, const void *second) {
    return strcmp(((const struct st_pair *)first)->key, ((const struct st_pair *)second)->key);
}

const char *st_metadata_find(const struct st_header *header, const char *key) {
    const struct st_pair wanted = {key, NULL};
    const struct st_pair *const found =
        header->metadata_count == 0
            ? NULL
            : bsearch(&wanted, header->metadata_by_key, header->metadata_count, sizeof wanted, compare_pairs);
    return found == NULL ? NULL : found->value;
}

static void sort_metadata(struct st_header *header) {
    if (header->metadata_count != 0) {
        header->metadata_by_key = alloc_array(header->metadata_count, sizeof *header->metadata);
        memcpy(header->metadata_by_key, header->metadata, header->metadata_count * sizeof *header->metadata);
        qsort(header->metadata_by_key, header->metadata_count, sizeof *header->metadata, compare_pairs);
    }
}

static enum opaq_status read_metadata(struct reading *reading, yyjson_val *value, struct st_header *header) {
    size_t index = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *inner = NULL;
    header->metadata = alloc_array(yyjson_obj_size(value), sizeof *header->metadata);
    yyjson_obj_foreach(value, index, count, key, inner) {
        if (!yyjson_is_str(inner) || strlen(yyjson_get_str(inner)) != yyjson_get_len(inner) ||
            strlen(yyjson_get_str(key)) != yyjson_get_len(key)) {
            return opaq_fail(reading->error, OPAQ_ERROR_TEXT, "%s: __metadata__: \"%.100s\" is not a string",
                             reading->file, yyjson_get_str(key));
        }
        char *const name = keep_text(reading, key);
        header->metadata[header->metadata_count++] = (struct st_pair){name, keep_text(reading, inner)};
    }
    return yyjson_is_obj(value)
               ? OPAQ_OK
               : opaq_fail(reading->error, OPAQ_ERROR_TEXT, "%s: __metadata__ is not an object", reading->file);
}

static int compare_offsets(const void *first, const void *second) {
    const struct st_tensor *const a = first;
    const struct st_tensor *const b = second;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    if (a->bytes != b->bytes) {
        return a->bytes < b->bytes ? -1 : 1;
    }
    return strcmp(a->name, b->name);
}

static enum opaq_status check_offsets(const struct reading *reading, struct st_header *header) {
    qsort(header->tensors, header->count, sizeof *header->tensors, compare_offsets);
    uint64_t end = 0;
    for (size_t i = 0; i < header->count; ++i) {
        const struct st_tensor *const tensor = &header->tensors[i];
        if (tensor->begin != end) {
            return opaq_fail(reading->error, OPAQ_ERROR_BUFFER,
                             "%s: %.160s: its bytes begin at %" PRIu64 ", but those before it end at %" PRIu64
                             ": %s",
                             reading->file, tensor->name, tensor->begin, end,
                             tensor->begin < end ? "tensors overlap" : "there is a gap");
        }
        end += tensor->bytes;
    }
    if (end != reading->data_bytes) {
        return opaq_fail(reading->error, OPAQ_ERROR_BUFFER,
                         "%s: its tensors end at byte %" PRIu64 " of the data, but it has %" PRIu64,
                         reading->file, end, reading->data_bytes);
    }
    return OPAQ_OK;
}

enum opaq_status st_header_parse(const char *json, uint64_t length, uint64_t file_bytes, const char *file,
                                 struct st_header *header, struct opaq_error *error) {
    *header = (struct st_header){.data_begin = ST_LENGTH_BYTES + length};
    if (length == 0 || json[0] != '{') {
        return opaq_fail(error, OPAQ_ERROR_TEXT,
                         "%s: its header does not begin with '{': not a safetensors file", file);
    }
    yyjson_doc *document = NULL;
    CLI_TRY(json_read(json, length, file, &document, error));
    enum opaq_status status = OPAQ_OK;
    yyjson_val *const root = yyjson_doc_get_root(document);
    header->tensors = alloc_array(yyjson_obj_size(root), sizeof *header->tensors);
    header->names = alloc_array(length + 1, 1);
    struct reading reading = {file, file_bytes - header->data_begin, header->names, error};
    size_t index = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    yyjson_obj_foreach(root, index, count, key, value) {
        if (yyjson_equals_str(key, "__metadata__")) {
            status = read_metadata(&reading, value, header);
        } else {
            status = read_tensor(&reading, key, value, &header->tensors[header->count++]);
        }
        if (status != OPAQ_OK) {
            break;
        }
    }
    yyjson_doc_free(document);
    if (status == OPAQ_OK) {
        sort_metadata(header);
        status = check_offsets(&reading, header);
    }
    if (status != OPAQ_OK) {
        st_header_free(header);
    }
    return status;
}

void st_header_free(struct st_header *header) {
    free(header->tensors);
    free(header->metadata);
    free(header->metadata_by_key);
    free(header->names);
    *header = (struct st_header){0};
}

/* ---- writing ---- */

static int compare_for_writing(const void *first, const void *second) {
    const struct st_tensor *const a = first;
    const struct st_tensor *const b = second;
    return a->dtype != b->dtype ? (a->dtype > b->dtype ? -1 : 1) : strcmp(a->name, b->name);
}

static void write_tensor(yyjson_mut_doc *document, yyjson_mut_val *root, const struct st_tensor *tensor) {
    yyjson_mut_val *const entry = yyjson_mut_obj_add_obj(document, root, tensor->name);
    yyjson_mut_obj_add_str(document, entry, "dtype", st_dtype_name(tensor->dtype));
    yyjson_mut_val *const shape = yyjson_mut_obj_add_arr(document, entry, "shape");
    for (int i = 0; i < tensor->rank; ++i) {
        yyjson_mut_arr_add_sint(document, shape, tensor->shape[i]);
    }
    yyjson_mut_val *const offsets = yyjson_mut_obj_add_arr(document, entry, "data_offsets");
    yyjson_mut_arr_add_uint(document, offsets, tensor->begin);
    yyjson_mut_arr_add_uint(document, offsets, tensor->begin + tensor->bytes);
}

void st_header_write(struct st_tensor *tensors, size_t count, const struct st_pair *metadata,
                     size_t metadata_count, struct text *bytes) {
    if (count != 0) {
        qsort(tensors, count, sizeof *tensors, compare_for_writing);
    }
    uint64_t end = 0;
    for (size_t i = 0; i < count; ++i) {
        tensors[i].begin = end;
        end += tensors[i].bytes;
    }
    yyjson_mut_doc *const document = yyjson_mut_doc_new(NULL);
    yyjson_mut_val *const root = yyjson_mut_obj(document);
    yyjson_mut_doc_set_root(document, root);
    if (metadata_count != 0) {
        yyjson_mut_val *const pairs = yyjson_mut_obj_add_obj(document, root, "__metadata__");
        for (size_t i = 0; i < metadata_count; ++i) {
            yyjson_mut_obj_add_str(document, pairs, metadata[i].key, metadata[i].value);
        }
    }
    for (size_t i = 0; i < count; ++i) {
        write_tensor(document, root, &tensors[i]);
    }
    size_t length = 0;
    char *const json = yyjson_mut_write(document, 0, &length);
    yyjson_mut_doc_free(document);
    if (json == NULL) { /* names come from JSON, so this can only be out of memory */
        alloc_array(SIZE_MAX, 1);
        return;
    }
    const size_t padded = (length + ST_LENGTH_BYTES - 1) / ST_LENGTH_BYTES * ST_LENGTH_BYTES;
    char first[ST_LENGTH_BYTES];
    for (int i = 0; i < ST_LENGTH_BYTES; ++i) {
        first[i] = (char)(uint8_t)((uint64_t)padded >> (8 * i));
    }
    text_add(bytes, first, sizeof first);
    text_add(bytes, json, length);
    text_add(bytes, "       ", padded - length);
    free(json);
}

/* fuzz_cli_header.c: any bytes as the beginning of a safetensors file. The first two are the number of data
 * bytes after the header. An accepted header covers the file, is written and read again unchanged, and its
 * tensors form weights. */
#include "cli/read/st_header.h"
#include "cli/read/weights.h"
#include "fuzz_cli.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char file[] = "x.safetensors";

static void expect_offsets(const struct st_header *header, uint64_t file_bytes) {
    uint64_t end = 0;
    for (size_t i = 0; i < header->count; ++i) {
        const struct st_tensor *const tensor = &header->tensors[i];
        uint64_t bytes = 0;
        expect(tensor->rank >= 0 && tensor->rank <= ST_RANK_LIMIT);
        expect(st_bytes(tensor->dtype, tensor->shape, tensor->rank, &bytes) && bytes == tensor->bytes);
        expect(tensor->begin == end && strlen(tensor->name) > 0 && strlen(tensor->name) <= ST_NAME_LIMIT);
        end += bytes;
    }
    expect(header->data_begin + end == file_bytes);
}

static int compare_names(const void *first, const void *second) {
    return strcmp(((const struct st_tensor *)first)->name, ((const struct st_tensor *)second)->name);
}

/* Writing and reading gives the same tensors and metadata. */
static void expect_round_trip(const struct st_header *header, uint64_t data_bytes) {
    struct st_tensor *const tensors = alloc_array(header->count, sizeof *tensors);
    if (header->count != 0) {
        memcpy(tensors, header->tensors, header->count * sizeof *tensors);
    }
    struct text bytes = {0};
    struct st_header again;
    struct opaq_error error;
    uint64_t length = 0;
    st_header_write(tensors, header->count, header->metadata, header->metadata_count, &bytes);
    const uint64_t all = bytes.length + data_bytes;
    expect(bytes.length % ST_LENGTH_BYTES == 0);
    expect(st_header_length((const uint8_t *)bytes.bytes, all, file, &length, &error) == OPAQ_OK);
    expect(length + ST_LENGTH_BYTES == bytes.length);
    expect(st_header_parse(bytes.bytes + ST_LENGTH_BYTES, length, all, file, &again, &error) == OPAQ_OK);
    expect(again.count == header->count && again.metadata_count == header->metadata_count);
    qsort(tensors, header->count, sizeof *tensors, compare_names);
    qsort(again.tensors, again.count, sizeof *tensors, compare_names);
    for (size_t i = 0; i < again.count; ++i) {
        const struct st_tensor *const a = &tensors[i];
        const struct st_tensor *const b = &again.tensors[i];
        expect(strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->rank == b->rank);
        expect(memcmp(a->shape, b->shape, (size_t)a->rank * sizeof a->shape[0]) == 0);
        expect(a->begin == b->begin && a->bytes == b->bytes);
    }
    for (size_t i = 0; i < again.metadata_count; ++i) {
        expect(strcmp(header->metadata[i].key, again.metadata[i].key) == 0);
        expect(strcmp(header->metadata[i].value, again.metadata[i].value) == 0);
    }
    st_header_free(&again);
    text_free(&bytes);
    free(tensors);
}

static int compare_tensors(const void *first, const void *second) {
    return strcmp(((const struct model_tensor *)first)->tensor->name,
                  ((const struct model_tensor *)second)->tensor->name);
}

/* A model of this one header, without a file behind it: every tensor belongs to one weight. */
static void expect_weights(const struct st_header *header) {
    static char path[] = "x.safetensors";
    struct model model = {.path = path, .tensor_count = header->count};
    struct weights weights;
    struct opaq_error error;
    model.tensors = alloc_array(header->count, sizeof *model.tensors);
    for (size_t i = 0; i < header->count; ++i) {
        model.tensors[i].tensor = &header->tensors[i];
    }
    qsort(model.tensors, header->count, sizeof *model.tensors, compare_tensors);
    const enum opaq_status status = weights_find(&model, &weights, &error);
    if (status != OPAQ_OK) {
        expect_sentence(status, &error, file);
    } else {
        uint64_t bytes = 0;
        uint64_t expected = 0;
        for (size_t i = 0; i < weights.count; ++i) {
            bytes += weight_bytes(&weights.items[i]);
            expect(weights.items[i].rows >= 0 && weights.items[i].columns >= 0 && weights.items[i].stack >= 0);
            expect(weights_named(&weights, weights.items[i].name) == &weights.items[i]);
        }
        for (size_t i = 0; i < header->count; ++i) {
            expected += header->tensors[i].bytes;
        }
        expect(bytes == expected);
        weights_free(&weights);
    }
    free(model.tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2 + ST_LENGTH_BYTES) {
        return 0;
    }
    const uint64_t data_bytes = data[0] | (uint64_t)data[1] << 8;
    const uint64_t file_bytes = size - 2 + data_bytes;
    struct opaq_error error;
    struct st_header header;
    uint64_t length = 0;
    enum opaq_status status = st_header_length(data + 2, file_bytes, file, &length, &error);
    if (status != OPAQ_OK) {
        expect_sentence(status, &error, file);
        return 0;
    }
    if (length > size - 2 - ST_LENGTH_BYTES) { /* the data bytes are not in the input */
        return 0;
    }
    char *const json = exactly(data + 2 + ST_LENGTH_BYTES, length);
    status = st_header_parse(json, length, file_bytes, file, &header, &error);
    if (status != OPAQ_OK) {
        expect_sentence(status, &error, file);
        expect(header.tensors == NULL);
    } else {
        expect_offsets(&header, file_bytes);
        expect_round_trip(&header, file_bytes - header.data_begin);
        expect_weights(&header);
        st_header_free(&header);
    }
    free(json);
    return 0;
}

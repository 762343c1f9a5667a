/* cli/read/st_header.h: the header of a safetensors file. Eight bytes with the length of a JSON object, the object
 * (dtype, shape and offsets of each tensor), then the bytes of the tensors, which must cover the rest of the file
 * exactly. */
#ifndef OPAQ_CLI_READ_ST_HEADER_H
#define OPAQ_CLI_READ_ST_HEADER_H

#include <stddef.h>
#include <stdint.h>

#include "cli/cli_memory.h"
#include "cli/read/st_dtype.h"
#include "opaq/status.h"

#define ST_HEADER_LIMIT 100000000 /* bytes of JSON, as in the safetensors package */
#define ST_RANK_LIMIT 16
#define ST_NAME_LIMIT 1000                /* bytes of a tensor's name */
#define ST_SIZE_LIMIT ((uint64_t)1 << 56) /* elements; products with small numbers cannot overflow */
#define ST_LENGTH_BYTES 8

struct st_tensor {
    const char *name; /* without control characters */
    enum st_dtype dtype;
    int rank;
    int64_t shape[ST_RANK_LIMIT];
    uint64_t begin; /* from the end of the header */
    uint64_t bytes;
};

struct st_pair {
    const char *key;
    const char *value;
};

struct st_header {
    uint64_t data_begin; /* in the file */
    struct st_tensor *tensors;
    size_t count; /* in the order of their bytes */
    struct st_pair *metadata;
    size_t metadata_count;
    struct st_pair *metadata_by_key; /* the same, sorted */
    char *names;                     /* memory of all names and metadata */
};

/* Decodes the length in the first eight bytes of a file; fails if it exceeds the limit or the file. */
enum opaq_status st_header_length(const uint8_t first[ST_LENGTH_BYTES], uint64_t file_bytes, const char *file,
                                  uint64_t *length, struct opaq_error *error);

/* `json` are the `length` bytes after them. Errors name the file, the tensor and the numbers: invalid JSON, duplicate
 * keys, unknown dtypes, sizes that overflow, offsets that overlap, leave gaps or exceed the file, a byte count that
 * does not match shape and dtype. */
enum opaq_status st_header_parse(const char *json, uint64_t length, uint64_t file_bytes, const char *file,
                                 struct st_header *header, struct opaq_error *error);
/* The value of a key of __metadata__; NULL if there is none. */
const char *st_metadata_find(const struct st_header *header, const char *key);
void st_header_free(struct st_header *header);

/* Elements of a shape, bytes of a tensor. False if the product of the sizes other than 0 exceeds ST_SIZE_LIMIT, or if
 * the bits are not whole bytes. */
int st_elements(const int64_t *shape, int rank, uint64_t *elements);
int st_bytes(enum st_dtype dtype, const int64_t *shape, int rank, uint64_t *bytes);

/* "BF16 [4096, 128]". */
void st_describe(const struct st_tensor *tensor, struct text *text);

/* Sorts the tensors as the safetensors package does, sets their offsets, and adds the bytes of the file up to the first
 * tensor to `bytes`. */
void st_header_write(struct st_tensor *tensors, size_t count, const struct st_pair *metadata,
                     size_t metadata_count, struct text *bytes);

#endif

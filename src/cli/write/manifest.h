/* cli/write/manifest.h: what a command writes, decided before the first byte: the files, their tensors, and the
 * origin of each tensor's bytes. manifest_write.h writes it. */
#ifndef OPAQ_CLI_WRITE_MANIFEST_H
#define OPAQ_CLI_WRITE_MANIFEST_H

#include "cli/read/weight_slice.h"

/* One tensor of an output file. Its bytes are copied from the source, given, or computed by targets. */
struct manifest_entry {
    char *name;
    enum st_dtype dtype;
    int rank;
    int64_t shape[ST_RANK_LIMIT];
    const struct model_tensor *copied; /* NULL: not copied */
    void *given;                       /* NULL: not given */
    uint64_t bytes;
    uint64_t begin; /* in the file */
};

/* Where the bytes of a target are written. */
struct manifest_place {
    size_t entry;
    uint64_t offset; /* in the entry, which holds the matrices of a stack one after another */
};

/* A matrix that is quantized, or decoded to a plain dtype. */
struct manifest_target {
    struct weight_slice slice;
    size_t file;
    const struct opaq_layout_row *scheme; /* NULL: decoded */
    struct opaq_spec spec;
    enum opaq_element dtype;    /* dtype of a decoded target */
    bool is_written_transposed; /* a decoded target is written transposed */
    size_t set; /* the targets that share its amax; NO_SET if the format has no scale of the whole tensor */
    struct manifest_place data;
    struct manifest_place scale;
    struct manifest_place global;
    uint64_t data_row_bytes;
    uint64_t scale_row_bytes; /* of a row of blocks */
    uint64_t nonfinite;       /* number of quantized NaNs and infinities, set by manifest_write */
};
#define NO_SET ((size_t)-1)

/* Targets whose global scales must be equal, because engines fuse them to one matrix. */
struct manifest_set {
    size_t *targets;
    size_t count;
    float amax;
    bool is_known;
};

struct manifest_file {
    char *name;
    struct manifest_entry *entries;
    size_t count;
    size_t capacity;
    struct st_pair *metadata;
    size_t metadata_count;
    size_t metadata_capacity;
    struct text header;
    uint64_t bytes; /* of the whole file */
};

struct manifest {
    const struct weights *weights;
    struct manifest_file *files; /* in the order of the model's files */
    size_t file_count;
    struct manifest_target *targets;
    size_t target_count;
    size_t target_capacity;
    struct manifest_set *sets;
    size_t set_count;
    char **texts; /* owned texts of the metadata */
    size_t text_count;
    size_t text_capacity;
};

/* Starts with the model's files, without tensors. The weights must outlive the manifest. */
void manifest_begin(struct manifest *manifest, const struct weights *weights);
void manifest_free(struct manifest *manifest);

/* Copies a tensor, with another name and shape if these are not NULL. */
void manifest_copy(struct manifest *manifest, const struct model_tensor *tensor, const char *name,
                   const int64_t *shape, int rank);

/* Adds a tensor with these bytes, which are copied. */
void manifest_give(struct manifest *manifest, size_t file, const char *name, enum st_dtype dtype,
                   const int64_t *shape, int rank, const void *bytes);

/* Quantizes a slice of a weight in a scheme of opaq/layout.h. The manifest takes over the slice's name. */
enum opaq_status manifest_quantize(struct manifest *manifest, struct weight_slice slice,
                                   const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                   struct opaq_error *error);

/* Quantizes all matrices of a stack to one tensor each of codes, scales and global scales. `first` is the whole first
 * matrix; the manifest takes over its name. */
enum opaq_status manifest_quantize_stack(struct manifest *manifest, struct weight_slice first,
                                         const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                         struct opaq_error *error);

/* Decodes a quantized weight to floats, or converts floats to another dtype. gpt-oss's blocks become [experts, in,
 * out], as its model stores them. */
void manifest_decode(struct manifest *manifest, const struct weight *weight, enum opaq_element dtype);

/* Called last: finds the sets, writes the headers, sets the offsets. Fails for two tensors of one name and for a header
 * above the limit of safetensors. */
enum opaq_status manifest_finish(struct manifest *manifest, struct opaq_error *error);

/* Adds to the metadata of a file. Both texts must live as long as the manifest; manifest_keep_text takes one over. */
void manifest_metadata(struct manifest *manifest, size_t file, const char *key, const char *value);
void manifest_keep_text(struct manifest *manifest, char *text);

uint64_t manifest_bytes(const struct manifest *manifest);        /* of all files */
uint64_t manifest_tensor_bytes(const struct manifest *manifest); /* of all tensors */

#endif

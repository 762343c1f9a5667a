/* cli/write/plan.h: what a run writes, decided before the first byte: files like the source's, their tensors, and where the
 * bytes of each come from. plan_run.h carries it out. */
#ifndef OPAQ_CLI_WRITE_PLAN_H
#define OPAQ_CLI_WRITE_PLAN_H

#include "cli/read/weight_slice.h"

/* One tensor of an output file. Its bytes are copied, or given, or made by targets. */
struct plan_entry {
    char *name;
    enum st_dtype dtype;
    int rank;
    int64_t shape[ST_RANK_LIMIT];
    const struct model_tensor *copied; /* NULL: not copied */
    void *given;                       /* NULL: not given */
    uint64_t bytes;
    uint64_t begin; /* in the file */
};

/* Where in a file a target's bytes go. */
struct plan_place {
    size_t entry;
    uint64_t offset; /* in the entry: the matrices of a stack follow each other */
};

/* A matrix that is quantized, or decoded to a plain dtype. */
struct plan_target {
    struct weight_slice slice;
    size_t file;
    const struct opaq_layout_row *scheme; /* NULL: decoded */
    struct opaq_spec spec;
    enum opaq_element dtype;    /* decoded: to this */
    bool is_written_transposed; /* decoded: written transposed */
    size_t set; /* with whom it shares its amax; NO_SET if its format has no scale for the tensor */
    struct plan_place data;
    struct plan_place scale;
    struct plan_place global;
    uint64_t data_row_bytes;
    uint64_t scale_row_bytes; /* of a row of blocks */
    uint64_t nonfinite;       /* NaNs and infinities that were quantized; counted by plan_run */
};
#define NO_SET ((size_t)-1)

/* Targets whose global scales must be the same, because engines multiply them as one matrix. */
struct plan_set {
    size_t *targets;
    size_t count;
    float amax;
    bool is_known;
};

struct plan_file {
    char *name;
    struct plan_entry *entries;
    size_t count;
    size_t capacity;
    struct st_pair *metadata;
    size_t metadata_count;
    size_t metadata_capacity;
    struct text header;
    uint64_t bytes; /* of the whole file */
};

struct plan {
    const struct weights *weights;
    struct plan_file *files; /* in the order of the model's */
    size_t file_count;
    struct plan_target *targets;
    size_t target_count;
    size_t target_capacity;
    struct plan_set *sets;
    size_t set_count;
    char **texts; /* that metadata point to */
    size_t text_count;
    size_t text_capacity;
};

/* Files like the model's, empty. The weights must outlive the plan. */
void plan_begin(struct plan *plan, const struct weights *weights);
void plan_free(struct plan *plan);

/* A tensor as it is, under another name and in another shape if these are not NULL. */
void plan_copy(struct plan *plan, const struct model_tensor *tensor, const char *name, const int64_t *shape,
               int rank);

/* Bytes that are known now; they are copied. */
void plan_give(struct plan *plan, size_t file, const char *name, enum st_dtype dtype, const int64_t *shape,
               int rank, const void *bytes);

/* A slice of a weight quantized as a row of opaq/layout.h stores it. The slice's name passes to the plan. */
enum opaq_status plan_quantize(struct plan *plan, struct weight_slice slice,
                               const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                               struct opaq_error *error);

/* All the matrices of a stack in one tensor each of codes, scales and global scales. `first` is the whole first matrix,
 * and its name passes to the plan. */
enum opaq_status plan_quantize_stack(struct plan *plan, struct weight_slice first,
                                     const struct opaq_layout_row *scheme, const struct opaq_spec *spec,
                                     struct opaq_error *error);

/* A quantized weight as floats, or floats of another dtype. gpt-oss's blocks become [experts, in, out], as its model holds
 * them. */
void plan_decode(struct plan *plan, const struct weight *weight, enum opaq_element dtype);

/* After the last: who shares scales, headers, places. Refuses two tensors of one name, and a header that no reader of
 * safetensors would take. */
enum opaq_status plan_finish(struct plan *plan, struct opaq_error *error);

/* Adds to a file's metadata; both texts live as long as the plan: plan_keep_text takes one over. */
void plan_metadata(struct plan *plan, size_t file, const char *key, const char *value);
void plan_keep_text(struct plan *plan, char *text);

uint64_t plan_bytes(const struct plan *plan);        /* of all files */
uint64_t plan_tensor_bytes(const struct plan *plan); /* of all tensors */

/* The shape that letters of opaq/layout.h give scales of a rows x columns matrix; returns the rank. */
int layout_shape(const char *letters, enum opaq_format format, int64_t rows, int64_t columns, int64_t *shape);

#endif

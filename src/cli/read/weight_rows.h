/* cli/read/weight_rows.h: rows of a weight out of its files, as floats. A chunk at a time, so that memory is that of the
 * chunk. */
#ifndef OPAQ_CLI_READ_WEIGHT_ROWS_H
#define OPAQ_CLI_READ_WEIGHT_ROWS_H

#include "cli/read/weights.h"

/* Memory of one thread, which grows as needed; all zero at first. */
struct row_memory {
    void *bytes[4];
    size_t capacity[4];
};
void row_memory_free(struct row_memory *memory);

/* Rows [first, first + count) of matrix `matrix` of a weight's stack, as a plain tensor [count, columns] in this memory:
 * a plain weight as it is stored, a quantized one as float32. For fp8blk2 `first` is a multiple of 128. */
enum opaq_status weight_rows(const struct model *model, const struct weight *weight, int64_t matrix,
                             int64_t first, int64_t count, struct row_memory *memory, struct opaq_view *rows,
                             struct opaq_error *error);

/* A quantized weight's as bf16 or f16 too. */
enum opaq_status weight_decoded(const struct model *model, const struct weight *weight, int64_t matrix,
                                int64_t first, int64_t count, enum opaq_element dtype,
                                struct row_memory *memory, struct opaq_view *rows, struct opaq_error *error);

/* The same as float32 whatever it is. */
enum opaq_status weight_floats(const struct model *model, const struct weight *weight, int64_t matrix,
                               int64_t first, int64_t count, struct row_memory *memory, const float **floats,
                               struct opaq_error *error);

/* What weight_rows or weight_slice_rows gave, as float32; may use the memory that they used. */
const float *rows_floats(const struct opaq_view *rows, struct row_memory *memory);

/* So many rows that a chunk has about `bytes` bytes in the file: at least one, and whole blocks. */
int64_t rows_in(const struct weight *weight, uint64_t bytes);

/* One of the slots of the memory with at least so many bytes, aligned to 64; what it held is lost. */
void *row_memory_take(struct row_memory *memory, int slot, size_t bytes);

#endif

/* cli/read/weight_rows.h: reads rows of a weight as floats, a chunk at a time, so that memory is proportional to the
 * chunk. */
#ifndef OPAQ_CLI_READ_WEIGHT_ROWS_H
#define OPAQ_CLI_READ_WEIGHT_ROWS_H

#include "cli/read/weights.h"

/* Buffers of one thread, which grow as needed; initialized with zeros. */
struct row_memory {
    void *bytes[4];
    size_t capacity[4];
};
void row_memory_free(struct row_memory *memory);

/* Rows [first, first + count) of matrix `matrix` of a weight's stack, as a plain tensor [count, columns] in this
 * memory: a plain weight as it is stored, a quantized one as float32. For fp8blk2 `first` is a multiple of 128. */
enum opaq_status weight_rows(const struct model *model, const struct weight *weight, int64_t matrix,
                             int64_t first, int64_t count, struct row_memory *memory, struct opaq_view *rows,
                             struct opaq_error *error);

/* The same for a quantized weight, as f32, bf16 or f16. */
enum opaq_status weight_decoded(const struct model *model, const struct weight *weight, int64_t matrix,
                                int64_t first, int64_t count, enum opaq_element dtype,
                                struct row_memory *memory, struct opaq_view *rows, struct opaq_error *error);

/* The same as float32 for any weight. */
enum opaq_status weight_floats(const struct model *model, const struct weight *weight, int64_t matrix,
                               int64_t first, int64_t count, struct row_memory *memory, const float **floats,
                               struct opaq_error *error);

/* Converts the result of weight_rows or weight_slice_rows to float32, in place or in the same memory. */
const float *rows_floats(const struct opaq_view *rows, struct row_memory *memory);

/* Number of rows with about `bytes` bytes in the file: at least one, and whole blocks. */
int64_t rows_in(const struct weight *weight, uint64_t bytes);

/* Buffer number `slot` with at least `bytes` bytes, aligned to 64; its contents are lost. */
void *row_memory_take(struct row_memory *memory, int slot, size_t bytes);

#endif

/* support_stored.h: rows as checkpoints store them, with their memory. Depends on support_quant.h. */
#ifndef SUPPORT_STORED_H
#define SUPPORT_STORED_H

#include "support_quant.h"

/* Each tensor is in an allocation of exactly its size. */
struct rows {
    struct opaq_stored stored;
};

/* As opaq_stored_describe describes `count` rows of q; the memory is 0xA5. */
struct rows rows_make(const struct tensor *q, int64_t count);
void rows_free(struct rows *rows);

/* data, scale, global; and the bytes of a contiguous one. */
struct opaq_tensor *rows_part(struct rows *rows, int i);
size_t rows_part_bytes(struct rows *rows, int i);

/* Changes the shape of a contiguous tensor. */
void rows_shape(struct opaq_tensor *tensor, int rank, const int64_t *shape);

/* Export and import that must succeed. */
struct rows rows_exported(const struct tensor *q, int64_t first, int64_t count);
void rows_import(const struct tensor *q, int64_t first, const struct opaq_stored *stored);

/* Random numbers, quantized. */
struct tensor sample(int64_t rows, int64_t columns, const struct opaq_spec *spec, uint64_t seed);
struct tensor sample_of(int64_t rows, int64_t columns, const char *text, uint64_t seed);

#endif

/* support_stored.c: rows as checkpoints store them. */
#include "support_stored.h"

#include <stdlib.h>

#include "check.h"
#include "support_spec.h"

struct opaq_tensor *rows_part(struct rows *rows, int i) {
    return i == 0 ? &rows->stored.data : i == 1 ? &rows->stored.scale : &rows->stored.global;
}

size_t rows_part_bytes(struct rows *rows, int i) {
    const struct opaq_tensor *tensor = rows_part(rows, i);
    size_t bytes = tensor->rank < 0 ? 0 : tensor->dtype == OPAQ_DTYPE_U8 ? 1 : 4;
    for (int d = 0; d < tensor->rank; ++d) {
        bytes *= (size_t)tensor->shape[d];
    }
    return bytes;
}

struct rows rows_make(const struct tensor *q, int64_t count) {
    struct rows rows;
    struct opaq_error error;
    if (opaq_stored_describe(&q->view.proto, count, &rows.stored, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    for (int i = 0; i < 3; ++i) {
        const size_t bytes = rows_part_bytes(&rows, i);
        CHECK(rows_part(&rows, i)->data == NULL);
        rows_part(&rows, i)->data = bytes > 0 ? malloc(bytes) : NULL;
        if (bytes > 0) {
            memset(rows_part(&rows, i)->data, 0xA5, bytes);
        }
    }
    return rows;
}

void rows_free(struct rows *rows) {
    for (int i = 0; i < 3; ++i) {
        free(rows_part(rows, i)->data);
    }
}

struct rows rows_exported(const struct tensor *q, int64_t first, int64_t count) {
    struct rows rows = rows_make(q, count);
    struct opaq_error error = {OPAQ_OK, ""};
    if (opaq_stored_export(&q->view, first, count, &rows.stored, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", spec_text(&q->view.proto.spec).text, error.text);
    }
    return rows;
}

void rows_import(const struct tensor *q, int64_t first, const struct opaq_stored *stored) {
    struct opaq_error error = {OPAQ_OK, ""};
    if (opaq_stored_import(&q->view, first, stored, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", spec_text(&q->view.proto.spec).text, error.text);
    }
}

void rows_shape(struct opaq_tensor *tensor, int rank, const int64_t *shape) {
    int64_t stride = 1;
    tensor->rank = rank;
    for (int i = rank - 1; i >= 0; --i) {
        tensor->shape[i] = shape[i];
        tensor->strides[i] = stride;
        stride *= shape[i] < 1 << 20 ? shape[i] : 1;
    }
}

struct tensor sample(int64_t rows, int64_t columns, const struct opaq_spec *spec, uint64_t seed) {
    struct tensor x = tensor_make(rows, columns, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_OUTLIERS, seed);
    struct tensor q = quantized(&x, spec, NULL);
    tensor_free(&x);
    return q;
}

struct tensor sample_of(int64_t rows, int64_t columns, const char *text, uint64_t seed) {
    const struct opaq_spec spec = spec_of(text);
    return sample(rows, columns, &spec, seed);
}

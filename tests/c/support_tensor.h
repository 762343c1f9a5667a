/* support_tensor.h: tensors with their memory, for tests. Depends on opaq's public headers. */
#ifndef SUPPORT_TENSOR_H
#define SUPPORT_TENSOR_H

#include "opaq/opaq.h"

static const struct opaq_device tensor_cpu = {OPAQ_DEVICE_CPU, 0};

/* A tensor and the memory its view points to; every buffer is in an allocation of exactly its size, so that
 * AddressSanitizer detects an access beyond it. The memory is initialized to 0xA5. */
struct tensor {
    struct opaq_view view;
};

/* A plain tensor if the spec's text is NULL. Ends the test program on an error: tests depend on these. */
struct tensor tensor_make(int64_t rows, int64_t columns, enum opaq_element dtype, const char *spec);
struct tensor tensor_make_proto(const struct opaq_proto *proto);
void tensor_free(struct tensor *tensor);

/* The bytes of buffer i. */
size_t tensor_bytes(const struct tensor *tensor, int index);

/* Reads a plain tensor's element as float, and writes it. */
float tensor_get(const struct tensor *tensor, int64_t row, int64_t column);
void tensor_set(struct tensor *tensor, int64_t row, int64_t column, float value);

/* Kinds of contents; the numbers are equal on every machine. */
enum tensor_fill {
    FILL_NORMAL,
    FILL_OUTLIERS,
    FILL_ZERO,
    FILL_TINY,
    FILL_HUGE,
    FILL_NAN,
    FILL_INFINITY,
    FILL_COUNT
};
void tensor_fill(struct tensor *tensor, enum tensor_fill fill, uint64_t seed);

#endif

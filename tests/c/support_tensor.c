/* support_tensor.c: tensors with their memory, for tests. */
#include "support_tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what, const struct opaq_error *error) {
    printf("  %s: %s\n", what, error == NULL ? "no memory" : error->text);
    exit(1);
}

struct tensor tensor_make_proto(const struct opaq_proto *proto) {
    struct tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.view.proto = *proto;
    tensor.view.row_stride = proto->is_quantized ? 0 : opaq_proto_columns(proto);
    const int count = opaq_proto_buffer_count(proto);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        struct opaq_error error;
        if (opaq_proto_buffer(proto, i, &buffer, &error) != OPAQ_OK) {
            fail("proto_buffer", &error);
        }
        void *memory = malloc(buffer.bytes > 0 ? buffer.bytes : 1);
        if (memory == NULL) {
            fail("malloc", NULL);
        }
        memset(memory, 0xA5, buffer.bytes);
        tensor.view.buffer[i] = (struct opaq_span){memory, buffer.bytes};
    }
    return tensor;
}

struct tensor tensor_make(int64_t rows, int64_t columns, enum opaq_element dtype, const char *text) {
    const int64_t shape[2] = {rows, columns};
    struct opaq_spec spec;
    struct opaq_proto proto;
    struct opaq_error error;
    if (text != NULL && opaq_spec_parse(text, strlen(text), &spec, &error) != OPAQ_OK) {
        fail(text, &error);
    }
    if (opaq_proto_make(shape, 2, dtype, text == NULL ? NULL : &spec, tensor_cpu, &proto, &error) != OPAQ_OK) {
        fail("proto_make", &error);
    }
    return tensor_make_proto(&proto);
}

void tensor_free(struct tensor *tensor) {
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        free(tensor->view.buffer[i].data);
    }
    memset(tensor, 0, sizeof *tensor);
}

size_t tensor_bytes(const struct tensor *tensor, int index) { return tensor->view.buffer[index].bytes; }

float tensor_get(const struct tensor *tensor, int64_t row, int64_t column) {
    const int64_t index = row * tensor->view.row_stride + column;
    const enum opaq_element dtype = (enum opaq_element)tensor->view.proto.dtype;
    const void *data = tensor->view.buffer[0].data;
    return dtype == OPAQ_F32 ? ((const float *)data)[index]
                             : opaq_element_decode(dtype, ((const uint16_t *)data)[index]);
}

void tensor_set(struct tensor *tensor, int64_t row, int64_t column, float value) {
    const int64_t index = row * tensor->view.row_stride + column;
    const enum opaq_element dtype = (enum opaq_element)tensor->view.proto.dtype;
    void *data = tensor->view.buffer[0].data;
    if (dtype == OPAQ_F32) {
        ((float *)data)[index] = value;
    } else {
        ((uint16_t *)data)[index] = (uint16_t)opaq_element_encode(dtype, value, OPAQ_IEEE);
    }
}

/* splitmix64, independent of the library. */
static uint64_t next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Approximately normal: the sum of twelve uniform numbers, minus six. */
static float normal(uint64_t *state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) {
        sum += (float)(next(state) >> 40) * 0x1p-24f;
    }
    return sum;
}

static float value_of(enum tensor_fill fill, uint64_t *state, float largest) {
    const float base = normal(state);
    const uint64_t dice = next(state) % 37;
    switch (fill) {
    case FILL_OUTLIERS:
        return dice == 0 ? base * 100.0f : base;
    case FILL_ZERO:
        return dice % 2 ? 0.0f : -0.0f;
    case FILL_TINY:
        return base * (largest > 1e6f ? 0x1p-140f : 0x1p-20f);
    case FILL_HUGE:
        return base * 0.1f * largest;
    case FILL_NAN:
        return dice == 0 ? (float)NAN : base;
    case FILL_INFINITY:
        return dice == 0 ? (base < 0.0f ? -(float)INFINITY : (float)INFINITY) : base;
    case FILL_NORMAL:
    case FILL_COUNT:
        break;
    }
    return base;
}

void tensor_fill(struct tensor *tensor, enum tensor_fill fill, uint64_t seed) {
    uint64_t state = seed * 1000003u + (uint64_t)fill;
    const int64_t rows = opaq_proto_rows(&tensor->view.proto);
    const int64_t columns = opaq_proto_columns(&tensor->view.proto);
    const float largest = opaq_element_info((enum opaq_element)tensor->view.proto.dtype)->largest;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(tensor, r, c, value_of(fill, &state, largest));
        }
    }
}

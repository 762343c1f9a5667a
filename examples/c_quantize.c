/* c_quantize.c: quantizes a matrix to NVFP4 and back, with only a C compiler and libopaq. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "opaq/opaq.h"

int main(void) {
    enum { ROWS = 4, COLUMNS = 64 };
    const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};
    const int64_t shape[2] = {ROWS, COLUMNS};
    float x[ROWS * COLUMNS];
    float y[ROWS * COLUMNS];
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        x[i] = sinf((float)i) * (float)(1 + i % 7);
    }

    struct opaq_error error;
    struct opaq_spec spec;
    struct opaq_proto proto;
    struct opaq_view source;
    struct opaq_view quantized;
    struct opaq_view result;
    size_t bytes = 0;
    void *memory = NULL;
    if (opaq_spec_parse("nvfp4", 5, &spec, &error) != OPAQ_OK || /* the quantizer */
        opaq_proto_make(shape, 2, OPAQ_F32, &spec, cpu, &proto, &error) !=
            OPAQ_OK ||                                                          /* the tensor, without data */
        opaq_view_bind_bytes(&proto, &bytes, &error) != OPAQ_OK ||              /* its size in bytes */
        (memory = aligned_alloc(64, bytes)) == NULL ||                          /* owned by the caller */
        opaq_view_bind(&proto, memory, bytes, &quantized, &error) != OPAQ_OK || /* the tensor, with data */
        opaq_view_plain(shape, NULL, 2, OPAQ_F32, cpu, x, sizeof x, &source, &error) != OPAQ_OK ||
        opaq_view_plain(shape, NULL, 2, OPAQ_F32, cpu, y, sizeof y, &result, &error) != OPAQ_OK ||
        opaq_quantize(&source, NULL, NULL, &quantized, &error) != OPAQ_OK ||
        opaq_dequantize(&quantized, 0, NULL, &result, &error) != OPAQ_OK) {
        fprintf(stderr, "%s\n", memory == NULL && bytes > 0 ? "no memory" : error.text);
        free(memory);
        return 1;
    }

    for (int i = 0; i < opaq_proto_buffer_count(&proto); ++i) {
        struct opaq_buffer buffer;
        if (opaq_proto_buffer(&proto, i, &buffer, &error) == OPAQ_OK) {
            printf("%-20s %-5s %6zu bytes\n", buffer.name, opaq_element_info(buffer.element)->name,
                   buffer.bytes);
        }
    }
    printf("x[1] = %.4f, after NVFP4 %.4f\n", (double)x[1], (double)y[1]);
    free(memory);
    return 0;
}

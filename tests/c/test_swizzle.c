/* test_swizzle.c: the 128x4 scale tiles against their definition view(R/128, 4, 32, C/4, 4).permute(0, 3, 2, 1, 4),
 * and the option "swizzle" against the plain scales. */
#include <stdlib.h>

#include "check.h"
#include "support_quant.h"
#include "support_spec.h"

/* The definition, by indices: entry (a, b, c, d, e) of the view is element (a, d, c, b, e) of the permuted one. */
static void permute(const uint8_t *plain, int64_t rows, int64_t columns, uint8_t *swizzled) {
    uint8_t *out = swizzled;
    for (int64_t a = 0; a < rows / 128; ++a) {
        for (int64_t d = 0; d < columns / 4; ++d) {
            for (int64_t c = 0; c < 32; ++c) {
                for (int64_t b = 0; b < 4; ++b) {
                    for (int64_t e = 0; e < 4; ++e) {
                        *out++ = plain[(a * 128 + b * 32 + c) * columns + d * 4 + e];
                    }
                }
            }
        }
    }
}

static uint8_t *bytes_of(size_t count) {
    uint8_t *bytes = malloc(count > 0 ? count : 1);
    if (bytes == NULL) {
        exit(1);
    }
    for (size_t i = 0; i < count; ++i) {
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    return bytes;
}

static void against_the_definition(void) {
    static const int64_t sizes[][2] = {{128, 4}, {128, 8}, {256, 4}, {384, 20},
                                       {128, 0}, {0, 4},   {0, 0},   {1024, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        const int64_t rows = sizes[i][0];
        const int64_t columns = sizes[i][1];
        const size_t count = (size_t)(rows * columns);
        uint8_t *plain = bytes_of(count);
        uint8_t *expected = bytes_of(count);
        uint8_t *actual = bytes_of(count);
        uint8_t *back = bytes_of(count);
        memset(back, 0, count);
        permute(plain, rows, columns, expected);
        CHECK_EQ_INT(opaq_scale_swizzle(plain, rows, columns, actual, NULL), OPAQ_OK);
        CHECK_BYTES(actual, expected, count, "%lld x %lld", (long long)rows, (long long)columns);
        CHECK_EQ_INT(opaq_scale_unswizzle(actual, rows, columns, back, NULL), OPAQ_OK);
        CHECK_BYTES(back, plain, count, "%lld x %lld and back", (long long)rows, (long long)columns);
        free(back);
        free(actual);
        free(expected);
        free(plain);
    }
}

/* The formula of docs/formats.md, "Swizzled scales". */
static void against_the_formula(void) {
    enum { R = 256, C = 12 };
    uint8_t *plain = bytes_of((size_t)R * C);
    uint8_t *actual = bytes_of((size_t)R * C);
    CHECK_EQ_INT(opaq_scale_swizzle(plain, R, C, actual, NULL), OPAQ_OK);
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            const int at = ((r / 128) * (C / 4) + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4;
            CHECK_EQ_INT(actual[at], plain[r * C + c]);
        }
    }
    free(actual);
    free(plain);
}

/* The swizzled copy of a scale buffer by docs/formats.md: MX columnwise scales are transposed first. */
static void check_scales(const struct tensor *plain, const struct tensor *tiled, int usage, const char *what) {
    const struct opaq_proto *proto = &plain->view.proto;
    const int index = opaq_proto_find(proto, OPAQ_ROLE_SCALE, (enum opaq_usage)usage);
    struct opaq_buffer buffer;
    (void)opaq_proto_buffer(proto, index, &buffer, NULL);
    const int flip = usage == OPAQ_COLUMNWISE && proto->spec.format != OPAQ_NVFP4;
    const int64_t rows = buffer.shape[flip];
    const int64_t columns = buffer.shape[!flip];
    const uint8_t *scales = plain->view.buffer[index].data;
    uint8_t *upright = bytes_of(buffer.bytes);
    uint8_t *expected = bytes_of(buffer.bytes);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            upright[r * columns + c] = flip ? scales[c * rows + r] : scales[r * columns + c];
        }
    }
    permute(upright, rows, columns, expected);
    CHECK_BYTES(tiled->view.buffer[index].data, expected, buffer.bytes, "%s, usage %d", what, usage);
    free(expected);
    free(upright);
}

static void option_against_plain_scales(void) {
    static const int64_t sizes[][2] = {{1, 1}, {33, 100}, {130, 260}, {257, 65}, {0, 64}, {64, 0}};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    int seen = 0;
    for (int i = 0; i < list.count; ++i) {
        const struct opaq_spec swizzled = list.spec[i];
        struct opaq_spec plain = swizzled;
        if ((swizzled.options & OPAQ_SWIZZLED) == 0) {
            continue;
        }
        plain.options &= (uint16_t)~OPAQ_SWIZZLED;
        const struct spec_text text = spec_text(&swizzled);
        const int64_t *size = sizes[seen++ % (int)(sizeof sizes / sizeof sizes[0])];
        struct tensor x = tensor_make(size[0], size[1], OPAQ_BF16, NULL);
        tensor_fill(&x, FILL_OUTLIERS, (uint64_t)i);
        struct tensor a = quantized(&x, &plain, NULL);
        struct tensor b = quantized(&x, &swizzled, NULL);
        for (int usage = 1; usage <= 2; ++usage) {
            if (swizzled.usage & usage) {
                struct tensor from_a = dequantized(&a, usage);
                struct tensor from_b = dequantized(&b, usage);
                check_scales(&a, &b, usage, text.text);
                CHECK(first_difference(&from_a, &from_b) < 0);
                tensor_free(&from_a);
                tensor_free(&from_b);
            }
        }
        for (int k = 0; k < opaq_proto_buffer_count(&a.view.proto); ++k) { /* the other buffers are unchanged */
            struct opaq_buffer buffer;
            (void)opaq_proto_buffer(&a.view.proto, k, &buffer, NULL);
            if (buffer.role != OPAQ_ROLE_SCALE) {
                CHECK_BYTES(b.view.buffer[k].data, a.view.buffer[k].data, buffer.bytes, "%s %s", text.text,
                            buffer.name);
            }
        }
        tensor_free(&a);
        tensor_free(&b);
        tensor_free(&x);
    }
    printf("  %d specs\n", seen);
    spec_list_free(&list);
}

static void bad_arguments(void) {
    static const int64_t bad[][2] = {{127, 4}, {128, 3}, {-128, 4}, {128, -4}, {64, 4}, {1, 1}};
    uint8_t from[512] = {0};
    uint8_t to[512];
    uint8_t before[512];
    struct opaq_error error;
    memset(to, 0xA5, sizeof to);
    memset(before, 0xA5, sizeof before);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        char numbers[64];
        (void)snprintf(numbers, sizeof numbers, "%lld x %lld", (long long)bad[i][0], (long long)bad[i][1]);
        CHECK_EQ_INT(opaq_scale_swizzle(from, bad[i][0], bad[i][1], to, &error), OPAQ_ERROR_SHAPE);
        CHECK(strstr(error.text, numbers) != NULL && strstr(error.text, "scale_swizzle") != NULL);
        CHECK_EQ_INT(opaq_scale_unswizzle(from, bad[i][0], bad[i][1], to, &error), OPAQ_ERROR_SHAPE);
        CHECK(strstr(error.text, numbers) != NULL && strstr(error.text, "scale_unswizzle") != NULL);
        CHECK_EQ_INT(opaq_scale_swizzle(from, bad[i][0], bad[i][1], to, NULL), OPAQ_ERROR_SHAPE);
    }
    CHECK_EQ_INT(opaq_scale_swizzle(from, (int64_t)1 << 61, 4, to, &error), OPAQ_ERROR_OVERFLOW);
    CHECK_EQ_INT(opaq_scale_swizzle(NULL, 128, 4, to, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_scale_swizzle(from, 128, 4, NULL, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_scale_swizzle(from, 128, 4, from, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_scale_unswizzle(NULL, 128, 4, to, &error), OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "512") != NULL);
    CHECK_EQ_INT(opaq_scale_swizzle(NULL, 0, 4, NULL, &error), OPAQ_OK);
    CHECK_BYTES(to, before, sizeof to, "the output after errors");
}

static const struct test_case tests[] = {TEST(against_the_definition), TEST(against_the_formula),
                                         TEST(option_against_plain_scales), TEST(bad_arguments)};
TEST_MAIN(tests)

/* demo_rules.c: how the scale rules differ: blocks of chosen values, quantized with each rule of a format.
 *
 * A cell has the block's scale and the codes of its first three elements. The second table quantizes a tensor of
 * normal numbers: the percentage of scales and of data bytes that differ from those of rule te. The tables in docs/formats.md
 * are this program's output. Only the public headers are used. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

enum { BLOCK = 128 }; /* the longest block; shorter blocks are its first elements */
enum { NORMAL_ROWS = 256, NORMAL_COLUMNS = 2048 };

/* The first three elements; the rest of the tensor is zero. */
static const struct {
    const char *name;
    float values[3];
} inputs[] = {
    {"0, -0, 0", {0.0f, -0.0f, 0.0f}},
    {"1, -0, 0", {1.0f, -0.0f, 0.0f}},
    {"1 + 2^-23, 0, 0", {1.0f + 0x1p-23f, 0.0f, 0.0f}},
    {"1.5, 0.5, 0.1", {1.5f, 0.5f, 0.1f}},
    {"1.75, 0.5, 0.1", {1.75f, 0.5f, 0.1f}},
    {"448 + 2^-15, 1, 0", {448.0f + 0x1p-15f, 1.0f, 0.0f}},
    {"6, 0.75, -0.25", {6.0f, 0.75f, -0.25f}},
    {"7, 1, -0.1", {7.0f, 1.0f, -0.1f}},
    {"2^-149, 0, 0", {0x1p-149f, 0.0f, 0.0f}},
    {"NaN, 1, 0", {(float)NAN, 1.0f, 0.0f}},
    {"infinity, 1, 0", {(float)INFINITY, 1.0f, 0.0f}},
};

static void stop(const struct opaq_error *error) {
    fprintf(stderr, "demo_rules: %s\n", error == NULL ? "no memory" : error->text);
    exit(1);
}

/* The scale of the first block and the first codes, as "7f 38 80 00" or, with a float scale, "0.00223 7e 38 00". */
static void describe(const struct opaq_view *q, char cell[32]) {
    const uint8_t *data = q->buffer[opaq_proto_find(&q->proto, OPAQ_ROLE_DATA, OPAQ_ROWWISE)].data;
    const void *scale = q->buffer[opaq_proto_find(&q->proto, OPAQ_ROLE_SCALE, OPAQ_ROWWISE)].data;
    struct opaq_buffer buffer;
    char number[16];
    (void)opaq_proto_buffer(&q->proto, opaq_proto_find(&q->proto, OPAQ_ROLE_SCALE, OPAQ_ROWWISE), &buffer,
                            NULL);
    if (buffer.element == OPAQ_F32) {
        (void)snprintf(number, sizeof number, "%.3g", (double)*(const float *)scale);
    } else {
        (void)snprintf(number, sizeof number, "%02x", *(const uint8_t *)scale);
    }
    if (q->proto.spec.element == OPAQ_E2M1) {
        (void)snprintf(cell, 32, "%s: %x %x %x", number, data[0] & 15u, data[0] >> 4u, data[1] & 15u);
    } else {
        (void)snprintf(cell, 32, "%s: %02x %02x %02x", number, data[0], data[1], data[2]);
    }
}

/* Quantizes `rows` rows. The caller frees the first buffer, which is the start of the only allocation. */
static struct opaq_view quantize(const float *x, int64_t rows, int64_t columns, const struct opaq_spec *spec) {
    const int64_t shape[2] = {rows, columns};
    const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};
    const size_t x_bytes = (size_t)(rows * columns) * sizeof *x;
    struct opaq_proto proto;
    struct opaq_view source;
    struct opaq_view q;
    struct opaq_error error;
    size_t bytes = 0;
    float *copy = malloc(x_bytes);
    if (opaq_proto_make(shape, 2, OPAQ_F32, spec, cpu, &proto, &error) != OPAQ_OK ||
        opaq_view_bind_bytes(&proto, &bytes, &error) != OPAQ_OK) {
        stop(&error);
    }
    void *memory = aligned_alloc(64, bytes);
    if (copy == NULL || memory == NULL) {
        stop(NULL);
    }
    memcpy(copy, x, x_bytes);
    if (opaq_view_bind(&proto, memory, bytes, &q, &error) != OPAQ_OK ||
        opaq_view_plain(shape, NULL, 2, OPAQ_F32, cpu, copy, x_bytes, &source, &error) != OPAQ_OK ||
        opaq_quantize(&source, NULL, NULL, &q, &error) != OPAQ_OK) {
        stop(&error);
    }
    free(copy);
    return q;
}

static void show_format(enum opaq_format format) {
    const struct opaq_format_row *row = opaq_format_row(format);
    struct opaq_spec spec;
    (void)opaq_spec_make(format, &spec, NULL);
    printf("\n%-18s", row->name);
    for (int rule = 0; rule < OPAQ_RULE_COUNT; ++rule) {
        if (row->rules & 1u << rule) {
            printf(" %-19s", opaq_rule_name((enum opaq_rule)rule));
        }
    }
    printf("\n");
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; ++i) {
        float x[BLOCK] = {0.0f};
        memcpy(x, inputs[i].values, sizeof inputs[i].values);
        printf("%-18s", inputs[i].name);
        for (int rule = 0; rule < OPAQ_RULE_COUNT; ++rule) {
            if (row->rules & 1u << rule) {
                char cell[32];
                spec.rule = (uint8_t)rule;
                const struct opaq_view q = quantize(x, 1, BLOCK, &spec);
                describe(&q, cell);
                free(q.buffer[0].data);
                printf(" %-19s", cell);
            }
        }
        printf("\n");
    }
}

/* The percentage of the buffer's entries that differ. */
static double difference(const struct opaq_view *a, const struct opaq_view *b, enum opaq_role role) {
    const int index = opaq_proto_find(&a->proto, role, OPAQ_ROWWISE);
    struct opaq_buffer buffer;
    (void)opaq_proto_buffer(&a->proto, index, &buffer, NULL);
    const char *first = a->buffer[index].data;
    const char *second = b->buffer[index].data;
    const size_t entries = buffer.bytes / (size_t)buffer.entry_bytes;
    size_t different = 0;
    for (size_t i = 0; i < buffer.bytes; i += (size_t)buffer.entry_bytes) {
        different += memcmp(first + i, second + i, (size_t)buffer.entry_bytes) != 0;
    }
    return 100.0 * (double)different / (double)entries;
}

static void compare_rules(enum opaq_format format, const float *x) {
    const struct opaq_format_row *row = opaq_format_row(format);
    struct opaq_spec spec;
    (void)opaq_spec_make(format, &spec, NULL);
    const struct opaq_view te = quantize(x, NORMAL_ROWS, NORMAL_COLUMNS, &spec);
    for (int rule = OPAQ_RULE_TE + 1; rule < OPAQ_RULE_COUNT; ++rule) {
        if (row->rules & 1u << rule) {
            spec.rule = (uint8_t)rule;
            const struct opaq_view other = quantize(x, NORMAL_ROWS, NORMAL_COLUMNS, &spec);
            printf("%-9s %-19s %9.3f %9.3f\n", row->name, opaq_rule_name((enum opaq_rule)rule),
                   difference(&te, &other, OPAQ_ROLE_SCALE), difference(&te, &other, OPAQ_ROLE_DATA));
            free(other.buffer[0].data);
        }
    }
    free(te.buffer[0].data);
}

static void compare_on_normal_numbers(void) {
    float *x = malloc((size_t)NORMAL_ROWS * NORMAL_COLUMNS * sizeof *x);
    uint64_t state = 7;
    if (x == NULL) {
        stop(NULL);
    }
    for (int i = 0; i < NORMAL_ROWS * NORMAL_COLUMNS; ++i) {
        x[i] = -6.0f; /* the sum of twelve uniform numbers less 6 is approximately normal */
        for (int j = 0; j < 12; ++j) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            x[i] += (float)(state >> 40) * 0x1p-24f;
        }
    }
    printf("\n%d x %d normal numbers: percentage that differs from te\n%-9s %-19s %9s %9s\n", NORMAL_ROWS,
           NORMAL_COLUMNS, "format", "rule", "scales", "data");
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        compare_rules((enum opaq_format)format, x);
    }
    free(x);
}

int main(void) {
    printf(
        "How the scale rules differ: the first block's scale, then the codes of its first three elements.\n");
    show_format(OPAQ_FP8BLK1);
    show_format(OPAQ_MXFP8);
    show_format(OPAQ_MXFP4);
    show_format(OPAQ_NVFP4);
    compare_on_normal_numbers();
    return 0;
}

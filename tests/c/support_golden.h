/* support_golden.h: reads the files that tests/golden/write_golden.py writes. Depends on opaq's public headers. */
#ifndef SUPPORT_GOLDEN_H
#define SUPPORT_GOLDEN_H

#include <stdbool.h>
#include <stdint.h>

#include "opaq/opaq.h"

struct golden_input {
    enum opaq_element dtype;
    int64_t rows;
    int64_t columns;
    int64_t row_stride;
    struct opaq_span data;
};

struct golden_buffer {
    const char *name; /* not terminated */
    int name_length;
    struct opaq_span data;
};

struct golden_record {
    const char *spec; /* not terminated */
    int spec_length;
    const char *name; /* not terminated */
    int name_length;
    const struct golden_input *input;
    struct opaq_random random;
    bool has_scale;
    float scale;
    int buffer_count;
    struct golden_buffer buffer[OPAQ_BUFFER_LIMIT];
    bool has_amax;
    float amax;
    int dequant_count;
    struct {
        int usage;
        struct opaq_span values; /* float32, rows x columns */
    } dequant[2];
};

struct golden_file {
    uint8_t *bytes;
    int64_t input_count;
    struct golden_input *input;
    int64_t record_count;
    struct golden_record *record;
};

/* Reads the file of a format from $OPAQ_GOLDEN_DIR; prints and returns false if it is missing or invalid. */
bool golden_read(const char *format, struct golden_file *file);
void golden_free(struct golden_file *file);

#endif

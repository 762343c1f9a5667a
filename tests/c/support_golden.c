/* support_golden.c: reads golden files. The container is described in tests/golden/write_golden.py. */
#include "support_golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cursor {
    uint8_t *at;
    uint8_t *end;
    bool broken;
};

static void take(struct cursor *cursor, void *to, size_t bytes) {
    if (cursor->broken || (size_t)(cursor->end - cursor->at) < bytes) {
        cursor->broken = true;
        memset(to, 0, bytes);
        return;
    }
    memcpy(to, cursor->at, bytes);
    cursor->at += bytes;
}

static uint32_t take_u32(struct cursor *cursor) {
    uint32_t value;
    take(cursor, &value, sizeof value);
    return value;
}

static uint8_t take_u8(struct cursor *cursor) {
    uint8_t value;
    take(cursor, &value, sizeof value);
    return value;
}

static int64_t take_i64(struct cursor *cursor) {
    int64_t value;
    take(cursor, &value, sizeof value);
    return value;
}

static float take_f32(struct cursor *cursor) {
    float value;
    take(cursor, &value, sizeof value);
    return value;
}

/* A span within the file's memory. */
static struct opaq_span take_span(struct cursor *cursor, size_t bytes) {
    struct opaq_span span = {cursor->at, bytes};
    if (cursor->broken || (size_t)(cursor->end - cursor->at) < bytes) {
        cursor->broken = true;
        return (struct opaq_span){NULL, 0};
    }
    cursor->at += bytes;
    return span;
}

static const char *take_text(struct cursor *cursor, int *length) {
    uint16_t bytes;
    take(cursor, &bytes, sizeof bytes);
    *length = bytes;
    return take_span(cursor, bytes).data;
}

static void take_input(struct cursor *cursor, struct golden_input *input) {
    input->dtype = (enum opaq_element)take_u32(cursor);
    input->rows = take_i64(cursor);
    input->columns = take_i64(cursor);
    input->row_stride = take_i64(cursor);
    input->data = take_span(cursor, take_u32(cursor));
}

static void take_record(struct cursor *cursor, const struct golden_file *file, struct golden_record *record) {
    record->spec = take_text(cursor, &record->spec_length);
    record->name = take_text(cursor, &record->name_length);
    const uint32_t input = take_u32(cursor);
    cursor->broken |= input >= file->input_count;
    record->input = cursor->broken ? NULL : &file->input[input];
    record->random.seed = (uint64_t)take_i64(cursor);
    record->random.offset = (uint64_t)take_i64(cursor);
    record->has_scale = take_u8(cursor);
    record->scale = take_f32(cursor);
    record->buffer_count = (int)take_u32(cursor);
    cursor->broken |= record->buffer_count > OPAQ_BUFFER_LIMIT;
    for (int i = 0; !cursor->broken && i < record->buffer_count; ++i) {
        struct golden_buffer *buffer = &record->buffer[i];
        buffer->name = take_text(cursor, &buffer->name_length);
        buffer->data = take_span(cursor, take_u32(cursor));
    }
    record->has_amax = take_u8(cursor);
    record->amax = take_f32(cursor);
    record->dequant_count = (int)take_u32(cursor);
    cursor->broken |= record->dequant_count > 2;
    for (int i = 0; !cursor->broken && i < record->dequant_count; ++i) {
        record->dequant[i].usage = take_u8(cursor);
        record->dequant[i].values = take_span(cursor, take_u32(cursor));
    }
}

static bool read_whole(const char *path, uint8_t **bytes, size_t *size) {
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        return false;
    }
    size_t capacity = (size_t)1 << 16;
    *size = 0;
    *bytes = malloc(capacity);
    while (*bytes != NULL) {
        *size += fread(*bytes + *size, 1, capacity - *size, stream);
        if (*size < capacity) {
            break;
        }
        capacity *= 2;
        uint8_t *grown = realloc(*bytes, capacity);
        if (grown == NULL) {
            free(*bytes);
        }
        *bytes = grown;
    }
    fclose(stream);
    return *bytes != NULL;
}

bool golden_read(const char *format, struct golden_file *file) {
    const char *folder = getenv("OPAQ_GOLDEN_DIR");
    char path[1024];
    size_t size;
    memset(file, 0, sizeof *file);
    (void)snprintf(path, sizeof path, "%s/%s.golden", folder == NULL ? "tests/golden" : folder, format);
    if (!read_whole(path, &file->bytes, &size)) {
        printf("  %s cannot be read\n", path);
        return false;
    }
    struct cursor cursor = {file->bytes, file->bytes + size, false};
    const struct opaq_span magic = take_span(&cursor, 8);
    cursor.broken |= magic.data == NULL || memcmp(magic.data, "OPAQGOLD", 8) != 0 || take_u32(&cursor) != 1;
    file->input_count = take_u32(&cursor);
    file->input = calloc((size_t)file->input_count + 1, sizeof *file->input);
    for (int64_t i = 0; !cursor.broken && file->input != NULL && i < file->input_count; ++i) {
        take_input(&cursor, &file->input[i]);
    }
    file->record_count = take_u32(&cursor);
    file->record = calloc((size_t)file->record_count + 1, sizeof *file->record);
    for (int64_t i = 0; !cursor.broken && file->record != NULL && i < file->record_count; ++i) {
        take_record(&cursor, file, &file->record[i]);
    }
    if (cursor.broken || cursor.at != cursor.end || file->record == NULL || file->record_count == 0) {
        printf("  %s is not a golden file of version 1\n", path);
        golden_free(file);
        return false;
    }
    return true;
}

void golden_free(struct golden_file *file) {
    free(file->record);
    free(file->input);
    free(file->bytes);
    memset(file, 0, sizeof *file);
}

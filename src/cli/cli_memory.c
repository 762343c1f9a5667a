/* cli/cli_memory.c: see cli_memory.h. */
#include "cli/cli_memory.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(void *memory, size_t count, size_t size) {
    if (memory == NULL) {
        fprintf(stderr, "opaq: out of memory: %zu times %zu bytes\n", count, size);
        exit(3);
    }
    return memory;
}

void *alloc_array(size_t count, size_t size) {
    return must(calloc(count == 0 ? 1 : count, size == 0 ? 1 : size), count, size);
}

void *realloc_array(void *old, size_t count, size_t size) {
    const size_t bytes = size != 0 && count > SIZE_MAX / 2 / size ? 0 : count * size;
    if (bytes == 0 && count != 0 && size != 0) {
        return must(NULL, count, size);
    }
    return must(realloc(old, bytes == 0 ? 1 : bytes), count, size);
}

char *copy_text(const char *text, size_t length) {
    char *const copy = alloc_array(length + 1, 1);
    if (length != 0) {
        memcpy(copy, text, length);
    }
    return copy;
}

void *alloc_aligned(size_t bytes) {
    void *memory = NULL;
    return must(posix_memalign(&memory, 64, bytes == 0 ? 64 : bytes) == 0 ? memory : NULL, bytes, 1);
}

void *grow_array(void *array, size_t count, size_t *capacity, size_t size) {
    if (count < *capacity) {
        return array;
    }
    *capacity = *capacity == 0 ? 16 : *capacity * 2;
    return realloc_array(array, *capacity, size);
}

static void text_reserve(struct text *text, size_t more) {
    if (text->capacity - text->length > more) {
        return;
    }
    size_t capacity = text->capacity == 0 ? 64 : text->capacity;
    while (capacity - text->length <= more) {
        capacity *= 2;
    }
    text->bytes = realloc_array(text->bytes, capacity, 1);
    text->capacity = capacity;
}

void text_add(struct text *text, const char *bytes, size_t length) {
    text_reserve(text, length);
    if (length != 0) {
        memcpy(text->bytes + text->length, bytes, length);
    }
    text->length += length;
    text->bytes[text->length] = '\0';
}

void text_print(struct text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) {
        return;
    }
    text_reserve(text, (size_t)length);
    va_start(arguments, format);
    vsnprintf(text->bytes + text->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    text->length += (size_t)length;
}

void text_free(struct text *text) {
    free(text->bytes);
    *text = (struct text){NULL, 0, 0};
}

const char *text_get(const struct text *text) { return text->bytes == NULL ? "" : text->bytes; }

/* cli/cli_memory.h: memory and growable texts. When an allocation fails the process prints a message and exits,
 * so none of these functions returns an error; partial output files are removed at exit, see output_file.h. */
#ifndef OPAQ_CLI_CLI_MEMORY_H
#define OPAQ_CLI_CLI_MEMORY_H

#include <stddef.h>

/* Array of `count` elements of `size` bytes, zeroed; fails on overflow. */
void *alloc_array(size_t count, size_t size);

/* `old` may be NULL; added elements are uninitialized. */
void *realloc_array(void *old, size_t count, size_t size);

/* A zero-terminated copy of `length` bytes of `text`; released with free(). */
char *copy_text(const char *text, size_t length);

/* Aligned to 64 bytes, uninitialized; released with free(). */
void *alloc_aligned(size_t bytes);

/* Makes room for one more element by doubling the capacity; returns the array, which may have moved. */
void *grow_array(void *array, size_t count, size_t *capacity, size_t size);

/* A growable text. All zero is the empty text; `bytes` is then NULL. */
struct text {
    char *bytes; /* zero-terminated once anything was added */
    size_t length;
    size_t capacity;
};
void text_add(struct text *text, const char *bytes, size_t length);
void text_print(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_free(struct text *text);

/* The bytes, "" for the empty text. */
const char *text_get(const struct text *text);

#endif

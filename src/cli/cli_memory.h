/* cli/cli_memory.h: memory and texts that grow. The command ends with a sentence when memory runs out, so nothing here
 * fails; files that are half written go by their temporary names, see output_file.h. */
#ifndef OPAQ_CLI_CLI_MEMORY_H
#define OPAQ_CLI_CLI_MEMORY_H

#include <stddef.h>

/* `count` things of `size` bytes, all zero. */
void *alloc_array(size_t count, size_t size);

/* `old` may be NULL; what is new is not set. */
void *realloc_array(void *old, size_t count, size_t size);

/* A terminated copy of `length` bytes of `text`. */
char *copy_text(const char *text, size_t length);

/* Aligned to 64 bytes, not set; released with free(). */
void *alloc_aligned(size_t bytes);

/* Room for one more entry of an array that doubles: returns the array, perhaps moved. */
void *grow_array(void *array, size_t count, size_t *capacity, size_t size);

/* A text that grows; all zero is the empty one, and `bytes` is then NULL. */
struct text {
    char *bytes; /* terminated once anything was added */
    size_t length;
    size_t capacity;
};
void text_add(struct text *text, const char *bytes, size_t length);
void text_print(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_free(struct text *text);

/* The bytes, "" for the empty text. */
const char *text_get(const struct text *text);

#endif

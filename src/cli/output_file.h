/* cli/output_file.h: files that appear whole or not at all. A file is written under a temporary name
 * (".NAME.opaq-partial" beside it), made durable, and renamed. */
#ifndef OPAQ_CLI_OUTPUT_FILE_H
#define OPAQ_CLI_OUTPUT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

struct output_file;

/* `folder` is a file descriptor of the folder it goes to and `path` the folder's name for messages; both are kept by
 * the caller until the file is done. Space for `bytes` is reserved at once, so that a full disk is noticed before the
 * work; a temporary file that an earlier run left is replaced. */
enum opaq_status output_open(int folder, const char *path, const char *name, uint64_t bytes,
                             struct output_file **file, struct opaq_error *error);

/* At a place, from any thread. */
enum opaq_status output_write(struct output_file *file, uint64_t offset, const void *bytes, size_t count,
                              struct opaq_error *error);

/* Durable and under its name, replacing what was there; the file is released either way, and removed on an error. */
enum opaq_status output_commit(struct output_file *file, struct opaq_error *error);

/* Removes it. NULL is allowed. */
void output_discard(struct output_file *file);

/* A whole small file at once. */
enum opaq_status output_text(int folder, const char *path, const char *name, const char *bytes, size_t count,
                             struct opaq_error *error);

#endif

/* cli/write/output_file.h: files that appear whole or not at all. A file is written under a temporary name
 * (".NAME.opaq-partial" beside it, ".HASH.opaq-partial" if that is too long), made durable, and renamed. What it replaces
 * is a regular file that is none of the input; links, pipes, devices and folders are refused. The temporary file is
 * locked, so that a second process that writes the same file is refused and a killed one leaves no lock. */
#ifndef OPAQ_CLI_WRITE_OUTPUT_FILE_H
#define OPAQ_CLI_WRITE_OUTPUT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

#define PARTIAL_END ".opaq-partial" /* of temporary names, which begin with a dot */

struct output_file;

/* Whether `name` can be written: there is no such file, or a regular one that is not input (see inputs.h). */
enum opaq_status output_check(int folder, const char *path, const char *name, struct opaq_error *error);

/* `folder` is a file descriptor of the folder it goes to and `path` the folder's name for messages; both are kept by
 * the caller until the file is done. Space for `bytes` is reserved at once, so that a full disk is noticed before the
 * work; a temporary file that an earlier run left is replaced. `mode` is the permissions, less the process's umask. */
enum opaq_status output_open(int folder, const char *path, const char *name, uint64_t bytes, unsigned mode,
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
                             unsigned mode, struct opaq_error *error);

/* Makes what was renamed or created in a folder durable. 0, or the number of an error. */
int output_flush(int descriptor);

#endif

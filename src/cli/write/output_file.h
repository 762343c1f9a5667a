/* cli/write/output_file.h: files that appear completely or not at all. A file is written with a temporary name
 * (".NAME.opaq-partial" in the same folder, ".HASH.opaq-partial" if that is too long), flushed, and renamed. It
 * replaces only a regular file that is not input; links, pipes, devices and folders are errors. The temporary file is
 * locked, so that a second process that writes the same file fails, and a killed one leaves no lock. */
#ifndef OPAQ_CLI_WRITE_OUTPUT_FILE_H
#define OPAQ_CLI_WRITE_OUTPUT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

#define PARTIAL_END ".opaq-partial" /* suffix of temporary names, which begin with a dot */

struct output_file;

/* Whether `name` can be written: there is no such file, or a regular one that is not input (see inputs.h). */
enum opaq_status output_check(int folder, const char *path, const char *name, struct opaq_error *error);

/* `folder` is a file descriptor of the folder and `path` its name for messages; both must stay valid until the file is
 * done. Space for `bytes` is reserved, so that a full disk is an error before the work; a temporary file of an earlier
 * run is replaced. `mode` are the permissions, less the umask. */
enum opaq_status output_open(int folder, const char *path, const char *name, uint64_t bytes, unsigned mode,
                             struct output_file **file, struct opaq_error *error);

/* Writes at an offset; may be called from any thread. */
enum opaq_status output_write(struct output_file *file, uint64_t offset, const void *bytes, size_t count,
                              struct opaq_error *error);

/* Flushes the file and gives it its name, replacing an existing file. Released in any case, and removed on an error. */
enum opaq_status output_commit(struct output_file *file, struct opaq_error *error);

/* Removes it. NULL is allowed. */
void output_discard(struct output_file *file);

/* Writes a whole small file. */
enum opaq_status output_text(int folder, const char *path, const char *name, const char *bytes, size_t count,
                             unsigned mode, struct opaq_error *error);

/* fsync of a file or folder. Returns 0 or an errno. */
int output_flush(int descriptor);

#endif

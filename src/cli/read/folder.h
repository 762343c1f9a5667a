/* cli/read/folder.h: reads files of one folder and nothing outside it. Names must not be paths; links are rejected
 * unless the user allows them, or the folder is a snapshot of a Hugging Face cache (models--X--Y/snapshots/REVISION)
 * and they stay within models--X--Y. Files are read with pread, not mapped: a file that shrinks meanwhile gives an
 * error message instead of a signal, and memory use is bounded. */
#ifndef OPAQ_CLI_READ_FOLDER_H
#define OPAQ_CLI_READ_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

struct folder {
    int handle;
    char *path;
    bool follows_links;
    bool is_source;   /* its files are registered as input, see inputs.h */
    char *cache_root; /* ".../models--X--Y", where links may lead; NULL if it is not a snapshot */
};

struct input_file {
    int handle;
    char *path; /* folder and name, for messages */
    uint64_t bytes;
    uint64_t stamp; /* changes with the file: a hash of size, inode number and modification time */
    uint64_t device;
    uint64_t number;
    uint64_t time; /* of the last change, in nanoseconds */
    unsigned mode; /* permissions */
};

/* Opens a source folder: its files are registered as input. */
enum opaq_status folder_open(const char *path, bool follows_links, struct folder *folder,
                             struct opaq_error *error);
/* Opens a subfolder, which must not be a link. */
enum opaq_status folder_open_inner(const struct folder *folder, const char *name, struct folder *inner,
                                   struct opaq_error *error);
void folder_close(struct folder *folder);

/* Whether `name` can be a file of a folder: no separator, not "." or "..", no control characters, not too long. */
bool folder_allows(const char *name);
bool folder_has(const struct folder *folder, const char *name);

/* Opens a regular file. */
enum opaq_status folder_open_file(const struct folder *folder, const char *name, struct input_file *file,
                                  struct opaq_error *error);
enum opaq_status input_open(const char *path, struct input_file *file, struct opaq_error *error);

/* Fails if the file has changed since it was opened: its size or modification time, or `name` is another file now.
 * `folder` is NULL for a file of input_open. */
enum opaq_status input_check(const struct input_file *file, const struct folder *folder, const char *name,
                             struct opaq_error *error);
void input_close(struct input_file *file);

/* Reads exactly `count` bytes at `offset`; a truncated file is an error. May be called from any thread. */
enum opaq_status input_read(const struct input_file *file, uint64_t offset, void *bytes, size_t count,
                            struct opaq_error *error);

/* Reads a whole file of at most `limit` bytes, zero-terminated; released with free(). */
enum opaq_status folder_read(const struct folder *folder, const char *name, uint64_t limit, char **bytes,
                             size_t *count, struct opaq_error *error);

/* The names of a folder, sorted; released with folder_free_names. */
enum opaq_status folder_list(const struct folder *folder, char ***names, size_t *count,
                             struct opaq_error *error);
void folder_free_names(char **names, size_t count);

/* Type of a file that is not regular: "a symbolic link", "a pipe", "a device", "a folder", "a socket". */
const char *file_kind(unsigned mode);

#endif

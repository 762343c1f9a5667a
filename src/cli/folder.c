/* cli/folder.c: see folder.h. */
#include "cli/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli_memory.h"

enum { NAME_LIMIT = 200, READ_PIECE = 1 << 30 };

static char *joined(const char *path, const char *name) {
    struct text text = {0};
    const size_t length = strlen(path);
    text_print(&text, "%s%s%s", path, length != 0 && path[length - 1] == '/' ? "" : "/", name);
    return text.bytes;
}

enum opaq_status folder_open(const char *path, bool follows_links, struct folder *folder,
                             struct opaq_error *error) {
    const int handle = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (handle < 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", path, strerror(errno));
    }
    *folder = (struct folder){handle, copy_text(path, strlen(path)), follows_links};
    return OPAQ_OK;
}

void folder_close(struct folder *folder) {
    if (folder->path != NULL) {
        close(folder->handle);
        free(folder->path);
    }
    *folder = (struct folder){-1, NULL, false};
}

bool folder_allows(const char *name) {
    const size_t length = strlen(name);
    if (length == 0 || length > NAME_LIMIT || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return false;
    }
    for (size_t i = 0; i < length; ++i) {
        if (name[i] == '/' || name[i] == '\\' || (unsigned char)name[i] < 0x20 || name[i] == 0x7F) {
            return false;
        }
    }
    return true;
}

bool folder_has(const struct folder *folder, const char *name) {
    struct stat what;
    return folder_allows(name) && fstatat(folder->handle, name, &what, AT_SYMLINK_NOFOLLOW) == 0;
}

/* The descriptor and the path pass to `file`, also on an error. */
static enum opaq_status look_at(int handle, char *path, struct input_file *file, struct opaq_error *error) {
    struct stat what;
    enum opaq_status status = OPAQ_OK;
    if (fstat(handle, &what) != 0) {
        status = opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot look at %s: %s", path, strerror(errno));
    } else if (!S_ISREG(what.st_mode)) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is no regular file", path);
    }
    if (status != OPAQ_OK) {
        close(handle);
        free(path);
        return status;
    }
    const uint64_t time = (uint64_t)what.st_mtim.tv_sec * 1000000000u + (uint64_t)what.st_mtim.tv_nsec;
    const uint64_t number = (uint64_t)what.st_size * 0x9E3779B97F4A7C15u ^ (uint64_t)what.st_ino;
    *file = (struct input_file){handle, path, (uint64_t)what.st_size, number * 0xD6E8FEB86659FD93u ^ time};
    return OPAQ_OK;
}

enum opaq_status folder_open_file(const struct folder *folder, const char *name, struct input_file *file,
                                  struct opaq_error *error) {
    if (!folder_allows(name)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: \"%.100s\" is not the name of a file in this folder",
                         folder->path, name);
    }
    const int more = folder->follows_links ? 0 : O_NOFOLLOW;
    /* a pipe would block without O_NONBLOCK; it means nothing for files */
    const int handle = openat(folder->handle, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | more);
    char *const path = joined(folder->path, name);
    if (handle < 0) {
        const enum opaq_status status =
            errno == ELOOP && !folder->follows_links
                ? opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                            "%s is a link, which may lead out of the folder; --follow-links allows it", path)
                : opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open %s: %s", path, strerror(errno));
        free(path);
        return status;
    }
    return look_at(handle, path, file, error);
}

enum opaq_status input_open(const char *path, struct input_file *file, struct opaq_error *error) {
    const int handle = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (handle < 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open %s: %s", path, strerror(errno));
    }
    return look_at(handle, copy_text(path, strlen(path)), file, error);
}

void input_close(struct input_file *file) {
    if (file->path != NULL) {
        close(file->handle);
        free(file->path);
    }
    *file = (struct input_file){-1, NULL, 0, 0};
}

enum opaq_status input_read(const struct input_file *file, uint64_t offset, void *bytes, size_t count,
                            struct opaq_error *error) {
    char *to = bytes;
    for (size_t done = 0; done < count;) {
        const size_t piece = count - done < READ_PIECE ? count - done : READ_PIECE;
        const ssize_t got = pread(file->handle, to + done, piece, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot read %zu bytes at %" PRIu64 " of %s: %s", count,
                             offset, file->path, strerror(errno));
        }
        if (got == 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM,
                             "%s has become shorter while it was read: it had %" PRIu64
                             " bytes and ends now at %" PRIu64,
                             file->path, file->bytes, offset + done);
        }
        done += (size_t)got;
    }
    return OPAQ_OK;
}

enum opaq_status folder_read(const struct folder *folder, const char *name, uint64_t limit, char **bytes,
                             size_t *count, struct opaq_error *error) {
    struct input_file file = {-1, NULL, 0, 0};
    enum opaq_status status = folder_open_file(folder, name, &file, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (file.bytes > limit) {
        status = opaq_fail(error, OPAQ_ERROR_LIMIT, "%s has %" PRIu64 " bytes, at most %" PRIu64 " are read",
                           file.path, file.bytes, limit);
    } else {
        char *const memory = alloc_array((size_t)file.bytes + 1, 1);
        status = input_read(&file, 0, memory, (size_t)file.bytes, error);
        if (status == OPAQ_OK) {
            *bytes = memory;
            *count = (size_t)file.bytes;
        } else {
            free(memory);
        }
    }
    input_close(&file);
    return status;
}

static int compare_names(const void *first, const void *second) {
    return strcmp(*(char *const *)first, *(char *const *)second);
}

enum opaq_status folder_list(const struct folder *folder, char ***names, size_t *count,
                             struct opaq_error *error) {
    const int handle = openat(folder->handle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *const stream = handle < 0 ? NULL : fdopendir(handle);
    if (stream == NULL) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot list %s: %s", folder->path, strerror(errno));
    }
    char **found = NULL;
    size_t length = 0;
    size_t capacity = 0;
    /* the stream is this function's own */
    for (struct dirent *entry = readdir(stream); entry != NULL; entry = readdir(stream)) { /* NOLINT */
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            found = grow_array(found, length, &capacity, sizeof *found);
            found[length++] = copy_text(entry->d_name, strlen(entry->d_name));
        }
    }
    closedir(stream);
    if (length != 0) {
        qsort(found, length, sizeof *found, compare_names);
    }
    *names = found;
    *count = length;
    return OPAQ_OK;
}

void folder_free_names(char **names, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        free(names[i]);
    }
    free(names);
}

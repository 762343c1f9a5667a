/* cli/read/folder.c: see folder.h. */
#define _XOPEN_SOURCE 700 /* realpath */
#include "cli/read/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"
#include "cli/read/inputs.h"

enum { NAME_LIMIT = 255 /* bytes; NAME_MAX */, READ_LIMIT = 1 << 30 /* bytes of a read */ };

static char *joined(const char *path, const char *name) {
    struct text text = {0};
    const size_t length = strlen(path);
    text_print(&text, "%s%s%s", path, length != 0 && path[length - 1] == '/' ? "" : "/", name);
    return text.bytes;
}

const char *file_kind(unsigned mode) {
    return S_ISLNK(mode)                    ? "a symbolic link"
           : S_ISDIR(mode)                  ? "a folder"
           : S_ISFIFO(mode)                 ? "a pipe"
           : S_ISSOCK(mode)                 ? "a socket"
           : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
                                            : "not a regular file";
}

/* ".../models--X--Y" of a path in ".../models--X--Y/snapshots/REVISION", released with free(); NULL for others. */
static char *find_cache_root(const char *path) {
    static const char snapshots[] = "/snapshots/";
    static const char models[] = "models--";
    char *const real = realpath(path, NULL);
    char *root = NULL;
    for (const char *at = real == NULL ? NULL : strstr(real, snapshots); at != NULL && root == NULL;
         at = strstr(at + 1, snapshots)) {
        const char *name = at;
        while (name > real && name[-1] != '/') {
            --name;
        }
        if (strncmp(name, models, strlen(models)) == 0) {
            root = copy_text(real, (size_t)(at - real));
        }
    }
    free(real);
    return root;
}

enum opaq_status folder_open(const char *path, bool follows_links, struct folder *folder,
                             struct opaq_error *error) {
    const int handle = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (handle < 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", path, strerror(errno));
    }
    *folder =
        (struct folder){handle, copy_text(path, strlen(path)), follows_links, true, find_cache_root(path)};
    return OPAQ_OK;
}

enum opaq_status folder_open_inner(const struct folder *folder, const char *name, struct folder *inner,
                                   struct opaq_error *error) {
    char *const path = joined(folder->path, name);
    const int handle = openat(folder->handle, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (handle < 0) {
        const enum opaq_status status =
            opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", path, strerror(errno));
        free(path);
        return status;
    }
    const char *const root = folder->cache_root;
    *inner = (struct folder){handle, path, folder->follows_links, folder->is_source,
                             root == NULL ? NULL : copy_text(root, strlen(root))};
    return OPAQ_OK;
}

void folder_close(struct folder *folder) {
    if (folder->path != NULL) {
        close(folder->handle);
        free(folder->path);
        free(folder->cache_root);
    }
    *folder = (struct folder){.handle = -1};
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

static uint64_t time_of(const struct stat *what) {
    return (uint64_t)what->st_mtim.tv_sec * 1000000000u + (uint64_t)what->st_mtim.tv_nsec;
}

/* Takes over the descriptor and the path; releases them on an error. */
static enum opaq_status take_file(int handle, char *path, bool is_source, struct input_file *file,
                                  struct opaq_error *error) {
    struct stat what;
    enum opaq_status status = OPAQ_OK;
    if (fstat(handle, &what) != 0) {
        status = opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot stat %s: %s", path, strerror(errno));
    } else if (!S_ISREG(what.st_mode)) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is not a regular file", path);
    }
    if (status != OPAQ_OK) {
        close(handle);
        free(path);
        return status;
    }
    if (is_source) {
        inputs_add(&what);
    }
    const uint64_t time = time_of(&what);
    const uint64_t number = (uint64_t)what.st_size * 0x9E3779B97F4A7C15u ^ (uint64_t)what.st_ino;
    *file = (struct input_file){.handle = handle,
                                .path = path,
                                .bytes = (uint64_t)what.st_size,
                                .stamp = number * 0xD6E8FEB86659FD93u ^ time,
                                .device = (uint64_t)what.st_dev,
                                .number = (uint64_t)what.st_ino,
                                .time = time,
                                .mode = what.st_mode & 0777};
    return OPAQ_OK;
}

static bool is_link(const struct folder *folder, const char *name) {
    struct stat what;
    return fstatat(folder->handle, name, &what, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(what.st_mode);
}

/* Opens the target of a link in a snapshot if it is within the model's folder of the cache; -1 if not. Opened
 * component by component from there, so that no other link is followed. */
static int open_cached(const struct folder *folder, const char *path) {
    char *const real = realpath(path, NULL);
    const size_t length = strlen(folder->cache_root);
    if (real == NULL) {
        return -1; /* errno is realpath's */
    }
    if (strncmp(real, folder->cache_root, length) != 0 || real[length] != '/') {
        free(real);
        errno = ELOOP;
        return -1;
    }
    int handle = open(folder->cache_root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    for (char *step = real + length + 1; handle >= 0 && step != NULL;) {
        char *const slash = strchr(step, '/');
        if (slash != NULL) {
            *slash = '\0';
        }
        const int kind = slash == NULL ? O_NONBLOCK : O_DIRECTORY;
        const int next = openat(handle, step, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | kind);
        const int trouble = errno;
        close(handle);
        errno = trouble;
        handle = next;
        step = slash == NULL ? NULL : slash + 1;
    }
    free(real);
    return handle;
}

static enum opaq_status refuse_open(const struct folder *folder, const char *name, const char *path, int number,
                                    struct opaq_error *error) {
    if (number == ENOENT && is_link(folder, name)) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "%s is a link to a file that does not exist", path);
    }
    if (number != ELOOP || folder->follows_links) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open %s: %s", path, strerror(number));
    }
    return folder->cache_root == NULL
               ? opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "%s is a link, which may lead out of the folder; --follow-links allows it", path)
               : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "%s is a link that leads out of %s; --follow-links allows it", path,
                           folder->cache_root);
}

enum opaq_status folder_open_file(const struct folder *folder, const char *name, struct input_file *file,
                                  struct opaq_error *error) {
    if (!folder_allows(name)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: \"%.100s\" is not the name of a file in this folder",
                         folder->path, name);
    }
    const int more = folder->follows_links ? 0 : O_NOFOLLOW;
    /* without O_NONBLOCK a pipe would block; regular files ignore it */
    int handle = openat(folder->handle, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | more);
    char *const path = joined(folder->path, name);
    if (handle < 0 && errno == ELOOP && !folder->follows_links && folder->cache_root != NULL) {
        handle = open_cached(folder, path);
    }
    if (handle < 0) {
        const enum opaq_status status = refuse_open(folder, name, path, errno, error);
        free(path);
        return status;
    }
    return take_file(handle, path, folder->is_source, file, error);
}

enum opaq_status input_open(const char *path, struct input_file *file, struct opaq_error *error) {
    const int handle = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (handle < 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open %s: %s", path, strerror(errno));
    }
    return take_file(handle, copy_text(path, strlen(path)), true, file, error);
}

enum opaq_status input_check(const struct input_file *file, const struct folder *folder, const char *name,
                             struct opaq_error *error) {
    struct stat now;
    struct stat named;
    if (fstat(file->handle, &now) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot stat %s: %s", file->path, strerror(errno));
    }
    const int missing = folder == NULL ? stat(file->path, &named) : fstatat(folder->handle, name, &named, 0);
    const char *const what = missing != 0 ? "was removed"
                             : (uint64_t)named.st_ino != file->number || (uint64_t)named.st_dev != file->device
                                 ? "was replaced by another file"
                             : (uint64_t)now.st_size != file->bytes ? "has changed its size"
                             : time_of(&now) != file->time          ? "was written to"
                                                                    : NULL;
    return what == NULL
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_SYSTEM,
                           "%s %s while it was read: the result would be inconsistent", file->path, what);
}

void input_close(struct input_file *file) {
    if (file->path != NULL) {
        close(file->handle);
        free(file->path);
    }
    *file = (struct input_file){.handle = -1};
}

enum opaq_status input_read(const struct input_file *file, uint64_t offset, void *bytes, size_t count,
                            struct opaq_error *error) {
    char *to = bytes;
    for (size_t done = 0; done < count;) {
        const size_t wanted = count - done < READ_LIMIT ? count - done : READ_LIMIT;
        const ssize_t got = pread(file->handle, to + done, wanted, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot read %zu bytes at %" PRIu64 " of %s: %s", count,
                             offset, file->path, strerror(errno));
        }
        if (got == 0) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM,
                             "%s was truncated while it was read: it had %" PRIu64
                             " bytes and now ends at %" PRIu64,
                             file->path, file->bytes, offset + done);
        }
        done += (size_t)got;
    }
    return OPAQ_OK;
}

static enum opaq_status read_whole(const struct input_file *file, const struct folder *folder, const char *name,
                                   char *bytes, struct opaq_error *error) {
    CLI_TRY(input_read(file, 0, bytes, (size_t)file->bytes, error));
    return input_check(file, folder, name, error);
}

enum opaq_status folder_read(const struct folder *folder, const char *name, uint64_t limit, char **bytes,
                             size_t *count, struct opaq_error *error) {
    struct input_file file = {.handle = -1};
    CLI_TRY(folder_open_file(folder, name, &file, error));
    enum opaq_status status = OPAQ_OK;
    if (file.bytes > limit) {
        status = opaq_fail(error, OPAQ_ERROR_LIMIT, "%s has %" PRIu64 " bytes, at most %" PRIu64 " are read",
                           file.path, file.bytes, limit);
    } else {
        *bytes = alloc_array((size_t)file.bytes + 1, 1);
        *count = (size_t)file.bytes;
        status = read_whole(&file, folder, name, *bytes, error);
        if (status != OPAQ_OK) {
            free(*bytes);
            *bytes = NULL;
            *count = 0;
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
    /* the stream is local to this function */
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

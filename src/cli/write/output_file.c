/* cli/write/output_file.c: see output_file.h. Open files are in a list, so that exit() from anywhere removes them. */
#if defined(__linux__)
#define _GNU_SOURCE /* flock; fallocate: posix_fallocate writes into every block where the file system cannot reserve */
#endif
#include "cli/write/output_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"
#include "cli/console/number_text.h"
#include "cli/read/folder.h"
#include "cli/read/inputs.h"

struct output_file {
    int folder;
    int descriptor;
    const char *path;
    char *name;
    char *partial; /* the temporary name */
    struct stat identity;
    atomic_uint_fast64_t waiting; /* bytes written since the last write-back was started */
    struct output_file *next;
};

enum { SEND_BYTES = 32 << 20, NAME_MOST = 255 };

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct output_file *open_files;
static bool is_watching_exit;

/* Whether the temporary file still exists and was not replaced by another process. Must be called while the descriptor
 * is open, because the inode number of a removed file may be reused. */
static bool is_still_ours(const struct output_file *file) {
    struct stat there;
    return fstatat(file->folder, file->partial, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           there.st_dev == file->identity.st_dev && there.st_ino == file->identity.st_ino;
}

static void remove_partial(const struct output_file *file) {
    if (is_still_ours(file)) {
        (void)unlinkat(file->folder, file->partial, 0);
    }
}

static void remove_open_files(void) {
    pthread_mutex_lock(&list_lock);
    for (const struct output_file *file = open_files; file != NULL; file = file->next) {
        remove_partial(file);
    }
    pthread_mutex_unlock(&list_lock);
}

static void enlist(struct output_file *file) {
    pthread_mutex_lock(&list_lock);
    if (!is_watching_exit) {
        is_watching_exit = atexit(remove_open_files) == 0;
    }
    file->next = open_files;
    open_files = file;
    pthread_mutex_unlock(&list_lock);
}

static void delist(const struct output_file *file) {
    pthread_mutex_lock(&list_lock);
    struct output_file **place = &open_files;
    while (*place != NULL && *place != file) {
        place = &(*place)->next;
    }
    if (*place != NULL) {
        *place = file->next;
    }
    pthread_mutex_unlock(&list_lock);
}

static enum opaq_status fail_at(const struct output_file *file, const char *operation, int number,
                                struct opaq_error *error) {
    return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot %s %s/%s: %s", operation, file->path, file->name,
                     strerror(number));
}

static enum opaq_status fail_to_reserve(const struct output_file *file, uint64_t bytes, int number,
                                        struct opaq_error *error) {
    struct statvfs system;
    if (number == ENOSPC && fstatvfs(file->folder, &system) == 0) {
        const uint64_t free_bytes = (uint64_t)system.f_bavail * system.f_frsize;
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot reserve %s for %s/%s: %s (%s are free)",
                         size_text(bytes).text, file->path, file->name, strerror(number),
                         size_text(free_bytes).text);
    }
    return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot reserve %s for %s/%s: %s", size_text(bytes).text,
                     file->path, file->name, strerror(number));
}

/* Returns 0 or an errno. */
static int allocate_blocks(int descriptor, uint64_t bytes) {
#if defined(__linux__)
    int result;
    do {
        result = fallocate(descriptor, 0, 0, (off_t)bytes);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
#else
    (void)descriptor;
    (void)bytes;
    return EOPNOTSUPP;
#endif
}

/* If blocks cannot be reserved, compares with the free space. */
static int reserve(int descriptor, uint64_t bytes) {
    if (bytes == 0) {
        return 0;
    }
    if (bytes > INT64_MAX) {
        return EFBIG;
    }
    const int number = allocate_blocks(descriptor, bytes);
    if (number != EOPNOTSUPP && number != EINVAL && number != ENOSYS) {
        return number;
    }
    struct statvfs system;
    if (fstatvfs(descriptor, &system) == 0 && (uint64_t)system.f_bavail * system.f_frsize < bytes) {
        return ENOSPC;
    }
    return ftruncate(descriptor, (off_t)bytes) == 0 ? 0 : errno;
}

static struct output_file *describe(int folder, const char *path, const char *name) {
    struct output_file *const file = alloc_array(1, sizeof *file);
    struct text partial = {NULL, 0, 0};
    text_print(&partial, ".%s" PARTIAL_END, name);
    if (partial.length > NAME_MOST) {
        uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
        for (const char *at = name; *at != '\0'; ++at) {
            hash = (hash ^ (unsigned char)*at) * 0x100000001B3u;
        }
        partial.length = 0;
        text_print(&partial, ".%016" PRIx64 PARTIAL_END, hash);
    }
    file->folder = folder;
    file->descriptor = -1;
    file->path = path;
    file->name = copy_text(name, strlen(name));
    file->partial = partial.bytes;
    return file;
}

static void release(struct output_file *file) {
    if (file->descriptor >= 0) {
        (void)close(file->descriptor);
    }
    free(file->name);
    free(file->partial);
    free(file);
}

enum opaq_status output_check(int folder, const char *path, const char *name, struct opaq_error *error) {
    struct stat there;
    if (fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) != 0) {
        return OPAQ_OK;
    }
    if (!S_ISREG(there.st_mode)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "cannot write %s/%s: it is %s, only a regular file is replaced", path, name,
                         file_kind(there.st_mode));
    }
    return inputs_have(&there)
               ? opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "cannot write %s/%s: it is one of the files that are read", path, name)
               : OPAQ_OK;
}

/* Locks a file; false if another process has it locked. True on file systems without locks. */
static bool lock(int descriptor) { return flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

/* Removes a temporary file that no process is writing. */
static enum opaq_status remove_old(const struct output_file *file, struct opaq_error *error) {
    CLI_TRY(output_check(file->folder, file->path, file->partial, error));
    const int old = openat(file->folder, file->partial, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (old < 0) {
        return errno == ENOENT ? OPAQ_OK : fail_at(file, "create", errno, error);
    }
    const bool is_free = lock(old);
    const bool is_removed = is_free && (unlinkat(file->folder, file->partial, 0) == 0 || errno == ENOENT);
    const int trouble = errno;
    (void)close(old);
    if (!is_free) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot write %s/%s: another process is writing it",
                         file->path, file->name);
    }
    return is_removed ? OPAQ_OK : fail_at(file, "create", trouble, error);
}

/* Creates a new file; never opens an existing one. */
static enum opaq_status create(struct output_file *file, unsigned mode, struct opaq_error *error) {
    CLI_TRY(output_check(file->folder, file->path, file->name, error));
    CLI_TRY(remove_old(file, error));
    file->descriptor = openat(file->folder, file->partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                              (mode_t)(mode & 0777));
    if (file->descriptor < 0 || fstat(file->descriptor, &file->identity) != 0) {
        return fail_at(file, "create", errno, error);
    }
    return lock(file->descriptor)
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot write %s/%s: another process is writing it",
                           file->path, file->name);
}

enum opaq_status output_open(int folder, const char *path, const char *name, uint64_t bytes, unsigned mode,
                             struct output_file **file, struct opaq_error *error) {
    struct output_file *const made = describe(folder, path, name);
    const enum opaq_status trouble = create(made, mode, error);
    if (trouble != OPAQ_OK) {
        release(made);
        return trouble;
    }
    enlist(made);
    const int shortage = reserve(made->descriptor, bytes);
    if (shortage != 0) {
        const enum opaq_status status = fail_to_reserve(made, bytes, shortage, error);
        output_discard(made);
        return status;
    }
    *file = made;
    return OPAQ_OK;
}

/* Starts write-back of what was written, so that the final flush is short. */
static void start_writeback(struct output_file *file, size_t count) {
#if defined(__linux__)
    if (atomic_fetch_add(&file->waiting, count) + count >= SEND_BYTES) {
        atomic_store(&file->waiting, 0);
        (void)sync_file_range(file->descriptor, 0, 0, SYNC_FILE_RANGE_WRITE);
    }
#else
    (void)file;
    (void)count;
#endif
}

enum opaq_status output_write(struct output_file *file, uint64_t offset, const void *bytes, size_t count,
                              struct opaq_error *error) {
    const char *next = bytes;
    const size_t all = count;
    if (offset > INT64_MAX - count) {
        return fail_at(file, "write", EFBIG, error);
    }
    while (count != 0) {
        const ssize_t written = pwrite(file->descriptor, next, count, (off_t)offset);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return fail_at(file, "write", written == 0 ? EIO : errno, error);
        }
        next += written;
        offset += (uint64_t)written;
        count -= (size_t)written;
    }
    start_writeback(file, all);
    return OPAQ_OK;
}

/* EINVAL and ENOTSUP: the file system has nothing to flush. */
int output_flush(int descriptor) {
    while (fsync(descriptor) != 0) {
        if (errno != EINTR) {
            return errno == EINVAL || errno == ENOTSUP ? 0 : errno;
        }
    }
    return 0;
}

static enum opaq_status put_in_place(struct output_file *file, struct opaq_error *error) {
    int trouble = output_flush(file->descriptor);
    if (trouble != 0) {
        return fail_at(file, "flush", trouble, error);
    }
    if (!is_still_ours(file)) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM,
                         "cannot put %s/%s in place: another process has replaced %s meanwhile", file->path,
                         file->name, file->partial);
    }
    CLI_TRY(output_check(file->folder, file->path, file->name, error));
    if (renameat(file->folder, file->partial, file->folder, file->name) != 0) {
        return fail_at(file, "put in place", errno, error);
    }
    trouble = output_flush(file->folder);
    return trouble == 0 ? OPAQ_OK : fail_at(file, "flush the folder of", trouble, error);
}

enum opaq_status output_commit(struct output_file *file, struct opaq_error *error) {
    const enum opaq_status status = put_in_place(file, error);
    output_discard(file); /* after a rename there is nothing to remove */
    return status;
}

void output_discard(struct output_file *file) {
    if (file == NULL) {
        return;
    }
    delist(file);
    remove_partial(file);
    release(file);
}

enum opaq_status output_text(int folder, const char *path, const char *name, const char *bytes, size_t count,
                             unsigned mode, struct opaq_error *error) {
    struct output_file *file = NULL;
    CLI_TRY(output_open(folder, path, name, count, mode, &file, error));
    assert(file != NULL);
    const enum opaq_status status = output_write(file, 0, bytes, count, error);
    if (status != OPAQ_OK) {
        output_discard(file);
        return status;
    }
    return output_commit(file, error);
}

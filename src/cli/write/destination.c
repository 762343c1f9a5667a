/* cli/write/destination.c: see destination.h. */
#if defined(__linux__)
#define _GNU_SOURCE /* flock */
#endif
#include "cli/write/destination.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cli/cli_try.h"
#include "cli/console/interrupt.h"
#include "cli/read/inputs.h"
#include "cli/texts.h"
#include "cli/write/output_file.h"

enum { FOLDER_DEPTH = 16, COPY_BYTES = 2 << 20 };

enum { JOB_MODE = 0600, ANY_MODE = 0666 };

static const char job_name[] = JOB_FILE;

static bool is_own_file(const char *name) {
    return strcmp(name, job_name) == 0 || (name[0] == '.' && ends_with(name, PARTIAL_END));
}

/* ---- existing files ---- */

static void describe_job(struct destination *destination, const struct manifest *manifest,
                         const char *settings) {
    const struct model *const model = manifest->weights->model;
    text_print(&destination->job, "opaq %s\n%s\n", opaq_version(), settings);
    for (size_t i = 0; i < model->file_count; ++i) {
        const struct input_file *const input = &model->files[i].input;
        text_print(&destination->job, "%s %" PRIu64 " bytes, %016" PRIx64 "\n", model->files[i].name,
                   input->bytes, input->stamp);
    }
}

static enum opaq_status check_space(const struct destination *destination, const struct manifest *manifest,
                                    struct opaq_error *error) {
    struct statvfs space;
    if (fstatvfs(destination->folder, &space) != 0) {
        return OPAQ_OK; /* free space is unknown; a shortage then fails the write */
    }
    uint64_t needed = 0;
    for (size_t i = 0; i < manifest->file_count; ++i) {
        needed += destination->is_done[i] ? 0 : manifest->files[i].bytes;
    }
    const uint64_t unit = space.f_frsize == 0 ? 1 : space.f_frsize;
    const uint64_t available = space.f_bavail > UINT64_MAX / unit ? UINT64_MAX : space.f_bavail * unit;
    return needed <= available
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_SYSTEM, "%s needs %.2f GB, and its disk has %.2f GB left",
                           destination->path, (double)needed / 1e9, (double)available / 1e9);
}

static bool is_same_folder(int first, int second) {
    struct stat a;
    struct stat b;
    return fstat(first, &a) == 0 && fstat(second, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Files with their final names are complete; those of the expected size are done. */
static void find_done(struct destination *destination, const struct manifest *manifest) {
    for (size_t i = 0; i < manifest->file_count; ++i) {
        struct stat what;
        destination->is_done[i] =
            fstatat(destination->folder, manifest->files[i].name, &what, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(what.st_mode) && (uint64_t)what.st_size == manifest->files[i].bytes;
    }
}

/* The first file that is not a temporary file of opaq; NULL if there is none. Temporary files alone are left by a run
 * that was killed while it wrote its job file. */
static const char *find_other_file(char **names, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (!is_own_file(names[i])) {
            return names[i];
        }
    }
    return NULL;
}

/* Files of an earlier model, which would be loaded with this one. */
static bool is_of_old_model(const char *name) {
    return is_own_file(name) || ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") ||
           strcmp(name, "config.json") == 0 || strcmp(name, "hf_quant_config.json") == 0;
}

/* Checks, before anything is removed, that all files to be removed or replaced are regular files and not input. */
static enum opaq_status check_replaced(const struct destination *destination, const struct folder *source,
                                       char **names, size_t count, struct opaq_error *error) {
    for (size_t i = 0; i < count; ++i) {
        struct stat theirs;
        const bool is_copied = fstatat(source->handle, names[i], &theirs, 0) == 0 && !S_ISDIR(theirs.st_mode);
        if (is_copied && S_ISREG(theirs.st_mode)) {
            inputs_add(&theirs);
        }
        if (is_copied || is_of_old_model(names[i])) {
            CLI_TRY(output_check(destination->folder, destination->path, names[i], error));
        }
    }
    return OPAQ_OK;
}

static void remove_old_model(const struct destination *destination, char **names, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (is_of_old_model(names[i])) {
            unlinkat(destination->folder, names[i], 0);
        }
    }
}

static enum opaq_status take_folder(struct destination *destination, struct manifest *manifest, bool overwrites,
                                    struct opaq_error *error) {
    const struct folder folder = {.handle = destination->folder, .path = destination->path};
    char **names = NULL;
    size_t count = 0;
    CLI_TRY(folder_list(&folder, &names, &count, error));
    enum opaq_status status =
        check_replaced(destination, &manifest->weights->model->folder, names, count, error);
    if (status != OPAQ_OK) {
        folder_free_names(names, count);
        return status;
    }
    char *job = NULL;
    size_t job_bytes = 0;
    const bool has_job = folder_has(&folder, job_name);
    const bool is_same =
        has_job && folder_read(&folder, job_name, 1 << 24, &job, &job_bytes, NULL) == OPAQ_OK &&
        job_bytes == destination->job.length && memcmp(job, destination->job.bytes, job_bytes) == 0;
    if (is_same) {
        find_done(destination, manifest);
    } else if (overwrites) {
        remove_old_model(destination, names, count);
    } else if (has_job) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "%s holds an unfinished job with other settings, another source or another version "
                           "of opaq; --overwrite replaces it",
                           destination->path);
    } else if (find_other_file(names, count) != NULL) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "%s has files already (%s); --overwrite replaces a model in it", destination->path,
                           find_other_file(names, count));
    }
    free(job);
    folder_free_names(names, count);
    return status;
}

/* Makes the name of a new folder durable. */
static enum opaq_status flush_parent(const char *path, struct opaq_error *error) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        --length;
    }
    while (length > 0 && path[length - 1] != '/') {
        --length;
    }
    char *const parent = length == 0 ? copy_text(".", 1) : copy_text(path, length);
    const int handle = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int trouble = handle < 0 ? errno : output_flush(handle);
    if (handle >= 0) {
        close(handle);
    }
    free(parent);
    return trouble == 0 ? OPAQ_OK
                        : opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot flush the folder of %s: %s", path,
                                    strerror(trouble));
}

static unsigned folder_mode(int source) {
    struct stat what;
    return fstat(source, &what) == 0 ? (what.st_mode & 0777) | S_IRWXU : S_IRWXU;
}

/* Creates the folder with the permissions of the source if need be, and locks it until it is closed. */
static enum opaq_status open_folder(const char *path, int source, struct destination *destination,
                                    struct opaq_error *error) {
    const bool is_new = mkdir(path, folder_mode(source)) == 0;
    if (!is_new && errno != EEXIST) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot create the folder %s: %s", path, strerror(errno));
    }
    destination->folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat what;
    if (destination->folder < 0) {
        const int trouble = errno;
        return lstat(path, &what) == 0 && !S_ISDIR(what.st_mode)
                   ? opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is %s, expected a folder or a new name", path,
                               S_ISREG(what.st_mode) ? "a file" : file_kind(what.st_mode))
                   : opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", path,
                               strerror(trouble));
    }
    if (flock(destination->folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "another opaq is writing to %s", path);
    }
    return is_new ? flush_parent(path, error) : OPAQ_OK;
}

/* Opens the folder of a single file, and sets the name of the manifest's file. */
static enum opaq_status open_file(const char *path, struct manifest *manifest, bool overwrites,
                                  struct destination *destination, struct opaq_error *error) {
    const char *const slash = strrchr(path, '/');
    const char *const name = slash == NULL ? path : slash + 1;
    char *const folder = slash == NULL ? copy_text(".", 1) : copy_text(path, (size_t)(slash - path) + 1);
    free(destination->path);
    destination->path = folder;
    destination->folder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (destination->folder < 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", folder, strerror(errno));
    }
    struct stat what;
    if (!folder_allows(name)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is not the name of a file", path);
    }
    if (fstatat(destination->folder, name, &what, AT_SYMLINK_NOFOLLOW) == 0) {
        const bool is_source = inputs_have(&what);
        if (is_source || S_ISDIR(what.st_mode)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s %s", path,
                             is_source ? "is the source itself" : "is a folder, and the source is one file");
        }
        CLI_TRY(output_check(destination->folder, folder, name, error));
        if (!overwrites) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s exists; --overwrite replaces it", path);
        }
    }
    free(manifest->files[0].name);
    manifest->files[0].name = copy_text(name, strlen(name));
    return OPAQ_OK;
}

/* On an error the caller closes the destination. */
static enum opaq_status open_and_check(const char *path, struct manifest *manifest, bool overwrites,
                                       struct destination *destination, struct opaq_error *error) {
    const struct model *const model = manifest->weights->model;
    if (!model->is_folder) {
        CLI_TRY(open_file(path, manifest, overwrites, destination, error));
        return check_space(destination, manifest, error);
    }
    CLI_TRY(open_folder(path, model->folder.handle, destination, error));
    if (is_same_folder(destination->folder, model->folder.handle)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is the folder of the source", path);
    }
    CLI_TRY(take_folder(destination, manifest, overwrites, error));
    CLI_TRY(check_space(destination, manifest, error));
    return output_text(destination->folder, destination->path, job_name, destination->job.bytes,
                       destination->job.length, JOB_MODE, error);
}

enum opaq_status destination_open(const char *path, struct manifest *manifest, const char *settings,
                                  bool overwrites, struct destination *destination, struct opaq_error *error) {
    *destination = (struct destination){.folder = -1, .is_folder = manifest->weights->model->is_folder};
    destination->path = copy_text(path, strlen(path));
    destination->is_done = alloc_array(manifest->file_count, sizeof *destination->is_done);
    describe_job(destination, manifest, settings);
    const enum opaq_status status = open_and_check(path, manifest, overwrites, destination, error);
    if (status != OPAQ_OK) {
        destination_close(destination);
    }
    return status;
}

/* ---- the other files ---- */

static enum opaq_status copy_contents(const struct input_file *input, const struct folder *from,
                                      const char *name, struct output_file *output, void *bytes,
                                      struct opaq_error *error) {
    for (uint64_t at = 0; at < input->bytes; at += COPY_BYTES) {
        const size_t count = input->bytes - at < COPY_BYTES ? (size_t)(input->bytes - at) : COPY_BYTES;
        if (interrupt_seen()) {
            return opaq_fail(error, OPAQ_ERROR_SYSTEM, "stopped");
        }
        CLI_TRY(input_read(input, at, bytes, count, error));
        CLI_TRY(output_write(output, at, bytes, count, error));
    }
    return input_check(input, from, name, error);
}

static enum opaq_status copy_file(const struct folder *from, int to, const char *to_path, const char *name,
                                  struct opaq_error *error) {
    struct input_file input;
    CLI_TRY(folder_open_file(from, name, &input, error));
    struct output_file *output = NULL;
    enum opaq_status status = output_open(to, to_path, name, input.bytes, input.mode, &output, error);
    if (status == OPAQ_OK) {
        void *const bytes = alloc_aligned(COPY_BYTES);
        status = copy_contents(&input, from, name, output, bytes, error);
        free(bytes);
        if (status == OPAQ_OK) {
            status = output_commit(output, error);
        } else {
            output_discard(output);
        }
    }
    input_close(&input);
    return status;
}

/* Includes .safetensors files that the index does not name: they would be loaded with the others. */
static bool is_model_file(const struct model *model, const char *name) {
    return model_has_file(model, name) || (model->index != NULL && ends_with(name, ".safetensors")) ||
           (model->index_name != NULL && strcmp(model->index_name, name) == 0) ||
           strcmp(name, "config.json") == 0 || strcmp(name, "hf_quant_config.json") == 0;
}

static enum opaq_status copy_folder(const struct destination *destination, const struct folder *from, int to,
                                    const char *to_path, const struct model *model, int depth,
                                    struct opaq_error *error);

/* NOLINTNEXTLINE(misc-no-recursion): as deep as FOLDER_DEPTH */
static enum opaq_status copy_subfolder(const struct destination *destination, const struct folder *from, int to,
                                       const char *to_path, const char *name, int depth,
                                       struct opaq_error *error) {
    struct folder inner = {.handle = -1};
    CLI_TRY(folder_open_inner(from, name, &inner, error));
    enum opaq_status status = OPAQ_OK;
    struct text path = {0};
    text_print(&path, "%s/%s", to_path, name);
    int handle = -1;
    const bool is_destination = is_same_folder(inner.handle, destination->folder); /* which is in the source */
    if (!is_destination && ((mkdirat(to, name, folder_mode(inner.handle)) != 0 && errno != EEXIST) ||
                            (handle = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0)) {
        status =
            opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot create the folder %s: %s", path.bytes, strerror(errno));
    } else if (!is_destination) {
        status = copy_folder(destination, &inner, handle, path.bytes, NULL, depth + 1, error);
    }
    if (handle >= 0) {
        close(handle);
    }
    folder_close(&inner);
    text_free(&path);
    return status;
}

/* NOLINTNEXTLINE(misc-no-recursion): as deep as FOLDER_DEPTH */
static enum opaq_status copy_folder(const struct destination *destination, const struct folder *from, int to,
                                    const char *to_path, const struct model *model, int depth,
                                    struct opaq_error *error) {
    char **names = NULL;
    size_t count = 0;
    enum opaq_status status = depth > FOLDER_DEPTH
                                  ? opaq_fail(error, OPAQ_ERROR_LIMIT, "%s: folders are nested deeper than %d",
                                              from->path, FOLDER_DEPTH)
                                  : folder_list(from, &names, &count, error);
    for (size_t i = 0; i < count && status == OPAQ_OK; ++i) {
        struct stat what;
        if (fstatat(from->handle, names[i], &what, AT_SYMLINK_NOFOLLOW) != 0) {
            status = opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot stat %s/%s: %s", from->path, names[i],
                               strerror(errno));
        } else if (S_ISDIR(what.st_mode)) {
            if (names[i][0] != '.') { /* caches of other tools */
                status = copy_subfolder(destination, from, to, to_path, names[i], depth, error);
            }
        } else if (!is_own_file(names[i]) && (model == NULL || !is_model_file(model, names[i]))) {
            status = copy_file(from, to, to_path, names[i], error);
        }
    }
    folder_free_names(names, count);
    return status;
}

enum opaq_status destination_copy_others(const struct destination *destination, const struct model *model,
                                         struct opaq_error *error) {
    return !destination->is_folder ? OPAQ_OK
                                   : copy_folder(destination, &model->folder, destination->folder,
                                                 destination->path, model, 0, error);
}

/* ---- completion ---- */

/* Permissions of a file of the source. */
static unsigned mode_like(const struct model *model, const char *name) {
    struct stat what;
    return name != NULL && fstatat(model->folder.handle, name, &what, 0) == 0 ? what.st_mode & 0777 : ANY_MODE;
}

enum opaq_status destination_write_json(const struct destination *destination, const struct model *model,
                                        const char *name, const char *like, yyjson_mut_doc *document,
                                        struct opaq_error *error) {
    size_t length = 0;
    yyjson_write_err why = {0};
    char *const json = yyjson_mut_write_opts(
        document, YYJSON_WRITE_PRETTY_TWO_SPACES | YYJSON_WRITE_NEWLINE_AT_END, NULL, &length, &why);
    if (json == NULL) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "cannot write %s: %s", name, why.msg);
    }
    const enum opaq_status status =
        output_text(destination->folder, destination->path, name, json, length, mode_like(model, like), error);
    free(json);
    return status;
}

enum opaq_status destination_finish(const struct destination *destination, struct opaq_error *error) {
    if (destination->is_folder && unlinkat(destination->folder, job_name, 0) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot remove %s/%s: %s", destination->path, job_name,
                         strerror(errno));
    }
    return OPAQ_OK;
}

void destination_close(struct destination *destination) {
    if (destination->folder >= 0) {
        close(destination->folder);
    }
    free(destination->path);
    free(destination->is_done);
    text_free(&destination->job);
    *destination = (struct destination){.folder = -1};
}

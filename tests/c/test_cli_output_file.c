/* test_cli_output_file.c: output files of the command appear complete or not at all, and errors name the
 * file. */
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cli/console/interrupt.h"
#include "cli/read/inputs.h"
#include "cli/write/output_file.h"

static const char partial_name[] = ".x.opaq-partial";

/* A temporary folder of the test. */
struct test_folder {
    char path[64];
    int folder;
};

static struct test_folder test_folder_make(void) {
    struct test_folder test_folder = {"/tmp/opaq-test-XXXXXX", -1};
    if (mkdtemp(test_folder.path) == NULL ||
        (test_folder.folder = open(test_folder.path, O_RDONLY | O_DIRECTORY)) < 0) {
        perror("test_folder_make");
        exit(1);
    }
    return test_folder;
}

/* Fails if the folder has a file that the test has not named. */
static void test_folder_remove(const struct test_folder *test_folder) {
    (void)unlinkat(test_folder->folder, "x", 0);
    (void)close(test_folder->folder);
    CHECK(rmdir(test_folder->path) == 0);
}

static bool is_there(const struct test_folder *test_folder, const char *name) {
    struct stat status;
    return fstatat(test_folder->folder, name, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Up to 63 bytes of a file; "(none)" if it does not exist. */
struct contents {
    char text[64];
};
static struct contents contents_of(const struct test_folder *test_folder, const char *name) {
    struct contents contents = {"(none)"};
    const int file = openat(test_folder->folder, name, O_RDONLY);
    if (file >= 0) {
        const ssize_t length = read(file, contents.text, sizeof contents.text - 1);
        contents.text[length < 0 ? 0 : length] = '\0';
        (void)close(file);
    }
    return contents;
}

static void put(const struct test_folder *test_folder, const char *name, const char *text) {
    const int file = openat(test_folder->folder, name, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    CHECK(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) && close(file) == 0);
}

static struct output_file *open_x(const struct test_folder *test_folder, uint64_t bytes) {
    struct output_file *file = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    if (!CHECK_EQ_INT(output_open(test_folder->folder, test_folder->path, "x", bytes, 0666, &file, &error),
                      OPAQ_OK)) {
        printf("  %s\n", error.text);
        exit(1);
    }
    return file;
}

static void appears_complete(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *const file = open_x(&test_folder, 6);
    CHECK_EQ_INT(output_write(file, 3, "def", 3, NULL), OPAQ_OK);
    CHECK_EQ_INT(output_write(file, 0, "abc", 3, NULL), OPAQ_OK);
    CHECK(!is_there(&test_folder, "x") && is_there(&test_folder, partial_name));
    CHECK_EQ_INT(output_commit(file, NULL), OPAQ_OK);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "abcdef");
    CHECK(!is_there(&test_folder, partial_name));
    test_folder_remove(&test_folder);
}

static void replaces_existing_file(void) {
    const struct test_folder test_folder = test_folder_make();
    put(&test_folder, "x", "something longer");
    put(&test_folder, partial_name, "left by an earlier run");
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, NULL), OPAQ_OK);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "new");
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "", 0, 0666, NULL), OPAQ_OK);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "");
    CHECK(!is_there(&test_folder, partial_name));
    test_folder_remove(&test_folder);
}

/* Anything but a regular file is left unchanged and named in the error, under the final and the temporary
 * name. */
static void only_files_are_replaced(void) {
    const struct test_folder test_folder = test_folder_make();
    struct opaq_error error;
    put(&test_folder, "victim", "precious");
    for (int i = 0; i < 2; ++i) {
        const char *const name = i == 0 ? "x" : partial_name;
        CHECK_EQ_INT(symlinkat("victim", test_folder.folder, name), 0);
        CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, &error),
                     OPAQ_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "it is a symbolic link") != NULL);
        CHECK_EQ_STR(contents_of(&test_folder, name).text, "precious");
        CHECK_EQ_INT(unlinkat(test_folder.folder, name, 0), 0);
        CHECK_EQ_INT(mkfifoat(test_folder.folder, name, 0666), 0);
        CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, &error),
                     OPAQ_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "it is a pipe") != NULL && is_there(&test_folder, name));
        CHECK_EQ_INT(unlinkat(test_folder.folder, name, 0), 0);
    }
    struct stat read;
    CHECK_EQ_INT(fstatat(test_folder.folder, "victim", &read, 0), 0);
    inputs_add(&read);
    CHECK_EQ_INT(linkat(test_folder.folder, "victim", test_folder.folder, "x", 0), 0);
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, &error),
                 OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "one of the files that are read") != NULL);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "precious");
    CHECK_EQ_INT(unlinkat(test_folder.folder, "victim", 0), 0);
    test_folder_remove(&test_folder);
}

static void one_process_writes_a_file(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *second = NULL;
    struct opaq_error error;
    struct output_file *const first = open_x(&test_folder, 3);
    CHECK_EQ_INT(output_open(test_folder.folder, test_folder.path, "x", 3, 0666, &second, &error),
                 OPAQ_ERROR_SYSTEM);
    CHECK(strstr(error.text, "another process is writing it") != NULL && second == NULL);
    CHECK_EQ_INT(output_write(first, 0, "abc", 3, NULL), OPAQ_OK);
    CHECK_EQ_INT(output_commit(first, NULL), OPAQ_OK);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "abc");
    test_folder_remove(&test_folder);
}

static void permissions_are_the_callers(void) {
    const struct test_folder test_folder = test_folder_make();
    struct stat made;
    const mode_t before = umask(022);
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0600, NULL), OPAQ_OK);
    CHECK(fstatat(test_folder.folder, "x", &made, 0) == 0 && (made.st_mode & 0777) == 0600);
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, NULL), OPAQ_OK);
    CHECK(fstatat(test_folder.folder, "x", &made, 0) == 0 && (made.st_mode & 0777) == 0644);
    (void)umask(before);
    test_folder_remove(&test_folder);
}

static void long_names_have_a_temporary_name(void) {
    const struct test_folder test_folder = test_folder_make();
    char name[256];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, name, "new", 3, 0666, NULL), OPAQ_OK);
    CHECK_EQ_STR(contents_of(&test_folder, name).text, "new");
    CHECK_EQ_INT(unlinkat(test_folder.folder, name, 0), 0);
    test_folder_remove(&test_folder);
}

static void discarding_keeps_existing_file(void) {
    const struct test_folder test_folder = test_folder_make();
    put(&test_folder, "x", "old");
    struct output_file *const file = open_x(&test_folder, 3);
    CHECK_EQ_INT(output_write(file, 0, "new", 3, NULL), OPAQ_OK);
    output_discard(file);
    output_discard(NULL);
    CHECK_EQ_STR(contents_of(&test_folder, "x").text, "old");
    CHECK(!is_there(&test_folder, partial_name));
    test_folder_remove(&test_folder);
}

static void another_process_is_noticed(void) {
    const struct test_folder test_folder = test_folder_make();
    struct opaq_error error;
    struct output_file *const file = open_x(&test_folder, 3);
    CHECK_EQ_INT(unlinkat(test_folder.folder, partial_name, 0), 0);
    put(&test_folder, partial_name, "theirs");
    CHECK_EQ_INT(output_commit(file, &error), OPAQ_ERROR_SYSTEM);
    CHECK(strstr(error.text, "another process has replaced .x.opaq-partial") != NULL);
    CHECK(!is_there(&test_folder, "x"));
    CHECK_EQ_STR(contents_of(&test_folder, partial_name).text, "theirs");
    CHECK_EQ_INT(unlinkat(test_folder.folder, partial_name, 0), 0);
    test_folder_remove(&test_folder);
}

/* "cannot OPERATION FOLDER/x: REASON" */
static void check_sentence(const struct test_folder *test_folder, const char *text, const char *operation,
                           const char *reason) {
    char expected[256];
    (void)snprintf(expected, sizeof expected, "cannot %s %s/x: %s", operation, test_folder->path, reason);
    CHECK(strncmp(text, expected, strlen(expected)) == 0 || CHECK_FAIL("\"%s\" is not \"%s\"", text, expected));
}

static void too_large_is_refused_at_once(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *file = NULL;
    struct opaq_error error;
    CHECK_EQ_INT(output_open(test_folder.folder, test_folder.path, "x", UINT64_MAX, 0666, &file, &error),
                 OPAQ_ERROR_SYSTEM);
    check_sentence(&test_folder, error.text, "reserve 18 EB for", "File too large");
    CHECK_EQ_INT(
        output_open(test_folder.folder, test_folder.path, "x", 1200000000000000000, 0666, &file, &error),
        OPAQ_ERROR_SYSTEM);
    check_sentence(&test_folder, error.text, "reserve 1.2 EB for",
                   ""); /* the file system determines the reason */
    CHECK(file == NULL && !is_there(&test_folder, partial_name));
    test_folder_remove(&test_folder);
}

static void limits_are_named(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *file = NULL;
    struct opaq_error error;
    struct rlimit before;
    interrupt_watch(); /* exceeding the limit then raises no signal */
    CHECK_EQ_INT(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit small = {100000, before.rlim_max};
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &small), 0);
    CHECK_EQ_INT(output_open(test_folder.folder, test_folder.path, "x", 1000000, 0666, &file, &error),
                 OPAQ_ERROR_SYSTEM);
    check_sentence(&test_folder, error.text, "reserve 1.0 MB for", "File too large");
    file = open_x(&test_folder, 100000);
    CHECK_EQ_INT(output_write(file, 100000, "x", 1, &error), OPAQ_ERROR_SYSTEM);
    check_sentence(&test_folder, error.text, "write", "File too large");
    CHECK_EQ_INT(output_write(file, UINT64_MAX, "x", 1, &error), OPAQ_ERROR_SYSTEM);
    check_sentence(&test_folder, error.text, "write", "File too large");
    output_discard(file);
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &before), 0);
    test_folder_remove(&test_folder);
}

static void invalid_names_are_reported(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *file = NULL;
    struct opaq_error error;
    CHECK_EQ_INT(mkdirat(test_folder.folder, "x", 0777), 0);
    CHECK_EQ_INT(output_text(test_folder.folder, test_folder.path, "x", "new", 3, 0666, &error),
                 OPAQ_ERROR_ARGUMENT);
    check_sentence(&test_folder, error.text, "write", "it is a folder");
    CHECK_EQ_INT(unlinkat(test_folder.folder, "x", AT_REMOVEDIR), 0);
    CHECK_EQ_INT(mkdirat(test_folder.folder, partial_name, 0777), 0);
    CHECK_EQ_INT(output_open(test_folder.folder, test_folder.path, "x", 1, 0666, &file, &error),
                 OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "/.x.opaq-partial: it is a folder") != NULL);
    CHECK_EQ_INT(unlinkat(test_folder.folder, partial_name, AT_REMOVEDIR), 0);
    CHECK_EQ_INT(output_open(test_folder.folder, test_folder.path, "no/x", 1, 0666, &file, &error),
                 OPAQ_ERROR_SYSTEM);
    CHECK(strstr(error.text, "/no/x: No such file or directory") != NULL);
    test_folder_remove(&test_folder);
}

static void exit_removes_open_files(void) {
    const struct test_folder test_folder = test_folder_make();
    (void)fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        struct output_file *file = open_x(&test_folder, 3);
        (void)file;
        if (!is_there(&test_folder, partial_name)) {
            _exit(1);
        }
        exit(3);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    CHECK(!is_there(&test_folder, partial_name));
    test_folder_remove(&test_folder);
}

struct writer {
    struct output_file *file;
    uint64_t first;
};

enum { WRITERS = 4, BLOCK = 1000, BLOCKS = 50 };

static void *write_blocks(void *argument) {
    const struct writer *const writer = argument;
    char block[BLOCK];
    for (uint64_t i = writer->first; i < BLOCKS; i += WRITERS) {
        memset(block, 'a' + (int)(i % 26), sizeof block);
        CHECK_EQ_INT(output_write(writer->file, i * BLOCK, block, sizeof block, NULL), OPAQ_OK);
    }
    return NULL;
}

static void any_thread_may_write(void) {
    const struct test_folder test_folder = test_folder_make();
    struct output_file *const file = open_x(&test_folder, BLOCK * BLOCKS);
    pthread_t threads[WRITERS];
    struct writer writers[WRITERS];
    for (uint64_t i = 0; i < WRITERS; ++i) {
        writers[i] = (struct writer){file, i};
        CHECK_EQ_INT(pthread_create(&threads[i], NULL, write_blocks, &writers[i]), 0);
    }
    for (size_t i = 0; i < WRITERS; ++i) {
        CHECK_EQ_INT(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ_INT(output_commit(file, NULL), OPAQ_OK);
    char bytes[BLOCK * BLOCKS + 1];
    const int read_back = openat(test_folder.folder, "x", O_RDONLY);
    CHECK_EQ_INT(read(read_back, bytes, sizeof bytes), BLOCK * BLOCKS);
    for (int i = 0; i < BLOCK * BLOCKS; ++i) {
        if (!CHECK_EQ_INT(bytes[i], 'a' + i / BLOCK % 26)) {
            break;
        }
    }
    (void)close(read_back);
    test_folder_remove(&test_folder);
}

static const struct test_case tests[] = {TEST(appears_complete),
                                         TEST(replaces_existing_file),
                                         TEST(discarding_keeps_existing_file),
                                         TEST(another_process_is_noticed),
                                         TEST(too_large_is_refused_at_once),
                                         TEST(limits_are_named),
                                         TEST(invalid_names_are_reported),
                                         TEST(exit_removes_open_files),
                                         TEST(one_process_writes_a_file),
                                         TEST(permissions_are_the_callers),
                                         TEST(long_names_have_a_temporary_name),
                                         TEST(any_thread_may_write),
                                         TEST(only_files_are_replaced)}; /* its input stays registered */
TEST_MAIN(tests)

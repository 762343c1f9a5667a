/* test_cli_reproduce.c: the portable part of `opaq reproduce` equals tests/cli/reproduce.txt, which another
 * machine wrote: on every processor that this is compiled for, emulated ones too, with one thread and with
 * three. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "cli/report/reproduction.h"
#include "opaq/parallel.h"

enum { LINE_BYTES = 512, PATH_BYTES = 4096 };

static FILE *expectation(void) {
    const char *const folder = getenv("OPAQ_GOLDEN_DIR");
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/../cli/reproduce.txt", folder == NULL ? "tests/golden" : folder);
    return fopen(path, "r");
}

static void compare(const struct opaq_execution *execution) {
    struct reproduction made;
    struct opaq_error error;
    CHECK_EQ_INT(reproduction_compute(execution, &made, &error), OPAQ_OK);
    FILE *const file = expectation();
    CHECK(file != NULL);
    char expected[LINE_BYTES];
    char line[LINE_BYTES];
    size_t promised = 0;
    for (size_t i = 0; file != NULL && i < made.count; ++i) {
        const struct reproduction_result *const result = &made.results[i];
        if (result->is_portable) {
            (void)snprintf(line, sizeof line, "%016" PRIx64 "  %-15s %s\n", result->hash, result->operation,
                           result->what);
            CHECK(fgets(expected, sizeof expected, file) != NULL);
            CHECK_EQ_STR(line, expected);
            ++promised;
        }
    }
    CHECK(promised > 100);
    if (file != NULL) {
        CHECK(fgets(expected, sizeof expected, file) != NULL);
        CHECK_EQ_INT(strtoull(expected, NULL, 16) == reproduction_hash(&made, true), 1);
        CHECK(fgets(expected, sizeof expected, file) == NULL);
        (void)fclose(file);
    }
    reproduction_release(&made);
}

static void one_thread(void) { compare(NULL); }

static void three_threads(void) {
    struct opaq_pool *pool = NULL;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, &error), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const struct opaq_execution execution = {.parallel = &parallel};
    compare(&execution);
    opaq_pool_destroy(pool);
}

static const struct test_case tests[] = {TEST(one_thread), TEST(three_threads)};
TEST_MAIN(tests)

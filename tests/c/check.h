/* check.h: the test framework. Depends on the C library only.
 *
 * A test file defines functions `static void name(void)`, lists them and ends with one line:
 *
 *     static const struct test_case tests[] = {TEST(parses_names), TEST(refuses_rubbish)};
 *     TEST_MAIN(tests)
 *
 * A failed check is printed with its file, line and values, and the test continues. The program prints one line
 * per test and at the end "N passed, N failed"; it returns 1 if a check failed. An argument runs only the tests
 * whose name contains it; "--list" prints the names. Checks may be used on several threads. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct test_case {
    const char *name;
    void (*run)(void);
};

#define TEST(function) \
    { #function, function }

/* Each evaluates its arguments once and returns 1 if the check passed, so that a loop can stop at the first
 * failure. */
#define CHECK(condition) check_true(__FILE__, __LINE__, #condition, (condition) ? 1 : 0)
#define CHECK_EQ_INT(actual, expected) \
    check_eq_int(__FILE__, __LINE__, #actual, (int64_t)(actual), (int64_t)(expected))
#define CHECK_EQ_STR(actual, expected) check_eq_str(__FILE__, __LINE__, #actual, (actual), (expected))
/* Further arguments are a printf format and its values, which describe the case. */
#define CHECK_BYTES(actual, expected, count, ...) \
    check_bytes(__FILE__, __LINE__, (actual), (expected), (count), __VA_ARGS__)
/* Reports a failure that other code found. Returns 0. */
#define CHECK_FAIL(...) check_fail(__FILE__, __LINE__, __VA_ARGS__)

#if defined(__GNUC__)
#define CHECK_PRINTF(text, rest) __attribute__((unused, format(printf, text, rest)))
#define CHECK_UNUSED __attribute__((unused))
#else
#define CHECK_PRINTF(text, rest)
#define CHECK_UNUSED
#endif

/* The failed checks of the running test, in its file and in the support files. After CHECK_SHOWN of them
 * failures are only counted. */
extern atomic_int check_failures;
#define CHECK_SHOWN 20

/* Counts a failure; returns 1 if it is to be printed, after printing its file and line. */
CHECK_UNUSED static int check_count(const char *file, int line) {
    int before = atomic_fetch_add(&check_failures, 1);
    if (before == CHECK_SHOWN) {
        printf("  ... and more\n");
    }
    if (before >= CHECK_SHOWN) {
        return 0;
    }
    printf("  %s:%d: ", file, line);
    return 1;
}

CHECK_PRINTF(3, 4) static int check_fail(const char *file, int line, const char *format, ...) {
    if (check_count(file, line)) {
        va_list arguments;
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
    return 0;
}

CHECK_UNUSED static int check_true(const char *file, int line, const char *text, int condition) {
    return condition ? 1 : check_fail(file, line, "failed: %s", text);
}

CHECK_UNUSED static int check_eq_int(const char *file, int line, const char *text, int64_t actual,
                                     int64_t expected) {
    return actual == expected
               ? 1
               : check_fail(file, line,
                            "%s is %" PRId64 " (0x%" PRIx64 "), expected %" PRId64 " (0x%" PRIx64 ")", text,
                            actual, (uint64_t)actual, expected, (uint64_t)expected);
}

CHECK_UNUSED static int check_eq_str(const char *file, int line, const char *text, const char *actual,
                                     const char *expected) {
    if (actual == expected || (actual && expected && strcmp(actual, expected) == 0)) {
        return 1;
    }
    return check_fail(file, line, "%s is \"%s\", expected \"%s\"", text, actual ? actual : "(NULL)",
                      expected ? expected : "(NULL)");
}

CHECK_PRINTF(6, 7)
static int check_bytes(const char *file, int line, const void *actual, const void *expected, size_t count,
                       const char *format, ...) {
    const unsigned char *a = actual, *e = expected;
    size_t first = 0, different = 0;
    for (size_t i = count; i-- > 0;) {
        if (a[i] != e[i]) {
            first = i;
            different++;
        }
    }
    if (different == 0) {
        return 1;
    }
    if (check_count(file, line)) {
        va_list arguments;
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf(": %zu of %zu bytes differ, first at %zu:\n", different, count, first);
        size_t begin = first - first % 16;
        size_t end = count - begin < 16 ? count : begin + 16;
        printf("    actual   %6zu:", begin);
        for (size_t i = begin; i < end; i++) {
            printf(" %02x", a[i]);
        }
        printf("\n    expected %6zu:", begin);
        for (size_t i = begin; i < end; i++) {
            printf(" %02x", e[i]);
        }
        printf("\n");
    }
    return 0;
}

CHECK_UNUSED static int check_main(const struct test_case *tests, size_t count, int argc, char **argv) {
    const char *filter = argc > 1 ? argv[1] : "";
    int list = strcmp(filter, "--list") == 0;
    int passed = 0, failed = 0;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* so that output is not lost in a crash */
    for (size_t i = 0; i < count; i++) {
        if (list) {
            printf("%s\n", tests[i].name);
            continue;
        }
        if (!strstr(tests[i].name, filter)) {
            continue;
        }
        atomic_store(&check_failures, 0);
        tests[i].run();
        int failures = atomic_load(&check_failures);
        if (failures) {
            printf("FAILED %s (%d checks)\n", tests[i].name, failures);
            failed++;
        } else {
            printf("ok     %s\n", tests[i].name);
            passed++;
        }
    }
    if (list) {
        return 0;
    }
    if (passed + failed == 0) {
        printf("no test's name contains \"%s\"\n", filter);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed ? 1 : 0;
}

#define TEST_MAIN(tests)                                                          \
    atomic_int check_failures;                                                    \
    int main(int argc, char **argv) {                                             \
        return check_main(tests, sizeof(tests) / sizeof((tests)[0]), argc, argv); \
    }

#endif

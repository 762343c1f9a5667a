/* test_cli_progress.c: the lines of a progress bar, and the output to a terminal, to a file and with
 * --quiet. */
#define _XOPEN_SOURCE 700 /* pseudo-terminals */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "cli/console/number_text.h"
#include "cli/console/progress.h"
#include "cli/console/progress_line.h"
#include "support_stderr.h"

static void units_are_readable(void) {
    CHECK_EQ_STR(size_text(0).text, "0 bytes");
    CHECK_EQ_STR(size_text(1).text, "1 byte");
    CHECK_EQ_STR(size_text(999).text, "999 bytes");
    CHECK_EQ_STR(size_text(1000).text, "1.0 kB");
    CHECK_EQ_STR(size_text(9949).text, "9.9 kB");
    CHECK_EQ_STR(size_text(9950).text, "10 kB");
    CHECK_EQ_STR(size_text(999499).text, "999 kB");
    CHECK_EQ_STR(size_text(999500).text, "1.0 MB");
    CHECK_EQ_STR(size_text(1200000000).text, "1.2 GB");
    CHECK_EQ_STR(size_text(UINT64_MAX).text, "18 EB");
    CHECK_EQ_STR(rate_text(812e6).text, "812 MB/s");
    CHECK_EQ_STR(rate_text(0.0).text, "0 B/s");
    CHECK_EQ_STR(rate_text(-1.0).text, "0 B/s");
    CHECK_EQ_STR(time_text(0.412).text, "0.41 s");
    CHECK_EQ_STR(time_text(2.04).text, "2.0 s");
    CHECK_EQ_STR(time_text(59.4).text, "59 s");
    CHECK_EQ_STR(time_text(59.6).text, "1 min 00 s");
    CHECK_EQ_STR(time_text(200.0).text, "3 min 20 s");
    CHECK_EQ_STR(time_text(3900.0).text, "1 h 05 min");
    CHECK_EQ_STR(time_text(-1.0).text, "0.00 s");
}

static const struct progress_figures figures = {"quantizing", 1184000000, 3200000000, 812e6, 1.5};

static void last_lines_have_totals(void) {
    struct text line = {NULL, 0, 0};
    progress_bar_line(&figures, 80, &line);
    CHECK_EQ_STR(text_get(&line),
                 "quantizing  37% [=========>                 ] 1.2 GB/3.2 GB  812 MB/s  3 s left");
    CHECK_EQ_INT(line.length, 79);
    progress_log_line(&figures, &line);
    CHECK_EQ_STR(text_get(&line), "quantizing: 37%, 1.2 GB of 3.2 GB, 812 MB/s, 3 s left");
    progress_last_line(&figures, &line);
    CHECK_EQ_STR(text_get(&line), "quantizing: 1.2 GB in 1.5 s, 789 MB/s");
    text_free(&line);
}

static void bars_end_full(void) {
    struct text line = {NULL, 0, 0};
    const struct progress_figures full = {"q", 1000, 1000, 100.0, 1.0};
    const struct progress_figures nothing = {"q", 0, 0, 0.0, 0.0};
    progress_bar_line(&full, 48, &line);
    CHECK_EQ_STR(text_get(&line), "q 100% [===============] 1.0 kB/1.0 kB  100 B/s");
    progress_bar_line(&nothing, 40, &line);
    CHECK_EQ_STR(text_get(&line), "q 100% [==============] 0 bytes/0 bytes");
    progress_last_line(&nothing, &line);
    CHECK_EQ_STR(text_get(&line), "q: 0 bytes in 0.00 s");
    text_free(&line);
}

static void lines_fit(void) {
    struct text line = {NULL, 0, 0};
    for (int columns = 1; columns < 200; ++columns) {
        progress_bar_line(&figures, columns, &line);
        CHECK(line.length < (size_t)columns);
        CHECK_EQ_INT(strlen(text_get(&line)), line.length);
    }
    text_free(&line);
}

static void files_get_lines(void) {
    stderr_catch(-1);
    struct progress *const progress = progress_begin("quantizing", 4000, false);
    progress_add(progress, 1500);
    progress_note(progress, "%d is ignored", 7);
    progress_add(progress, 2500);
    progress_end(progress, true);
    char *const said = stderr_release();
    static const char expected[] = "7 is ignored\nquantizing: 4.0 kB in 0.";
    CHECK(strncmp(said, expected, strlen(expected)) == 0);
    CHECK(strchr(said, '\r') == NULL && strchr(said, '\033') == NULL);
    free(said);
}

static void quiet_and_incomplete_print_nothing(void) {
    stderr_catch(-1);
    struct progress *const quiet = progress_begin("quantizing", 4000, true);
    progress_add(quiet, 4000);
    progress_note(quiet, "a note");
    progress_end(quiet, true);
    struct progress *const incomplete = progress_begin("quantizing", 4000, false);
    progress_add(incomplete, 1);
    progress_end(incomplete, false);
    char *const said = stderr_release();
    CHECK_EQ_STR(said, "");
    free(said);
}

/* A pseudo-terminal whose other end the test reads; -1 if there are none. */
static int open_terminal(int *other_end) {
    const int ours = posix_openpt(O_RDWR | O_NOCTTY);
    if (ours < 0 || grantpt(ours) != 0 || unlockpt(ours) != 0) {
        return -1;
    }
    const char *const name = ptsname(ours);
    *other_end = name == NULL ? -1 : open(name, O_RDWR | O_NOCTTY);
    return *other_end < 0 ? -1 : ours;
}

/* Output to a terminal may arrive at its other end later. */
static void read_until_last_line(int terminal, char *seen, size_t capacity) {
    size_t length = 0;
    seen[0] = '\0';
    while (length + 1 < capacity && (strstr(seen, " kB in ") == NULL || seen[length - 1] != '\n')) {
        struct pollfd wait = {terminal, POLLIN, 0};
        const ssize_t more =
            poll(&wait, 1, 10000) == 1 ? read(terminal, seen + length, capacity - 1 - length) : 0;
        if (more <= 0) {
            return;
        }
        length += (size_t)more;
        seen[length] = '\0';
    }
}

/* The output of a bar of 400 steps on a terminal of this kind. */
static size_t draw(const char *kind, char *seen, size_t capacity) {
    int theirs = -1;
    const int ours = open_terminal(&theirs);
    if (ours < 0) {
        CHECK_FAIL("no pseudo-terminal can be opened");
        return 0;
    }
    CHECK_EQ_INT(setenv("TERM", kind, 1), 0);
    stderr_catch(theirs);
    struct progress *const progress = progress_begin("quantizing", 4000, false);
    for (int i = 0; i < 400; ++i) {
        progress_add(progress, 10);
    }
    progress_note(progress, "a note");
    progress_end(progress, true);
    free(stderr_release());
    read_until_last_line(ours, seen, capacity);
    CHECK_EQ_INT(close(theirs) | close(ours), 0);
    return strlen(seen);
}

static void terminals_get_a_bar(void) {
    char seen[4096];
    CHECK(draw("xterm", seen, sizeof seen) < 1000); /* fewer than 400 drawings */
    CHECK(strstr(seen, "\rquantizing   0% [>") == seen);
    CHECK(strstr(seen, "\r\033[Ka note\r\n\rquantizing 100% [=") != NULL);
    CHECK(strstr(seen, "\r\033[Kquantizing: 4.0 kB in 0.") != NULL);
    CHECK(draw("dumb", seen, sizeof seen) != 0);
    CHECK(strstr(seen, "a note\r\nquantizing: 4.0 kB in 0.") == seen);
}

static void *add_many(void *argument) {
    for (int i = 0; i < 10000; ++i) {
        progress_add(argument, 1);
        if (i % 1000 == 0) {
            progress_note(argument, "note");
        }
    }
    return NULL;
}

static void any_thread_may_add(void) {
    pthread_t threads[4];
    stderr_catch(-1);
    struct progress *const progress = progress_begin("quantizing", 40000, false);
    for (size_t i = 0; i < 4; ++i) {
        CHECK_EQ_INT(pthread_create(&threads[i], NULL, add_many, progress), 0);
    }
    for (size_t i = 0; i < 4; ++i) {
        CHECK_EQ_INT(pthread_join(threads[i], NULL), 0);
    }
    progress_end(progress, true);
    char *const said = stderr_release();
    size_t notes = 0;
    for (const char *note = said; strncmp(note, "note\n", 5) == 0; note += 5) {
        ++notes;
    }
    CHECK_EQ_INT(notes, 40);
    CHECK(strstr(said, "quantizing: 40 kB in ") == said + 5 * notes);
    free(said);
}

static const struct test_case tests[] = {TEST(units_are_readable),  TEST(last_lines_have_totals),
                                         TEST(bars_end_full),       TEST(lines_fit),
                                         TEST(files_get_lines),     TEST(quiet_and_incomplete_print_nothing),
                                         TEST(terminals_get_a_bar), TEST(any_thread_may_add)};
TEST_MAIN(tests)

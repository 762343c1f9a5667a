/* cli/console/progress.c: see progress.h. The thread that adds bytes when an update is due draws it; no thread waits
 * for another's drawing. */
#include "cli/console/progress.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli_memory.h"
#include "cli/console/progress_line.h"
#include "cli/console/terminal.h"

enum { SAMPLE_LIMIT = 64 };

static const int64_t nanoseconds = 1000000000;    /* in a second */
static const int64_t bar_interval = 100000000;    /* between two drawings of the bar */
static const int64_t line_interval = 10000000000; /* between two log lines */
static const int64_t rate_window = 5000000000;    /* the rate is averaged over this time */

struct sample {
    int64_t time;
    uint64_t done;
};

struct progress {
    char *what;
    uint64_t total;
    bool is_quiet;
    bool is_bar;
    int64_t begin;
    atomic_uint_fast64_t done;
    atomic_int_fast64_t next_report;
    pthread_mutex_t lock;                /* protects the following members, and stderr */
    struct sample samples[SAMPLE_LIMIT]; /* the oldest first */
    int sample_count;
    struct text line;
};

static int64_t clock_now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * nanoseconds + time.tv_nsec;
}

static void forget_oldest(struct progress *progress) {
    for (int i = 1; i < progress->sample_count; ++i) {
        progress->samples[i - 1] = progress->samples[i];
    }
    --progress->sample_count;
}

/* Keeps the samples of the window. */
static void add_sample(struct progress *progress, int64_t now, uint64_t done) {
    while (progress->sample_count == SAMPLE_LIMIT ||
           (progress->sample_count > 1 && now - progress->samples[1].time >= rate_window)) {
        forget_oldest(progress);
    }
    progress->samples[progress->sample_count] = (struct sample){now, done};
    ++progress->sample_count;
}

static double seconds_between(int64_t begin, int64_t end) {
    return (double)(end - begin) / (double)nanoseconds;
}

static struct progress_figures figures_now(struct progress *progress, int64_t now) {
    struct progress_figures figures = {progress->what, atomic_load(&progress->done), progress->total, 0.0,
                                       seconds_between(progress->begin, now)};
    add_sample(progress, now, figures.done);
    const struct sample *const oldest = &progress->samples[0];
    if (now > oldest->time) {
        figures.rate = (double)(figures.done - oldest->done) / seconds_between(oldest->time, now);
    }
    return figures;
}

static void draw_bar(struct progress *progress, const struct progress_figures *figures) {
    progress_bar_line(figures, terminal_columns(STDERR_FILENO), &progress->line);
    (void)fprintf(stderr, "\r%s\033[K", text_get(&progress->line));
    (void)fflush(stderr);
}

static void erase_bar(const struct progress *progress) {
    if (progress->is_bar) {
        (void)fputs("\r\033[K", stderr);
    }
}

static void report(struct progress *progress, int64_t now) {
    const struct progress_figures figures = figures_now(progress, now);
    if (progress->is_bar) {
        draw_bar(progress, &figures);
    } else {
        progress_log_line(&figures, &progress->line);
        (void)fprintf(stderr, "%s\n", text_get(&progress->line));
    }
    atomic_store(&progress->next_report, now + (progress->is_bar ? bar_interval : line_interval));
}

struct progress *progress_begin(const char *what, uint64_t total_bytes, bool is_quiet) {
    struct progress *const progress = alloc_array(1, sizeof *progress);
    struct text name = {NULL, 0, 0};
    text_print(&name, "%s", what);
    progress->what = name.bytes;
    progress->total = total_bytes;
    progress->is_quiet = is_quiet;
    progress->is_bar = terminal_is_drawable(STDERR_FILENO);
    progress->begin = clock_now();
    atomic_init(&progress->done, 0);
    atomic_init(&progress->next_report, progress->begin + line_interval);
    (void)pthread_mutex_init(&progress->lock, NULL);
    add_sample(progress, progress->begin, 0);
    if (progress->is_bar && !is_quiet) {
        report(progress, progress->begin);
    }
    return progress;
}

void progress_add(struct progress *progress, uint64_t bytes) {
    atomic_fetch_add(&progress->done, bytes);
    if (progress->is_quiet) {
        return;
    }
    const int64_t now = clock_now();
    if (now < atomic_load(&progress->next_report) || pthread_mutex_trylock(&progress->lock) != 0) {
        return;
    }
    if (now >= atomic_load(&progress->next_report)) {
        report(progress, now);
    }
    (void)pthread_mutex_unlock(&progress->lock);
}

void progress_note(struct progress *progress, const char *format, ...) {
    if (progress->is_quiet) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    (void)pthread_mutex_lock(&progress->lock);
    erase_bar(progress);
    show_list(stderr, format, arguments);
    (void)fputc('\n', stderr);
    if (progress->is_bar) {
        report(progress, clock_now());
    }
    (void)pthread_mutex_unlock(&progress->lock);
    va_end(arguments);
}

void progress_end(struct progress *progress, bool is_complete) {
    if (!progress->is_quiet) {
        erase_bar(progress);
        if (is_complete) {
            const struct progress_figures figures = figures_now(progress, clock_now());
            progress_last_line(&figures, &progress->line);
            (void)fprintf(stderr, "%s\n", text_get(&progress->line));
        }
        (void)fflush(stderr);
    }
    (void)pthread_mutex_destroy(&progress->lock);
    text_free(&progress->line);
    free(progress->what);
    free(progress);
}

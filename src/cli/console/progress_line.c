/* cli/console/progress_line.c: see progress_line.h. */
#include "cli/console/progress_line.h"

#include <stdio.h>

#include "cli/console/number_text.h"

enum { LEAST_BAR = 8, MOST_BAR = 40 };

static int percent_of(const struct progress_figures *figures) {
    if (figures->total == 0 || figures->done >= figures->total) {
        return 100;
    }
    return (int)(100.0 * ((double)figures->done / (double)figures->total));
}

static void begin_line(struct text *line) {
    line->length = 0;
    text_add(line, "", 0);
}

static void add_bar(struct text *line, int percent, int width) {
    const int filled = width * percent / 100;
    text_print(line, " [");
    for (int i = 0; i < width; ++i) {
        text_add(line, i < filled ? "=" : i == filled ? ">" : " ", 1);
    }
    text_print(line, "]");
}

/* Whole seconds below a minute: decimals would flicker. */
static struct number_text left_text(double seconds) {
    struct number_text unit;
    if (seconds >= 59.0) {
        return time_text(seconds);
    }
    (void)snprintf(unit.text, sizeof unit.text, "%d s", (int)seconds + 1);
    return unit;
}

/* The rate and the time left, where they are known. */
static void add_speed(struct text *line, const struct progress_figures *figures, const char *between) {
    if (figures->rate <= 0.0) {
        return;
    }
    text_print(line, "%s%s", between, rate_text(figures->rate).text);
    if (figures->done < figures->total) {
        const double left = (double)(figures->total - figures->done) / figures->rate;
        text_print(line, "%s%s left", between, left_text(left).text);
    }
}

void progress_bar_line(const struct progress_figures *figures, int columns, struct text *line) {
    const int percent = percent_of(figures);
    struct text head = {NULL, 0, 0};
    struct text tail = {NULL, 0, 0};
    text_print(&head, "%s %3d%%", figures->what, percent);
    text_print(&tail, " %s/%s", size_text(figures->done).text, size_text(figures->total).text);
    add_speed(&tail, figures, "  ");

    const int room = columns - 1 - (int)head.length - (int)tail.length - 3; /* the bar's " [" and "]" */
    begin_line(line);
    text_add(line, text_get(&head), head.length);
    if (room >= LEAST_BAR) {
        add_bar(line, percent, room < MOST_BAR ? room : MOST_BAR);
    }
    text_add(line, text_get(&tail), tail.length);
    if (columns > 0 && line->length >= (size_t)columns) {
        line->length = (size_t)columns - 1;
        line->bytes[line->length] = '\0';
    }
    text_free(&head);
    text_free(&tail);
}

void progress_log_line(const struct progress_figures *figures, struct text *line) {
    begin_line(line);
    text_print(line, "%s: %d%%, %s of %s", figures->what, percent_of(figures), size_text(figures->done).text,
               size_text(figures->total).text);
    add_speed(line, figures, ", ");
}

void progress_last_line(const struct progress_figures *figures, struct text *line) {
    begin_line(line);
    text_print(line, "%s: %s in %s", figures->what, size_text(figures->done).text,
               time_text(figures->seconds).text);
    if (figures->seconds > 0.0) {
        text_print(line, ", %s", rate_text((double)figures->done / figures->seconds).text);
    }
}

/* cli/console/progress_line.h: the lines that progress.h prints. */
#ifndef OPAQ_CLI_CONSOLE_PROGRESS_LINE_H
#define OPAQ_CLI_CONSOLE_PROGRESS_LINE_H

#include <stdint.h>

#include "cli/cli_memory.h"

struct progress_figures {
    const char *what;
    uint64_t done;
    uint64_t total;
    double rate;    /* recent bytes per second; 0 if unknown */
    double seconds; /* since the beginning */
};

/* "quantizing  37% [=====>      ] 1.2 GB/3.2 GB  812 MB/s  3 s left", in fewer than `columns` columns: if
 * space is short the bar is omitted, then the end is cut. Replaces the contents of `line`. */
void progress_bar_line(const struct progress_figures *figures, int columns, struct text *line);

/* "quantizing: 37%, 1.2 GB of 3.2 GB, 812 MB/s, 3 s left" */
void progress_log_line(const struct progress_figures *figures, struct text *line);

/* "quantizing: 3.2 GB in 4.0 s, 810 MB/s" */
void progress_last_line(const struct progress_figures *figures, struct text *line);

#endif

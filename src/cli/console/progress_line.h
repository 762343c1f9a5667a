/* cli/console/progress_line.h: the lines that progress.h shows, as texts. */
#ifndef OPAQ_CLI_CONSOLE_PROGRESS_LINE_H
#define OPAQ_CLI_CONSOLE_PROGRESS_LINE_H

#include <stdint.h>

#include "cli/cli_memory.h"

struct progress_figures {
    const char *what;
    uint64_t done;
    uint64_t total;
    double rate;    /* bytes per second of late; 0 if not known */
    double seconds; /* since the beginning */
};

/* "quantizing  37% [=====>      ] 1.2 GB/3.2 GB  812 MB/s  3 s left", in less than `columns` columns: first the bar
 * goes, then what is last. Replaces what `line` held. */
void progress_bar_line(const struct progress_figures *figures, int columns, struct text *line);

/* "quantizing: 37%, 1.2 GB of 3.2 GB, 812 MB/s, 3 s left" */
void progress_log_line(const struct progress_figures *figures, struct text *line);

/* "quantizing: 3.2 GB in 4.0 s, 810 MB/s" */
void progress_last_line(const struct progress_figures *figures, struct text *line);

#endif

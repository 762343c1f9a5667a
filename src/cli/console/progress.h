/* cli/console/progress.h: progress of long operations, on stderr. On a terminal a bar with the rate and the remaining
 * time; elsewhere a line every ten seconds; nothing with --quiet. */
#ifndef OPAQ_CLI_CONSOLE_PROGRESS_H
#define OPAQ_CLI_CONSOLE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress;

/* `what` is the label: "quantizing". */
struct progress *progress_begin(const char *what, uint64_t total_bytes, bool is_quiet);

/* May be called from any thread; redraws at most ten times a second. */
void progress_add(struct progress *progress, uint64_t bytes);

/* Prints a line above the bar; may be called from any thread. */
void progress_note(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Removes the bar, prints bytes and time if the work is complete, and releases it. */
void progress_end(struct progress *progress, bool is_complete);

#endif

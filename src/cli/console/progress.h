/* cli/console/progress.h: how far long work is. On a terminal a bar with the rate and the time left; elsewhere a plain line now
 * and then; nothing with --quiet. Everything goes to stderr. */
#ifndef OPAQ_CLI_CONSOLE_PROGRESS_H
#define OPAQ_CLI_CONSOLE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress;

/* `what` is said in front: "quantizing". */
struct progress *progress_begin(const char *what, uint64_t total_bytes, bool is_quiet);

/* From any thread. Cheap: draws at most some times a second. */
void progress_add(struct progress *progress, uint64_t bytes);

/* A line of its own above the bar, from any thread. */
void progress_note(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Takes the bar away, says how much was done in what time if it was all, and releases it. */
void progress_end(struct progress *progress, bool is_complete);

#endif

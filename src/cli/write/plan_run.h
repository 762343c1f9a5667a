/* cli/write/plan_run.h: carries out a plan. The work is cut into chunks of a few megabytes, which all threads take in turn:
 * each reads its rows, computes and writes them to their place, so memory is that of the chunks under way. */
#ifndef OPAQ_CLI_WRITE_PLAN_RUN_H
#define OPAQ_CLI_WRITE_PLAN_RUN_H

#include "cli/write/plan.h"

struct run_options {
    const char *what; /* "quantizing", for the progress bar */
    int threads;      /* 0: one for each processor */
    bool is_quiet;
    bool allows_nonfinite; /* count NaNs and infinities in the plan's targets instead of refusing them */
};

/* Writes the plan's files into a folder, each of them whole or not at all, but not those that are done already.
 * After Ctrl-C it ends with an error too. */
enum opaq_status plan_run(struct plan *plan, int folder, const char *path, const bool *is_done,
                          const struct run_options *options, struct opaq_error *error);

#endif

/* cli/write/manifest_write.h: writes the files of a manifest. The work is split into chunks of a few megabytes, which
 * the threads take in turn: each reads its rows, computes and writes the result, so memory is proportional to the
 * chunks in progress. */
#ifndef OPAQ_CLI_WRITE_MANIFEST_WRITE_H
#define OPAQ_CLI_WRITE_MANIFEST_WRITE_H

#include "cli/write/manifest.h"

struct run_options {
    const char *what; /* "quantizing", for the progress bar */
    int threads;      /* 0: one for each processor */
    bool is_quiet;
    bool allows_nonfinite; /* count NaNs and infinities in the manifest's targets instead of refusing them */
};

/* Writes the files of the manifest that are not done into a folder, each of them completely or not at all. Returns an
 * error after Ctrl-C. */
enum opaq_status manifest_write(struct manifest *manifest, int folder, const char *path, const bool *is_done,
                                const struct run_options *options, struct opaq_error *error);

#endif

/* cli/report/reproduction.h: hashes of the library's results for fixed numbers, to compare machines.
 *
 * The numbers come from Philox 4x32 (10 rounds) and are exact in bf16, so every machine has the same ones. The hashes
 * cover every byte that an operator returns. */
#ifndef OPAQ_CLI_REPORT_REPRODUCTION_H
#define OPAQ_CLI_REPORT_REPRODUCTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "opaq/execution.h"
#include "opaq/status.h"

struct reproduction_result {
    const char *operation; /* "quantize", the operator's name */
    char *what;            /* the quantizer or the plan */
    uint64_t hash;
    bool is_portable; /* the same on every processor */
};

struct reproduction {
    struct reproduction_result *results; /* portable ones first */
    size_t count;
    size_t capacity;
};

/* Computes everything. On an error `reproduction` has what was computed; release it either way. */
enum opaq_status reproduction_compute(const struct opaq_execution *execution, struct reproduction *reproduction,
                                      struct opaq_error *error);

/* Hash of the operations, quantizers, plans and hashes of one part. */
uint64_t reproduction_hash(const struct reproduction *reproduction, bool is_portable);

void reproduction_release(struct reproduction *reproduction);

#endif

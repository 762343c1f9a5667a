/* cli/write/checkpoint_job.h: what quantizing and converting have in common: a plan becomes a checkpoint, with its index,
 * configuration and the source's other files. */
#ifndef OPAQ_CLI_WRITE_CHECKPOINT_JOB_H
#define OPAQ_CLI_WRITE_CHECKPOINT_JOB_H

#include "cli/command.h"
#include "cli/report/coverage.h"
#include "cli/write/plan.h"
#include "cli/write/quantization_config.h"

/* Names of modules, each a text of its own. */
struct module_list {
    char **names;
    size_t count;
    size_t capacity;
};
void module_list_add(struct module_list *list, const char *name, size_t length);
void module_list_free(struct module_list *list);

struct checkpoint_job {
    struct plan *plan;
    const struct opaq_layout_row *scheme; /* NULL: nothing is quantized any more */
    enum activations activations;
    struct module_list ignored; /* modules that could be quantized and are not */
    struct coverages coverages; /* of the source's parameters */
    bool allows_nonfinite;      /* see plan_run.h */
    bool has_guessed_stacks;    /* a note says so */
    struct module_list notes;   /* sentences for the summary */
    struct text settings;       /* for going on with a job, see destination.h */
};

void job_note(struct checkpoint_job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The plan stays the caller's. */
void job_free(struct checkpoint_job *job);

/* The module of a weight's name: without ".weight". Returns the length, 0 if it ends otherwise. */
size_t module_length(const char *weight);

/* Whether a plain weight is a linear layer's as far as one can see: a matrix of floats called "weight", no embedding. */
bool looks_linear(const struct weight *weight);
bool looks_like_embedding(const struct weight *weight);

/* Runs the job, or says what it would do (--dry-run), by the options that both commands have: threads, dry-run,
 * overwrite, quiet, json. Says how it went; the plan must be finished. */
enum exit_code checkpoint_run(const struct command_call *call, struct checkpoint_job *job, const char *path,
                              const char *what);

#endif

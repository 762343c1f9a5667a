/* cli/write/checkpoint_job.h: the common part of quantize and convert: writes the checkpoint of a manifest, with index,
 * configuration and the other files of the source. */
#ifndef OPAQ_CLI_WRITE_CHECKPOINT_JOB_H
#define OPAQ_CLI_WRITE_CHECKPOINT_JOB_H

#include "cli/command.h"
#include "cli/report/coverage.h"
#include "cli/write/manifest.h"
#include "cli/write/quantization_config.h"

/* Owned texts: names of modules, or notes. */
struct module_list {
    char **names;
    size_t count;
    size_t capacity;
};
void module_list_add(struct module_list *list, const char *name, size_t length);
void module_list_free(struct module_list *list);

struct checkpoint_job {
    struct manifest *manifest;
    const struct opaq_layout_row *scheme; /* NULL: all weights are plain */
    enum opaq_activations activations;
    struct module_list ignored; /* linear modules that are not quantized */
    struct coverages coverages; /* of the parameters of the source */
    bool allows_nonfinite;      /* see manifest_write.h */
    bool has_guessed_stacks;    /* the note about stacks was added */
    struct module_list notes;   /* of the summary */
    struct text settings;       /* to recognize the same job, see destination.h */
};

void job_note(struct checkpoint_job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Does not release the manifest. */
void job_free(struct checkpoint_job *job);

/* Length of the module in a weight's name, without ".weight"; 0 if the name does not end so. */
size_t module_length(const char *weight);

/* Heuristic for the weight of a linear layer: a matrix of floats called "weight" that is not an embedding. */
bool looks_linear(const struct weight *weight);
bool looks_like_embedding(const struct weight *weight);

/* Runs the job, or prints what it would do (--dry-run), with the options of both commands: threads, dry-run, overwrite,
 * quiet, json. Prints the summary or the error. The manifest must be finished. */
enum exit_code checkpoint_run(const struct command_call *call, struct checkpoint_job *job, const char *path,
                              const char *what);

#endif

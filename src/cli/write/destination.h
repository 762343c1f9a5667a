/* cli/write/destination.h: where a run writes: a folder, or one file. A folder under work holds a file ".opaq-job" that says
 * what is being made of what; if it fits, the next run goes on with the files that are missing. config.json comes last,
 * so that a folder that can be loaded is complete. One process at a time writes to a folder: it holds a lock on it, which
 * ends with the process. */
#ifndef OPAQ_CLI_WRITE_DESTINATION_H
#define OPAQ_CLI_WRITE_DESTINATION_H

#include "cli/write/plan.h"

struct destination {
    int folder;
    char *path;     /* of the folder */
    bool is_folder; /* else one file, whose name the plan has */
    bool *is_done;  /* of the plan's files */
    struct text job;
};

/* `settings` says what the run makes, in one line: a later run with the same line, source and version goes on with it.
 * Refuses a folder that has something else in it, or a file that exists, unless it may be overwritten; the folder of
 * the source; a disk with too little space. */
enum opaq_status destination_open(const char *path, struct plan *plan, const char *settings, bool overwrites,
                                  struct destination *destination, struct opaq_error *error);

/* The files of the source's folder that are not the model's own: those of the plan, the index and the configuration. */
enum opaq_status destination_copy_others(const struct destination *destination, const struct model *model,
                                         struct opaq_error *error);

/* A JSON file, in the manner of Hugging Face: two spaces, a newline at the end. `like` is the file of the source whose
 * permissions it gets. */
enum opaq_status destination_write_json(const struct destination *destination, const struct model *model,
                                        const char *name, const char *like, yyjson_mut_doc *document,
                                        struct opaq_error *error);

/* The job is complete. */
enum opaq_status destination_finish(const struct destination *destination, struct opaq_error *error);
void destination_close(struct destination *destination);

#endif

/* cli/write/destination.h: the folder or file that a run writes to. While it is written, a folder has a file
 * ".opaq-job" that describes source and settings; if they are the same, the next run continues with the missing files.
 * config.json is written last, so that a folder that can be loaded is complete. A process that writes to a folder
 * holds a lock on it, which ends with the process. */
#ifndef OPAQ_CLI_WRITE_DESTINATION_H
#define OPAQ_CLI_WRITE_DESTINATION_H

#include "cli/write/manifest.h"

struct destination {
    int folder;
    char *path;     /* of the folder */
    bool is_folder; /* else one file, whose name is in the manifest */
    bool *is_done;  /* which files of the manifest exist already */
    struct text job;
};

/* `settings` describes the run in one line: a later run with the same line, source and version continues it. Fails for
 * a folder with other files in it or a file that exists, unless `overwrites`; for the folder of the source; and if the
 * disk has too little space. */
enum opaq_status destination_open(const char *path, struct manifest *manifest, const char *settings,
                                  bool overwrites, struct destination *destination, struct opaq_error *error);

/* Copies the other files of the source's folder: all but those of the manifest, the index and the configuration. */
enum opaq_status destination_copy_others(const struct destination *destination, const struct model *model,
                                         struct opaq_error *error);

/* Writes a JSON file as Hugging Face does: indented by two spaces, a newline at the end. `like` is the file of the
 * source whose permissions it gets. */
enum opaq_status destination_write_json(const struct destination *destination, const struct model *model,
                                        const char *name, const char *like, yyjson_mut_doc *document,
                                        struct opaq_error *error);

/* Marks the job as complete. */
enum opaq_status destination_finish(const struct destination *destination, struct opaq_error *error);
void destination_close(struct destination *destination);

#endif

/* cli/report/model_notes.h: notes on likely mistakes in a checkpoint, one sentence each. */
#ifndef OPAQ_CLI_REPORT_MODEL_NOTES_H
#define OPAQ_CLI_REPORT_MODEL_NOTES_H

#include "cli/read/checkpoint.h"

struct model_notes {
    char **lines;
    size_t count;
};

/* Uses headers and configuration; of the tensors it reads only the global scales of fused modules. */
enum opaq_status model_notes_make(const struct checkpoint *checkpoint, struct model_notes *notes,
                                  struct opaq_error *error);
void model_notes_free(struct model_notes *notes);

#endif

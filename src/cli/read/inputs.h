/* cli/read/inputs.h: the files that this process has opened as input, so that none of them is replaced by its output, under
 * whatever name. Depends on libc. */
#ifndef OPAQ_CLI_READ_INPUTS_H
#define OPAQ_CLI_READ_INPUTS_H

#include <stdbool.h>
#include <sys/stat.h>

/* From the main thread. Entries stay until the process ends. */
void inputs_add(const struct stat *file);
bool inputs_have(const struct stat *file);

#endif

/* cli/read/inputs.h: the files that this process has opened as input, by inode, so that output never replaces one of
 * them. Depends on libc. */
#ifndef OPAQ_CLI_READ_INPUTS_H
#define OPAQ_CLI_READ_INPUTS_H

#include <stdbool.h>
#include <sys/stat.h>

/* Main thread only. Entries stay until the process ends. */
void inputs_add(const struct stat *file);
bool inputs_have(const struct stat *file);

#endif

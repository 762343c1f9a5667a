/* cli/console/terminal.h: what a stream leads to. Depends on POSIX. */
#ifndef OPAQ_CLI_CONSOLE_TERMINAL_H
#define OPAQ_CLI_CONSOLE_TERMINAL_H

#include <stdbool.h>

/* A terminal that a line can be drawn on again and again. */
bool terminal_is_drawable(int descriptor);

/* The columns of a terminal: as it says, else as the environment variable COLUMNS says, else 80. */
int terminal_columns(int descriptor);

#endif

/* cli/commands/arguments.h: command lines, read by the rows of the table of commands. */
#ifndef OPAQ_CLI_COMMANDS_ARGUMENTS_H
#define OPAQ_CLI_COMMANDS_ARGUMENTS_H

#include <stddef.h>

#include "cli/command.h"

enum arguments_outcome {
    ARGUMENTS_FINE,
    ARGUMENTS_HELP, /* --help was asked for */
    ARGUMENTS_WRONG /* a sentence and the usage are on stderr */
};

/* A command line and the memory its call points to; the words stay the caller's. */
struct parsed_line {
    struct command_call call;
    const char **arguments;
    const char ***values;
};

/* `words` are what follows the command's name. To be released whatever the outcome. */
enum arguments_outcome arguments_parse(const struct command_row *row, const char *const *words, size_t count,
                                       struct parsed_line *line);
void arguments_release(struct parsed_line *line);

/* "usage: opaq quantize [options] SRC DST" */
void usage_line(const struct command_row *row, char *buffer, size_t capacity);

#endif

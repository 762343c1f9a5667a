/* cli/commands/arguments.h: command lines, parsed by the rows of the command table, and the choices of an option. */
#ifndef OPAQ_CLI_COMMANDS_ARGUMENTS_H
#define OPAQ_CLI_COMMANDS_ARGUMENTS_H

#include <stdbool.h>
#include <stddef.h>

#include "cli/cli_memory.h"
#include "cli/command.h"

enum arguments_outcome {
    ARGUMENTS_FINE,
    ARGUMENTS_HELP, /* --help was given */
    ARGUMENTS_WRONG /* a message and the usage were printed to stderr */
};

/* A command line and the arrays that its call points to; the words belong to the caller. */
struct parsed_line {
    struct command_call call;
    const char **arguments;
    const char ***values;
    char **lowered; /* copies in lower case of choices that were given with capitals */
    size_t lowered_count;
};

/* `words` follow the command's name. Must be released after any outcome. */
enum arguments_outcome arguments_parse(const struct command_row *row, const char *const *words, size_t count,
                                       struct parsed_line *line);
void arguments_release(struct parsed_line *line);

/* "usage: opaq quantize [options] SRC DST" */
void usage_line(const struct command_row *row, char *buffer, size_t capacity);

/* ---- choices: "nvfp4|mxfp4|fp8" ---- */

struct choice {
    const char *text; /* not terminated */
    size_t length;
};

/* Splits off the first choice; returns the rest, or NULL if there was none. */
const char *choice_next(const char *choices, struct choice *choice);

bool choices_have(const char *choices, const char *value);

/* Adds "nvfp4, mxfp4 or fp8". */
void choices_print(const char *choices, struct text *text);

#endif

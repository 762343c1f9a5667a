/* cli/commands/help.h: texts generated from the command table: help and manual page. */
#ifndef OPAQ_CLI_COMMANDS_HELP_H
#define OPAQ_CLI_COMMANDS_HELP_H

#include "cli/cli_memory.h"
#include "cli/command.h"

enum { HELP_LEAST_COLUMNS = 40, HELP_MOST_COLUMNS = 100 };

/* Width of help on stdout, in columns. */
int help_columns(void);

/* The list of commands, and one command, in lines of fewer than `columns` characters. */
void help_overview(struct text *help, int columns);
void help_command(struct text *help, const struct command_row *row, int columns);

/* The manual page, in troff with the macros of man. */
void help_manual(struct text *page);

/* Meanings of the exit codes; ends with a meaning of NULL. */
struct exit_meaning {
    enum exit_code code;
    const char *meaning;
};
extern const struct exit_meaning exit_meanings[];

/* One line of a description: a paragraph, or a literal line. Returns the next one, NULL after the last. */
struct description_line {
    const char *text;
    size_t length;
    bool is_literal;
};
const char *description_next(const char *description, struct description_line *line);

#endif

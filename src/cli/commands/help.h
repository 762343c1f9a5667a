/* cli/commands/help.h: what is made from the table of commands for people and for shells. */
#ifndef OPAQ_CLI_COMMANDS_HELP_H
#define OPAQ_CLI_COMMANDS_HELP_H

#include "cli/cli_memory.h"
#include "cli/command.h"

enum { HELP_LEAST_COLUMNS = 40, HELP_MOST_COLUMNS = 100 };

/* How many columns a help on stdout has. */
int help_columns(void);

/* The list of commands, and one command, in lines of fewer than `columns` characters. */
void help_overview(struct text *help, int columns);
void help_command(struct text *help, const struct command_row *row, int columns);

/* The manual page, in troff with the macros of man. */
void help_manual(struct text *page);

/* The completion of bash. Needs nothing but bash 4. */
void help_bash_completion(struct text *script);

/* How the command ends, for the help and the manual page; ends with a meaning of NULL. */
struct exit_meaning {
    enum exit_code code;
    const char *meaning;
};
extern const struct exit_meaning exit_meanings[];

/* One line of a description: a paragraph, or a line that is shown as it is. Returns the next one, NULL after the last. */
struct description_line {
    const char *text;
    size_t length;
    bool is_literal;
};
const char *description_next(const char *description, struct description_line *line);

#endif

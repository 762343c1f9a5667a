/* cli/commands/completion.h: completion scripts of shells, generated from the command table. */
#ifndef OPAQ_CLI_COMMANDS_COMPLETION_H
#define OPAQ_CLI_COMMANDS_COMPLETION_H

#include "cli/cli_memory.h"
#include "cli/command.h"

#define COMPLETION_SHELLS "bash|zsh|fish"

/* The script of one of these shells; false if it is another. */
bool completion_script(const char *shell, struct text *script);

void completion_bash(struct text *script); /* bash 4 and later */
void completion_zsh(struct text *script);
void completion_fish(struct text *script); /* fish 3 and later */

/* ---- parts of the scripts ---- */

/* What a value or an argument is completed with. */
enum completion_kind {
    COMPLETION_NOTHING,  /* a value without a fixed set, or no argument */
    COMPLETION_CHOICES,  /* the option's choices */
    COMPLETION_FILES,    /* files and folders */
    COMPLETION_COMMANDS, /* names of commands */
    COMPLETION_SHELL     /* COMPLETION_SHELLS */
};
enum completion_kind completion_of_value(const struct option_row *option); /* the option must have one */
enum completion_kind completion_of_arguments(const struct command_row *row);

/* Calls `add` for every command, the hidden ones last. */
void completion_for_all(struct text *script, void (*add)(struct text *, const struct command_row *));

/* Adds choices ("a|b") separated by spaces. */
void completion_add_choices(struct text *script, const char *choices);

/* Adds an option's help up to the first full stop or semicolon. A backslash goes before each character of
 * `escaped`; `quote` replaces single quotes. */
void completion_add_summary(struct text *script, const char *help, const char *escaped, const char *quote);

#endif

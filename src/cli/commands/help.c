/* cli/commands/help.c: the help of a command and the list of all, as texts for a terminal. See help.h. */
#include "cli/commands/help.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"
#include "cli/console/terminal.h"
#include "opaq/version.h"

enum { OPTION_INDENT = 2, HELP_INDENT = 24 };

const struct exit_meaning exit_meanings[] = {
    {EXIT_FINE, "success"},
    {EXIT_NO, "success with a negative result: a figure is too low, checkpoints differ"},
    {EXIT_USAGE, "invalid options or arguments"},
    {EXIT_TROUBLE, "any other error: invalid input, no space, ..."},
    {EXIT_STOPPED, "stopped by Ctrl-C"},
    {EXIT_FINE, NULL},
};

int help_columns(void) {
    const int columns = terminal_columns(STDOUT_FILENO);
    return columns < HELP_LEAST_COLUMNS  ? HELP_LEAST_COLUMNS
           : columns > HELP_MOST_COLUMNS ? HELP_MOST_COLUMNS
                                         : columns;
}

const char *description_next(const char *description, struct description_line *line) {
    if (description == NULL || *description == '\0') {
        return NULL;
    }
    line->text = description;
    line->length = strcspn(description, "\n");
    line->is_literal = strncmp(description, "  ", 2) == 0;
    description += line->length;
    return *description == '\n' ? description + 1 : description;
}

/* Wraps words: the first line continues at `column`, later lines start at `indent`. Ends with a newline. */
static void add_wrapped(struct text *help, const char *words, size_t length, int column, int indent,
                        int columns) {
    bool is_line_empty = true;
    const char *const end = words + length;
    while (words < end) {
        const char *const space = memchr(words, ' ', (size_t)(end - words));
        const int word = (int)((space == NULL ? end : space) - words);
        if (!is_line_empty && column + 1 + word >= columns) {
            text_print(help, "\n%*s", indent, "");
            column = indent;
            is_line_empty = true;
        }
        text_print(help, "%s%.*s", is_line_empty ? "" : " ", word, words);
        column += word + (is_line_empty ? 0 : 1);
        is_line_empty = false;
        words += word + (space == NULL ? 0 : 1);
    }
    text_print(help, "\n");
}

/* A name, and its meaning in a column beside or below it. */
static void add_entry(struct text *help, const char *name, const char *meaning, int column, int columns) {
    text_print(help, "%*s%s", OPTION_INDENT, "", name);
    const int length = OPTION_INDENT + (int)strlen(name);
    if (length + 2 > column) {
        text_print(help, "\n%*s", column, "");
    } else {
        text_print(help, "%*s", column - length, "");
    }
    add_wrapped(help, meaning, strlen(meaning), column, column, columns);
}

static void add_option(struct text *help, const struct option_row *option, int columns) {
    struct text name = {NULL, 0, 0};
    struct text meaning = {NULL, 0, 0};
    text_print(&name, "--%s%s%s", option->name, option->value == NULL ? "" : " ",
               option->value == NULL ? "" : option->value);
    text_print(&meaning, "%s", option->help);
    if (option->choices != NULL) {
        text_print(&meaning, " %s: ", option->value);
        choices_print(option->choices, &meaning);
        text_print(&meaning, ".");
    }
    add_entry(help, text_get(&name), text_get(&meaning), HELP_INDENT, columns);
    text_free(&name);
    text_free(&meaning);
}

static void add_description(struct text *help, const char *description, int columns) {
    struct description_line line;
    bool was_literal = false;
    while ((description = description_next(description, &line)) != NULL) {
        text_print(help, "%s", was_literal && line.is_literal ? "" : "\n");
        if (line.is_literal) {
            text_print(help, "%.*s\n", (int)line.length, line.text);
        } else {
            add_wrapped(help, line.text, line.length, 0, 0, columns);
        }
        was_literal = line.is_literal;
    }
}

void help_command(struct text *help, const struct command_row *row, int columns) {
    static const struct option_row help_option = {"help", NULL, NULL, "Print this help.", false};
    char usage[256];
    usage_line(row, usage, sizeof usage);
    text_print(help, "%s\n", usage);
    add_description(help, row->description, columns);

    text_print(help, "\noptions:\n");
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        add_option(help, option, columns);
    }
    add_option(help, &help_option, columns);

    text_print(help, "\nexamples:\n");
    for (const char *const *example = row->examples; *example != NULL; example += 2) {
        text_print(help, "  %s\n%*s", example[0], 6, "");
        add_wrapped(help, example[1], strlen(example[1]), 6, 6, columns);
    }
}

void help_overview(struct text *help, int columns) {
    text_print(help, "opaq %s: checkpoints of quantized tensors\n\n", opaq_version());
    text_print(help, "usage: opaq COMMAND [options] ARGUMENTS\n\ncommands:\n");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add_entry(help, row->name, row->summary, 13, columns);
    }
    text_print(help, "\n");
    static const char more[] =
        "'opaq COMMAND --help' describes a command and 'opaq --version' prints the version. "
        "'opaq help --man' prints the manual page, and 'opaq completion SHELL' the "
        "completion script of bash, zsh or fish.";
    add_wrapped(help, more, strlen(more), 0, 0, columns);
    text_print(help, "\nexit status:\n");
    for (const struct exit_meaning *entry = exit_meanings; entry->meaning != NULL; ++entry) {
        char number[16];
        (void)snprintf(number, sizeof number, "%d", (int)entry->code);
        add_entry(help, number, entry->meaning, 7, columns);
    }
}

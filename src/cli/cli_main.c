/* cli/cli_main.c: the program opaq: looks up the command in the table and runs it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"
#include "cli/commands/help.h"
#include "cli/console/interrupt.h"
#include "opaq/version.h"

static enum exit_code print_usage(void) {
    (void)fprintf(stderr, "usage: opaq COMMAND [options] ARGUMENTS\ncommands:");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        (void)fprintf(stderr, "%s %s", row == command_table ? "" : ",", row->name);
    }
    (void)fprintf(stderr, "\nSee 'opaq --help'.\n");
    return EXIT_USAGE;
}

static void print_help(const struct command_row *row) {
    struct text help = {NULL, 0, 0};
    help_command(&help, row, help_columns());
    (void)fputs(text_get(&help), stdout);
    text_free(&help);
}

static enum exit_code run_row(const struct command_row *row, const char *const *words, size_t count) {
    struct parsed_line line;
    enum exit_code code = EXIT_USAGE;
    switch (arguments_parse(row, words, count, &line)) {
    case ARGUMENTS_FINE:
        code = row->run(&line.call);
        break;
    case ARGUMENTS_HELP:
        print_help(row);
        code = EXIT_FINE;
        break;
    case ARGUMENTS_WRONG:
        break;
    }
    arguments_release(&line);
    return code;
}

static enum exit_code run_words(const char *const *words, size_t count) {
    if (count == 0) {
        return print_usage();
    }
    if (strcmp(words[0], "--version") == 0) {
        printf("opaq %s\n", opaq_version());
        return EXIT_FINE;
    }
    const bool is_help = strcmp(words[0], "--help") == 0 || strcmp(words[0], "-h") == 0;
    const char *const name = is_help ? "help" : words[0];
    const struct command_row *const row = command_find(name);
    return row == NULL ? command_unknown(name) : run_row(row, words + 1, count - 1);
}

/* No message if the reader has closed the pipe, as `head` does. */
static bool is_output_complete(void) {
    if (fflush(stdout) == 0 && ferror(stdout) == 0) {
        return true;
    }
    if (errno != EPIPE) {
        (void)fprintf(stderr, "opaq: cannot write to the standard output: %s\n", strerror(errno));
    }
    return false;
}

int main(int count, char **words) {
    interrupt_watch();
    const enum exit_code code = run_words((const char *const *)words + 1, count > 0 ? (size_t)count - 1 : 0);
    return is_output_complete() ? (int)code : (int)EXIT_TROUBLE;
}

/* cli/command.h: the type of a command. The table of commands is the only description: the parser, --help, the manual
 * page and the shell completion are generated from it. */
#ifndef OPAQ_CLI_COMMAND_H
#define OPAQ_CLI_COMMAND_H

#include <stdbool.h>
#include <stddef.h>

/* Exit status of the process. */
enum exit_code {
    EXIT_FINE = 0,
    EXIT_NO = 1,      /* success with a negative result: a threshold missed, a difference found */
    EXIT_USAGE = 2,   /* invalid options or arguments */
    EXIT_TROUBLE = 3, /* any other error: invalid input, no space, ... */
    EXIT_STOPPED = 130
};

struct option_row {
    const char *name;    /* "format", for --format */
    const char *value;   /* placeholder of the value in the help: "NAME"; NULL for a switch */
    const char *choices; /* "nvfp4|mxfp4|...": accepted and completed values; NULL for any. The value
                            "FILE" is completed with paths */
    const char *help;
    bool repeats; /* may be given several times */
};

struct command_row;

/* A parsed command line. */
struct command_call {
    const struct command_row *command;
    const char *const *arguments; /* between least_arguments and most_arguments */
    size_t argument_count;
    const char *const *const
        *values; /* values[option]: a list that ends with NULL; {"", NULL} for a switch that was given */
};

struct command_row {
    const char *name;
    const char *summary;   /* one line */
    const char *arguments; /* "SRC DST" */
    size_t least_arguments;
    size_t most_arguments;
    const struct option_row *options; /* ends with a name of NULL */
    const char *description;          /* paragraphs of the help and the manual page */
    const char *const *examples;      /* command lines, each followed by what it does; ends with NULL */
    enum exit_code (*run)(const struct command_call *call);
};

/* The commands in the order of the help; ends with a name of NULL. */
extern const struct command_row command_table[];

/* The last value of an option, `otherwise` if it was not given. The name must be in the row. */
const char *call_value(const struct command_call *call, const char *option, const char *otherwise);
const char *const *call_values(const struct command_call *call, const char *option); /* ends with NULL */
bool call_has(const struct command_call *call, const char *option);

/* Numeric values of options. Returns false after a message on stderr if the text is not a number or out of range. */
bool call_integer(const struct command_call *call, const char *option, long long least, long long most,
                  long long *number);
bool call_real(const struct command_call *call, const char *option, double least, double most, double *number);

/* Prints "opaq COMMAND: ..." to stderr. */
void complain(const struct command_call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif

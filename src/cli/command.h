/* cli/command.h: what a command is. The table of commands is the one description: the parser, --help, the manual page
 * and the completion of shells are made from it. */
#ifndef OPAQ_CLI_COMMAND_H
#define OPAQ_CLI_COMMAND_H

#include <stdbool.h>
#include <stddef.h>

/* How the command ends. */
enum exit_code {
    EXIT_FINE = 0,
    EXIT_NO = 1,      /* it worked, and the answer is no: a threshold missed, a difference found */
    EXIT_USAGE = 2,   /* options or arguments that make no sense */
    EXIT_TROUBLE = 3, /* bad input, no space, ... */
    EXIT_STOPPED = 130
};

struct option_row {
    const char *name;  /* "format", for --format */
    const char *value; /* what stands for its value in the help: "NAME"; NULL for a switch */
    const char
        *choices; /* "nvfp4|mxfp4|...": what is accepted and completed; NULL for anything. "FILE" and "DIR" as
                            `value` complete paths */
    const char *help;
    bool repeats; /* may be given several times */
};

struct command_row;

/* A command line, parsed: values by the option's place in the row. */
struct command_call {
    const struct command_row *command;
    const char *const *arguments; /* as many as the row wants */
    size_t argument_count;
    const char *const *const
        *values; /* values[option]: a list that ends with NULL; a switch's is {"", NULL} if given */
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

/* The last value of an option of this call, `otherwise` if it was not given. A name that is not in the row is an
 * error of the program. */
const char *call_value(const struct command_call *call, const char *option, const char *otherwise);
const char *const *call_values(const struct command_call *call, const char *option); /* ends with NULL */
bool call_has(const struct command_call *call, const char *option);

/* Numbers of options, with a sentence on stderr and false if the text is none or is out of range. */
bool call_integer(const struct command_call *call, const char *option, long long least, long long most,
                  long long *number);
bool call_real(const struct command_call *call, const char *option, double least, double most, double *number);

/* Prints "opaq COMMAND: ..." to stderr. */
void complain(const struct command_call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif

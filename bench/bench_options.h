/* bench_options.h: the options of a benchmark, "--name value" each. Depends on libc. */
#ifndef OPAQ_BENCH_BENCH_OPTIONS_H
#define OPAQ_BENCH_BENCH_OPTIONS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A number within limits or, if `number` is NULL, a text. */
struct bench_option {
    const char *name;
    int *number;
    int low, high;
    const char **text;
};

static inline int bench_number(const char *text, const struct bench_option *option, const char *program) {
    char *end;
    const long value = strtol(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value < option->low || value > option->high) {
        fprintf(stderr, "%s: %s is \"%s\", expected a number from %d to %d\n", program, option->name, text,
                option->low, option->high);
        exit(2);
    }
    return (int)value;
}

/* Reads all options; --help or an unknown option prints the usage and ends the program. */
static inline void bench_options_read(int argc, char **argv, const char *program, void (*usage)(FILE *stream),
                                      const struct bench_option *options, size_t count) {
    for (int i = 1; i < argc; i += 2) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            exit(0);
        }
        size_t k = 0;
        while (k < count && strcmp(argv[i], options[k].name) != 0) {
            ++k;
        }
        if (k == count || i + 1 >= argc) {
            usage(stderr);
            exit(2);
        }
        if (options[k].number != NULL) {
            *options[k].number = bench_number(argv[i + 1], &options[k], program);
        } else {
            *options[k].text = argv[i + 1];
        }
    }
}

#endif

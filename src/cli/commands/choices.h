/* cli/commands/choices.h: the lists "nvfp4|mxfp4|fp8" of options. */
#ifndef OPAQ_CLI_COMMANDS_CHOICES_H
#define OPAQ_CLI_COMMANDS_CHOICES_H

#include <stdbool.h>
#include <stddef.h>

#include "cli/cli_memory.h"

struct choice {
    const char *text; /* not terminated */
    size_t length;
};

/* Takes the first; returns the rest, or NULL if there was none. */
const char *choice_next(const char *choices, struct choice *choice);

bool choices_have(const char *choices, const char *value);

/* Adds "nvfp4, mxfp4 or fp8". */
void choices_print(const char *choices, struct text *text);

#endif

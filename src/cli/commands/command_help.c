/* cli/commands/command_help.c: `opaq help` and `opaq completion`. */
#include <stdio.h>

#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"
#include "cli/commands/completion.h"
#include "cli/commands/help.h"

enum exit_code command_help(const struct command_call *call) {
    struct text text = {NULL, 0, 0};
    if (call_has(call, "man")) {
        help_manual(&text);
    } else if (call->argument_count == 0) {
        help_overview(&text, help_columns());
    } else {
        const struct command_row *const row = command_find(call->arguments[0]);
        if (row == NULL) {
            return command_unknown(call->arguments[0]);
        }
        help_command(&text, row, help_columns());
    }
    (void)fputs(text_get(&text), stdout);
    text_free(&text);
    return EXIT_FINE;
}

enum exit_code command_completion(const struct command_call *call) {
    struct text script = {NULL, 0, 0};
    if (!completion_script(call->arguments[0], &script)) {
        struct text shells = {NULL, 0, 0};
        choices_print(COMPLETION_SHELLS, &shells);
        complain(call, "the shell is \"%s\", expected %s", call->arguments[0], text_get(&shells));
        text_free(&shells);
        return EXIT_USAGE;
    }
    (void)fputs(text_get(&script), stdout);
    text_free(&script);
    return EXIT_FINE;
}

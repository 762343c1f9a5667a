/* cli/commands/completion.c: what the completion scripts of all shells share. See completion.h. */
#include "cli/commands/completion.h"

#include <string.h>

#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"

bool completion_script(const char *shell, struct text *script) {
    static const struct {
        const char *shell;
        void (*print)(struct text *);
    } rows[] = {{"bash", completion_bash}, {"zsh", completion_zsh}, {"fish", completion_fish}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        if (strcmp(shell, rows[i].shell) == 0) {
            rows[i].print(script);
            return true;
        }
    }
    return false;
}

enum completion_kind completion_of_value(const struct option_row *option) {
    return option->choices != NULL              ? COMPLETION_CHOICES
           : strcmp(option->value, "FILE") == 0 ? COMPLETION_FILES
                                                : COMPLETION_NOTHING;
}

enum completion_kind completion_of_arguments(const struct command_row *row) {
    return row->most_arguments == 0                   ? COMPLETION_NOTHING
           : strcmp(row->arguments, "[COMMAND]") == 0 ? COMPLETION_COMMANDS
           : strcmp(row->arguments, "SHELL") == 0     ? COMPLETION_SHELL
                                                      : COMPLETION_FILES;
}

void completion_for_all(struct text *script, void (*add)(struct text *, const struct command_row *)) {
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add(script, row);
    }
    for (const struct command_row *row = hidden_command_table; row->name != NULL; ++row) {
        add(script, row);
    }
}

void completion_add_choices(struct text *script, const char *choices) {
    struct choice choice;
    const char *space = "";
    while ((choices = choice_next(choices, &choice)) != NULL) {
        text_print(script, "%s%.*s", space, (int)choice.length, choice.text);
        space = " ";
    }
}

void completion_add_summary(struct text *script, const char *help, const char *escaped, const char *quote) {
    size_t length = strcspn(help, ".;");
    while (help[length] != '\0' && help[length + 1] != ' ' && help[length + 1] != '\0') {
        length += 1 + strcspn(help + length + 1, ".;"); /* a full stop inside of a word */
    }
    for (size_t i = 0; i < length; ++i) {
        if (help[i] == '\'') {
            text_print(script, "%s", quote);
        } else {
            text_print(script, "%s%c", strchr(escaped, help[i]) == NULL ? "" : "\\", help[i]);
        }
    }
}

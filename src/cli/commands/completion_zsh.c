/* cli/commands/completion_zsh.c: the completion of zsh: a call of _arguments for each command. The script works
 * as a file _opaq in $fpath and when it is sourced. See completion.h. */
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/completion.h"
#include "opaq/version.h"

/* Adds a help text within single quotes, escaping [ ] and :, which are syntax of _arguments and _describe. */
static void add_summary(struct text *script, const char *help) {
    completion_add_summary(script, help, "[]:\\", "'\\''");
}

static void add_command(struct text *script, const struct command_row *row) {
    text_print(script, "        '%s:", row->name);
    add_summary(script, row->summary);
    text_print(script, "'\n");
}

/* The action of _arguments. */
static void add_action(struct text *script, enum completion_kind kind, const char *choices) {
    switch (kind) {
    case COMPLETION_CHOICES:
        text_print(script, "(");
        completion_add_choices(script, choices);
        text_print(script, ")");
        break;
    case COMPLETION_FILES:
        text_print(script, "_files");
        break;
    case COMPLETION_COMMANDS:
        text_print(script, "_opaq_commands");
        break;
    case COMPLETION_SHELL:
        add_action(script, COMPLETION_CHOICES, COMPLETION_SHELLS);
        break;
    case COMPLETION_NOTHING:
        text_print(script, " ");
        break; /* shows the placeholder */
    }
}

static void add_option(struct text *script, const struct option_row *option) {
    text_print(script, " \\\n            '%s--%s%s[", option->repeats ? "*" : "", option->name,
               option->value == NULL ? "" : "=");
    add_summary(script, option->help);
    text_print(script, "]");
    if (option->value != NULL) {
        text_print(script, ":%s:", option->value);
        add_action(script, completion_of_value(option), option->choices);
    }
    text_print(script, "'");
}

/* Each word of "SRC DST" is an argument; an optional one such as [COMMAND] is marked by two colons. */
static void add_arguments(struct text *script, const struct command_row *row) {
    int number = 1;
    for (const char *name = row->arguments; *name != '\0'; ++number) {
        const size_t length = strcspn(name, " ");
        const bool is_optional = *name == '[';
        text_print(script, " \\\n            '%d%s:%.*s:", number, is_optional ? ":" : "",
                   (int)length - (is_optional ? 2 : 0), name + (is_optional ? 1 : 0));
        add_action(script, completion_of_arguments(row), NULL);
        text_print(script, "'");
        name += length + strspn(name + length, " ");
    }
}

static void add_case(struct text *script, const struct command_row *row) {
    text_print(script, "    %s)\n        _arguments -S", row->name);
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        add_option(script, option);
    }
    text_print(script, " \\\n            '(- *)--help[Print the help]'");
    add_arguments(script, row);
    text_print(script, " && result=0\n        ;;\n");
}

void completion_zsh(struct text *script) {
    text_print(script,
               "#compdef opaq\n"
               "# Completion of opaq %s in zsh, made by 'opaq completion zsh' from the table of commands.\n\n"
               "_opaq_commands() {\n    local -a commands\n    commands=(\n",
               opaq_version());
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add_command(script, row);
    }
    add_command(script, command_find("help"));
    text_print(script,
               "    )\n    _describe -t commands command commands\n}\n\n"
               "_opaq() {\n"
               "    local curcontext=$curcontext state line\n"
               "    local -i result=1\n"
               "    _arguments -C '(- *)--help[List the commands]' '(- *)--version[Print the version]' \\\n"
               "        '1:command:_opaq_commands' '*:: :->rest' && result=0\n"
               "    if [[ $state != rest ]]; then\n        return result\n    fi\n"
               "    curcontext=${curcontext%%:*:*}:opaq-$line[1]:\n"
               "    case $line[1] in\n");
    completion_for_all(script, add_case);
    text_print(script,
               "    esac\n    return result\n}\n\n"
               "if [[ ${funcstack[1]-} == _opaq ]]; then # a file of $fpath that is run for the first time\n"
               "    _opaq \"$@\"\n"
               "else\n    compdef _opaq opaq\nfi\n");
}

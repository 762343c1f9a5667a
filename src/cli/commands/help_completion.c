/* cli/commands/help_completion.c: the completion of bash: functions that hold the data of the table, and one that uses
 * them. See help.h. */
#include <string.h>

#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"
#include "cli/commands/help.h"
#include "opaq/version.h"

static void add_options(struct text *script, const struct command_row *row) {
    text_print(script, "    %s) echo '", row->name);
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        text_print(script, "--%s ", option->name);
    }
    text_print(script, "--help' ;;\n");
}

/* Paths are completed by bash, choices from their list; other values are not completed. */
static void add_value(struct text *script, const struct command_row *row, const struct option_row *option) {
    text_print(script, "    %s--%s) echo '", row->name, option->name);
    if (option->choices != NULL) {
        text_print(script, "words");
        struct choice choice;
        for (const char *rest = option->choices; (rest = choice_next(rest, &choice)) != NULL;) {
            text_print(script, " %.*s", (int)choice.length, choice.text);
        }
    } else if (strcmp(option->value, "FILE") == 0) {
        text_print(script, "file");
    } else if (strcmp(option->value, "DIR") == 0) {
        text_print(script, "folder");
    } else {
        text_print(script, "anything");
    }
    text_print(script, "' ;;\n");
}

static void add_values(struct text *script, const struct command_row *row) {
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        if (option->value != NULL) {
            add_value(script, row, option);
        }
    }
}

static void add_for_all(struct text *script, void (*add)(struct text *, const struct command_row *)) {
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add(script, row);
    }
    for (const struct command_row *row = hidden_command_table; row->name != NULL; ++row) {
        add(script, row);
    }
}

static const char function_text[] =
    "_opaq() {\n"
    "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
    "    local command= kind= word i\n"
    "    local -i options_over=0\n"
    "    for ((i = 1; i < COMP_CWORD; ++i)); do\n"
    "        word=${COMP_WORDS[i]}\n"
    "        if [[ $word == -- ]]; then\n"
    "            options_over=1\n"
    "        elif [[ -z $command && $word != -* ]]; then\n"
    "            command=$word\n"
    "        fi\n"
    "    done\n"
    "    # --name=value comes as three words\n"
    "    if [[ $current == '=' ]]; then\n"
    "        current=\n"
    "    elif [[ $before == '=' ]] && ((COMP_CWORD > 1)); then\n"
    "        before=${COMP_WORDS[COMP_CWORD - 2]}\n"
    "    fi\n"
    "    if [[ -z $command ]]; then\n"
    "        kind=\"words $(_opaq_commands) --help --version\"\n"
    "    elif ((!options_over)) && [[ $before == --* ]]; then\n"
    "        kind=$(_opaq_value_of \"$command\" \"$before\")\n"
    "    fi\n"
    "    if [[ -z $kind ]]; then\n"
    "        if ((!options_over)) && [[ $current == -* ]]; then\n"
    "            kind=\"words $(_opaq_options_of \"$command\")\"\n"
    "        else\n"
    "            kind=$(_opaq_arguments_of \"$command\")\n"
    "        fi\n"
    "    fi\n"
    "    COMPREPLY=()\n"
    "    case $kind in\n"
    "    words*) mapfile -t COMPREPLY < <(compgen -W \"${kind#words}\" -- \"$current\") ;;\n"
    "    file) mapfile -t COMPREPLY < <(compgen -f -- \"$current\") ;;\n"
    "    folder) mapfile -t COMPREPLY < <(compgen -d -- \"$current\") ;;\n"
    "    esac\n"
    "    if [[ $kind == file || $kind == folder ]]; then\n"
    "        compopt -o filenames 2>/dev/null\n"
    "    fi\n"
    "    return 0\n"
    "}\n"
    "complete -F _opaq opaq\n";

static void add_commands(struct text *script) {
    text_print(script, "_opaq_commands() {\n    echo '");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        text_print(script, "%s ", row->name);
    }
    text_print(script, "help'\n}\n\n");
}

/* Arguments are paths, except of these two commands. */
static void add_arguments(struct text *script) {
    text_print(script, "_opaq_arguments_of() { # <command>\n    case $1 in\n"
                       "    help) echo \"words $(_opaq_commands)\" ;;\n"
                       "    completion) echo 'words bash' ;;\n");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        text_print(script, "    %s) echo '%s' ;;\n", row->name, row->most_arguments == 0 ? "nothing" : "file");
    }
    text_print(script, "    esac\n}\n\n");
}

void help_bash_completion(struct text *script) {
    text_print(
        script,
        "# Completion of opaq %s in bash, made by 'opaq completion bash' from the table of commands.\n\n",
        opaq_version());
    add_commands(script);
    text_print(script, "_opaq_options_of() { # <command>\n    case $1 in\n");
    add_for_all(script, add_options);
    text_print(script, "    esac\n}\n\n");
    text_print(script, "_opaq_value_of() { # <command> <--option>: what its value is; nothing for a switch\n"
                       "    case $1$2 in\n");
    add_for_all(script, add_values);
    text_print(script, "    esac\n}\n\n");
    add_arguments(script);
    text_print(script, "%s", function_text);
}

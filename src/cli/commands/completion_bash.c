/* cli/commands/completion_bash.c: the completion of bash: functions that hold the data of the table, and one that uses
 * them. See completion.h. */
#include "cli/commands/commands.h"
#include "cli/commands/completion.h"
#include "opaq/version.h"

static void add_options(struct text *script, const struct command_row *row) {
    text_print(script, "    %s) echo '", row->name);
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        text_print(script, "--%s ", option->name);
    }
    text_print(script, "--help' ;;\n");
}

/* Adds a word list or "file", in the form that _opaq's `kind` uses; other kinds complete nothing. */
static void add_kind(struct text *script, enum completion_kind kind, const char *choices) {
    switch (kind) {
    case COMPLETION_CHOICES:
        text_print(script, "echo 'words ");
        completion_add_choices(script, choices);
        text_print(script, "' ;;\n");
        break;
    case COMPLETION_FILES:
        text_print(script, "echo 'file' ;;\n");
        break;
    case COMPLETION_COMMANDS:
        text_print(script, "echo \"words $(_opaq_commands)\" ;;\n");
        break;
    case COMPLETION_SHELL:
        add_kind(script, COMPLETION_CHOICES, COMPLETION_SHELLS);
        break;
    case COMPLETION_NOTHING:
        text_print(script, "echo 'nothing' ;;\n");
        break;
    }
}

static void add_values(struct text *script, const struct command_row *row) {
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        if (option->value != NULL) {
            text_print(script, "    %s--%s) ", row->name, option->name);
            add_kind(script, completion_of_value(option), option->choices);
        }
    }
}

static void add_arguments(struct text *script, const struct command_row *row) {
    text_print(script, "    %s) ", row->name);
    add_kind(script, completion_of_arguments(row), NULL);
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
    "    esac\n"
    "    if [[ $kind == file ]]; then\n"
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

void completion_bash(struct text *script) {
    text_print(
        script,
        "# Completion of opaq %s in bash, made by 'opaq completion bash' from the table of commands.\n\n",
        opaq_version());
    add_commands(script);
    text_print(script, "_opaq_options_of() { # <command>\n    case $1 in\n");
    completion_for_all(script, add_options);
    text_print(script, "    esac\n}\n\n");
    text_print(script, "_opaq_value_of() { # <command> <--option>: what its value is; nothing for a switch\n"
                       "    case $1$2 in\n");
    completion_for_all(script, add_values);
    text_print(script, "    esac\n}\n\n");
    text_print(script, "_opaq_arguments_of() { # <command>\n    case $1 in\n");
    completion_for_all(script, add_arguments);
    text_print(script, "    esac\n}\n\n");
    text_print(script, "%s", function_text);
}

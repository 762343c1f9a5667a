/* cli/commands/completion_fish.c: the completion of fish: calls of `complete`, each for the command that it belongs to.
 * See completion.h. */
#include "cli/commands/commands.h"
#include "cli/commands/completion.h"
#include "opaq/version.h"

static const char function_text[] =
    "# Whether the line's command is $argv[1]; without an argument, whether it has none yet.\n"
    "function __opaq_in\n"
    "    set -l words (commandline -opc)\n"
    "    set -e words[1]\n"
    "    for word in $words\n"
    "        if not string match -q -- '-*' $word\n"
    "            test \"$word\" = \"$argv[1]\"\n"
    "            return\n"
    "        end\n"
    "    end\n"
    "    test (count $argv) = 0\n"
    "end\n\n"
    "complete -c opaq -f\n"
    "complete -c opaq -n __opaq_in -l help -d 'List the commands'\n"
    "complete -c opaq -n __opaq_in -l version -d 'Print the version'\n";

static void add_description(struct text *script, const char *help) {
    text_print(script, " -d '");
    completion_add_summary(script, help, "\\", "\\'");
    text_print(script, "'\n");
}

/* Names of commands, after the command in `condition`. */
static void add_commands(struct text *script, const char *condition) {
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        text_print(script, "complete -c opaq -n '%s' -a %s", condition, row->name);
        add_description(script, row->summary);
    }
    text_print(script, "complete -c opaq -n '%s' -a help", condition);
    add_description(script, command_find("help")->summary);
}

static void add_option(struct text *script, const struct option_row *option) {
    text_print(script, " -l %s", option->name);
    if (option->value != NULL) {
        switch (completion_of_value(option)) {
        case COMPLETION_CHOICES:
            text_print(script, " -x -a '");
            completion_add_choices(script, option->choices);
            text_print(script, "'");
            break;
        case COMPLETION_FILES:
            text_print(script, " -r -F");
            break;
        default:
            text_print(script, " -x");
            break;
        }
    }
    add_description(script, option->help);
}

static void add_arguments(struct text *script, const struct command_row *row) {
    struct text condition = {NULL, 0, 0};
    text_print(&condition, "__opaq_in %s", row->name);
    switch (completion_of_arguments(row)) {
    case COMPLETION_FILES:
        text_print(script, "complete -c opaq -n '%s' -F\n", text_get(&condition));
        break;
    case COMPLETION_COMMANDS:
        add_commands(script, text_get(&condition));
        break;
    case COMPLETION_SHELL:
        text_print(script, "complete -c opaq -n '%s' -a '", text_get(&condition));
        completion_add_choices(script, COMPLETION_SHELLS);
        text_print(script, "'\n");
        break;
    default:
        break;
    }
    text_free(&condition);
}

static void add_command(struct text *script, const struct command_row *row) {
    text_print(script, "\n");
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        text_print(script, "complete -c opaq -n '__opaq_in %s'", row->name);
        add_option(script, option);
    }
    text_print(script, "complete -c opaq -n '__opaq_in %s' -l help -d 'Print the help'\n", row->name);
    add_arguments(script, row);
}

void completion_fish(struct text *script) {
    text_print(
        script,
        "# Completion of opaq %s in fish, made by 'opaq completion fish' from the table of commands.\n\n",
        opaq_version());
    text_print(script, "%s", function_text);
    add_commands(script, "__opaq_in");
    completion_for_all(script, add_command);
}

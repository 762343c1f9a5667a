/* cli/commands/help_manual.c: the manual page. See help.h. */
#include <string.h>

#include "cli/commands/arguments.h"
#include "cli/commands/help.h"
#include "opaq/version.h"

/* Escapes text for troff. */
static void add_escaped(struct text *page, const char *bytes, size_t length) {
    for (size_t i = 0; i < length; ++i) {
        const bool begins_line = page->length == 0 || page->bytes[page->length - 1] == '\n';
        const char letter = bytes[i];
        if (begins_line && (letter == '.' || letter == '\'')) {
            text_print(page, "\\&");
        }
        if (letter == '\\') {
            text_print(page, "\\e");
        } else if (letter == '-') {
            text_print(page, "\\-");
        } else if (letter == '\'') {
            text_print(page, "\\(aq");
        } else if (letter == '^') {
            text_print(page, "\\(ha");
        } else if (letter == '~') {
            text_print(page, "\\(ti");
        } else if (letter == '`') {
            text_print(page, "\\(ga");
        } else {
            text_add(page, &letter, 1);
        }
    }
}

static void add_line(struct text *page, const char *words) {
    add_escaped(page, words, strlen(words));
    text_print(page, "\n");
}

static void add_description(struct text *page, const char *description) {
    struct description_line line;
    bool was_literal = false;
    while ((description = description_next(description, &line)) != NULL) {
        if (was_literal != line.is_literal) {
            text_print(page, "%s", line.is_literal ? ".PP\n.nf\n" : ".fi\n");
        }
        if (!line.is_literal) {
            text_print(page, ".PP\n");
        }
        add_escaped(page, line.text, line.length);
        text_print(page, "\n");
        was_literal = line.is_literal;
    }
    if (was_literal) {
        text_print(page, ".fi\n");
    }
}

static void add_synopsis(struct text *page, const struct command_row *row) {
    text_print(page, ".B opaq ");
    add_escaped(page, row->name, strlen(row->name));
    text_print(page, "\n[options]\n");
    if (row->arguments[0] != '\0') {
        text_print(page, ".I ");
        add_line(page, row->arguments);
    }
}

static void add_option(struct text *page, const struct option_row *option) {
    text_print(page, ".TP\n");
    text_print(page, "%s\"\\-\\-", option->value == NULL ? ".B " : ".BI ");
    add_escaped(page, option->name, strlen(option->name));
    if (option->value == NULL) {
        text_print(page, "\"\n");
    } else {
        text_print(page, " \" %s\n", option->value);
    }
    add_line(page, option->help);
    if (option->choices != NULL) {
        struct text choices = {NULL, 0, 0};
        choices_print(option->choices, &choices);
        text_print(page, ".I %s\nis ", option->value);
        add_escaped(page, text_get(&choices), choices.length);
        text_print(page, ".\n");
        text_free(&choices);
    }
}

static void add_examples(struct text *page, const struct command_row *row) {
    for (const char *const *example = row->examples; *example != NULL; example += 2) {
        text_print(page, ".TP\n");
        add_line(page, example[0]);
        add_line(page, example[1]);
    }
}

static void add_command(struct text *page, const struct command_row *row) {
    text_print(page, ".SS opaq %s\n", row->name);
    add_synopsis(page, row);
    add_description(page, row->description);
    for (const struct option_row *option = row->options; option->name != NULL; ++option) {
        add_option(page, option);
    }
}

/* Environment variables of the library and of the command. */
static void add_environment(struct text *page) {
    static const char *const entries[][2] = {
        {"OPAQ_CPU",
         "Limits the instruction sets: avx2, avx512, ref for none, or another name that 'opaq version' "
         "prints."},
        {"OPAQ_KERNEL", "Names of kernels to use instead of the fastest, separated by commas."},
        {"COLUMNS", "The width of the help and of the progress bar if the terminal does not report it."},
        {"TERM", "If it is dumb, a line every ten seconds replaces the progress bar."},
    };
    text_print(page, ".SH ENVIRONMENT\n");
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
        text_print(page, ".TP\n.B %s\n", entries[i][0]);
        add_line(page, entries[i][1]);
    }
}

static void add_exit_status(struct text *page) {
    text_print(page, ".SH EXIT STATUS\n");
    for (const struct exit_meaning *entry = exit_meanings; entry->meaning != NULL; ++entry) {
        text_print(page, ".TP\n.B %d\n", (int)entry->code);
        add_line(page, entry->meaning);
    }
}

void help_manual(struct text *page) {
    text_print(page, ".\\\" Made by 'opaq help --man' from the table of commands.\n");
    text_print(page, ".TH OPAQ 1 \"\" \"opaq %s\" \"User Commands\"\n.nh\n.ad l\n", opaq_version());
    text_print(page, ".SH NAME\nopaq \\- checkpoints of quantized tensors\n.SH SYNOPSIS\n");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add_synopsis(page, row);
        text_print(page, ".br\n");
    }
    text_print(page, ".B opaq help\n.I [COMMAND]\n.br\n.B opaq completion bash\n");
    text_print(page, ".SH DESCRIPTION\n.B opaq\n");
    add_line(
        page,
        "quantizes the weights of model checkpoints, converts between the layouts that inference engines "
        "load, and measures the error of quantizing. Options may appear anywhere after the command's name, as "
        "'--name value' or '--name=value'; '--' ends them. Every command takes --help.");
    text_print(page, ".SH COMMANDS\n");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add_command(page, row);
    }
    add_exit_status(page);
    add_environment(page);
    text_print(page, ".SH EXAMPLES\n");
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        add_examples(page, row);
    }
}

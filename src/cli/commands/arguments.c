/* cli/commands/arguments.c: see arguments.h and command.h. */
#include "cli/commands/arguments.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/commands/nearest.h"
#include "cli/console/terminal.h"

/* ---- choices ---- */

const char *choice_next(const char *choices, struct choice *choice) {
    if (*choices == '\0') {
        return NULL;
    }
    *choice = (struct choice){choices, strcspn(choices, "|")};
    choices += choice->length;
    return *choices == '|' ? choices + 1 : choices;
}

bool choices_have(const char *choices, const char *value) {
    const size_t length = strlen(value);
    struct choice choice;
    while ((choices = choice_next(choices, &choice)) != NULL) {
        if (choice.length == length && memcmp(choice.text, value, length) == 0) {
            return true;
        }
    }
    return false;
}

void choices_print(const char *choices, struct text *text) {
    struct choice choice;
    const char *between = "";
    for (const char *rest = choices; (rest = choice_next(rest, &choice)) != NULL;) {
        text_print(text, "%s%.*s", between, (int)choice.length, choice.text);
        between = strchr(rest, '|') == NULL ? " or " : ", ";
    }
}

/* ---- command lines ---- */

static size_t option_count(const struct command_row *row) {
    size_t count = 0;
    while (row->options[count].name != NULL) {
        ++count;
    }
    return count;
}

/* Index of the option whose name is the first `length` letters of `name`; the number of options if there is none. */
static size_t find_option(const struct command_row *row, const char *name, size_t length) {
    size_t index = 0;
    while (row->options[index].name != NULL &&
           (strncmp(row->options[index].name, name, length) != 0 || row->options[index].name[length] != '\0')) {
        ++index;
    }
    return index;
}

void complain(const struct command_call *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)fprintf(stderr, "opaq %s: ", call->command->name);
    show_list(stderr, format, arguments);
    (void)fputc('\n', stderr);
    va_end(arguments);
}

void usage_line(const struct command_row *row, char *buffer, size_t capacity) {
    (void)snprintf(buffer, capacity, "usage: opaq %s [options]%s%s", row->name,
                   row->arguments[0] == '\0' ? "" : " ", row->arguments);
}

static enum arguments_outcome wrong(const struct command_call *call) {
    char usage[256];
    usage_line(call->command, usage, sizeof usage);
    (void)fprintf(stderr, "%s\nSee 'opaq %s --help'.\n", usage, call->command->name);
    return ARGUMENTS_WRONG;
}

static enum arguments_outcome unknown_option(const struct command_call *call, const char *word) {
    const char *const name = word + strspn(word, "-");
    const size_t length = strcspn(word, "=");
    char bare[64];
    (void)snprintf(bare, sizeof bare, "%.*s", (int)strcspn(name, "="), name);
    struct nearest nearest = nearest_begin(bare);
    nearest_try(&nearest, "help", 4);
    for (const struct option_row *option = call->command->options; option->name != NULL; ++option) {
        nearest_try(&nearest, option->name, strlen(option->name));
    }
    if (nearest.best != NULL) {
        complain(call, "unknown option %.*s; did you mean --%s?", (int)length, word, nearest.best);
    } else {
        complain(call, "unknown option %.*s", (int)length, word);
    }
    return wrong(call);
}

/* `lower` is the value in lower case, which is compared with the choices. */
static enum arguments_outcome refuse_choice(const struct command_call *call, const struct option_row *option,
                                            const char *value, const char *lower) {
    struct text list = {NULL, 0, 0};
    struct nearest nearest = nearest_begin(lower);
    struct choice choice;
    for (const char *rest = option->choices; (rest = choice_next(rest, &choice)) != NULL;) {
        nearest_try(&nearest, choice.text, choice.length);
    }
    choices_print(option->choices, &list);
    if (nearest.best != NULL) {
        complain(call, "--%s is \"%s\", expected %s; did you mean %.*s?", option->name, value, text_get(&list),
                 (int)nearest.best_length, nearest.best);
    } else {
        complain(call, "--%s is \"%s\", expected %s", option->name, value, text_get(&list));
    }
    text_free(&list);
    return wrong(call);
}

/* The choice that a value is, whose case does not matter; NULL if it is none. */
static const char *find_choice(struct parsed_line *line, const struct option_row *option, const char *value) {
    if (choices_have(option->choices, value)) {
        return value;
    }
    char *const lower = copy_text(value, strlen(value));
    for (char *c = lower; *c != '\0'; ++c) {
        *c = (char)(*c >= 'A' && *c <= 'Z' ? *c - 'A' + 'a' : *c);
    }
    line->lowered[line->lowered_count++] = lower;
    return choices_have(option->choices, lower) ? lower : NULL;
}

static enum arguments_outcome add_value(struct parsed_line *line, size_t index, const char *value) {
    const struct option_row *const option = &line->call.command->options[index];
    const char **const values = line->values[index];
    size_t count = 0;
    while (values[count] != NULL) {
        ++count;
    }
    if (option->choices != NULL) {
        const char *const choice = find_choice(line, option, value);
        if (choice == NULL) {
            return refuse_choice(&line->call, option, value, line->lowered[line->lowered_count - 1]);
        }
        value = choice;
    }
    if (count != 0 && option->value == NULL) {
        return ARGUMENTS_FINE;
    }
    if (count != 0 && !option->repeats) {
        complain(&line->call, "--%s is given twice, as \"%s\" and as \"%s\"", option->name, values[0], value);
        return wrong(&line->call);
    }
    values[count] = value;
    return ARGUMENTS_FINE;
}

/* Parses the option at `words[0]`; `taken` is the number of words it consists of. */
static enum arguments_outcome take_option(struct parsed_line *line, const char *const *words, size_t count,
                                          size_t *taken) {
    const struct command_row *const row = line->call.command;
    const char *const word = words[0];
    *taken = 1;
    if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) {
        return ARGUMENTS_HELP;
    }
    if (strncmp(word, "--", 2) != 0) {
        return unknown_option(&line->call, word);
    }
    const size_t length = strcspn(word + 2, "=");
    const char *const equals = word[2 + length] == '=' ? word + 2 + length + 1 : NULL;
    const size_t index = find_option(row, word + 2, length);
    const struct option_row *const option = &row->options[index];
    if (option->name == NULL) {
        return unknown_option(&line->call, word);
    }
    if (option->value == NULL) {
        if (equals != NULL) {
            complain(&line->call, "--%s takes no value, and \"%s\" was given", option->name, equals);
            return wrong(&line->call);
        }
        return add_value(line, index, "");
    }
    if (equals != NULL) {
        return add_value(line, index, equals);
    }
    if (count < 2 || strncmp(words[1], "--", 2) == 0) {
        complain(&line->call, "--%s needs a value: --%s %s", option->name, option->name, option->value);
        return wrong(&line->call);
    }
    *taken = 2;
    return add_value(line, index, words[1]);
}

/* Name of argument number `index`: for 1 the second word of "SRC DST". */
static void argument_name(const struct command_row *row, size_t index, char *buffer, size_t capacity) {
    const char *name = row->arguments;
    for (; index != 0; --index) {
        name += strcspn(name, " ");
        name += strspn(name, " ");
    }
    (void)snprintf(buffer, capacity, "%.*s", (int)strcspn(name, " "), name);
}

static enum arguments_outcome count_arguments(const struct command_call *call) {
    const struct command_row *const row = call->command;
    const size_t count = call->argument_count;
    char name[64];
    if (count < row->least_arguments) {
        argument_name(row, count, name, sizeof name);
        complain(call, "%s is missing: %zu of %zu arguments %s given", name, count, row->least_arguments,
                 count == 1 ? "was" : "were");
        return wrong(call);
    }
    if (count > row->most_arguments) {
        complain(call, "unexpected argument \"%s\": %zu arguments were given, expected %zu",
                 call->arguments[row->most_arguments], count, row->most_arguments);
        return wrong(call);
    }
    return ARGUMENTS_FINE;
}

static void prepare(const struct command_row *row, size_t words, struct parsed_line *line) {
    const size_t options = option_count(row);
    line->arguments = alloc_array(words + 1, sizeof *line->arguments);
    line->lowered = alloc_array(words + 1, sizeof *line->lowered);
    line->lowered_count = 0;
    line->values = alloc_array(options + 1, sizeof *line->values);
    for (size_t i = 0; i < options; ++i) {
        line->values[i] = alloc_array(words + 1, sizeof *line->values[i]);
    }
    line->call = (struct command_call){row, line->arguments, 0, (const char *const *const *)line->values};
}

enum arguments_outcome arguments_parse(const struct command_row *row, const char *const *words, size_t count,
                                       struct parsed_line *line) {
    bool is_option_over = false;
    prepare(row, count, line);
    for (size_t i = 0; i < count;) {
        const char *const word = words[i];
        if (is_option_over || word[0] != '-' || word[1] == '\0') {
            line->arguments[line->call.argument_count] = word;
            ++line->call.argument_count;
            ++i;
        } else if (strcmp(word, "--") == 0) {
            is_option_over = true;
            ++i;
        } else {
            size_t taken;
            const enum arguments_outcome outcome = take_option(line, words + i, count - i, &taken);
            if (outcome != ARGUMENTS_FINE) {
                return outcome;
            }
            i += taken;
        }
    }
    return count_arguments(&line->call);
}

void arguments_release(struct parsed_line *line) {
    const size_t options = option_count(line->call.command);
    for (size_t i = 0; i < options; ++i) {
        free(line->values[i]);
    }
    for (size_t i = 0; i < line->lowered_count; ++i) {
        free(line->lowered[i]);
    }
    free(line->lowered);
    free(line->values);
    free(line->arguments);
}

const char *const *call_values(const struct command_call *call, const char *option) {
    const size_t index = find_option(call->command, option, strlen(option));
    assert(call->command->options[index].name != NULL);
    return call->values[index];
}

const char *call_value(const struct command_call *call, const char *option, const char *otherwise) {
    const char *const *values = call_values(call, option);
    const char *last = otherwise;
    for (; *values != NULL; ++values) {
        last = *values;
    }
    return last;
}

bool call_has(const struct command_call *call, const char *option) {
    return call_values(call, option)[0] != NULL;
}

bool call_integer(const struct command_call *call, const char *option, long long least, long long most,
                  long long *number) {
    const char *const text = call_value(call, option, NULL);
    if (text == NULL) {
        return true;
    }
    char *end = NULL;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < least || value > most) {
        complain(call, "--%s is \"%s\", expected a whole number from %lld to %lld", option, text, least, most);
        return false;
    }
    *number = value;
    return true;
}

bool call_real(const struct command_call *call, const char *option, double least, double most, double *number) {
    const char *const text = call_value(call, option, NULL);
    if (text == NULL) {
        return true;
    }
    char *end = NULL;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= least && value <= most)) {
        complain(call, "--%s is \"%s\", expected a number from %g to %g", option, text, least, most);
        return false;
    }
    *number = value;
    return true;
}

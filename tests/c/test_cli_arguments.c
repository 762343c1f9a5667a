/* test_cli_arguments.c: the command's parser, its messages about invalid lines, and the rows of the table of
 * commands. */
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "cli/commands/arguments.h"
#include "cli/commands/commands.h"
#include "cli/commands/nearest.h"
#include "support_stderr.h"

static const struct option_row options[] = {
    {"format", "NAME", "nvfp4|mxfp4|fp8", "The format.", false},
    {"ignore", "PATTERN", NULL, "What to leave.", true},
    {"seconds", "S", NULL, "How long.", false},
    {"quiet", NULL, NULL, "Say nothing.", false},
    {NULL, NULL, NULL, NULL, false},
};
static const struct command_row row = {"try", "a row", "SRC DST", 2, 2, options, "", NULL, NULL};

/* A line of words separated by spaces, and its result. */
struct attempt {
    char *text;
    const char *words[16];
    struct parsed_line line;
    enum arguments_outcome outcome;
    char *said;
};

static struct attempt attempt_make(const char *text) {
    struct attempt attempt = {.text = malloc(strlen(text) + 1)};
    size_t count = 0;
    if (attempt.text == NULL) {
        exit(1);
    }
    memcpy(attempt.text, text, strlen(text) + 1);
    for (char *word = strtok(attempt.text, " "); word != NULL && count < 16; word = strtok(NULL, " ")) {
        attempt.words[count] = word;
        ++count;
    }
    stderr_catch(-1);
    attempt.outcome = arguments_parse(&row, attempt.words, count, &attempt.line);
    attempt.said = stderr_release();
    return attempt;
}

static void attempt_free(struct attempt *attempt) {
    arguments_release(&attempt->line);
    free(attempt->said);
    free(attempt->text);
}

static void values_follow_space_or_equals(void) {
    static const char *const lines[] = {"--format mxfp4 a b", "a --format=mxfp4 b", "a b --format mxfp4",
                                        "--format MXFP4 a b", "a b --format=MxFp4"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; ++i) {
        struct attempt attempt = attempt_make(lines[i]);
        const struct command_call *const call = &attempt.line.call;
        CHECK_EQ_INT(attempt.outcome, ARGUMENTS_FINE);
        CHECK_EQ_STR(attempt.said, "");
        CHECK_EQ_STR(call_value(call, "format", "nvfp4"), "mxfp4");
        CHECK_EQ_INT(call->argument_count, 2);
        CHECK_EQ_STR(call->arguments[0], "a");
        CHECK_EQ_STR(call->arguments[1], "b");
        attempt_free(&attempt);
    }
}

static void missing_options_have_defaults(void) {
    struct attempt attempt = attempt_make("a b");
    const struct command_call *const call = &attempt.line.call;
    double seconds = 3.0;
    long long number = 4;
    CHECK_EQ_STR(call_value(call, "format", "nvfp4"), "nvfp4");
    CHECK(call_values(call, "ignore")[0] == NULL);
    CHECK(!call_has(call, "quiet"));
    CHECK(call_real(call, "seconds", 0.0, 1.0, &seconds) && seconds == 3.0);
    CHECK(call_integer(call, "seconds", 0, 1, &number) && number == 4);
    attempt_free(&attempt);
}

static void repeats_keep_their_order(void) {
    struct attempt attempt = attempt_make("--ignore x a --ignore=y=z --quiet b --quiet --ignore -1");
    const struct command_call *const call = &attempt.line.call;
    const char *const *const values = call_values(call, "ignore");
    CHECK_EQ_INT(attempt.outcome, ARGUMENTS_FINE);
    CHECK(call_has(call, "quiet"));
    CHECK_EQ_STR(values[0], "x");
    CHECK_EQ_STR(values[1], "y=z");
    CHECK_EQ_STR(values[2], "-1");
    CHECK(values[3] == NULL);
    CHECK_EQ_STR(call_value(call, "ignore", ""), "-1");
    attempt_free(&attempt);
}

static void two_dashes_end_options(void) {
    struct attempt attempt = attempt_make("--quiet -- --format -");
    CHECK_EQ_INT(attempt.outcome, ARGUMENTS_FINE);
    CHECK_EQ_STR(attempt.line.call.arguments[0], "--format");
    CHECK_EQ_STR(attempt.line.call.arguments[1], "-");
    attempt_free(&attempt);
}

static void help_needs_no_arguments(void) {
    static const char *const lines[] = {"--help", "-h", "a b c --help", "--format nvfp4 -h"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; ++i) {
        struct attempt attempt = attempt_make(lines[i]);
        CHECK_EQ_INT(attempt.outcome, ARGUMENTS_HELP);
        CHECK_EQ_STR(attempt.said, "");
        attempt_free(&attempt);
    }
}

static void wrong_lines_have_messages(void) {
    static const char *const lines[][2] = {
        {"--fromat nvfp4 a b", "unknown option --fromat; did you mean --format?"},
        {"--form=nvfp4 a b", "unknown option --form; did you mean --format?"},
        {"-quiet a b", "unknown option -quiet; did you mean --quiet?"},
        {"--hepl", "unknown option --hepl; did you mean --help?"},
        {"--zebra a b", "unknown option --zebra"},
        {"-x a b", "unknown option -x"},
        {"--format NVPF4 a b", "--format is \"NVPF4\", expected nvfp4, mxfp4 or fp8; did you mean nvfp4?"},
        {"--format nvfp5 a b", "--format is \"nvfp5\", expected nvfp4, mxfp4 or fp8; did you mean nvfp4?"},
        {"--format fp4 a b", "--format is \"fp4\", expected nvfp4, mxfp4 or fp8; did you mean nvfp4?"},
        {"--format= a b", "--format is \"\", expected nvfp4, mxfp4 or fp8"},
        {"--format zebra a b", "--format is \"zebra\", expected nvfp4, mxfp4 or fp8"},
        {"--format nvfp4 --format fp8 a b", "--format is given twice, as \"nvfp4\" and as \"fp8\""},
        {"a b --format", "--format needs a value: --format NAME"},
        {"a b --format --quiet", "--format needs a value: --format NAME"},
        {"--quiet=yes a b", "--quiet takes no value, and \"yes\" was given"},
        {"", "SRC is missing: 0 of 2 arguments were given"},
        {"a", "DST is missing: 1 of 2 arguments was given"},
        {"a b c", "unexpected argument \"c\": 3 arguments were given, expected 2"},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; ++i) {
        char expected[512];
        struct attempt attempt = attempt_make(lines[i][0]);
        (void)snprintf(expected, sizeof expected,
                       "opaq try: %s\nusage: opaq try [options] SRC DST\nSee 'opaq try --help'.\n",
                       lines[i][1]);
        CHECK_EQ_INT(attempt.outcome, ARGUMENTS_WRONG);
        CHECK_EQ_STR(attempt.said, expected);
        attempt_free(&attempt);
    }
}

static void numbers_have_limits(void) {
    static const struct {
        const char *text;
        bool is_integer;
        bool is_real;
    } cases[] = {{"7", true, true},     {"1", true, true},     {"0", false, false},
                 {"11", false, false},  {"2.5", false, true},  {"1e0", false, true},
                 {"x", false, false},   {"7x", false, false},  {"", false, false},
                 {"nan", false, false}, {"inf", false, false}, {"99999999999999999999", false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        char text[64];
        long long integer = -1;
        double real = -1.0;
        (void)snprintf(text, sizeof text, "--seconds=%s a b", cases[i].text);
        struct attempt attempt = attempt_make(text);
        stderr_catch(-1);
        const bool is_integer = call_integer(&attempt.line.call, "seconds", 1, 10, &integer);
        char *const about_integer = stderr_release();
        stderr_catch(-1);
        const bool is_real = call_real(&attempt.line.call, "seconds", 1.0, 10.0, &real);
        char *const about_real = stderr_release();
        (void)snprintf(text, sizeof text, "opaq try: --seconds is \"%s\", expected a", cases[i].text);
        CHECK_EQ_INT(is_integer, cases[i].is_integer);
        CHECK_EQ_INT(is_real, cases[i].is_real);
        CHECK(is_integer ? integer >= 1 : integer == -1 && strncmp(about_integer, text, strlen(text)) == 0);
        CHECK(is_real ? real >= 1.0 : real == -1.0 && strncmp(about_real, text, strlen(text)) == 0);
        CHECK(is_integer || strstr(about_integer, "whole number from 1 to 10") != NULL);
        CHECK(is_real || strstr(about_real, "number from 1 to 10") != NULL);
        free(about_integer);
        free(about_real);
        attempt_free(&attempt);
    }
}

static size_t distance(const char *a, const char *b) { return edit_distance(a, strlen(a), b, strlen(b)); }

static void distances_count_edits(void) {
    CHECK_EQ_INT(distance("", ""), 0);
    CHECK_EQ_INT(distance("format", "format"), 0);
    CHECK_EQ_INT(distance("", "abc"), 3);
    CHECK_EQ_INT(distance("fromat", "format"), 1);
    CHECK_EQ_INT(distance("ab", "ba"), 1);
    CHECK_EQ_INT(distance("formt", "format"), 1);
    CHECK_EQ_INT(distance("kitten", "sitting"), 3);
    CHECK_EQ_INT(distance("sitting", "kitten"), 3);
}

static size_t words_in(const char *text) {
    size_t count = 0;
    for (; *text != '\0'; text += strcspn(text, " ")) {
        text += strspn(text, " ");
        ++count;
    }
    return count;
}

static void check_option(const struct command_row *command, const struct option_row *option) {
    CHECK(option->help[strlen(option->help) - 1] == '.');
    CHECK(strcmp(option->name, "help") != 0);
    CHECK(option->choices == NULL || option->value != NULL);
    for (const struct option_row *other = command->options; other != option; ++other) {
        CHECK(strcmp(other->name, option->name) != 0);
    }
}

/* Checks that the parser accepts the row and that the help can display it. */
static void check_row(const struct command_row *command) {
    CHECK_EQ_INT(words_in(command->arguments), command->most_arguments);
    CHECK(command->least_arguments <= command->most_arguments);
    CHECK(command->run != NULL && command->name[0] != '-');
    CHECK(command->description[strlen(command->description) - 1] == '\n');
    CHECK(command_find(command->name) == command);
    for (const struct option_row *option = command->options; option->name != NULL; ++option) {
        check_option(command, option);
    }
    size_t lines = 0;
    while (command->examples[lines] != NULL) {
        ++lines;
    }
    CHECK(lines != 0 && lines % 2 == 0);
}

static void rows_are_valid(void) {
    for (const struct command_row *command = command_table; command->name != NULL; ++command) {
        check_row(command);
    }
    for (const struct command_row *command = hidden_command_table; command->name != NULL; ++command) {
        check_row(command);
    }
    CHECK(command_find("quantise") == NULL);
}

static void choices_are_found_and_listed(void) {
    struct text text = {NULL, 0, 0};
    CHECK(choices_have("a|bc|d", "a") && choices_have("a|bc|d", "bc") && choices_have("a|bc|d", "d"));
    CHECK(!choices_have("a|bc|d", "b") && !choices_have("a|bc|d", "") && !choices_have("a|bc|d", "a|bc"));
    choices_print("a|bc|d", &text);
    CHECK_EQ_STR(text_get(&text), "a, bc or d");
    text_free(&text);
    choices_print("a", &text);
    CHECK_EQ_STR(text_get(&text), "a");
    text_free(&text);
}

static const struct test_case tests[] = {
    TEST(values_follow_space_or_equals), TEST(missing_options_have_defaults), TEST(repeats_keep_their_order),
    TEST(two_dashes_end_options),        TEST(help_needs_no_arguments),       TEST(wrong_lines_have_messages),
    TEST(numbers_have_limits),           TEST(distances_count_edits),         TEST(rows_are_valid),
    TEST(choices_are_found_and_listed)};
TEST_MAIN(tests)

/* base/pattern_code.c: compiles patterns. Jumps are relative, so that the code of a part can be moved and
 * repeated unchanged. */
#include "base/pattern_code.h"
#include "base/try.h"

#include <string.h>

enum { LAST_CODE_POINT = 0x10FFFF, MOST_REPEATS = 1000 };

int pattern_decode(const char *text, size_t bytes, int32_t *characters) {
    const unsigned char *at = (const unsigned char *)text;
    const unsigned char *const end = at + bytes;
    int count = 0;
    while (at < end) {
        const int length = *at < 0x80   ? 1
                           : *at < 0xC2 ? 0
                           : *at < 0xE0 ? 2
                           : *at < 0xF0 ? 3
                           : *at < 0xF5 ? 4
                                        : 0;
        int32_t code = length < 2 ? *at : *at & (0x7F >> length);
        int i = 1;
        for (; i < length && at + i < end && (at[i] & 0xC0) == 0x80; ++i) {
            code = code << 6 | (at[i] & 0x3F);
        }
        const int is_whole = length != 0 && i == length;
        characters[count++] = is_whole ? code : 0xDC00 + *at;
        at += is_whole ? length : 1;
    }
    return count;
}

struct parser {
    const char *text; /* quoted in messages */
    int32_t characters[PATTERN_BYTES + 1];
    int at;
    int count;
    int nested;
    int depth;                  /* of look-aheads */
    int32_t run[PATTERN_BYTES]; /* consecutive literals outside of groups */
    int run_length;
    int has_alternatives; /* outside of groups: no text is common to all matches */
    struct pattern_code *code;
    struct opaq_error *error;
};

static enum opaq_status refuse(const struct parser *parser, const char *why) {
    return opaq_fail(parser->error, OPAQ_ERROR_TEXT, "the pattern \"%.80s\"%s: %s", parser->text,
                     strlen(parser->text) > 80 ? " and so on" : "", why);
}

static int32_t peek(const struct parser *parser, int ahead) {
    return parser->at + ahead < parser->count ? parser->characters[parser->at + ahead] : -1;
}

static int take(struct parser *parser, int32_t character) {
    if (peek(parser, 0) != character) {
        return 0;
    }
    ++parser->at;
    return 1;
}

/* ---- code ---- */

/* Inserts `count` steps at `place`; the steps after it move. */
static enum opaq_status insert(struct parser *parser, int place, int count) {
    struct pattern_code *const code = parser->code;
    if (count > PATTERN_STATES - code->count) {
        return refuse(parser, "has more than 4096 states");
    }
    memmove(code->steps + place + count, code->steps + place,
            (size_t)(code->count - place) * sizeof *code->steps);
    code->count += count;
    return OPAQ_OK;
}

static struct pattern_step step(const struct parser *parser, enum pattern_op op, int32_t a, int32_t b) {
    return (struct pattern_step){(uint8_t)op, 0, (uint8_t)parser->depth, a, b};
}

static enum opaq_status put(struct parser *parser, int place, struct pattern_step made) {
    TRY(insert(parser, place, 1));
    parser->code->steps[place] = made;
    return OPAQ_OK;
}

static enum opaq_status add(struct parser *parser, struct pattern_step made) {
    return put(parser, parser->code->count, made);
}

/* ---- what every match contains ---- */

static void end_run(struct parser *parser) {
    if (parser->run_length > parser->code->literal_length) {
        memcpy(parser->code->literal, parser->run, (size_t)parser->run_length * sizeof *parser->run);
        parser->code->literal_length = parser->run_length;
    }
    parser->run_length = 0;
}

/* ---- sets ---- */

static const struct pattern_range digits[] = {{'0', '9'}};
static const struct pattern_range no_digits[] = {{0, '0' - 1}, {'9' + 1, LAST_CODE_POINT}};
static const struct pattern_range words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
static const struct pattern_range no_words[] = {
    {0, '0' - 1}, {'9' + 1, 'A' - 1}, {'Z' + 1, '_' - 1}, {'_' + 1, 'a' - 1}, {'z' + 1, LAST_CODE_POINT}};
static const struct pattern_range spaces[] = {{'\t', '\r'}, {' ', ' '}};
static const struct pattern_range no_spaces[] = {
    {0, '\t' - 1}, {'\r' + 1, ' ' - 1}, {' ' + 1, LAST_CODE_POINT}};

static const struct {
    char letter;
    int count;
    const struct pattern_range *ranges;
} classes[] = {{'d', 1, digits},   {'D', 2, no_digits}, {'w', 4, words},
               {'W', 5, no_words}, {'s', 2, spaces},    {'S', 3, no_spaces}};

static enum opaq_status add_range(struct parser *parser, int32_t first, int32_t last) {
    struct pattern_code *const code = parser->code;
    if (code->range_count == PATTERN_RANGES) {
        return refuse(parser, "has more than 4096 ranges in its sets");
    }
    code->ranges[code->range_count++] = (struct pattern_range){first, last};
    return OPAQ_OK;
}

/* Adds the ranges of a class such as \d; sets `is_class` to 0 for another letter. */
static enum opaq_status add_class(struct parser *parser, int32_t letter, int *is_class) {
    *is_class = 0;
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; ++i) {
        for (int k = 0; classes[i].letter == letter && k < classes[i].count; ++k) {
            *is_class = 1;
            TRY(add_range(parser, classes[i].ranges[k].first, classes[i].ranges[k].last));
        }
    }
    return OPAQ_OK;
}

/* The character that an escape denotes; -1 if it is not supported. */
static int32_t escaped(int32_t letter) {
    static const char letters[] = "tnrfv";
    static const char meant[] = "\t\n\r\f\v";
    const char *const found = letter > 0 && letter < 0x80 ? strchr(letters, (int)letter) : NULL;
    const int is_alphanumeric = (letter >= '0' && letter <= '9') || (letter >= 'A' && letter <= 'Z') ||
                                (letter >= 'a' && letter <= 'z');
    return found != NULL ? meant[found - letters] : is_alphanumeric ? -1 : letter;
}

/* One end of a range, or a class such as \d; `is_glob`: a backslash is a literal. */
static enum opaq_status set_member(struct parser *parser, int is_glob, int32_t *character, int *is_class) {
    *character = parser->characters[parser->at++];
    *is_class = 0;
    if (*character == '[' && peek(parser, 0) == ':') {
        return refuse(parser, "has a set like [:digit:], which is not supported; write \\d");
    }
    if (*character != '\\' || is_glob) {
        return OPAQ_OK;
    }
    const int32_t letter = peek(parser, 0);
    ++parser->at;
    TRY(add_class(parser, letter, is_class));
    *character = escaped(letter);
    return *is_class || *character >= 0 ? OPAQ_OK : refuse(parser, "has an escape that is not supported");
}

/* Parses a set, after its '['. */
static enum opaq_status parse_set(struct parser *parser, int is_glob) {
    struct pattern_step made = step(parser, PATTERN_SET, parser->code->range_count, 0);
    made.is_negated = (uint8_t)(take(parser, '^') || (is_glob && take(parser, '!')));
    for (int is_first = 1; is_first || peek(parser, 0) != ']'; is_first = 0) {
        int32_t first = 0;
        int is_class = 0;
        if (parser->at >= parser->count) {
            return refuse(parser, "has a set without its end, ]");
        }
        TRY(set_member(parser, is_glob, &first, &is_class));
        int32_t last = first;
        if (!is_class && peek(parser, 0) == '-' && peek(parser, 1) != ']' && peek(parser, 1) >= 0) {
            ++parser->at;
            TRY(set_member(parser, is_glob, &last, &is_class));
            if (is_class || last < first) {
                return refuse(parser, "has a range whose end is before its beginning");
            }
        }
        if (!is_class) {
            TRY(add_range(parser, first, last));
        }
    }
    ++parser->at;
    made.b = parser->code->range_count - made.a;
    return add(parser, made);
}

/* ---- expressions ---- */

static enum opaq_status parse_alternatives(struct parser *parser);

/* Parses a group, from after '(' to its ')'. A repeated look-ahead is allowed, though the repetition has no
 * effect. */
/* NOLINTNEXTLINE(misc-no-recursion): as deep as PATTERN_NESTED */
static enum opaq_status parse_group(struct parser *parser) {
    const int begin = parser->code->count;
    int ahead = 0;
    if (++parser->nested > PATTERN_NESTED) {
        return refuse(parser, "has groups nested deeper than 100");
    }
    if (take(parser, '?')) {
        if (peek(parser, 0) == 'P' && peek(parser, 1) == '<') {
            while (parser->at < parser->count && !take(parser, '>')) {
                ++parser->at;
            }
        } else if (take(parser, '=')) {
            ahead = 1;
        } else if (take(parser, '!')) {
            ahead = -1;
        } else if (!take(parser, ':')) {
            return refuse(parser, "has a group (?..., of which only (?:, (?=, (?! and (?P<name> are supported");
        }
    }
    parser->depth += ahead != 0;
    TRY(parse_alternatives(parser));
    if (!take(parser, ')')) {
        return refuse(parser, "has a group without its end, )");
    }
    if (ahead != 0) {
        TRY(add(parser, step(parser, PATTERN_FOUND, 0, 0)));
    }
    parser->depth -= ahead != 0;
    --parser->nested;
    if (ahead == 0) {
        return OPAQ_OK;
    }
    struct pattern_step made = step(parser, PATTERN_AHEAD, parser->code->count - begin + 1, 0);
    made.is_negated = ahead < 0;
    return put(parser, begin, made);
}

static enum opaq_status parse_escape(struct parser *parser, int *is_literal) {
    static const struct {
        char letter;
        uint8_t op;
        uint8_t is_negated;
    } places[] = {
        {'A', PATTERN_BEGIN, 0}, {'Z', PATTERN_END, 0}, {'b', PATTERN_EDGE, 0}, {'B', PATTERN_EDGE, 1}};
    const int32_t letter = peek(parser, 0);
    if (letter < 0) {
        return refuse(parser, "ends with a backslash");
    }
    ++parser->at;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; ++i) {
        if (places[i].letter == letter) {
            struct pattern_step made = step(parser, (enum pattern_op)places[i].op, 0, 0);
            made.is_negated = places[i].is_negated;
            return add(parser, made);
        }
    }
    int is_class = 0;
    struct pattern_step made = step(parser, PATTERN_SET, parser->code->range_count, 0);
    TRY(add_class(parser, letter, &is_class));
    if (is_class) {
        made.b = parser->code->range_count - made.a;
        return add(parser, made);
    }
    *is_literal = escaped(letter) >= 0;
    return *is_literal ? add(parser, step(parser, PATTERN_CHARACTER, escaped(letter), 0))
                       : refuse(parser, "has an escape that is not supported, like a reference to a group");
}

/* A number; -1 if there is none. */
static int parse_number(struct parser *parser) {
    int number = -1;
    while (peek(parser, 0) >= '0' && peek(parser, 0) <= '9') {
        const int digit = (int)(parser->characters[parser->at++] - '0');
        number = number < 0 ? digit : number > MOST_REPEATS ? number : number * 10 + digit;
    }
    return number;
}

/* "{2}", "{2,}", "{,3}" or "{2,3}"; returns 0 for anything else, where '{' is a literal. `most` is -1 for no
 * limit. */
static int parse_counts(struct parser *parser, int *least, int *most) {
    const int begin = parser->at++;
    *least = parse_number(parser);
    *most = *least;
    if (take(parser, ',')) {
        *most = parse_number(parser);
        *least = *least < 0 && *most >= 0 ? 0 : *least;
    }
    if (*least < 0 || !take(parser, '}')) {
        parser->at = begin;
        return 0;
    }
    return 1;
}

/* NOLINTNEXTLINE(misc-no-recursion): see parse_group */
static enum opaq_status parse_atom(struct parser *parser, int *is_literal) {
    const int32_t character = peek(parser, 0);
    int least = 0;
    int most = 0;
    *is_literal = 0;
    if (character == '{' && parse_counts(parser, &least, &most)) {
        return refuse(parser, "repeats nothing, or a repetition");
    }
    ++parser->at;
    switch (character) {
    case '(':
        return parse_group(parser);
    case '[':
        return parse_set(parser, 0);
    case '\\':
        return parse_escape(parser, is_literal);
    case '.':
        return add(parser, step(parser, PATTERN_ANY, 0, 0));
    case '^':
        return add(parser, step(parser, PATTERN_BEGIN, 0, 0));
    case '$':
        return add(parser, step(parser, PATTERN_END, 0, 0));
    case '*':
    case '+':
    case '?':
        return refuse(parser, "repeats nothing, or a repetition");
    default:
        *is_literal = 1;
        return add(parser, step(parser, PATTERN_CHARACTER, character, 0));
    }
}

/* Repeats the code from `begin` on, `least` to `most` times (-1: any number). */
static enum opaq_status repeat(struct parser *parser, int begin, int least, int most) {
    struct pattern_code *const code = parser->code;
    const int length = code->count - begin;
    if (least > MOST_REPEATS || most > MOST_REPEATS || (most >= 0 && most < least)) {
        return refuse(parser, most >= 0 && most < least ? "repeats at most less than at least"
                                                        : "repeats something more than 1000 times");
    }
    /* The part was emitted once already: append copies, the last of which may become a loop. */
    const int needed = most < 0 ? (least == 0 ? 1 : least) : most;
    for (int i = 1; i < needed; ++i) {
        const int to = code->count;
        TRY(insert(parser, to, length));
        memcpy(code->steps + to, code->steps + begin, (size_t)length * sizeof *code->steps);
    }
    if (most == 0) {
        code->count = begin;
        return OPAQ_OK;
    }
    if (most < 0) {
        const int last = code->count - length;
        if (least == 0) {
            TRY(put(parser, last, step(parser, PATTERN_SPLIT, 1, length + 2)));
            return add(parser, step(parser, PATTERN_JUMP, -(length + 1), 0));
        }
        return add(parser, step(parser, PATTERN_SPLIT, -length, 1));
    }
    for (int i = most - 1; i >= least; --i) { /* each optional copy jumps past all later ones */
        const int place = begin + i * length;
        TRY(put(parser, place, step(parser, PATTERN_SPLIT, 1, code->count - place + 1)));
    }
    return OPAQ_OK;
}

/* NOLINTNEXTLINE(misc-no-recursion): see parse_group */
static enum opaq_status parse_part(struct parser *parser) {
    const int begin = parser->code->count;
    const int32_t character = peek(parser, 0);
    int is_literal = 0;
    int least = 1;
    int most = 1;
    if (character == '(') {
        end_run(parser);
    }
    TRY(parse_atom(parser, &is_literal));
    const int32_t mark = peek(parser, 0);
    int repeats = mark == '*' || mark == '+' || mark == '?';
    if (repeats) {
        ++parser->at;
        least = mark == '+';
        most = mark == '?' ? 1 : -1;
    } else if (mark == '{') {
        repeats = parse_counts(parser, &least, &most);
    }
    if (repeats && peek(parser, 0) == '+') {
        return refuse(parser, "has a possessive repetition, which is not supported");
    }
    if (repeats) {
        (void)take(parser, '?'); /* a lazy repetition matches the same names */
        end_run(parser);
        return repeat(parser, begin, least, most);
    }
    if (is_literal && parser->nested == 0) {
        parser->run[parser->run_length++] = parser->code->steps[begin].a;
    } else {
        end_run(parser);
    }
    return OPAQ_OK;
}

/* NOLINTNEXTLINE(misc-no-recursion): see parse_group */
static enum opaq_status parse_alternatives(struct parser *parser) {
    int begin = parser->code->count;
    int chain = -1; /* the last jump to the end; each links to the previous one in `b` */
    while (parser->at < parser->count && peek(parser, 0) != ')') {
        if (!take(parser, '|')) {
            TRY(parse_part(parser));
            continue;
        }
        const int length = parser->code->count - begin;
        TRY(put(parser, begin, step(parser, PATTERN_SPLIT, 1, length + 2)));
        TRY(add(parser, step(parser, PATTERN_JUMP, 0, chain)));
        chain = parser->code->count - 1;
        begin = parser->code->count;
        if (parser->nested == 0) {
            parser->has_alternatives = 1;
        }
    }
    while (chain >= 0) {
        struct pattern_step *const jump = &parser->code->steps[chain];
        const int before = jump->b;
        jump->a = parser->code->count - chain;
        jump->b = 0;
        chain = before;
    }
    return OPAQ_OK;
}

/* ---- globs ---- */

static int has_set(const struct parser *parser) {
    for (int at = parser->at + 2; at < parser->count; ++at) { /* a ']' first in a set is a member */
        if (parser->characters[at] == ']') {
            return 1;
        }
    }
    return 0;
}

/* A star is SPLIT, ANY and a jump back. */
static enum opaq_status parse_glob(struct parser *parser) {
    while (parser->at < parser->count) {
        const int32_t character = peek(parser, 0);
        const int begin = parser->code->count;
        if (character == '[' && has_set(parser)) {
            end_run(parser);
            ++parser->at;
            TRY(parse_set(parser, 1));
            continue;
        }
        ++parser->at;
        if (character == '*' || character == '?') {
            end_run(parser);
            TRY(add(parser, step(parser, PATTERN_ANY, 0, 0)));
            if (character == '*') {
                TRY(repeat(parser, begin, 0, -1));
            }
        } else {
            parser->run[parser->run_length++] = character;
            TRY(add(parser, step(parser, PATTERN_CHARACTER, character, 0)));
        }
    }
    return add(parser, step(parser, PATTERN_END, 0, 0));
}

enum opaq_status pattern_compile(const char *text, struct pattern_code *code, struct opaq_error *error) {
    static const char regular[] = "re:";
    const int is_regular = strncmp(text, regular, strlen(regular)) == 0;
    const char *const body = is_regular ? text + strlen(regular) : text;
    struct parser parser = {.text = text, .code = code, .error = error};
    const size_t bytes = strlen(body);
    code->count = 0;
    code->range_count = 0;
    code->literal_length = 0;
    if (bytes > PATTERN_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT,
                         "the pattern \"%.80s\" and so on: has %zu bytes, at most 4096 are allowed", text,
                         bytes);
    }
    parser.count = pattern_decode(body, bytes, parser.characters);
    TRY(is_regular ? parse_alternatives(&parser) : parse_glob(&parser));
    if (parser.at < parser.count) {
        return refuse(&parser, "has a ) without its (");
    }
    end_run(&parser);
    if (parser.has_alternatives) {
        code->literal_length = 0;
    }
    return add(&parser, step(&parser, PATTERN_FOUND, 0, 0));
}

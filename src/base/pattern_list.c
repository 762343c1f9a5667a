/* base/pattern_list.c: lists of compiled patterns, see opaq/pattern.h.
 *
 * A pattern is run backwards over the name: for each position, from the end to the start, it computes the set
 * of steps from which the pattern can still be completed. The result of a look-ahead is then known when it is
 * needed, and each position costs at most the number of steps. A pattern is run only if the name contains the
 * longest text that all its matches contain; hashes of the name's substrings of that length select the
 * candidates of all patterns at once. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/pattern_code.h"
#include "opaq/pattern.h"

struct pattern {
    struct pattern_step *steps;
    struct pattern_range *ranges;
    uint16_t *before_begin; /* for each step, and one more: where its predecessors without a character begin */
    uint16_t *before;
    int count;
    int deepest; /* maximum look-ahead depth */
    int literal_length;
    uint64_t literal_hash;
    int64_t next; /* next in its bucket, or in the list without literals; -1 at the end */
};

struct opaq_patterns {
    struct pattern *items;
    int64_t count;
    int64_t capacity;
    int64_t *buckets;                   /* patterns by the hashes of their literals; `capacity` buckets */
    int64_t always;                     /* first of the patterns without a literal */
    bool has_length[PATTERN_BYTES + 1]; /* whether a literal of that length exists */
    int longest;
};

static const uint64_t factor = 0x9E3779B97F4A7C15u;

static uint64_t hash_on(uint64_t hash, int32_t character) {
    return hash * factor + (uint64_t)(uint32_t)character + 1;
}

static int64_t bucket_of(const struct opaq_patterns *patterns, uint64_t hash, int length) {
    const uint64_t mixed = (hash ^ (uint64_t)length * 0xD6E8FEB86659FD93u) * factor;
    return (int64_t)((mixed >> 20) % (uint64_t)patterns->capacity);
}

/* ---- one pattern ---- */

static void release(struct pattern *pattern) {
    free(pattern->steps);
    free(pattern->ranges);
    free(pattern->before_begin);
    free(pattern->before);
    *pattern = (struct pattern){0};
}

/* The steps that follow a step without consuming a character; -1 for unused entries. A look-ahead's code is not
 * among them. */
static void following(const struct pattern *pattern, int at, int next[2]) {
    const struct pattern_step *const step = &pattern->steps[at];
    next[0] = next[1] = -1;
    switch ((enum pattern_op)step->op) {
    case PATTERN_SPLIT:
        next[1] = at + step->b;
        next[0] = at + step->a;
        break;
    case PATTERN_JUMP:
    case PATTERN_AHEAD:
        next[0] = at + step->a;
        break;
    case PATTERN_BEGIN:
    case PATTERN_END:
    case PATTERN_EDGE:
        next[0] = at + 1;
        break;
    case PATTERN_CHARACTER:
    case PATTERN_ANY:
    case PATTERN_SET:
    case PATTERN_FOUND:
        break;
    }
}

/* Fills before[before_begin[i]] up to before[before_begin[i + 1]] with the predecessors of step i. */
static void find_predecessors(struct pattern *pattern) {
    uint16_t *const begin = pattern->before_begin;
    for (int pass = 0; pass < 2; ++pass) { /* count, then place */
        for (int i = 0; i < pattern->count; ++i) {
            int next[2];
            following(pattern, i, next);
            for (int k = 0; k < 2; ++k) {
                if (next[k] >= 0 && pass == 0) {
                    ++begin[next[k]];
                } else if (next[k] >= 0) {
                    pattern->before[--begin[next[k]]] = (uint16_t)i; /* fill each range from its end */
                }
            }
        }
        for (int i = 1; i <= pattern->count && pass == 0; ++i) {
            begin[i] = (uint16_t)(begin[i] + begin[i - 1]);
        }
    }
}

static enum opaq_status make(const char *text, struct pattern *pattern, struct opaq_error *error) {
    struct pattern_code *const code = malloc(sizeof *code);
    if (code == NULL) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory to compile a pattern");
    }
    enum opaq_status status = pattern_compile(text, code, error);
    if (status != OPAQ_OK) {
        free(code);
        return status;
    }
    const size_t count = (size_t)code->count;
    *pattern = (struct pattern){.steps = malloc(count * sizeof *pattern->steps),
                                .ranges = malloc(((size_t)code->range_count + 1) * sizeof *pattern->ranges),
                                .before_begin = calloc(count + 1, sizeof *pattern->before_begin),
                                .before = malloc(2 * count * sizeof *pattern->before),
                                .count = code->count,
                                .literal_length = code->literal_length};
    if (pattern->steps == NULL || pattern->ranges == NULL || pattern->before_begin == NULL ||
        pattern->before == NULL) {
        release(pattern);
        status = opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for a pattern of %zu states", count);
    } else {
        memcpy(pattern->steps, code->steps, count * sizeof *pattern->steps);
        memcpy(pattern->ranges, code->ranges, (size_t)code->range_count * sizeof *pattern->ranges);
        for (int i = 0; i < code->literal_length; ++i) {
            pattern->literal_hash = hash_on(pattern->literal_hash, code->literal[i]);
        }
        for (int i = 0; i < pattern->count; ++i) {
            const int depth = pattern->steps[i].depth;
            pattern->deepest = depth > pattern->deepest ? depth : pattern->deepest;
        }
        find_predecessors(pattern);
    }
    free(code);
    return status;
}

/* ---- running it ---- */

struct name {
    int32_t characters[PATTERN_BYTES];
    int count;
};

/* For every step, whether the pattern can be completed from it at a position. */
struct places {
    bool here[PATTERN_STATES];
    bool ahead[PATTERN_STATES]; /* at the next position */
    uint16_t waiting[PATTERN_STATES];
};

static bool is_word(const struct name *name, int at) {
    const int32_t c = at < 0 || at >= name->count ? 0 : name->characters[at];
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= 'a' && c <= 'z');
}

static bool takes(const struct pattern *pattern, const struct pattern_step *step, int32_t character) {
    if (step->op != PATTERN_SET) {
        return step->op == PATTERN_ANY || (step->op == PATTERN_CHARACTER && step->a == character);
    }
    bool is_in = false;
    for (int i = step->a; i < step->a + step->b && !is_in; ++i) {
        is_in = character >= pattern->ranges[i].first && character <= pattern->ranges[i].last;
    }
    return is_in != (step->is_negated != 0);
}

/* Whether a step that consumes no character succeeds here. */
static bool passes(const struct pattern *pattern, int at, const struct name *name, int place,
                   const struct places *places) {
    const struct pattern_step *const step = &pattern->steps[at];
    switch ((enum pattern_op)step->op) {
    case PATTERN_BEGIN:
        return place == 0;
    case PATTERN_END:
        return place == name->count;
    case PATTERN_EDGE:
        return (is_word(name, place - 1) != is_word(name, place)) != (step->is_negated != 0);
    case PATTERN_AHEAD:
        return places->here[at + 1] != (step->is_negated != 0);
    default:
        return true;
    }
}

static void run_place(const struct pattern *pattern, const struct name *name, int place, int depth,
                      struct places *places) {
    int waiting = 0;
    for (int i = 0; i < pattern->count; ++i) {
        const struct pattern_step *const step = &pattern->steps[i];
        if (step->depth != depth) {
            continue;
        }
        const bool is_found = step->op == PATTERN_FOUND;
        const bool is_taken = step->op <= PATTERN_SET && place < name->count && places->ahead[i + 1] &&
                              takes(pattern, step, name->characters[place]);
        places->here[i] = is_found || is_taken;
        if (places->here[i]) {
            places->waiting[waiting++] = (uint16_t)i;
        }
    }
    while (waiting > 0) {
        const int at = places->waiting[--waiting];
        for (int k = pattern->before_begin[at]; k < pattern->before_begin[at + 1]; ++k) {
            const int from = pattern->before[k];
            if (!places->here[from] && pattern->steps[from].depth == depth &&
                passes(pattern, from, name, place, places)) {
                places->here[from] = true;
                places->waiting[waiting++] = (uint16_t)from;
            }
        }
    }
}

static bool matches(const struct pattern *pattern, const struct name *name) {
    struct places places;
    places.here[0] = false;
    for (int place = name->count; place >= 0; --place) {
        for (int depth = pattern->deepest; depth >= 0; --depth) {
            run_place(pattern, name, place, depth, &places);
        }
        memcpy(places.ahead, places.here, (size_t)pattern->count * sizeof *places.here);
    }
    return places.here[0];
}

/* ---- lists ---- */

enum opaq_status opaq_patterns_create(struct opaq_patterns **patterns, struct opaq_error *error) {
    if (patterns == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "opaq_patterns_create: patterns is NULL");
    }
    struct opaq_patterns *const made = calloc(1, sizeof *made);
    if (made == NULL) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for a list of patterns");
    }
    made->always = -1;
    *patterns = made;
    return OPAQ_OK;
}

void opaq_patterns_destroy(struct opaq_patterns *patterns) {
    for (int64_t i = 0; patterns != NULL && i < patterns->count; ++i) {
        release(&patterns->items[i]);
    }
    if (patterns != NULL) {
        free(patterns->items);
        free(patterns->buckets);
    }
    free(patterns);
}

static void enlist(struct opaq_patterns *patterns, int64_t number) {
    struct pattern *const pattern = &patterns->items[number];
    int64_t *const first =
        pattern->literal_length == 0
            ? &patterns->always
            : &patterns->buckets[bucket_of(patterns, pattern->literal_hash, pattern->literal_length)];
    pattern->next = *first;
    *first = number;
}

static enum opaq_status grow(struct opaq_patterns *patterns, struct opaq_error *error) {
    const int64_t capacity = patterns->capacity == 0 ? 16 : 2 * patterns->capacity;
    struct pattern *const items = realloc(patterns->items, (size_t)capacity * sizeof *items);
    if (items != NULL) {
        patterns->items = items;
    }
    int64_t *const buckets = malloc((size_t)capacity * sizeof *buckets);
    if (items == NULL || buckets == NULL) {
        free(buckets);
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for %lld patterns", (long long)capacity);
    }
    free(patterns->buckets);
    patterns->buckets = buckets;
    patterns->capacity = capacity;
    patterns->always = -1;
    for (int64_t i = 0; i < capacity; ++i) {
        buckets[i] = -1;
    }
    for (int64_t i = 0; i < patterns->count; ++i) {
        enlist(patterns, i);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_patterns_add(struct opaq_patterns *patterns, const char *text, struct opaq_error *error) {
    if (patterns == NULL || text == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "opaq_patterns_add: patterns or text is NULL");
    }
    struct pattern made = {0};
    enum opaq_status status = make(text, &made, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (patterns->count == patterns->capacity) {
        status = grow(patterns, error);
    }
    if (status != OPAQ_OK) {
        release(&made);
        return status;
    }
    patterns->items[patterns->count] = made;
    patterns->has_length[made.literal_length] = true;
    patterns->longest = made.literal_length > patterns->longest ? made.literal_length : patterns->longest;
    enlist(patterns, patterns->count++);
    return OPAQ_OK;
}

/* The first pattern of a chain that matches and comes before `best`. A bucket's chain may contain other
 * literals. */
static int64_t find_in(const struct opaq_patterns *patterns, int64_t first, uint64_t hash, int length,
                       const struct name *name, bool *is_tried, int64_t best) {
    for (int64_t i = first; i >= 0; i = patterns->items[i].next) {
        const struct pattern *const pattern = &patterns->items[i];
        if ((best < 0 || i < best) && pattern->literal_length == length && pattern->literal_hash == hash &&
            !is_tried[i]) {
            is_tried[i] = true;
            best = matches(pattern, name) ? i : best;
        }
    }
    return best;
}

int64_t opaq_patterns_find(const struct opaq_patterns *patterns, const char *text) {
    const size_t bytes = patterns == NULL || text == NULL ? PATTERN_BYTES + 1 : strlen(text);
    if (bytes > PATTERN_BYTES || patterns->count == 0) {
        return -1;
    }
    struct name name;
    name.count = pattern_decode(text, bytes, name.characters);
    bool *const is_tried = calloc((size_t)patterns->count, sizeof *is_tried);
    uint64_t *const hashes = malloc(((size_t)name.count + 1) * sizeof *hashes); /* hashes of the prefixes */
    int64_t best = -1;
    if (is_tried == NULL || hashes == NULL) { /* out of memory: try all patterns in turn */
        for (int64_t i = 0; i < patterns->count && best < 0; ++i) {
            best = matches(&patterns->items[i], &name) ? i : -1;
        }
        free(is_tried);
        free(hashes);
        return best;
    }
    hashes[0] = 0;
    for (int i = 0; i < name.count; ++i) {
        hashes[i + 1] = hash_on(hashes[i], name.characters[i]);
    }
    best = find_in(patterns, patterns->always, 0, 0, &name, is_tried, best);
    uint64_t power = 1; /* of the hash's multiplier */
    for (int length = 1; length <= name.count && length <= patterns->longest; ++length) {
        power *= factor;
        for (int end = length; patterns->has_length[length] && end <= name.count; ++end) {
            const uint64_t hash = hashes[end] - hashes[end - length] * power;
            const int64_t first = patterns->buckets[bucket_of(patterns, hash, length)];
            best = find_in(patterns, first, hash, length, &name, is_tried, best);
        }
    }
    free(is_tried);
    free(hashes);
    return best;
}

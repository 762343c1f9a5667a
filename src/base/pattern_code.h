/* base/pattern_code.h: compiled patterns of opaq/pattern.h: instructions of a nondeterministic automaton over
 * code points. Depends on status.h. */
#ifndef OPAQ_BASE_PATTERN_CODE_H
#define OPAQ_BASE_PATTERN_CODE_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/status.h"

enum { PATTERN_BYTES = 4096, PATTERN_STATES = 4096, PATTERN_RANGES = 4096, PATTERN_NESTED = 100 };

enum pattern_op {
    PATTERN_CHARACTER, /* `a` is the code point */
    PATTERN_ANY,
    PATTERN_SET,   /* one of `b` ranges from `a` on; negated: in none of them */
    PATTERN_SPLIT, /* continues at `a` and at `b`, both relative */
    PATTERN_JUMP,  /* continues at `a`, relative */
    PATTERN_BEGIN,
    PATTERN_END,
    PATTERN_EDGE,  /* a word boundary; negated: none */
    PATTERN_AHEAD, /* continues at `a`, relative, if the code after it matches here; negated: if it does not */
    PATTERN_FOUND  /* the end of the pattern, or of a look-ahead */
};

struct pattern_step {
    uint8_t op; /* enum pattern_op */
    uint8_t is_negated;
    uint8_t depth; /* of look-aheads around it */
    int32_t a;
    int32_t b;
};

struct pattern_range {
    int32_t first;
    int32_t last;
};

/* Large: allocate it on the heap. */
struct pattern_code {
    struct pattern_step steps[PATTERN_STATES];
    int count;
    struct pattern_range ranges[PATTERN_RANGES];
    int range_count;
    /* The longest text that every match contains; length 0 if none is known. */
    int32_t literal[PATTERN_BYTES];
    int literal_length;
};

/* Decodes UTF-8 into code points; invalid bytes become 0xDC80 and above. Returns the number, at most `bytes`. */
int pattern_decode(const char *text, size_t bytes, int32_t *characters);

enum opaq_status pattern_compile(const char *text, struct pattern_code *code, struct opaq_error *error);

#endif

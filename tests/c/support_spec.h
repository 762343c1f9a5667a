/* support_spec.h: all valid specs, written from docs/spec.md and not from the library's own check. Depends on
 * opaq's public headers. */
#ifndef SUPPORT_SPEC_H
#define SUPPORT_SPEC_H

#include <stdbool.h>

#include "opaq/opaq.h"

/* What docs/spec.md allows, for any 16 bytes. */
bool spec_is_valid(const struct opaq_spec *spec);

struct spec_list {
    int count;
    struct opaq_spec *spec;
};

/* Every valid combination of format, element, usage, rule and options, each with its default parameters or with
 * several masks, error modes, e4m3max and eps. */
enum spec_set { SPEC_DEFAULTS, SPEC_PARAMETERS };
struct spec_list spec_list_make(enum spec_set set);
void spec_list_free(struct spec_list *list);

/* The spec of a valid text. Ends the test program if it is invalid. */
struct opaq_spec spec_of(const char *text);

/* The canonical text, or "(invalid)". */
struct spec_text {
    char text[OPAQ_SPEC_TEXT_BYTES];
};
struct spec_text spec_text(const struct opaq_spec *spec);

#endif

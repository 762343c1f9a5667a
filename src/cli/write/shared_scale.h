/* cli/write/shared_scale.h: the scale of a whole tensor, from the amax of all targets that share it. */
#ifndef OPAQ_CLI_WRITE_SHARED_SCALE_H
#define OPAQ_CLI_WRITE_SHARED_SCALE_H

#include <stdbool.h>

#include "opaq/layout.h"
#include "opaq/opaq.h"

struct shared_scale {
    float given;  /* passed to opaq_quantize as the amax */
    float stored; /* in the file, in the form of the layout; 0 for formats without one */
};

enum opaq_status shared_scale_of(const struct opaq_spec *spec, const struct opaq_layout_row *scheme, float amax,
                                 struct shared_scale *scale, struct opaq_error *error);

#endif

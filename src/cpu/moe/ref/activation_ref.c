/* cpu/moe/ref/activation_ref.c: activations in plain C. */
#include "cpu/moe/activation_table.h"

#include "definition/activation_formulas.h"

const struct activation_table activation_table_ref = {
    .name = "activation_ref", .features = 0, .run = activate_stretch};

/* cpu/moe/ref/activation_ref.c: reference activations in C, without instruction-set flags. */
#include "cpu/moe/activation_table.h"

#include "definition/activation_formulas.h"

const struct activation_table activation_table_ref = {
    .name = "activation_ref", .features = 0, .run = activate_stretch};

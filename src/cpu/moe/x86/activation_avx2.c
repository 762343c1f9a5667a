/* cpu/moe/x86/activation_avx2.c: activations with 8 lanes; compiled with -mavx2. */
#include "cpu/moe/activation_table.h"

#if defined(__x86_64__)
#include "definition/activation_formulas.h"
#include "opaq/cpu.h"

const struct activation_table activation_table_avx2 = {
    .name = "activation_avx2", .features = OPAQ_CPU_AVX2, .run = activate_stretch};
#endif

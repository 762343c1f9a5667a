/* cpu/moe/x86/activation_avx512.c: activations with 16 lanes; compiled with -mavx512f. */
#include "cpu/moe/activation_table.h"

#if defined(__x86_64__)
#include "definition/activation_formulas.h"
#include "opaq/cpu.h"

const struct activation_table activation_table_avx512 = {
    .name = "activation_avx512", .features = OPAQ_CPU_AVX512, .run = activate_stretch};
#endif

/* cpu/quant/ref/amax_ref.c: reference for the amax of a tensor or of its rows. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/segment_ref.h"

void amax_ref(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
              float *amax, int64_t step) {
    float values[SEGMENT];
    uint32_t bits = 0;
    const int n = copy->is_hadamard ? HADAMARD_SIZE : SEGMENT;
    for (int64_t row = r; row < r_end; ++row) {
        bits = step == 0 ? bits : 0;
        for (int64_t c = 0; c < copy->operand.columns; c += n) {
            copy_load(copy, spec, row, c, n, values);
            bits = amax_bits(bits, values, n, spec->rule == OPAQ_RULE_TE);
        }
        if (step != 0) {
            amax[row] = amax_from_bits(bits);
        }
    }
    if (step == 0) {
        *amax = amax_from_bits(bits);
    }
}

/* definition/delayed_ref.h: the amax history of delayed scaling. Depends on opaq/quant.h. Specification:
 * docs/formats.md, "fp8". */
#ifndef OPAQ_DEFINITION_DELAYED_REF_H
#define OPAQ_DEFINITION_DELAYED_REF_H

#include <stdbool.h>

#include "backend/operand.h"
#include "base/device.h"
#include "base/float_bits.h"

OPAQ_DEVICE static inline float delayed_larger(float a, float b) { return b > a ? b : a; }

/* Rolls one tensor's column of the history; returns the amax for its next scale. Entry 1, the oldest, is
 * dropped but still counts for this maximum, as in Transformer Engine: the maximum is over `length` amaxes. */
OPAQ_DEVICE static inline float delayed_roll(float *history, int64_t length, int64_t count, float last,
                                             enum opaq_amax_algorithm algorithm) {
    float amax = 0.0f;
    if (last != 0.0f) {
        for (int64_t i = 1; i < length; ++i) {
            amax = delayed_larger(amax, history[i * count]);
            history[i * count] = i + 1 < length ? history[(i + 1) * count] : last;
        }
        history[0] = 0.0f;
        amax = delayed_larger(amax, last);
    }
    return algorithm == OPAQ_AMAX_MOST_RECENT ? last : amax;
}

/* Merges the recorded amax of tensor i (NULL: none) into the history. */
OPAQ_DEVICE static inline void delayed_record(const struct opaq_delayed_state *state, const float *recorded,
                                              int64_t i) {
    if (recorded != NULL && recorded[i] > state->amax_history[i]) {
        state->amax_history[i] = recorded[i];
    }
}

/* Computes the next scale of tensor i. `target`: the element's largest value times 2^-margin. */
OPAQ_DEVICE static inline void delayed_rescale(const struct opaq_delayed_state *state, const float *reduced,
                                               enum opaq_amax_algorithm algorithm, float target, int64_t i) {
    float *history = state->amax_history + i;
    const bool is_reduced = reduced != NULL && reduced[i] != 0.0f;
    const float amax =
        delayed_roll(history, state->length, state->count, is_reduced ? reduced[i] : history[0], algorithm);
    const float scale = float_is_finite(amax) && amax > 0.0f ? target / amax : state->scale[i];
    const bool is_infinite = float_to_bits(float_abs(scale)) == 0x7F800000u;
    state->scale[i] = is_infinite ? float_from_bits(0x7F7FFFFFu) : scale;
}

#endif

/* cpu/quant/delayed_scaling.c: delayed scaling's history. Specification: docs/formats.md, "fp8". */
#include <math.h>
#include <stdbool.h>

#include "base/float_bits.h"
#include "base/fp_environment.h"
#include "cpu/cpu_functions.h"

static float larger(float a, float b) { return b > a ? b : a; }

/* One tensor's column of the history; returns the amax that its next scale follows from. Entry 1, the oldest, leaves the
 * history here and counts for the maximum once more, as in Transformer Engine: so `length` amaxes do. */
static float roll(float *history, int64_t length, int64_t count, float last,
                  enum opaq_amax_algorithm algorithm) {
    float amax = 0.0f;
    if (last != 0.0f) {
        for (int64_t i = 1; i < length; ++i) {
            amax = larger(amax, history[i * count]);
            history[i * count] = i + 1 < length ? history[(i + 1) * count] : last;
        }
        history[0] = 0.0f;
        amax = larger(amax, last);
    }
    return algorithm == OPAQ_AMAX_MOST_RECENT ? last : amax;
}

enum opaq_status cpu_delayed_update(const struct opaq_delayed_state *state, const float *recorded,
                                    const float *reduced, const struct delayed_rule *rule,
                                    const struct opaq_execution *execution, struct opaq_error *error) {
    (void)execution;
    (void)error;
    for (int64_t i = 0; recorded != NULL && i < state->count; ++i) {
        if (recorded[i] > state->amax_history[i]) {
            state->amax_history[i] = recorded[i];
        }
    }
    const uint64_t saved = fp_environment_enter();
    const float target = ldexpf(opaq_element_info(rule->element)->largest, -rule->margin);
    for (int64_t i = 0; rule->updates && i < state->count; ++i) {
        float *history = state->amax_history + i;
        const bool is_reduced = reduced != NULL && reduced[i] != 0.0f;
        const float amax =
            roll(history, state->length, state->count, is_reduced ? reduced[i] : history[0], rule->algorithm);
        const float scale = float_is_finite(amax) && amax > 0.0f ? target / amax : state->scale[i];
        state->scale[i] = isinf(scale) ? 0x1.FFFFFEp127f : scale;
    }
    fp_environment_leave(saved);
    return OPAQ_OK;
}

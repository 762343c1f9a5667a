/* op/quantize/delayed_op.c: delayed scaling's history. Specification: docs/formats.md, "fp8". */
#include <math.h>
#include <stdbool.h>

#include "base/checked.h"
#include "base/float_bits.h"
#include "base/fp_environment.h"
#include "opaq/quant.h"
#include "opaq/status.h"

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

enum opaq_status opaq_delayed_update(const struct opaq_delayed_state *state, const float *reduced_amax,
                                     enum opaq_element element, int margin, enum opaq_amax_algorithm algorithm,
                                     struct opaq_error *error) {
    int64_t floats;
    if (state == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "delayed_update: state is NULL");
    }
    if (state->length < 1 || state->count < 0 || !checked_multiply(state->length, state->count, &floats)) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "delayed_update: the history is [%lld][%lld], expected at least [1][0]",
                         (long long)state->length, (long long)state->count);
    }
    if (floats > 0 && (state->amax_history == NULL || state->scale == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "delayed_update: %s is NULL",
                         state->scale == NULL ? "scale" : "amax_history");
    }
    if (element != OPAQ_E4M3 && element != OPAQ_E5M2) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "delayed_update: element is %d, expected e4m3 (%d) or e5m2 (%d)", (int)element,
                         OPAQ_E4M3, OPAQ_E5M2);
    }
    if (margin < -64 || margin > 64) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "delayed_update: margin is %d, expected -64 to 64",
                         margin);
    }
    if (algorithm != OPAQ_AMAX_MAX && algorithm != OPAQ_AMAX_MOST_RECENT) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "delayed_update: algorithm is %d, expected 0 or 1",
                         (int)algorithm);
    }
    const uint64_t saved = fp_environment_enter();
    const float target = ldexpf(opaq_element_info(element)->largest, -margin);
    for (int64_t i = 0; i < state->count; ++i) {
        float *history = state->amax_history + i;
        const bool reduced = reduced_amax != NULL && reduced_amax[i] != 0.0f;
        const float amax =
            roll(history, state->length, state->count, reduced ? reduced_amax[i] : history[0], algorithm);
        const float scale = float_is_finite(amax) && amax > 0.0f ? target / amax : state->scale[i];
        state->scale[i] = isinf(scale) ? 0x1.FFFFFEp127f : scale;
    }
    fp_environment_leave(saved);
    return OPAQ_OK;
}

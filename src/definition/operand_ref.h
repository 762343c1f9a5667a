/* definition/operand_ref.h: decodes a product's operand to floats. Depends on decode_ref.h, backend/product.h. */
#ifndef OPAQ_DEFINITION_OPERAND_REF_H
#define OPAQ_DEFINITION_OPERAND_REF_H

#include "backend/product.h"
#include "definition/decode_ref.h"

/* The number of columns that may be nonzero. Where the Hadamard transform is not undone, this includes the
 * padding of the last Hadamard group, whose codes are nonzero. */
OPAQ_DEVICE static inline int64_t operand_depth(const struct gemm_operand *operand) {
    const bool is_left = operand->copy != NULL && operand->copy->is_hadamard && !operand->undo_hadamard;
    return is_left ? round_up(operand->plain.columns, HADAMARD_SIZE) : operand->plain.columns;
}

/* ---- the factor that all elements of a copy have in common ---- */

/* The common factor of all elements; 0 if there is none. */
OPAQ_DEVICE static inline float shared_factor(const struct opaq_spec *spec, const struct quant_copy *copy) {
    if (spec->format == OPAQ_FP8) {
        return *(const float *)copy->scale;
    }
    if (spec->format != OPAQ_NVFP4 || copy->amax_step != 0) {
        return 0.0f;
    }
    const bool is_global = (spec->options & OPAQ_GLOBAL) != 0;
    return !is_global                         ? copy->amax[0] * (1.0f / (6.0f * (float)spec->e4m3_max))
           : spec->rule == OPAQ_RULE_MODELOPT ? copy->amax[0]
           : copy->amax[0] == 0.0f            ? 0.0f
                                              : 1.0f / copy->amax[0];
}

/* A copy without that factor. It contains pointers to itself. */
struct bare_copy {
    struct opaq_spec spec;
    struct quant_copy copy;
    float one;
};

/* Returns false and changes nothing unless there is such a factor between 2^-100 and 2^100. */
OPAQ_DEVICE static inline bool bare_copy_make(const struct opaq_spec *spec, const struct quant_copy *copy,
                                              struct bare_copy *bare, float *factor) {
    const float found = shared_factor(spec, copy);
    if (!(float_abs(found) > 0x1p-100f && float_abs(found) < 0x1p100f)) {
        return false;
    }
    bare->one = 1.0f;
    bare->spec = *spec;
    bare->copy = *copy;
    if (spec->format == OPAQ_FP8) {
        bare->copy.scale = &bare->one;
    } else { /* its block scales are multiplied with the global one */
        bare->spec.options |= OPAQ_GLOBAL;
        bare->spec.rule = OPAQ_RULE_MODELOPT;
        bare->copy.amax = &bare->one;
    }
    *factor = found;
    return true;
}

/* Whether a product applies its second operand's common factor to the sums instead of the elements. */
OPAQ_DEVICE static inline bool leaves_factor_out(const struct gemm_operand *a, const struct gemm_operand *b) {
    return b->is_across && a->copy == NULL && a->plain.dtype == OPAQ_BF16;
}

/* ---- elements ---- */

enum { OPERAND_PART = HADAMARD_SIZE };

/* Elements (row, k) to (row, k + n - 1) of an operand that is read across the rows of its copy. */
OPAQ_DEVICE static inline void operand_across(const struct gemm_operand *operand, int64_t row, int64_t k, int n,
                                              float values[OPERAND_PART]) {
    const int64_t column = row / OPERAND_PART * OPERAND_PART;
    for (int i = 0; i < n; ++i) {
        float part[OPERAND_PART];
        decode_segment(operand->spec, operand->copy, operand->undo_hadamard, k + i, column, OPERAND_PART, part);
        values[i] = part[row - column];
    }
}

/* Elements (row, k) to (row, k + 15), k a multiple of 16; zeros beyond the operand's depth. */
OPAQ_DEVICE static inline void operand_part(const struct gemm_operand *operand, int64_t row, int64_t k,
                                            float values[OPERAND_PART]) {
    const int64_t inside = operand_depth(operand) - k;
    if (inside > 0 && operand->is_across) {
        operand_across(operand, row, k, (int)min_int64(inside, OPERAND_PART), values);
    } else if (inside > 0 && operand->copy != NULL) {
        const bool is_whole = operand->copy->is_hadamard && operand->undo_hadamard; /* the transform's group */
        decode_segment(operand->spec, operand->copy, operand->undo_hadamard, row, k,
                       is_whole ? OPERAND_PART : (int)min_int64(inside, OPERAND_PART), values);
    } else if (inside > 0) {
        segment_load(&operand->plain, row, k, OPERAND_PART, values);
    }
    for (int i = 0; i < OPERAND_PART; ++i) {
        values[i] = i < inside ? values[i] : 0.0f;
    }
}

#endif

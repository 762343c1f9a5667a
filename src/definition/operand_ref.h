/* definition/operand_ref.h: a product's operand as floats. Depends on decode_ref.h, backend/product.h. */
#ifndef OPAQ_DEFINITION_OPERAND_REF_H
#define OPAQ_DEFINITION_OPERAND_REF_H

#include "backend/product.h"
#include "definition/decode_ref.h"

/* The columns of an operand that are not zero by definition: with those of its last Hadamard group, whose codes beyond the
 * columns count, where the transform is left in place. */
OPAQ_DEVICE static inline int64_t operand_depth(const struct gemm_operand *operand) {
    const bool is_left = operand->copy != NULL && operand->copy->is_hadamard && !operand->undo_hadamard;
    return is_left ? round_up(operand->plain.columns, HADAMARD_SIZE) : operand->plain.columns;
}

/* Elements (row, k) to (row, k + 15), k a multiple of 16; zeros beyond the operand's depth. */
enum { OPERAND_PART = HADAMARD_SIZE };
OPAQ_DEVICE static inline void operand_part(const struct gemm_operand *operand, int64_t row, int64_t k,
                                            float values[OPERAND_PART]) {
    const int64_t inside = operand_depth(operand) - k;
    if (inside > 0 && operand->copy != NULL) {
        decode_segment(operand->spec, operand->copy, operand->undo_hadamard, row, k, OPERAND_PART, values);
    } else if (inside > 0) {
        segment_load(&operand->plain, row, k, OPERAND_PART, values);
    }
    for (int i = 0; i < OPERAND_PART; ++i) {
        values[i] = i < inside ? values[i] : 0.0f;
    }
}

#endif

/* opaq/stored.h: rows of a quantized tensor as checkpoints store them. Depends on op.h.
 *
 * A checkpoint stores plain matrices without padding, and often several tensors where a model computes with
 * one: q, k and v, or the experts of a layer. These functions copy a range of such rows into a quantized tensor
 * or out of one, byte for byte, without rounding or allocating. */
#ifndef OPAQ_STORED_H
#define OPAQ_STORED_H

#include <stdint.h>

#include "opaq/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `rows` rows of K columns. Dimensions of size 1 are allowed anywhere, adjacent dimensions may be merged or
 * split (a row of packed blocks as [K/32, 16]), memory may be strided and unaligned. */
struct opaq_stored {
    /* Codes: u8 [rows, K], or for 4-bit codes [rows, ceil(K/2)] with the even element in the low nibble. */
    struct opaq_tensor data;
    /* One entry per block: [ceil(rows / block rows), ceil(K / block columns)]; [rows] or [rows, 1] for fp8row;
     * [] or [1] for fp8. u8 for mxfp8, mxfp4 (e8m0) and nvfp4 (e4m3), else f32. An import also accepts bf16
     * instead of f32, u8 (e8m0: 2^(e-127)) for fp8blk2, and one entry for all rows for fp8row. */
    struct opaq_tensor scale;
    /* nvfp4: the second-level float, f32: with OPAQ_GLOBAL the global scale, else the amax. [] or [1], with
     * OPAQ_ROWSCALED [rows], or one for all of them. Other formats: rank -1 and data NULL. */
    struct opaq_tensor global;
};

/* Copies into rows [first_row, first_row + rows) of `to`, a tensor with a rowwise copy only, its scales
 * swizzled or not. Both ends are multiples of the block's rows, or the tensor's last row. A scale or float of
 * the whole tensor is set by the first import; later ones must have the same value. Other bytes, such as
 * padding, are unchanged. On an error nothing was written. */
OPAQ_API enum opaq_status opaq_stored_import(const struct opaq_view *to, int64_t first_row,
                                             const struct opaq_stored *from, struct opaq_error *error);

/* Copies from rows [first_row, first_row + rows) of `from`, under the same rules. One entry for all rows
 * (fp8row, OPAQ_ROWSCALED) is possible if they are equal. On an error nothing was written. */
OPAQ_API enum opaq_status opaq_stored_export(const struct opaq_view *from, int64_t first_row, int64_t rows,
                                             const struct opaq_stored *to, struct opaq_error *error);

/* Whether an import's shapes and dtypes are valid, from the files' headers alone: data is not read and may be
 * NULL. */
OPAQ_API enum opaq_status opaq_stored_check(const struct opaq_proto *to, int64_t first_row,
                                            const struct opaq_stored *from, struct opaq_error *error);

/* The dtypes, shapes and contiguous strides that `rows` rows of a tensor like `proto` are stored with; data is
 * NULL. */
OPAQ_API enum opaq_status opaq_stored_describe(const struct opaq_proto *proto, int64_t rows,
                                               struct opaq_stored *stored, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif

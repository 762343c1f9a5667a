/* opaq/stored.h: rows of a quantized tensor as checkpoints hold them. Depends on op.h.
 *
 * A checkpoint stores plain matrices without padding, and often several tensors where a model computes with one:
 * q, k and v, or the experts of a layer. Here a stretch of such rows goes into a quantized tensor, or out of one, byte
 * for byte; nothing is rounded. Allocates nothing. */
#ifndef OPAQ_STORED_H
#define OPAQ_STORED_H

#include <stdint.h>

#include "opaq/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `rows` rows of K columns. Dimensions of size 1 may stand anywhere, neighbours may be merged or split (a row of
 * packed blocks as [K/32, 16]), memory may be strided and need not be aligned. */
struct opaq_stored {
    /* Codes: u8 [rows, K], or of 4 bits [rows, ceil(K/2)], the even element in the low nibble. */
    struct opaq_tensor data;
    /* One entry per block: [ceil(rows / block rows), ceil(K / block columns)]; [rows] or [rows, 1] for fp8row; [] or
     * [1] for fp8. Of u8 for mxfp8, mxfp4 (e8m0) and nvfp4 (e4m3), else of f32. Imported are also bf16 instead of f32,
     * u8 (e8m0: 2^(e-127)) for fp8blk2, and one entry for all rows for fp8row. */
    struct opaq_tensor scale;
    /* nvfp4: the float beside the scales, f32: with OPAQ_GLOBAL the global scale, else the amax. [] or [1], with
     * OPAQ_ROWSCALED [rows], or one for all of them. Other formats: rank -1 and data NULL. */
    struct opaq_tensor global;
};

/* Into rows [first_row, first_row + rows) of `to`, a tensor with a rowwise copy only, its scales swizzled or not. Both
 * ends are multiples of the block's rows, or the tensor's last row. A scale or float that covers the tensor is set by the
 * first stretch that comes, and later ones must have the same. What is not written here stays: padding is zero if the
 * buffers were. On an error nothing was written. */
OPAQ_API enum opaq_status opaq_stored_import(const struct opaq_view *to, int64_t first_row,
                                             const struct opaq_stored *from, struct opaq_error *error);

/* Out of rows [first_row, first_row + rows) of `from`, under the same rules. One entry for all rows (fp8row,
 * OPAQ_ROWSCALED) is possible where they agree. On an error nothing was written. */
OPAQ_API enum opaq_status opaq_stored_export(const struct opaq_view *from, int64_t first_row, int64_t rows,
                                             const struct opaq_stored *to, struct opaq_error *error);

/* Whether an import would be refused for its shapes or dtypes, by the files' headers alone: what `data` points to does
 * not matter and may be NULL. */
OPAQ_API enum opaq_status opaq_stored_check(const struct opaq_proto *to, int64_t first_row,
                                            const struct opaq_stored *from, struct opaq_error *error);

/* What `rows` rows of a tensor like `proto` are stored as: dtypes, shapes and contiguous strides, data NULL. */
OPAQ_API enum opaq_status opaq_stored_describe(const struct opaq_proto *proto, int64_t rows,
                                               struct opaq_stored *stored, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif

/* format/proto_layout.h: the buffers of a checked prototype, and the sizes of elements. Depends on opaq/proto.h,
 * opaq/tensor.h. */
#ifndef OPAQ_FORMAT_PROTO_LAYOUT_H
#define OPAQ_FORMAT_PROTO_LAYOUT_H

#include "opaq/proto.h"
#include "opaq/tensor.h"

/* All of them, in flatten order, for a prototype that opaq_proto_check accepts; returns their number. */
int proto_buffers(const struct opaq_proto *proto, struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT]);

/* Bytes of an element of a dtype (OPAQ_DTYPE_...): 1, 2, 4 or 8; 0 for a number that is not one. */
int dtype_bytes(int32_t dtype);

#endif

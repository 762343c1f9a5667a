/* format/proto_layout.h: the buffers of a checked prototype. Depends on opaq/proto.h. */
#ifndef OPAQ_FORMAT_PROTO_LAYOUT_H
#define OPAQ_FORMAT_PROTO_LAYOUT_H

#include "opaq/proto.h"

/* All of them, in flatten order, for a prototype that opaq_proto_check accepts; returns their number. */
int proto_buffers(const struct opaq_proto *proto, struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT]);

#endif

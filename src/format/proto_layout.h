/* format/proto_layout.h: the buffers of a prototype that was checked before. Depends on opaq/proto.h. */
#ifndef OPAQ_FORMAT_PROTO_LAYOUT_H
#define OPAQ_FORMAT_PROTO_LAYOUT_H

#include "opaq/proto.h"

/* As opaq_proto_buffer, for a prototype that opaq_proto_check accepts and an index below its buffer count. */
void proto_buffer_at(const struct opaq_proto *proto, int index, struct opaq_buffer *buffer);

#endif

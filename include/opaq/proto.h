/* opaq/proto.h: a prototype (a tensor without its data), and a view (a prototype with borrowed memory). Depends
 * on spec.h.
 *
 * A prototype is all metadata of a tensor. It determines the list of buffers to allocate, in flatten order,
 * which real tensors, fake tensors and files share. */
#ifndef OPAQ_PROTO_H
#define OPAQ_PROTO_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPAQ_RANK_LIMIT 8
#define OPAQ_BUFFER_LIMIT 6

enum opaq_device_type { OPAQ_DEVICE_CPU = 0, OPAQ_DEVICE_CUDA = 1 };

struct opaq_device {
    int32_t type;  /* enum opaq_device_type */
    int32_t index; /* 0 for the CPU */
};

struct opaq_proto {
    int32_t rank;         /* 0 to OPAQ_RANK_LIMIT; a quantized tensor has at least one dimension */
    int32_t dtype;        /* OPAQ_F32, OPAQ_BF16 or OPAQ_F16: the dtype of the tensor before quantization */
    int32_t is_quantized; /* 0: one plain buffer of dtype; 1: the buffers of the spec's format */
    struct opaq_device device;
    int64_t shape[OPAQ_RANK_LIMIT]; /* unused entries are 0 */
    struct opaq_spec spec;          /* all zero when not quantized */
};

/* One buffer of a prototype, with its extents evaluated. */
struct opaq_buffer {
    const char *name; /* "_rowwise_data", ...; "data" for a plain tensor */
    enum opaq_role role;
    int usage;                 /* the usages it serves; 0 for a plain tensor */
    enum opaq_element element; /* type of its elements */
    int packing;               /* elements per stored entry: 2 for E2M1, else 1 */
    int entry_bytes;           /* bytes per stored entry: 1, 2 or 4 */
    int32_t rank;
    int64_t shape[OPAQ_RANK_LIMIT];   /* in stored entries */
    int64_t strides[OPAQ_RANK_LIMIT]; /* in stored entries; contiguous */
    size_t bytes;
};

/* `spec` NULL makes a plain tensor. Fails on negative sizes, on more than 2^62 elements or bytes, on a spec
 * that opaq_spec_check refuses. */
OPAQ_API enum opaq_status opaq_proto_make(const int64_t *shape, int rank, enum opaq_element dtype,
                                          const struct opaq_spec *spec, struct opaq_device device,
                                          struct opaq_proto *proto, struct opaq_error *error);

/* Checks a prototype that opaq_proto_make did not make, for example one from a file. */
OPAQ_API enum opaq_status opaq_proto_check(const struct opaq_proto *proto, struct opaq_error *error);

/* The rows M (product of all leading dimensions, 1 if there are none) and columns K (last dimension); 0 for NULL. */
OPAQ_API int64_t opaq_proto_rows(const struct opaq_proto *proto);
OPAQ_API int64_t opaq_proto_columns(const struct opaq_proto *proto);

/* The buffers in flatten order. The count is at most OPAQ_BUFFER_LIMIT; 0 for NULL. */
OPAQ_API int opaq_proto_buffer_count(const struct opaq_proto *proto);
OPAQ_API enum opaq_status opaq_proto_buffer(const struct opaq_proto *proto, int index,
                                            struct opaq_buffer *buffer, struct opaq_error *error);

/* The sum of the buffers' bytes. */
OPAQ_API enum opaq_status opaq_proto_bytes(const struct opaq_proto *proto, size_t *bytes,
                                           struct opaq_error *error);

/* Sets the usages of this prototype's own spec. */
OPAQ_API enum opaq_status opaq_proto_update_usage(struct opaq_proto *proto, int usage,
                                                  struct opaq_error *error);

/* The metadata as text, "bf16[4,128] nvfp4+2d cuda:0" ("bf16[4,128] cpu" for a plain tensor), and back. The
 * text is canonical: equal prototypes have equal texts. */
#define OPAQ_PROTO_TEXT_BYTES 384
OPAQ_API enum opaq_status opaq_proto_print(const struct opaq_proto *proto, char *buffer, size_t capacity,
                                           struct opaq_error *error);
OPAQ_API enum opaq_status opaq_proto_parse(const char *text, size_t length, struct opaq_proto *proto,
                                           struct opaq_error *error);
OPAQ_API int opaq_proto_equal(const struct opaq_proto *a, const struct opaq_proto *b); /* 0 for NULL */

/* Borrowed memory. */
struct opaq_span {
    void *data;
    size_t bytes; /* usable bytes */
};

/* A tensor: a prototype and pointers to its buffers, which the view does not own. */
struct opaq_view {
    struct opaq_proto proto;
    int64_t row_stride; /* plain tensors: elements from one row to the next, at least K */
    struct opaq_span buffer[OPAQ_BUFFER_LIMIT]; /* in the prototype's order; unused entries are zero */
};

/* A view of a plain tensor. `strides` (in elements) may be NULL for a contiguous one; otherwise the last must
 * be 1 and the leading ones must amount to one constant distance between rows. */
OPAQ_API enum opaq_status opaq_view_plain(const int64_t *shape, const int64_t *strides, int rank,
                                          enum opaq_element dtype, struct opaq_device device, void *data,
                                          size_t bytes, struct opaq_view *view, struct opaq_error *error);

/* A view of a quantized tensor: one span per buffer of the prototype. */
OPAQ_API enum opaq_status opaq_view_quantized(const struct opaq_proto *proto, const struct opaq_span *spans,
                                              int count, struct opaq_view *view, struct opaq_error *error);

/* A view of any tensor in one allocation: buffers one after another, each starting at a multiple of 64 bytes
 * from `memory`, which must itself be aligned to 64. opaq_view_bind_bytes computes the size. */
OPAQ_API enum opaq_status opaq_view_bind_bytes(const struct opaq_proto *proto, size_t *bytes,
                                               struct opaq_error *error);
OPAQ_API enum opaq_status opaq_view_bind(const struct opaq_proto *proto, void *memory, size_t bytes,
                                         struct opaq_view *view, struct opaq_error *error);

/* Checks that every pointer is set and aligned to its entries, and every buffer large enough. */
OPAQ_API enum opaq_status opaq_view_check(const struct opaq_view *view, struct opaq_error *error);

/* The index of the buffer with a role and usage, e.g. the columnwise scales; -1 if the tensor has none. */
OPAQ_API int opaq_proto_find(const struct opaq_proto *proto, enum opaq_role role, enum opaq_usage usage);

#ifdef __cplusplus
}
#endif

#endif

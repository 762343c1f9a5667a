/* op/table/op_tensor.h: between a framework's tensors and opaq's views. Addresses are
 * checked, never followed; error texts name no operation. Depends on opaq/op.h,
 * format/proto_layout.h. */
#ifndef OPAQ_OP_TABLE_OP_TENSOR_H
#define OPAQ_OP_TABLE_OP_TENSOR_H

#include <stdbool.h>

#include "format/proto_layout.h"
#include "opaq/op.h"

const char *dtype_name(int32_t dtype);

/* "[4,128]", written into the buffer. */
const char *shape_text(const struct opaq_tensor *tensor, char *buffer, size_t capacity);

/* The number of elements; -1 if a size is negative or there are too many. */
int64_t tensor_elements(const struct opaq_tensor *tensor);

/* Bytes from the first element to the end of the last; -1 if that does not fit or a stride is negative. */
int64_t tensor_reach(const struct opaq_tensor *tensor);

/* The spec of a quantizer's text, parsed once. */
enum opaq_status spec_of_value(const struct opaq_value *text, struct opaq_spec *spec, struct opaq_error *error);

bool is_on_device(const struct opaq_tensor *tensor, struct opaq_device device);

/* The same, with an error that names the tensor. */
enum opaq_status check_on_device(const char *name, const struct opaq_tensor *tensor, struct opaq_device device,
                                 struct opaq_error *error);

/* Checks that a tensor of any dtype is on the device and has memory. */
enum opaq_status check_tensor_memory(const char *name, const struct opaq_tensor *tensor,
                                     struct opaq_device device, struct opaq_error *error);

/* A plain view of a float tensor. */
enum opaq_status view_of_tensor(const char *what, const struct opaq_tensor *tensor, struct opaq_view *view,
                                struct opaq_error *error);

/* Whether a buffer has the dtype and shape of another, and is contiguous as that is. */
enum opaq_status check_same_tensor(const char *name, const struct opaq_tensor *tensor,
                                   const struct opaq_tensor *wanted, struct opaq_error *error);

/* A quantized view of contiguous buffers that must be exactly the prototype's: count, dtypes, shapes, device. A buffer
 * may also come with its entries in one dimension. */
enum opaq_status view_of_buffers(const struct opaq_proto *proto, const struct opaq_tensor *buffers,
                                 int64_t count, struct opaq_view *view, struct opaq_error *error);

/* The buffers of a prototype, or its plain tensor, as tensors without data; returns their number. */
int tensors_of_proto(const struct opaq_proto *proto, struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT]);

/* The address of the `count` floats of an optional argument on the device; NULL if it is absent. */
enum opaq_status floats_of_tensor(const char *what, const struct opaq_value *value, int64_t count,
                                  struct opaq_device device, const float **values, struct opaq_error *error);

/* The address of the two int64 (seed, offset) of an optional argument on the device; NULL if it is absent. */
enum opaq_status random_of_tensor(const struct opaq_value *value, struct opaq_device device,
                                  const int64_t **random, struct opaq_error *error);

#endif

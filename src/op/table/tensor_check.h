/* op/table/tensor_check.h: checks that several operations make at the door. Depends on quant. */
#ifndef OPAQ_OP_TABLE_TENSOR_CHECK_H
#define OPAQ_OP_TABLE_TENSOR_CHECK_H

#include "opaq/proto.h"

/* A valid plain tensor on the CPU. `what` names the argument in the message. */
enum opaq_status check_plain_tensor(const char *operation, const char *what, const struct opaq_view *view,
                                    struct opaq_error *error);

/* A valid quantized tensor on the CPU. */
enum opaq_status check_quantized_tensor(const char *operation, const char *what, const struct opaq_view *view,
                                        struct opaq_error *error);

/* Which copy `usage` asks for: 0 is the rowwise one if it is there, else the columnwise one. */
enum opaq_status check_usage(const char *operation, const struct opaq_view *quantized, int usage, int *copy,
                             struct opaq_error *error);

/* The same shape, and no byte in common. */
enum opaq_status check_pair(const char *operation, const struct opaq_view *plain,
                            const struct opaq_view *quantized, struct opaq_error *error);

#endif

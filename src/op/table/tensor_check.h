/* op/table/tensor_check.h: checks of public functions: arguments, and the environment's choice of kernels. Error texts
 * do not name the operation. Depends on backend.h. */
#ifndef OPAQ_OP_TABLE_TENSOR_CHECK_H
#define OPAQ_OP_TABLE_TENSOR_CHECK_H

#include "backend/backend.h"

/* A valid plain (quantized) tensor. `what` names the argument in the message. */
enum opaq_status check_plain_tensor(const char *what, const struct opaq_view *view, struct opaq_error *error);
enum opaq_status check_quantized_tensor(const char *what, const struct opaq_view *view,
                                        struct opaq_error *error);

/* The copy that `usage` selects: 0 is the rowwise one if there is one, else the columnwise one. */
enum opaq_status check_usage(const struct opaq_view *quantized, int usage, int *copy, struct opaq_error *error);

/* Checks that both have the same device and shape and do not overlap. */
enum opaq_status check_pair(const struct opaq_view *plain, const struct opaq_view *quantized,
                            struct opaq_error *error);

/* kernel_list.c: OPAQ_OK, or an error that names the invalid OPAQ_CPU, or the kernel in OPAQ_KERNEL that does not
 * exist or cannot run. */
enum opaq_status kernel_list_check(struct opaq_error *error);

/* Sets up a call on tensors of `device`; the work points to `execution`. */
enum opaq_status work_of(const struct opaq_execution *given, struct opaq_device device,
                         struct opaq_execution *execution, struct work *work, struct opaq_error *error);

#endif

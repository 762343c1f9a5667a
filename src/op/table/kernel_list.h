/* op/table/kernel_list.h: checks the environment's choice of kernels. Depends on opaq/kernel.h. */
#ifndef OPAQ_OP_TABLE_KERNEL_LIST_H
#define OPAQ_OP_TABLE_KERNEL_LIST_H

#include "opaq/kernel.h"

/* OPAQ_OK, or an error that names the invalid OPAQ_CPU, or the kernel in OPAQ_KERNEL that does not exist or
 * cannot run. */
enum opaq_status kernel_list_check(struct opaq_error *error);

#endif

/* op/experts/experts_batch.h: the forward of many experts at once, where their weights came tiled and activations stay as they
 * are: one run over all experts' tiles for each product. Depends on experts_parts.h. */
#ifndef OPAQ_OP_EXPERTS_EXPERTS_BATCH_H
#define OPAQ_OP_EXPERTS_EXPERTS_BATCH_H

#include "op/experts/experts_parts.h"

/* Whether it can be done so; while measuring, whether it might be: how weights lie in memory shows in the run. */
bool experts_batch_can_run(struct experts *experts);

/* y, the first output; the same bits as expert by expert. Measures or runs. */
enum opaq_status experts_batch_forward(struct experts *experts, struct opaq_error *error);

#endif

/* cpu/moe/grouped_tiles.h: grouped products of unquantized rows with tiled weights, in one run over all groups'
 * tiles. The same bits as one group at a time. Depends on backend/grouped.h. */
#ifndef OPAQ_CPU_MOE_GROUPED_TILES_H
#define OPAQ_CPU_MOE_GROUPED_TILES_H

#include "backend/grouped.h"

/* Whether it can run a job; and whether it could if the weights' memory were aligned. */
bool grouped_tiles_can_run(const struct grouped_product *job);
bool grouped_tiles_could_run(const struct grouped_product *job);

enum opaq_status grouped_tiles_workspace(const struct grouped_product *job, size_t *bytes,
                                         struct opaq_error *error);
enum opaq_status grouped_tiles_run(struct work *work, const struct grouped_product *job,
                                   struct opaq_error *error);

#endif

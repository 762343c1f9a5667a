/* cli/read/hub_cache.h: models of the Hugging Face Hub in its local cache. Nothing is downloaded. */
#ifndef OPAQ_CLI_READ_HUB_CACHE_H
#define OPAQ_CLI_READ_HUB_CACHE_H

#include "opaq/status.h"

/* The folder of a source, released with free(): for ORG/NAME or ORG/NAME@REVISION that is no path, and for the cache's
 * own folder models--ORG--NAME, the snapshot in the cache; for anything else, and if there is no such snapshot, a copy
 * of `path`. The default revision is main. */
char *hub_resolve(const char *path);

/* The error of a path that does not exist; `number` is errno. For the id of a model it says how to download it. */
enum opaq_status hub_refuse(const char *path, int number, struct opaq_error *error);

#endif

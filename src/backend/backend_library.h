/* backend/backend_library.h: loads a back end from its own shared object when its device is first used. Depends
 * on backend.h. */
#ifndef OPAQ_BACKEND_BACKEND_LIBRARY_H
#define OPAQ_BACKEND_BACKEND_LIBRARY_H

#include "backend/backend.h"

/* The function that the shared object exports. `version` is opaq_version() and `table_bytes` the size of struct
 * backend in the calling library. Fails on another version, or if there is no driver or no supported GPU. */
typedef enum opaq_status backend_open_function(const char *version, size_t table_bytes,
                                               const struct backend **backend, struct opaq_error *error);

/* Loads "libopaq_cuda.so" from the folder of this library, or the file that the environment variable
 * OPAQ_CUDA_LIBRARY names. The result, success or failure, is cached. */
enum opaq_status backend_library_open(const struct backend **backend, struct opaq_error *error);

#endif

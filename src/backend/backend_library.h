/* backend/backend_library.h: a back end in a shared object of its own, opened when the first tensor on its device appears.
 * Depends on backend.h. */
#ifndef OPAQ_BACKEND_BACKEND_LIBRARY_H
#define OPAQ_BACKEND_BACKEND_LIBRARY_H

#include "backend/backend.h"

/* The shared object exports one function of this type. `version` is opaq_version() and `table_bytes` the size of struct
 * backend in the library that asks; another version, no driver, or no GPU that can be used is a failure. */
typedef enum opaq_status backend_open_function(const char *version, size_t table_bytes,
                                               const struct backend **backend, struct opaq_error *error);

/* Opens "libopaq_cuda.so" in the folder of this library, or the file that the environment variable OPAQ_CUDA_LIBRARY names.
 * The answer, good or bad, is kept: it is asked for once. */
enum opaq_status backend_library_open(const struct backend **backend, struct opaq_error *error);

#endif

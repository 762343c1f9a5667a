/* cuda/cuda_open.h: what libopaq_cuda.so exports. */
#ifndef OPAQ_CUDA_CUDA_OPEN_H
#define OPAQ_CUDA_CUDA_OPEN_H

#include "backend/backend_library.h"

/* The function that backend/backend_library.h describes. */
#ifdef __cplusplus
extern "C"
#endif
    OPAQ_API backend_open_function opaq_cuda_open;

#endif

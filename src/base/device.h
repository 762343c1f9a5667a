/* base/device.h: marks inline functions that are compiled for a GPU too. Depends on nothing.
 *
 * Arithmetic that defines bytes is written once, in headers of base, format and definition, and compiled for every back
 * end. In C the marks are empty. */
#ifndef OPAQ_BASE_DEVICE_H
#define OPAQ_BASE_DEVICE_H

#if defined(__CUDACC__)
#define OPAQ_DEVICE __host__ __device__
#else
#define OPAQ_DEVICE
#endif

/* A constant table at file scope that such functions read. */
#if defined(__CUDA_ARCH__)
#define OPAQ_DEVICE_CONSTANT static __device__ const
#else
#define OPAQ_DEVICE_CONSTANT static const
#endif

#endif

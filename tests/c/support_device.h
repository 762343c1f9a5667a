/* support_device.h: the device that stands for CUDA in tests, chosen by the environment variable OPAQ_TEST_DEVICE. Depends on
 * backend.h.
 *
 *   (not set)   the CPU's table, behind the hiding back end
 *   emulated    the CUDA back end on an emulated GPU (tests/cuda)
 *   cuda        the CUDA back end on a GPU
 *
 * OPAQ_TEST_CUDA_LIBRARY names the file of the back end. */
#ifndef SUPPORT_DEVICE_H
#define SUPPORT_DEVICE_H

#include "backend/backend.h"

enum test_device { TEST_DEVICE_CPU, TEST_DEVICE_EMULATED, TEST_DEVICE_CUDA };

/* Exits with a sentence where the device cannot be had. `enter` and `leave` are called around what an emulated GPU does with
 * memory. */
enum test_device test_device_open(void (*enter)(void), void (*leave)(void), const struct backend **table);

/* Memory that the host can read while nothing runs; and waiting for what does. */
void *test_device_allocate(enum test_device device, const struct backend *table, size_t bytes);
void test_device_free(enum test_device device, void *memory, size_t bytes);
void test_device_wait(enum test_device device);

#endif

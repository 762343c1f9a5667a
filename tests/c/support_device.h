/* support_device.h: the device that tests use in the role of CUDA, selected by the environment variable
 * OPAQ_TEST_DEVICE. Depends on backend.h.
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

/* Exits with a message if the device is unavailable. `enter` and `leave` are called around an emulated GPU's
 * accesses to memory. */
enum test_device test_device_open(void (*enter)(void), void (*leave)(void), const struct backend **table);

/* Adds results of the device to a hash that the test prints at its end; tests/same_results.sh compares it between kernels that must
 * have the same bits. Does nothing on the CPU. */
void test_device_hash(const void *results, size_t bytes);

/* Around an operator's call, which runs on the stream that `begin` returns. An emulated GPU refuses meanwhile what a CUDA
 * graph cannot hold. On a GPU with OPAQ_TEST_CAPTURE=1 the call is captured, and `end` launches the graph. */
void *test_device_begin(enum test_device device);
void test_device_end(enum test_device device, void *stream);

/* Memory of the device. On a GPU the host cannot access it; elsewhere it is pages of the process. */
void *test_device_allocate(enum test_device device, const struct backend *table, size_t bytes);
void test_device_free(enum test_device device, const struct backend *table, void *memory, size_t bytes);

/* Copies to and from a GPU's memory, after waiting for all running work. Exits with CUDA's message after an error. */
void test_device_write(void *to, const void *from, size_t bytes);
void test_device_read(void *to, const void *from, size_t bytes);

#endif

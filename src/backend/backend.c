/* backend/backend.c: selects the function table of a device. */
#include "backend/backend.h"

#include <stdatomic.h>
#include <stddef.h>

#include "backend/backend_library.h"

enum { DEVICE_TYPES = 2 };

/* Tables besides the CPU's, which is always available. */
static _Atomic(const struct backend *) installed[DEVICE_TYPES];

void backend_install(enum opaq_device_type type, const struct backend *backend) {
    atomic_store_explicit(&installed[type], backend, memory_order_release);
}

enum opaq_status backend_of(struct opaq_device device, const struct backend **backend,
                            struct opaq_error *error) {
    if (device.type == OPAQ_DEVICE_CPU) {
        *backend = &cpu_backend;
        return OPAQ_OK;
    }
    const struct backend *found = NULL;
    if (device.type > OPAQ_DEVICE_CPU && device.type < DEVICE_TYPES) {
        found = atomic_load_explicit(&installed[device.type], memory_order_acquire);
    }
    if (found == NULL && device.type == OPAQ_DEVICE_CUDA) {
        struct opaq_error reason;
        if (backend_library_open(&found, &reason) != OPAQ_OK) {
            if (device.index < 0) { /* opaq_device_check of any device: there are no tensors */
                return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s", reason.text);
            }
            return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "the tensors are on cuda:%d: %s", device.index,
                             reason.text);
        }
    }
    if (found == NULL) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "the tensors are on an unknown device (%d, %d), expected the cpu or cuda", device.type,
                         device.index);
    }
    *backend = found;
    return OPAQ_OK;
}

enum opaq_status opaq_device_check(struct opaq_device device, struct opaq_error *error) {
    const struct backend *backend = NULL;
    const enum opaq_status status = backend_of(device, &backend, error);
    return backend == NULL || backend->check_device == NULL ? status : backend->check_device(device, error);
}

enum opaq_status execution_of(const struct opaq_execution *given, struct opaq_device device,
                              struct opaq_execution *execution, struct opaq_error *error) {
    if (given == NULL) {
        *execution = (struct opaq_execution){.device = device};
        return OPAQ_OK;
    }
    if (given->device.type != device.type || given->device.index != device.index) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "the execution is for device (%d, %d), the tensors are on (%d, %d), expected the same",
                         given->device.type, given->device.index, device.type, device.index);
    }
    *execution = *given;
    return OPAQ_OK;
}

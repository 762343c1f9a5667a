/* support_hiding.h: a back end whose memory only its own functions can read. It simulates a device: every
 * tensor and the workspace are in pages that are unreadable except while one of the back end's functions
 * runs, which forwards to the CPU's. An operator that dereferences an address itself crashes. Depends on
 * backend.h. */
#ifndef SUPPORT_HIDING_H
#define SUPPORT_HIDING_H

#include "backend/backend.h"
#include "opaq/op.h"

/* The device that the back end serves between hiding_install and the last hiding_remove. */
extern const struct opaq_device hiding_device;
void hiding_install(void);
void hiding_remove(void);

/* Memory of the device, for the calling thread's operations; hidden until hiding_reveal. */
struct hiding {
    char *memory;
    char *host; /* where a test reads and writes what is in `memory`: the same, or a copy of a GPU's memory */
    size_t bytes;
    size_t used;
    size_t copied; /* what the test reads and writes; the rest is for the back end only */
};
struct hiding hiding_make(size_t bytes);
void hiding_free(struct hiding *hiding);

/* A copy of bytes, or of a tensor with its strides, in hidden memory. */
void *hiding_copy(struct hiding *hiding, const void *from, size_t bytes);
struct opaq_tensor hiding_tensor(struct hiding *hiding, const struct opaq_tensor *tensor);

/* Memory that only the back end uses, after what is copied. On a GPU nothing is written to it, so that compute-sanitizer's
 * initcheck sees what is read before it is written. */
void *hiding_take(struct hiding *hiding, size_t bytes);

/* The host's address for one in hidden memory, while it is not hidden. */
void *hiding_host(const struct hiding *hiding, const void *address);

/* hiding_hide makes it the thread's memory and unreadable; hiding_reveal makes it readable again. */
void hiding_hide(struct hiding *hiding);
void hiding_reveal(struct hiding *hiding);

/* Around calls that a CUDA graph has to be able to hold, on the stream that `begin` returns. *is_refusing: whether calls that
 * it cannot hold are refused, which only an emulated GPU does. */
void *hiding_begin(bool *is_refusing);
void hiding_end(void *stream);

/* Makes the table's n-th allocation from now on fail, n from 1 on; 0: none. */
void hiding_fail_allocation(int n);

/* The number of products in any order since the last call. */
int hiding_any_order(void);

/* An operator call on copies of its tensors in hidden memory, to compare with the same call on the CPU. */
struct hidden_call {
    struct hiding hiding;
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor *tensors; /* of all arguments */
    struct opaq_outputs outputs;
    enum opaq_status status;
    struct opaq_error error;
    bool has_run;
};

/* After `true`, calls are expected to fail and are not copied: their tensors may be invalid. */
void hidden_calls_pause(bool is_paused);

/* Copies the tensors of a call and runs it on the copies; does nothing for tensors that are not on the CPU and
 * for runners, which own their tensors. Call it before the call on the CPU, which may change tensors. */
void hidden_call_run(struct hidden_call *call, const struct opaq_op *op, const struct opaq_value *values,
                     const struct opaq_outputs *outputs, const struct opaq_parallel *parallel);

/* Checks that both calls have the same status and the same bytes in outputs and changed tensors. Frees the
 * copies. */
void hidden_call_compare(struct hidden_call *call, const struct opaq_op *op, const struct opaq_value *values,
                         const struct opaq_outputs *outputs, enum opaq_status status);

#endif

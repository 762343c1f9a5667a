/* opaq/op.h: the operator table. Depends on execution.h, quant.h and tensor.h.
 *
 * An operator is a row that describes its arguments and results. A framework binding generates its schema, fake
 * function and calls from the row. The rows do not depend on any framework:
 *
 *     const struct opaq_op *op = opaq_op_find("quantize");
 *     opaq_op_outputs(op, values, &outputs, &error);                    shapes and dtypes of the results (the fake)
 *     opaq_op_workspace(op, values, &bytes, &error);                    scratch memory
 *     ... allocate outputs.tensor[i].data and the workspace ...
 *     opaq_op_run(op, values, &outputs, workspace, execution, &error);  the results
 *
 * opaq_op_call does all of it in one call, with a callback that allocates; use it for calls on a hot path. */
#ifndef OPAQ_OP_H
#define OPAQ_OP_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/execution.h"
#include "opaq/quant.h"
#include "opaq/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum opaq_argument_kind {
    OPAQ_ARGUMENT_TENSOR = 0,
    OPAQ_ARGUMENT_OPTIONAL_TENSOR = 1,
    OPAQ_ARGUMENT_TENSOR_LIST = 2,
    OPAQ_ARGUMENT_TEXT = 3,  /* a quantizer, a plan */
    OPAQ_ARGUMENT_SIZES = 4, /* a shape */
    OPAQ_ARGUMENT_DTYPE = 5,
    OPAQ_ARGUMENT_INT = 6,           /* a choice, constant when a graph is traced */
    OPAQ_ARGUMENT_SYMINT = 7,        /* a size, possibly symbolic */
    OPAQ_ARGUMENT_CHANGED_TENSOR = 8 /* like OPTIONAL_TENSOR; the operator writes into it */
};

struct opaq_argument_row {
    const char *name;
    enum opaq_argument_kind kind;
    const char *default_text; /* in schema syntax: "None", "0"; NULL if the argument is required */
};

/* Where an output's shape comes from. It is data, so that a fake can evaluate it on symbolic sizes. */
enum opaq_shape_source {
    OPAQ_SHAPE_OF_TENSOR = 0,         /* the shape of a tensor argument */
    OPAQ_SHAPE_OF_SIZES = 1,          /* a sizes argument */
    OPAQ_SHAPE_LEADING_AND_FIRST = 2, /* a sizes argument, its last size replaced by the first of another */
    OPAQ_SHAPE_FIRST = 3,             /* one dimension: the first size of a sizes argument */
    OPAQ_SHAPE_CONSTANT = 4,          /* one dimension of a fixed size */
    OPAQ_SHAPE_LEADING_AND_INT = 5,   /* a tensor's shape, its last size replaced by an integer argument */
    OPAQ_SHAPE_LEADING = 6,           /* a sizes argument without its last size */
    OPAQ_SHAPE_LEADING_AND_OUTER = 7, /* a tensor's shape, its last size replaced by the second last of sizes */
    OPAQ_SHAPE_TENSOR_AND_OUTER = 8,  /* the shape of a tensor, followed by the second last of sizes */
    OPAQ_SHAPE_OF_SIZES_FLAT = 9 /* a sizes argument; each buffer of a quantized tensor is one-dimensional */
};

struct opaq_output_row {
    const char *name;
    enum opaq_shape_source shape_source;
    int shape_argument;  /* index of the argument that gives the shape; CONSTANT: the size */
    int first_argument;  /* ..._AND_...: index of the argument that gives the last dimension */
    int dtype_argument;  /* index of a tensor or dtype argument that gives the dtype; -1: `dtype` does */
    int dtype;           /* enum opaq_dtype */
    int device_argument; /* index of a tensor or tensor list that gives the device */
    int slots;           /* operators with changed tensors: the number of tensors returned for this output */
    int is_random;       /* the caller fills it with random integers from 0 to 2^62 - 1 before the run */
};

/* Whether an output is absent, one plain tensor or the buffers of a quantizer. It depends on text arguments
 * only, never on tensors or sizes, so it is constant when a graph is traced. */
enum opaq_form_kind { OPAQ_FORM_ABSENT = 0, OPAQ_FORM_PLAIN = 1, OPAQ_FORM_QUANTIZED = 2 };

struct opaq_form {
    int32_t kind; /* enum opaq_form_kind */
    struct opaq_spec spec;
};

#define OPAQ_OP_ARGUMENT_LIMIT 16
#define OPAQ_OP_RESULT_LIMIT 6  /* output rows */
#define OPAQ_OP_OUTPUT_LIMIT 24 /* output tensors */

/* An argument's value; the kind says which fields are used. */
struct opaq_value {
    /* TENSOR: one; OPTIONAL_, CHANGED_TENSOR: one or NULL; TENSOR_LIST: count of them */
    const struct opaq_tensor *tensors;
    const char *text;     /* TEXT: count characters, without a terminator; an empty plan is valid */
    const int64_t *sizes; /* SIZES: count of them */
    int64_t count;
    int64_t integer; /* DTYPE: enum opaq_dtype; INT; SYMINT */
};

/* The tensors of all outputs, in the order of the output rows. In an operator with changed tensors each row has
 * `slots` tensors; unused ones have the shape [0]. */
struct opaq_outputs {
    int count;
    int first[OPAQ_OP_RESULT_LIMIT + 1]; /* row i has tensors first[i] to first[i + 1] - 1 */
    struct opaq_tensor tensor[OPAQ_OP_OUTPUT_LIMIT];
};

struct opaq_op {
    const char *name; /* "quantize" */
    int argument_count;
    struct opaq_argument_row argument[OPAQ_OP_ARGUMENT_LIMIT];
    int output_count;
    struct opaq_output_row output[OPAQ_OP_RESULT_LIMIT];
    int returns_one; /* the only output is always one plain tensor, so the schema says "Tensor" */
};

OPAQ_API int opaq_op_count(void);

/* NULL beyond the count, and for an unknown name. Rows live as long as the library. */
OPAQ_API const struct opaq_op *opaq_op_at(int index);
OPAQ_API const struct opaq_op *opaq_op_find(const char *name);

/* "quantize(Tensor x, str quantizer, ...) -> Tensor[]", generated from the row. Returns a list; "Tensor" for
 * one output that is always plain; a tuple of the slots for an operator with changed tensors, since PyTorch
 * does not allow a list there. */
#define OPAQ_OP_SCHEMA_BYTES 768
OPAQ_API enum opaq_status opaq_op_schema(const struct opaq_op *op, char *buffer, size_t capacity,
                                         struct opaq_error *error);

/* Whether an operator writes to some of its arguments. */
OPAQ_API int opaq_op_changes(const struct opaq_op *op);

/* The form of output row `output`. Reads only text and integer values. */
OPAQ_API enum opaq_status opaq_op_form(const struct opaq_op *op, const struct opaq_value *values, int output,
                                       struct opaq_form *form, struct opaq_error *error);

/* The outputs' shapes, contiguous strides, dtypes and devices, without data. Reads no tensor's contents. `values`
 * has argument_count entries. */
OPAQ_API enum opaq_status opaq_op_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                          struct opaq_outputs *outputs, struct opaq_error *error);

/* The bytes of scratch memory that a run needs besides its outputs, on the tensors' device and aligned to 64;
 * often 0. */
OPAQ_API enum opaq_status opaq_op_workspace(const struct opaq_op *op, const struct opaq_value *values,
                                            size_t *bytes, struct opaq_error *error);

/* Computes the outputs into tensors that opaq_op_outputs described and the caller allocated. Outputs and
 * changed tensors must not overlap each other or another argument. */
OPAQ_API enum opaq_status opaq_op_run(const struct opaq_op *op, const struct opaq_value *values,
                                      const struct opaq_outputs *outputs, struct opaq_span workspace,
                                      const struct opaq_execution *execution, struct opaq_error *error);

/* How opaq_op_call allocates. `give` sets the data pointers of all tensors of `outputs`, which are already
 * described, and makes `workspace` at least `bytes` long and aligned to 64 unless `bytes` is 0. It is called at
 * most once, and not after an error; if it fails, the call returns its status. The caller owns the memory and
 * frees it, also when the call fails. */
struct opaq_memory {
    enum opaq_status (*give)(void *context, struct opaq_outputs *outputs, size_t bytes,
                             struct opaq_span *workspace, struct opaq_error *error);
    void *context;
};

/* opaq_op_outputs, opaq_op_workspace and opaq_op_run in one call, which checks the values once. */
OPAQ_API enum opaq_status opaq_op_call(const struct opaq_op *op, const struct opaq_value *values,
                                       const struct opaq_memory *memory, const struct opaq_execution *execution,
                                       struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif

/* opaq/op.h: the operator table. Depends on quant.h.
 *
 * An operator is a row: its arguments, what its results look like, and a function that computes them. A framework
 * reads the row to make its schema, its fake and its call; nothing about an operator is written twice. The rows
 * know no framework:
 *
 *     const struct opaq_op *op = opaq_op_find("quantize");
 *     opaq_op_outputs(op, values, &outputs, &error);                    what will come out: shapes, dtypes (the fake)
 *     opaq_op_workspace(op, values, &bytes, &error);                    scratch memory
 *     ... allocate outputs.tensor[i].data and the workspace ...
 *     opaq_op_run(op, values, &outputs, workspace, parallel, &error);   the results
 */
#ifndef OPAQ_OP_H
#define OPAQ_OP_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What memory holds. The floats have their element's number. */
enum opaq_dtype {
    OPAQ_DTYPE_F16 = 4,
    OPAQ_DTYPE_BF16 = 5,
    OPAQ_DTYPE_F32 = 6,
    OPAQ_DTYPE_U8 = 16,
    OPAQ_DTYPE_I64 = 17
};

/* Any strided tensor in memory, borrowed. */
struct opaq_tensor {
    void *data;    /* may be NULL where there are no elements, and before allocation */
    int32_t dtype; /* enum opaq_dtype */
    int32_t rank;
    struct opaq_device device;
    int64_t shape[OPAQ_RANK_LIMIT];   /* entries beyond the rank are not read */
    int64_t strides[OPAQ_RANK_LIMIT]; /* in elements */
};

enum opaq_argument_kind {
    OPAQ_ARGUMENT_TENSOR = 0,
    OPAQ_ARGUMENT_OPTIONAL_TENSOR = 1,
    OPAQ_ARGUMENT_TENSOR_LIST = 2,
    OPAQ_ARGUMENT_TEXT = 3,  /* a quantizer */
    OPAQ_ARGUMENT_SIZES = 4, /* a shape */
    OPAQ_ARGUMENT_DTYPE = 5,
    OPAQ_ARGUMENT_INT = 6,   /* a choice, known when a graph is made */
    OPAQ_ARGUMENT_SYMINT = 7 /* a size, which may be symbolic */
};

struct opaq_argument_row {
    const char *name;
    enum opaq_argument_kind kind;
    const char *default_text; /* as a schema writes it: "None", "0"; NULL if the argument must be given */
};

/* What an output looks like: a tensor of a shape and dtype that arguments give, either plain or as the buffers of a
 * quantizer that a text argument names. */
enum opaq_shape_source {
    OPAQ_SHAPE_OF_TENSOR = 0, /* the shape of a tensor argument */
    OPAQ_SHAPE_OF_SIZES = 1   /* a sizes argument */
};

struct opaq_output_row {
    const char *name;
    enum opaq_shape_source shape_source;
    int shape_argument;     /* whose shape it has */
    int dtype_argument;     /* a tensor or dtype argument that gives the dtype */
    int device_argument;    /* a tensor or tensor list that gives the device */
    int quantizer_argument; /* -1: one plain tensor; else: a list, the buffers of that quantizer */
};

#define OPAQ_OP_ARGUMENT_LIMIT 8
#define OPAQ_OP_OUTPUT_LIMIT 8

/* An argument's value, by its kind. */
struct opaq_value {
    const struct opaq_tensor
        *tensors;         /* TENSOR: one; OPTIONAL_TENSOR: one or NULL; TENSOR_LIST: count of them */
    const char *text;     /* TEXT: count characters */
    const int64_t *sizes; /* SIZES: count of them */
    int64_t count;
    int64_t integer; /* DTYPE: enum opaq_dtype; INT; SYMINT */
};

struct opaq_outputs {
    int count;
    struct opaq_tensor tensor[OPAQ_OP_OUTPUT_LIMIT];
};

struct opaq_op {
    const char *name; /* "quantize" */
    int argument_count;
    struct opaq_argument_row argument[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_output_row output;
    /* Not for direct use: opaq_op_run checks first. `proto` is what the outputs are the buffers of. */
    enum opaq_status (*run)(const struct opaq_value *values, const struct opaq_proto *proto,
                            const struct opaq_outputs *outputs, struct opaq_span workspace,
                            const struct opaq_parallel *parallel, struct opaq_error *error);
    size_t (*workspace)(const struct opaq_value *values, const struct opaq_proto *proto); /* NULL: none */
};

OPAQ_API int opaq_op_count(void);

/* NULL beyond the count, and for an unknown name. Rows live as long as the library. */
OPAQ_API const struct opaq_op *opaq_op_at(int index);
OPAQ_API const struct opaq_op *opaq_op_find(const char *name);

/* "quantize(Tensor x, str quantizer, ...) -> Tensor[]", made from the row. */
#define OPAQ_OP_SCHEMA_BYTES 512
OPAQ_API enum opaq_status opaq_op_schema(const struct opaq_op *op, char *buffer, size_t capacity,
                                         struct opaq_error *error);

/* The outputs' shapes, contiguous strides, dtypes and devices, without data. Reads no tensor's contents. `values`
 * has argument_count entries. */
OPAQ_API enum opaq_status opaq_op_outputs(const struct opaq_op *op, const struct opaq_value *values,
                                          struct opaq_outputs *outputs, struct opaq_error *error);

/* The bytes of scratch memory, aligned to 64, that a run needs beyond its outputs; often 0. */
OPAQ_API enum opaq_status opaq_op_workspace(const struct opaq_op *op, const struct opaq_value *values,
                                            size_t *bytes, struct opaq_error *error);

/* Computes the outputs into tensors that opaq_op_outputs described and the caller allocated; they share no byte with
 * each other or with an argument. */
OPAQ_API enum opaq_status opaq_op_run(const struct opaq_op *op, const struct opaq_value *values,
                                      const struct opaq_outputs *outputs, struct opaq_span workspace,
                                      const struct opaq_parallel *parallel, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif

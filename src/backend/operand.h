/* backend/operand.h: a tensor as an operand of a product: unchanged, quantized, or quantized and dequantized.
 * Works on any back end; the host code only handles addresses. Depends on product.h, base/arena.h. */
#ifndef OPAQ_BACKEND_OPERAND_H
#define OPAQ_BACKEND_OPERAND_H

#include "backend/product.h"
#include "base/arena.h"
#include "opaq/execution.h"
#include "opaq/tensor.h"

struct backend;

/* The back end, execution and memory of a call. While measuring, nothing runs and the arena only counts. */
struct work {
    const struct backend *backend;
    const struct opaq_execution *execution;
    struct arena arena;
    bool is_measuring;
};

/* The random numbers of stochastic rounding: seed and offset, as two int64 in device memory or as values. */
struct random_source {
    const int64_t *state; /* NULL: use seed and offset */
    uint64_t seed, offset;
    int64_t stream; /* added to the offset, modulo 2^63 */
};

/* Further inputs and outputs of a quantization; in device memory, NULL if absent. */
struct quantize_figures {
    const float *scale;                          /* delayed scaling */
    const float *amax_rowwise, *amax_columnwise; /* given instead of computed */
    float *amax;                                 /* fp8: receives the amax */
    struct random_source random;
};

/* How delayed scaling computes the next scale from its history. */
struct delayed_rule {
    enum opaq_element element;
    int margin;
    enum opaq_amax_algorithm algorithm;
    bool updates; /* false: only record amaxes */
};

/* How a tensor is converted to an operand. */
struct operand_form {
    bool quantizes;
    struct opaq_spec spec; /* with the usages to make */
    bool is_dequantized;   /* the product reads the dequantized floats */
    bool may_be_across;    /* second operands only: the product may read the rowwise copy across its rows */
    enum opaq_usage along; /* ROWWISE: the sum runs over the tensor's columns; COLUMNWISE: over its rows */
    const float *scale;    /* delayed scaling, or NULL */
    const float *amax;     /* given instead of computed, or NULL */
    struct random_source random;
};

struct operand {
    struct quant_job job;
    struct gemm_operand gemm; /* points into job */
};

/* Makes an operand; its memory comes from the work's arena. */
enum opaq_status operand_make(struct work *work, const struct opaq_view *view, const struct operand_form *form,
                              struct operand *operand, struct opaq_error *error);

/* Converts an operand that is read along the rows of a copy to one that is read across them. */
void operand_turn(struct operand *operand);

/* Rows [first, first + rows) of an operand that is read along its rows. False if they share a scale or a tile
 * with other rows. */
bool operand_rows(const struct operand *whole, int64_t first, int64_t rows, struct operand *part);

/* A contiguous plain tensor of the view's shape: without memory, and with memory from the arena. */
struct opaq_view plain_view_like(const struct opaq_view *view, enum opaq_element dtype);
enum opaq_status work_plain_like(struct work *work, const struct opaq_view *like, enum opaq_element dtype,
                                 struct opaq_view *plain, struct opaq_error *error);

/* A plain matrix in the arena. */
enum opaq_status work_matrix(struct work *work, int64_t rows, int64_t columns, enum opaq_element dtype,
                             struct opaq_view *plain, struct opaq_error *error);

/* The view itself if it is plain, else its values dequantized to f32 in the arena. */
enum opaq_status work_dequantize(struct work *work, const struct opaq_view *view, struct opaq_view *plain,
                                 struct opaq_error *error);

/* Runs a product, with scratch memory that is released afterwards. */
enum opaq_status work_product(struct work *work, struct gemm_job *job, struct opaq_error *error);

/* The same for the grouped functions of backend.h. */
struct grouped_product;
struct grouped_gradient;
struct row_dot;
enum opaq_status work_grouped_product(struct work *work, const struct grouped_product *job,
                                      struct opaq_error *error);
enum opaq_status work_grouped_gradient(struct work *work, const struct grouped_gradient *job,
                                       struct opaq_error *error);
enum opaq_status work_row_dot(struct work *work, const struct row_dot *job, struct opaq_error *error);

/* Rows [first, first + rows) of a plain view as a matrix; row `index` of a bias [E,N] (the whole of one [N]); matrix
 * `index` of a plain stack [E,N,K] (the whole of one [N,K]). */
struct opaq_view plain_rows(const struct opaq_view *view, int64_t first, int64_t rows);
struct opaq_view stack_vector(const struct opaq_view *stack, int64_t index);
struct opaq_view stack_matrix(const struct opaq_view *stack, int64_t index);

/* Matrix `index` of a stack of any kind, as an operand read along its rows. False if matrices share a scale or
 * a tile. */
bool stack_operand(const struct operand *stack, int64_t rows, int64_t index, struct operand *matrix);

#endif

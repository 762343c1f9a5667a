/* backend/backend.h: the table of functions that may access tensors' contents. Depends on grouped.h, remap.h.
 *
 * Operators check arguments and compose calls; they handle shapes, formats and addresses only. All reads and
 * writes of tensor memory, including scales, amaxes, seeds and expert ids, go through the table of the tensors'
 * device.
 *
 * Rules for every function: arguments were checked; memory is on execution->device; only `allocate` allocates,
 * and only `noise`, whose result is in host memory, may wait for the device. A function fails if the device
 * rejects the work or, on a device that can read contents synchronously, if these are invalid. A
 * `..._workspace` function returns the bytes of scratch memory, aligned to 64, that the call needs; it
 * dereferences no address, and addresses may be NULL. */
#ifndef OPAQ_BACKEND_BACKEND_H
#define OPAQ_BACKEND_BACKEND_H

#include "backend/grouped.h"
#include "backend/remap.h"
#include "opaq/noise.h"

struct backend {
    const char *name; /* "cpu" */
    /* Whether the device, or with index -1 any of its type, exists and can run the kernels; NULL: always. */
    enum opaq_status (*check_device)(struct opaq_device device, struct opaq_error *error);

    /* ---- memory ---- */
    /* Aligned to 64. */
    enum opaq_status (*allocate)(struct opaq_device device, size_t bytes, void **memory,
                                 struct opaq_error *error);
    void (*release)(struct opaq_device device, void *memory);
    enum opaq_status (*zero)(void *memory, size_t bytes, const struct opaq_execution *execution,
                             struct opaq_error *error);
    /* Copies a strided tensor to contiguous memory. */
    enum opaq_status (*copy)(const struct opaq_tensor *from, void *to, const struct opaq_execution *execution,
                             struct opaq_error *error);
    /* Sets `count` floats to *value. */
    enum opaq_status (*fill)(const float *value, int64_t count, float *to,
                             const struct opaq_execution *execution, struct opaq_error *error);

    /* ---- quantized tensors ---- */
    enum opaq_status (*quantize)(const struct quant_job *job, const struct quantize_figures *figures,
                                 const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*dequantize)(const struct quant_job *job, const struct opaq_execution *execution,
                                   struct opaq_error *error);
    /* The amax of a copy's operand: one (step 0) or one per operand row (step 1). is_stored: for NVFP4, in the
     * form that the spec stores. */
    enum opaq_status (*amax)(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                             int64_t step, float *amax, const struct opaq_execution *execution,
                             struct opaq_error *error);
    enum opaq_status (*remap)(const struct remap_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    /* Whether two shards have the same tensor-wide scales and amaxes. A device that cannot report sets
     * are_equal. */
    enum opaq_status (*compare_figures)(const struct quant_job *a, const struct quant_job *b, bool *are_equal,
                                        const struct opaq_execution *execution, struct opaq_error *error);
    /* The noise of one copy against its operand; `noise` is host memory. */
    enum opaq_status (*noise)(const struct quant_job *job, struct opaq_noise *noise,
                              const struct opaq_execution *execution, struct opaq_error *error);
    /* Merges `recorded` (count floats, or NULL) into the history by maximum and, if `updates`, computes new
     * scales. */
    enum opaq_status (*delayed_update)(const struct opaq_delayed_state *state, const float *recorded,
                                       const float *reduced, const struct delayed_rule *rule,
                                       const struct opaq_execution *execution, struct opaq_error *error);

    /* ---- products ---- */
    size_t (*product_workspace)(const struct gemm_job *job);
    enum opaq_status (*product)(const struct gemm_job *job, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*grouped_product_workspace)(const struct grouped_product *job, size_t *bytes,
                                                  struct opaq_error *error);
    enum opaq_status (*grouped_product)(const struct grouped_product *job, void *workspace,
                                        const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*grouped_gradient_workspace)(const struct grouped_gradient *job, size_t *bytes,
                                                   struct opaq_error *error);
    enum opaq_status (*grouped_gradient)(const struct grouped_gradient *job, void *workspace,
                                         const struct opaq_execution *execution, struct opaq_error *error);
    /* The sums of each column over the rows of each group, or over all rows if `groups` is NULL. `sums`: [N] or
     * [E,N]. */
    enum opaq_status (*column_sum)(const struct row_groups *groups, const struct quant_matrix *rows,
                                   const struct opaq_view *sums, const struct opaq_execution *execution,
                                   struct opaq_error *error);

    /* ---- rows of a mixture of experts ---- */
    enum opaq_status (*route)(const struct route_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    enum opaq_status (*split)(const struct split_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    /* Copies the rows of `from` in sorted order. */
    enum opaq_status (*gather_rows)(const struct row_groups *groups, const struct quant_matrix *from,
                                    enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                    const struct opaq_execution *execution, struct opaq_error *error);
    /* Multiplies each sorted row of a float32 matrix by its router weight, in place. */
    enum opaq_status (*weigh_rows)(const struct row_groups *groups, const struct quant_matrix *rows,
                                   const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*row_dot_workspace)(const struct row_dot *job, size_t *bytes, struct opaq_error *error);
    enum opaq_status (*row_dot)(const struct row_dot *job, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error);
    /* Converts a matrix to another dtype. */
    enum opaq_status (*convert_rows)(const struct quant_matrix *from, const struct quant_matrix *to,
                                     const struct opaq_execution *execution, struct opaq_error *error);
    /* Computes a from h, and dh from h and da (float32), for all sorted rows. */
    enum opaq_status (*activate)(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                 const struct quant_matrix *h, const struct quant_matrix *a,
                                 const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*activate_backward)(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                          const struct quant_matrix *h, const struct quant_matrix *da,
                                          const struct quant_matrix *dh, const struct opaq_execution *execution,
                                          struct opaq_error *error);

    /* ---- kernels by name ---- */
    /* The name of kernel `index`, NULL beyond the last, and whether this machine can run it. */
    const char *(*kernel_at)(int index, bool *can_run);
    /* The kernels that serve a spec or a product; NULL if there is none. */
    const char *(*quantize_kernel)(const struct opaq_spec *spec);
    const char *(*dequantize_kernel)(const struct opaq_spec *spec);
    const char *(*product_kernel)(const struct opaq_spec *w, const struct opaq_spec *x,
                                  enum opaq_element x_dtype, int32_t precision);
};

extern const struct backend cpu_backend;

/* The table of a device. If this build has none, the error says what to install. */
enum opaq_status backend_of(struct opaq_device device, const struct backend **backend,
                            struct opaq_error *error);

/* The execution of a call on tensors of `device`: the caller's, or the default one. Fails if the caller's is
 * for another device. */
enum opaq_status execution_of(const struct opaq_execution *given, struct opaq_device device,
                              struct opaq_execution *execution, struct opaq_error *error);

/* Installs the table for all devices of a type other than the CPU; NULL removes it. For tests: no operation may
 * be running. */
void backend_install(enum opaq_device_type type, const struct backend *backend);

#endif

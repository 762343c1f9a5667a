/* backend/backend.h: all that may touch the contents of a tensor, as one table of functions. Depends on grouped.h, remap.h.
 *
 * An operator checks and composes; it handles shapes, formats and addresses. Whatever reads or writes memory that an
 * address leads to goes through the table of the tensors' device, scales, amaxes, seeds and expert ids included.
 *
 * Rules for every function: arguments were checked; memory lies on execution->device; nothing is allocated (but by
 * `allocate`) and nothing waits for the device; the status is not OPAQ_OK where the device refused the work or, on a
 * device that sees contents at once, where these are wrong; `noise`, whose result is in host memory, may wait. A `..._workspace` gives the bytes of scratch memory, aligned
 * to 64, that the call needs; it follows no address, and addresses may be NULL. */
#ifndef OPAQ_BACKEND_BACKEND_H
#define OPAQ_BACKEND_BACKEND_H

#include "backend/grouped.h"
#include "backend/remap.h"
#include "opaq/noise.h"

struct backend {
    const char *name; /* "cpu" */

    /* ---- memory ---- */
    /* Aligned to 64. */
    enum opaq_status (*allocate)(struct opaq_device device, size_t bytes, void **memory,
                                 struct opaq_error *error);
    void (*release)(struct opaq_device device, void *memory);
    enum opaq_status (*zero)(void *memory, size_t bytes, const struct opaq_execution *execution,
                             struct opaq_error *error);
    /* The elements of a strided tensor, contiguous. */
    enum opaq_status (*copy)(const struct opaq_tensor *from, void *to, const struct opaq_execution *execution,
                             struct opaq_error *error);
    /* One float, `count` times. */
    enum opaq_status (*fill)(const float *value, int64_t count, float *to,
                             const struct opaq_execution *execution, struct opaq_error *error);

    /* ---- quantized tensors ---- */
    enum opaq_status (*quantize)(const struct quant_job *job, const struct quantize_figures *figures,
                                 const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*dequantize)(const struct quant_job *job, const struct opaq_execution *execution,
                                   struct opaq_error *error);
    /* The amax of a copy's operand, one (step 0) or one for each operand row (step 1). is_stored: NVFP4, as the spec
     * stores it. */
    enum opaq_status (*amax)(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                             int64_t step, float *amax, const struct opaq_execution *execution,
                             struct opaq_error *error);
    enum opaq_status (*remap)(const struct remap_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    /* Whether two shards have the same tensor-wide figures. A device that cannot report does not look. */
    enum opaq_status (*compare_figures)(const struct quant_job *a, const struct quant_job *b, bool *are_equal,
                                        const struct opaq_execution *execution, struct opaq_error *error);
    /* Of one copy against its operand; `noise` is host memory. */
    enum opaq_status (*noise)(const struct quant_job *job, struct opaq_noise *noise,
                              const struct opaq_execution *execution, struct opaq_error *error);
    /* Joins `recorded` (count floats, or NULL) to the history by a maximum and, if `updates`, computes new scales. */
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
    /* The sums over the rows of each group; without groups (NULL) over all rows. `sums`: [N] or [E,N]. */
    enum opaq_status (*column_sum)(const struct row_groups *groups, const struct quant_matrix *rows,
                                   const struct opaq_view *sums, const struct opaq_execution *execution,
                                   struct opaq_error *error);

    /* ---- rows of a mixture of experts ---- */
    enum opaq_status (*route)(const struct route_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    enum opaq_status (*split)(const struct split_job *job, const struct opaq_execution *execution,
                              struct opaq_error *error);
    /* The rows of `from` in sorted order. */
    enum opaq_status (*gather_rows)(const struct row_groups *groups, const struct quant_matrix *from,
                                    enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                    const struct opaq_execution *execution, struct opaq_error *error);
    /* Each sorted row of a float32 matrix times its router weight, in place. */
    enum opaq_status (*weigh_rows)(const struct row_groups *groups, const struct quant_matrix *rows,
                                   const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*row_dot_workspace)(const struct row_dot *job, size_t *bytes, struct opaq_error *error);
    enum opaq_status (*row_dot)(const struct row_dot *job, void *workspace,
                                const struct opaq_execution *execution, struct opaq_error *error);
    /* A matrix in another dtype. */
    enum opaq_status (*convert_rows)(const struct quant_matrix *from, const struct quant_matrix *to,
                                     const struct opaq_execution *execution, struct opaq_error *error);
    /* a from h, and dh from h and da, which is float32, for all sorted rows. */
    enum opaq_status (*activate)(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                 const struct quant_matrix *h, const struct quant_matrix *a,
                                 const struct opaq_execution *execution, struct opaq_error *error);
    enum opaq_status (*activate_backward)(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                          const struct quant_matrix *h, const struct quant_matrix *da,
                                          const struct quant_matrix *dh, const struct opaq_execution *execution,
                                          struct opaq_error *error);

    /* ---- kernels by name ---- */
    /* Kernel `index`, NULL beyond the last; whether this machine can run it. */
    const char *(*kernel_at)(int index, bool *can_run);
    /* Those that serve a spec, or a product; NULL where there is none. */
    const char *(*quantize_kernel)(const struct opaq_spec *spec);
    const char *(*dequantize_kernel)(const struct opaq_spec *spec);
    const char *(*product_kernel)(const struct opaq_spec *w, const struct opaq_spec *x,
                                  enum opaq_element x_dtype, int32_t precision);
};

extern const struct backend cpu_backend;

/* The table of a device. Fails with what to install where this build has none. */
enum opaq_status backend_of(struct opaq_device device, const struct backend **backend,
                            struct opaq_error *error);

/* The execution of a call on tensors of `device`: the caller's, or the default one. Fails where the caller's is for
 * another device. */
enum opaq_status execution_of(const struct opaq_execution *given, struct opaq_device device,
                              struct opaq_execution *execution, struct opaq_error *error);

/* Installs a table for all devices of a type but the CPU, NULL for none. For tests: no operation may be running. */
void backend_install(enum opaq_device_type type, const struct backend *backend);

#endif

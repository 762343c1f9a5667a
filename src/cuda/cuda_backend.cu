/* cuda/cuda_backend.cu: CUDA's function table, and its entry point. */
#include <stdio.h>
#include <string.h>

#include "cuda/cuda_functions.h"
#include "cuda/cuda_open.h"

/* Names for reports; a product's is that of the family that serves its operands, by the weight's format. */
static const char *const kernel_names[] = {
    "quantize_cuda",     "dequantize_cuda",    "product_fma",         "product_bf16_mma",
    "product_fp8_mma",   "product_fp8row_mma", "product_fp8blk1_mma", "product_fp8blk2_mma",
    "product_mxfp8_mma", "product_mxfp4_mma",  "product_nvfp4_mma",
};
enum { KERNEL_COUNT = sizeof kernel_names / sizeof kernel_names[0] };

static const char *kernel_at(int index, bool *can_run) {
    *can_run = true;
    return index >= 0 && index < KERNEL_COUNT ? kernel_names[index] : NULL;
}

static const char *quantize_kernel_name(const struct opaq_spec *spec) {
    (void)spec;
    return kernel_names[0];
}

static const char *dequantize_kernel_name(const struct opaq_spec *spec) {
    (void)spec;
    return kernel_names[1];
}

/* Tensor cores serve values that bf16 represents: product_mma_takes(), which also looks at addresses. */
static const char *product_kernel_name(const struct opaq_spec *w, const struct opaq_spec *x,
                                       enum opaq_element x_dtype, int32_t precision) {
    (void)precision;
    if ((x == NULL || w == NULL) && x_dtype != OPAQ_BF16) { /* a plain weight has the dtype of x */
        return "product_fma";
    }
    const char *const format = w == NULL ? "bf16" : opaq_format_row((enum opaq_format)w->format)->name;
    const size_t length = strlen(format);
    for (int i = 0; i < KERNEL_COUNT; ++i) { /* product_<format>_mma */
        const char *const name = kernel_names[i] + sizeof "product_" - 1;
        if (strncmp(name, format, length) == 0 && strcmp(name + length, "_mma") == 0) {
            return kernel_names[i];
        }
    }
    return "product_fma";
}

/* ---- GPUs ---- */

enum { OLDEST_CAPABILITY = 80 }; /* ten times the compute capability of the PTX */

/* The number of GPUs; fails if there is no driver, too old a driver, or no GPU. */
static enum opaq_status count_devices(int *count, struct opaq_error *error) {
    *count = 0;
    const cudaError_t result = cudaGetDeviceCount(count);
    if (result == cudaErrorInsufficientDriver) {
        int driver = 0;
        int needed = 0;
        (void)cudaDriverGetVersion(&driver);
        (void)cudaRuntimeGetVersion(&needed);
        return driver == 0
                   ? opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                               "opaq's CUDA back end found no NVIDIA driver on this machine: install one, or "
                               "use tensors on the cpu")
                   : opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                               "the NVIDIA driver supports CUDA %d.%d, opaq's CUDA back end needs %d.%d: "
                               "update the driver, or use tensors on the cpu",
                               driver / 1000, driver % 1000 / 10, needed / 1000, needed % 1000 / 10);
    }
    return result == cudaSuccess && *count > 0
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "opaq's CUDA back end found no GPU: %s",
                           result == cudaSuccess ? "none is visible" : cudaGetErrorString(result));
}

/* Ten times the compute capability of a GPU. */
static enum opaq_status read_capability(int index, int *capability, struct opaq_error *error) {
    int major = 0;
    int minor = 0;
    TRY(cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
                    "to name a GPU's capability", error));
    TRY(cuda_status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
                    "to name a GPU's capability", error));
    *capability = 10 * major + minor;
    return OPAQ_OK;
}

/* Whether there is a GPU that can run the kernels. On another one their launch is refused. */
static enum opaq_status check_devices(struct opaq_error *error) {
    char found[OPAQ_ERROR_TEXT_BYTES / 2] = ""; /* "GPU 0 has 7.5, GPU 1 has 7.0" */
    int64_t used = 0;
    int count;
    TRY(count_devices(&count, error));
    for (int i = 0; i < count; ++i) {
        int capability;
        TRY(read_capability(i, &capability, error));
        if (capability >= OLDEST_CAPABILITY) {
            return OPAQ_OK;
        }
        used += snprintf(found + used, sizeof found - (size_t)used, "%sGPU %d has %d.%d", i == 0 ? "" : ", ", i,
                         capability / 10, capability % 10);
        used = min_int64(used, sizeof found - 1);
    }
    return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                     "opaq's CUDA back end needs a GPU of compute capability %d.%d or later: %s",
                     OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10, found);
}

/* The table's function: whether the GPU exists and can run the kernels; index -1: whether there is one that can. */
static enum opaq_status check_device(struct opaq_device device, struct opaq_error *error) {
    int count;
    int capability;
    if (device.index == -1) {
        return check_devices(error);
    }
    TRY(count_devices(&count, error));
    if (device.index < 0 || device.index >= count) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "there is no cuda:%d: the machine has %d GPU%s, expected 0 to %d", device.index, count,
                         count == 1 ? "" : "s", count - 1);
    }
    TRY(read_capability(device.index, &capability, error));
    return capability >= OLDEST_CAPABILITY
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                           "cuda:%d has compute capability %d.%d, opaq's CUDA back end needs %d.%d or later",
                           device.index, capability / 10, capability % 10, OLDEST_CAPABILITY / 10,
                           OLDEST_CAPABILITY % 10);
}

/* ---- the table ---- */

const struct backend cuda_backend = {
    .name = "cuda",
    .check_device = check_device,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .zero = cuda_zero,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .quantize = cuda_quantize,
    .dequantize = cuda_dequantize,
    .amax = cuda_amax,
    .remap = cuda_remap,
    .compare_figures = cuda_compare_figures,
    .noise = cuda_noise,
    .delayed_update = cuda_delayed_update,
    .product_workspace = cuda_product_workspace,
    .product = cuda_product,
    .grouped_product_workspace = cuda_grouped_product_workspace,
    .grouped_product = cuda_grouped_product,
    .grouped_gradient_workspace = cuda_grouped_gradient_workspace,
    .grouped_gradient = cuda_grouped_gradient,
    .column_sum = cuda_column_sum,
    .route = cuda_route,
    .split = cuda_split,
    .gather_rows = cuda_gather_rows,
    .weigh_rows = cuda_weigh_rows,
    .row_dot_workspace = cuda_row_dot_workspace,
    .row_dot = cuda_row_dot,
    .convert_rows = cuda_convert_rows,
    .activate = cuda_activate,
    .activate_backward = cuda_activate_backward,
    .kernel_at = kernel_at,
    .quantize_kernel = quantize_kernel_name,
    .dequantize_kernel = dequantize_kernel_name,
    .product_kernel = product_kernel_name,
};

enum opaq_status opaq_cuda_open(const char *version, size_t table_bytes, const struct backend **backend,
                                struct opaq_error *error) {
    const char *own = opaq_version();
    if (strcmp(version, own) != 0 || table_bytes != sizeof(struct backend)) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "libopaq_cuda.so is of opaq %s (a table of %zu bytes), libopaq of %s (%zu): install "
                         "both from one build",
                         own, sizeof(struct backend), version, table_bytes);
    }
    TRY(check_devices(error));
    *backend = &cuda_backend;
    return OPAQ_OK;
}

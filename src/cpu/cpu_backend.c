/* cpu/cpu_backend.c: the function table of the CPU. */
#include "cpu/cpu_functions.h"
#include "cpu/quant/quant_table.h"

static const char *quantize_kernel_name(const struct opaq_spec *spec) {
    return quantize_kernel((enum opaq_format)spec->format)->name;
}

static const char *dequantize_kernel_name(const struct opaq_spec *spec) {
    return dequantize_kernel((enum opaq_format)spec->format)->name;
}

const struct backend cpu_backend = {
    .name = "cpu",
    .allocate = cpu_allocate,
    .release = cpu_release,
    .zero = cpu_zero,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .quantize = cpu_quantize,
    .dequantize = cpu_dequantize,
    .amax = cpu_amax,
    .remap = cpu_remap,
    .compare_figures = cpu_compare_figures,
    .noise = cpu_noise,
    .delayed_update = cpu_delayed_update,
    .product_workspace = cpu_product_workspace,
    .product = cpu_product,
    .grouped_product_workspace = cpu_grouped_product_workspace,
    .grouped_product = cpu_grouped_product,
    .grouped_gradient_workspace = cpu_grouped_gradient_workspace,
    .grouped_gradient = cpu_grouped_gradient,
    .column_sum = cpu_column_sum,
    .route = cpu_route,
    .split = cpu_split,
    .gather_rows = cpu_gather_rows,
    .weigh_rows = cpu_weigh_rows,
    .row_dot_workspace = cpu_row_dot_workspace,
    .row_dot = cpu_row_dot,
    .convert_rows = cpu_convert_rows,
    .activate = cpu_activate,
    .activate_backward = cpu_activate_backward,
    .kernel_at = cpu_kernel_at,
    .quantize_kernel = quantize_kernel_name,
    .dequantize_kernel = dequantize_kernel_name,
    .product_kernel = cpu_product_kernel,
};

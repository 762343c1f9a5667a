/* cli/write/quantization_config.h: the JSON that describes to engines how a checkpoint is quantized. */
#ifndef OPAQ_CLI_WRITE_QUANTIZATION_CONFIG_H
#define OPAQ_CLI_WRITE_QUANTIZATION_CONFIG_H

#include <stdbool.h>
#include <yyjson.h>

#include "opaq/checkpoint_config.h"

/* Whether the scheme supports them. */
bool activations_fit(const struct opaq_layout_row *scheme, enum opaq_activations activations);

/* None for formats of 4 bits, dynamic for those of 8; the only supported form if there is one. */
enum opaq_activations activations_default(const struct opaq_layout_row *scheme);

/* "none", "dynamic", "given". */
const char *activations_name(enum opaq_activations activations);

/* The activations of a compressed-tensors quantization_config. False for other configurations. */
bool activations_of_config(yyjson_val *quantization, enum opaq_activations *activations);

struct quantization {
    const struct opaq_layout_row *scheme;
    enum opaq_activations activations;
    bool has_exponents;         /* deepseek: the block scales are powers of two (e8m0) */
    const char *const *ignored; /* linear modules that are not quantized */
    size_t ignored_count;
};

/* The "quantization_config" of config.json. */
yyjson_mut_val *quantization_config(yyjson_mut_doc *document, const struct quantization *quantization);

/* ModelOpt's own file, hf_quant_config.json. */
yyjson_mut_val *modelopt_config(yyjson_mut_doc *document, const struct quantization *quantization);

#endif

/* cli/write/quantization_config.h: the JSON by which engines know how a checkpoint is quantized. */
#ifndef OPAQ_CLI_WRITE_QUANTIZATION_CONFIG_H
#define OPAQ_CLI_WRITE_QUANTIZATION_CONFIG_H

#include <stdbool.h>
#include <yyjson.h>

#include "opaq/layout.h"

/* What becomes of the inputs of quantized layers. */
enum activations {
    ACTIVATIONS_NONE,    /* they stay as they are */
    ACTIVATIONS_DYNAMIC, /* quantized as they come, with scales computed from them */
    ACTIVATIONS_GIVEN    /* quantized with scales that the checkpoint has */
};

/* Whether the layout has a form of the row's format for them. */
bool activations_fit(const struct opaq_layout_row *scheme, enum activations activations);

/* The one rule: as they are for formats of 4 bits, dynamic for those of 8; the layout's only form where it has one. */
enum activations activations_default(const struct opaq_layout_row *scheme);

/* "none", "dynamic", "given". */
const char *activations_name(enum activations activations);

/* What a quantization_config of compressed-tensors says of them. False if it says nothing. */
bool activations_of_config(yyjson_val *quantization, enum activations *activations);

struct quantization {
    const struct opaq_layout_row *scheme;
    enum activations activations;
    bool has_exponents;         /* deepseek: the block scales are powers of two (e8m0) */
    const char *const *ignored; /* modules that could be quantized and are not */
    size_t ignored_count;
};

/* What config.json has as "quantization_config". */
yyjson_mut_val *quantization_config(yyjson_mut_doc *document, const struct quantization *quantization);

/* ModelOpt's own file, hf_quant_config.json. */
yyjson_mut_val *modelopt_config(yyjson_mut_doc *document, const struct quantization *quantization);

#endif

/* cli/quantization_config.h: the JSON by which engines know how a checkpoint is quantized. */
#ifndef OPAQ_CLI_QUANTIZATION_CONFIG_H
#define OPAQ_CLI_QUANTIZATION_CONFIG_H

#include <stdbool.h>
#include <yyjson.h>

#include "opaq/layout.h"

struct quantization {
    const struct opaq_layout_row *row;
    bool has_input_scales;      /* the checkpoint has scales for the layers' inputs */
    bool has_exponents;         /* deepseek: the block scales are powers of two (e8m0) */
    const char *const *ignored; /* modules that could be quantized and are not */
    size_t ignored_count;
};

/* What config.json has as "quantization_config". */
yyjson_mut_val *quantization_config(yyjson_mut_doc *document, const struct quantization *quantization);

/* ModelOpt's own file, hf_quant_config.json. */
yyjson_mut_val *modelopt_config(yyjson_mut_doc *document, const struct quantization *quantization);

#endif

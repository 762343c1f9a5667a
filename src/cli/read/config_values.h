/* cli/read/config_values.h: JSON as the list of values that opaq/checkpoint_config.h reads. */
#ifndef OPAQ_CLI_READ_CONFIG_VALUES_H
#define OPAQ_CLI_READ_CONFIG_VALUES_H

#include <yyjson.h>

#include "opaq/checkpoint_config.h"

/* Reads a quantization_config; NULL if it is unsupported. Released with opaq_config_destroy. */
struct opaq_config *config_of_json(yyjson_val *quantization);

/* The enum opaq_layout of a quantization_config; -1 if it is NULL or of an unsupported method. */
int layout_of_config(yyjson_val *quantization);

#endif

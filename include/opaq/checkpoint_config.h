/* opaq/checkpoint_config.h: reads the quantization_config of a checkpoint: which weights are stored in which
 * format and under which names, and how their layers' inputs are quantized. Depends on layout.h and spec.h.
 * Fields: docs/checkpoints.md.
 *
 * The library does not parse JSON: the caller parses it and passes the values as an array. */
#ifndef OPAQ_CHECKPOINT_CONFIG_H
#define OPAQ_CHECKPOINT_CONFIG_H

#include <stdint.h>

#include "opaq/layout.h"
#include "opaq/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- reading ---- */

enum opaq_json_kind {
    OPAQ_JSON_NULL = 0,
    OPAQ_JSON_BOOLEAN = 1,
    OPAQ_JSON_INTEGER = 2,
    OPAQ_JSON_NUMBER = 3, /* with a fraction or an exponent, or beyond int64 */
    OPAQ_JSON_STRING = 4,
    OPAQ_JSON_LIST = 5,
    OPAQ_JSON_OBJECT = 6,
    OPAQ_JSON_OTHER = 7 /* no JSON type: a value of a configuration that was not read from JSON */
};

/* One value. A configuration is an array of them in document order: each object or list is followed by its
 * members, whose depth is one greater. */
struct opaq_config_value {
    int32_t depth;    /* 0: the configuration itself */
    int32_t kind;     /* enum opaq_json_kind */
    const char *key;  /* key in the enclosing object; NULL for a list item and for the configuration itself */
    const char *text; /* STRING: the string. NUMBER, OTHER: the text that error messages show */
    int64_t integer;  /* INTEGER; BOOLEAN: 0 or 1 */
};

/* How one group of weights is stored, and how its layers' inputs are quantized. */
struct opaq_config_scheme {
    const struct opaq_layout_row *row; /* the tensors' names, dtypes and shapes */
    struct opaq_spec weight;           /* quantizer of a weight stored alone */
    struct opaq_spec stacked; /* quantizer of several weights stacked in one tensor, each with its own scales */
    int32_t has_input;        /* whether inputs are quantized with `input` ... */
    int32_t has_input_given;  /* ... or, where the checkpoint stores an input scale, with `input_given` */
    struct opaq_spec input;
    struct opaq_spec input_given;
    const char *input_scale; /* name of the input scale, a tensor of the weight's module; "" if there is none */
};

struct opaq_config;

/* Reads a quantization_config; values[0] is the object itself. An error names the field, its value and the
 * expected ones. `values` may be freed after the call. opaq_config_destroy releases the result; NULL is
 * allowed. */
OPAQ_API enum opaq_status opaq_config_read(const struct opaq_config_value *values, int64_t count,
                                           struct opaq_config **config, struct opaq_error *error);
OPAQ_API void opaq_config_destroy(struct opaq_config *config);

/* The enum opaq_layout of a quantization_config, from its quant_method; -1 for a method that opaq_config_read does
 * not support. Needs no other valid field. */
OPAQ_API int opaq_config_layout(const struct opaq_config_value *values, int64_t count);

/* The schemes, in order of precedence (the first match applies); NULL beyond the last. They live as long as the
 * configuration. */
OPAQ_API const struct opaq_config_scheme *opaq_config_scheme(const struct opaq_config *config, int64_t index);

/* The modules that a scheme applies to: module names or patterns of opaq/pattern.h; NULL beyond the last. */
OPAQ_API const char *opaq_config_target(const struct opaq_config *config, int64_t scheme, int64_t index);

/* The modules that stay unquantized even where a scheme matches, as names or patterns; NULL beyond the last. */
OPAQ_API const char *opaq_config_ignored(const struct opaq_config *config, int64_t index);

/* The names that a plain weight has in its module; NULL beyond the last. */
OPAQ_API const char *opaq_config_weight_name(const struct opaq_config *config, int64_t index);

/* ---- tables ---- */

/* The schemes that a layout can store, with unquantized inputs; input_scale is set where the layout has one.
 * Returns 0 beyond the last. */
OPAQ_API int opaq_layout_scheme(enum opaq_layout layout, int index, struct opaq_config_scheme *scheme);

/* How engines treat the inputs of quantized layers. */
enum opaq_activations {
    OPAQ_ACTIVATIONS_NONE = 0,    /* not quantized */
    OPAQ_ACTIVATIONS_DYNAMIC = 1, /* quantized at run time, with scales computed from them */
    OPAQ_ACTIVATIONS_GIVEN = 2    /* quantized at run time, with a scale of the checkpoint */
};

/* The name by which a configuration describes a row's weights together with such inputs: the row's method or, in
 * ModelOpt's layout, another algorithm. NULL if the layout cannot describe them. */
OPAQ_API const char *opaq_layout_method(const struct opaq_layout_row *row, enum opaq_activations activations);

/* How compressed-tensors describes a format's weights and inputs. */
struct opaq_config_row {
    enum opaq_format format;
    int bits;
    const char *strategy; /* "block": the blocks of the format's table row */
    int group;            /* 0: none */
    const char *scale_dtype;
    enum opaq_format input_format;
    const char *input_strategy;
    int input_group;
};

/* NULL if compressed-tensors has no description of the format. */
OPAQ_API const struct opaq_config_row *opaq_config_row(enum opaq_format format);

#ifdef __cplusplus
}
#endif

#endif

/* opaq/checkpoint_config.h: what the quantization_config of a checkpoint says: which weights are stored in which format,
 * under which names, and how their layers' inputs are quantized. Depends on layout.h and spec.h. Fields: docs/checkpoints.md.
 *
 * The library parses no JSON: its caller lists the configuration's values. */
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
    OPAQ_JSON_OTHER = 7 /* what JSON does not have, where a configuration comes from elsewhere */
};

/* One value. A configuration is a list of them in the order of its text: an object or a list, then what is in it, one
 * deeper. */
struct opaq_config_value {
    int32_t depth;    /* 0: the configuration itself */
    int32_t kind;     /* enum opaq_json_kind */
    const char *key;  /* in an object; NULL in a list and for the configuration itself */
    const char *text; /* STRING: the string. NUMBER, OTHER: how errors show it */
    int64_t integer;  /* INTEGER; BOOLEAN: 0 or 1 */
};

/* How one kind of weight is stored, and how its layers run. */
struct opaq_config_scheme {
    const struct opaq_layout_row *row; /* the tensors' names, dtypes and shapes */
    struct opaq_spec weight;           /* of a weight of its own */
    struct opaq_spec stacked;          /* of several in one tensor, each with the scales it has */
    int32_t has_input;                 /* whether inputs are quantized, by `input` ... */
    int32_t has_input_given;           /* ... or, where the checkpoint has a scale for them, by `input_given` */
    struct opaq_spec input;
    struct opaq_spec input_given;
    const char *input_scale; /* the name of that scale, a tensor of the weight's module; "" if there is none */
};

struct opaq_config;

/* Reads a quantization_config: values[0] is the object. The error names the field, what it is and what was expected. Keeps
 * nothing of `values`; opaq_config_destroy releases the result, and allows NULL. */
OPAQ_API enum opaq_status opaq_config_read(const struct opaq_config_value *values, int64_t count,
                                           struct opaq_config **config, struct opaq_error *error);
OPAQ_API void opaq_config_destroy(struct opaq_config *config);

/* The schemes, the one that decides first; NULL beyond the last. They live as long as the configuration. */
OPAQ_API const struct opaq_config_scheme *opaq_config_scheme(const struct opaq_config *config, int64_t index);

/* Which modules have a scheme, by patterns of opaq/pattern.h or names; NULL beyond the last. */
OPAQ_API const char *opaq_config_target(const struct opaq_config *config, int64_t scheme, int64_t index);

/* Which modules are not quantized whatever the schemes say, likewise. */
OPAQ_API const char *opaq_config_ignored(const struct opaq_config *config, int64_t index);

/* What a plain weight is called in its module; NULL beyond the last. */
OPAQ_API const char *opaq_config_weight_name(const struct opaq_config *config, int64_t index);

/* ---- tables ---- */

/* A scheme that a layout's weights can have, inputs as they are but for the name of their scale; 0 beyond the last. */
OPAQ_API int opaq_layout_scheme(enum opaq_layout layout, int index, struct opaq_config_scheme *scheme);

/* How compressed-tensors describes a format's weights and inputs. */
struct opaq_config_row {
    enum opaq_format format;
    int bits;
    const char *strategy; /* "block" means 128x128 */
    int group;            /* 0: none */
    const char *scale_dtype;
    enum opaq_format input_format;
    const char *input_strategy;
    int input_group;
};

/* NULL where it has no description. */
OPAQ_API const struct opaq_config_row *opaq_config_row(enum opaq_format format);

#ifdef __cplusplus
}
#endif

#endif

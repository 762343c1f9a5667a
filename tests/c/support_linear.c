/* support_linear.c: plans, layers and calls of the linear operators. */
#include "support_linear.h"

#include <stdlib.h>

#include "check.h"
#include "support_hiding.h"
#include "support_quant.h"
#include "support_spec.h"

/* ---- plans ---- */

const struct linear_recipe linear_recipes[] = {
    {"", "", ""},
    {"fp8", "fp8", "fp8.e5m2"},
    {"fp8+pow2", "fp8+pow2+eps=0.5", "fp8+pow2"},
    {"fp8+sr", "fp8", "fp8.e5m2+sr"},
    {"fp8row", "fp8row", "fp8row.e5m2"},
    {"fp8blk1", "fp8blk2", "fp8blk1"},
    {"fp8blk1+pow2", "fp8blk2+pow2", "fp8blk1.e5m2+pow2"},
    {"fp8blk2", "fp8blk1", "fp8blk2"},
    {"mxfp8", "mxfp8", "mxfp8.e5m2"},
    {"mxfp8+2d", "mxfp8+2d", "mxfp8+sr"},
    {"mxfp8+swizzle", "mxfp8+rule=ocp", "mxfp8+rule=rceil"},
    {"mxfp4", "mxfp4", "mxfp4"},
    {"mxfp4+sr", "mxfp4+2d", "mxfp8"},
    {"nvfp4", "nvfp4", "nvfp4"},
    {"nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"},
    {"nvfp4+rht", "nvfp4+rht", "nvfp4"},               /* one side of each product is transformed */
    {"nvfp4+rht=0x1234", "nvfp4", "nvfp4+rht=0x4321"}, /* with other signs */
    {"nvfp4+rht+sr", "nvfp4+rht+sr", "nvfp4+sr"},
    {"nvfp4+rowscaled", "nvfp4+rowscaled", "nvfp4+rowscaled"},
    {"nvfp4+rowscaled+rht", "nvfp4+swizzle", "nvfp4+rowscaled+rht+swizzle"},
    {"nvfp4+4over6", "nvfp4+2d+4over6", "nvfp4+4over6=mse+e4m3max=256"},
    {"fp8", "mxfp8", "nvfp4"},
    {"", "fp8row", "mxfp8"},
    {"nvfp4+sr", "", ""},
    {"", "", "fp8blk1"},
};
const int linear_recipe_count = sizeof linear_recipes / sizeof linear_recipes[0];

struct linear_text linear_plan(const struct linear_recipe *recipe, const char *rest) {
    const struct {
        const char *name, *text;
    } words[] = {{"x=", recipe->x}, {"w=", recipe->w}, {"dy=", recipe->dy}, {"", rest}};
    struct linear_text plan = {""};
    for (int i = 0; i < 4; ++i) {
        const size_t length = strlen(plan.text);
        if (words[i].text[0] != '\0') {
            (void)snprintf(plan.text + length, sizeof plan.text - length, "%s%s%s", length > 0 ? " " : "",
                           words[i].name, words[i].text);
        }
    }
    return plan;
}

struct linear_text linear_with_usage(const char *text, int usage) {
    struct opaq_spec spec = spec_of(text);
    struct linear_text made;
    spec.usage = (uint8_t)usage;
    (void)snprintf(made.text, sizeof made.text, "%s", spec_text(&spec).text);
    return made;
}

/* ---- layers ---- */

static struct tensor shaped(const int64_t *shape, int rank, enum opaq_element dtype, uint64_t seed) {
    struct opaq_proto proto;
    struct opaq_error error;
    if (opaq_proto_make(shape, rank, dtype, NULL, tensor_cpu, &proto, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    struct tensor tensor = tensor_make_proto(&proto);
    tensor_fill(&tensor, seed % 2 ? FILL_OUTLIERS : FILL_NORMAL, seed);
    return tensor;
}

struct linear_layer linear_layer_shaped(const int64_t *x_shape, int rank, int64_t n, enum opaq_element dtype) {
    struct linear_layer layer;
    int64_t y_shape[OPAQ_RANK_LIMIT];
    memset(&layer, 0, sizeof layer);
    memcpy(layer.x_shape, x_shape, (size_t)rank * sizeof *x_shape);
    memcpy(y_shape, x_shape, (size_t)rank * sizeof *x_shape);
    y_shape[rank - 1] = n;
    layer.rank = rank;
    layer.n = n;
    layer.k = x_shape[rank - 1];
    layer.w_shape[0] = n;
    layer.w_shape[1] = layer.k;
    layer.x = shaped(x_shape, rank, dtype, 1);
    layer.w = shaped(layer.w_shape, 2, dtype, 2);
    layer.bias = shaped(&n, 1, dtype, 3);
    layer.dy = shaped(y_shape, rank, dtype, 5);
    layer.m = opaq_proto_rows(&layer.x.view.proto);
    return layer;
}

struct linear_layer linear_layer_make(int64_t m, int64_t n, int64_t k, enum opaq_element dtype) {
    const int64_t x_shape[2] = {m, k};
    return linear_layer_shaped(x_shape, 2, n, dtype);
}

void linear_layer_free(struct linear_layer *layer) {
    tensor_free(&layer->x);
    tensor_free(&layer->w);
    tensor_free(&layer->bias);
    tensor_free(&layer->dy);
}

/* ---- calls ---- */

static const struct linear_given nothing;
const struct linear_given linear_seeded = {.settings = {.random = {0x123456789ABCDEF, 1000}}};

static struct opaq_tensor floats_tensor(float *data, int64_t rows, int64_t columns) {
    struct opaq_tensor tensor = {.data = data, .dtype = OPAQ_DTYPE_F32, .rank = rows == 0 ? 1 : 2};
    tensor.shape[0] = rows == 0 ? columns : rows;
    tensor.strides[0] = rows == 0 ? 1 : columns;
    tensor.shape[1] = rows == 0 ? 0 : columns;
    tensor.strides[1] = rows == 0 ? 0 : 1;
    return tensor;
}

void linear_forward_arguments(const struct linear_layer *layer, const char *plan,
                              const struct linear_given *given, struct linear_arguments *arguments) {
    memset(arguments, 0, sizeof *arguments);
    arguments->x = op_tensors_of(given->x == NULL ? &layer->x : given->x);
    arguments->w = op_tensors_of(given->w == NULL ? &layer->w : given->w);
    arguments->bias = op_tensors_of(&layer->bias).tensor[0];
    arguments->value[0] = op_list_value(&arguments->x);
    arguments->value[1] = op_list_value(&arguments->w);
    arguments->value[2].tensors = given->no_bias ? NULL : &arguments->bias;
    arguments->value[3] = op_sizes_value(layer->x_shape, layer->rank);
    arguments->value[4] = op_sizes_value(layer->w_shape, 2);
    arguments->value[5] = op_int_value(layer->x.view.proto.dtype);
    arguments->value[6] = op_text_value(plan);
    if (given->state != NULL) {
        arguments->scale[0] = floats_tensor(given->state->scale_fwd, 0, 3);
        arguments->value[7].tensors = &arguments->scale[0];
    }
}

/* The first tensor of a forward's output row, or NULL. */
static const struct opaq_tensor *forward_tensor(const struct op_result *forward, int output,
                                                struct opaq_tensor *tensor) {
    const struct op_tensors row = op_result_row(forward, output);
    *tensor = row.tensor[0];
    return row.count > 0 ? tensor : NULL;
}

void linear_backward_arguments(const struct linear_layer *layer, const char *plan,
                               const struct linear_given *given, const struct op_result *forward,
                               struct linear_arguments *arguments) {
    const struct op_tensors x_saved = op_result_row(forward, LINEAR_X_SAVED);
    const struct op_tensors w_saved = op_result_row(forward, LINEAR_W_SAVED);
    const bool plain_w = strstr(plan, "backward=high_precision") != NULL; /* a cached weight is not usable
                                                                           * then */
    memset(arguments, 0, sizeof *arguments);
    arguments->dy = op_tensors_of(given->dy == NULL ? &layer->dy : given->dy);
    arguments->x = x_saved.count > 0 ? x_saved : op_tensors_of(given->x == NULL ? &layer->x : given->x);
    arguments->w =
        w_saved.count > 0 && !plain_w ? w_saved : op_tensors_of(given->w == NULL ? &layer->w : given->w);
    arguments->value[0] = op_list_value(&arguments->dy);
    arguments->value[1] = op_list_value(&arguments->x);
    arguments->value[2] = op_list_value(&arguments->w);
    arguments->value[3] = op_sizes_value(layer->x_shape, layer->rank);
    arguments->value[4] = op_sizes_value(layer->w_shape, 2);
    arguments->value[5] = op_int_value(layer->x.view.proto.dtype);
    arguments->value[6] = op_int_value(layer->w.view.proto.dtype);
    arguments->value[7] = op_text_value(plan);
    arguments->value[8].tensors = forward_tensor(forward, LINEAR_RANDOM, &arguments->random);
    arguments->value[9].tensors = forward_tensor(forward, LINEAR_AMAX, &arguments->amax);
    arguments->value[10].tensors = given->main_grad;
    if (given->state != NULL) {
        arguments->scale[0] = floats_tensor(given->state->scale_fwd, 0, 3);
        arguments->scale[1] = floats_tensor(given->state->scale_bwd, 0, 2);
        arguments->history[0] = floats_tensor(given->state->history_fwd[0], LINEAR_HISTORY, 3);
        arguments->history[1] = floats_tensor(given->state->history_bwd[0], LINEAR_HISTORY, 2);
        for (int i = 0; i < 2; ++i) {
            arguments->value[11 + 2 * i].tensors = &arguments->scale[i];
            arguments->value[12 + 2 * i].tensors = &arguments->history[i];
        }
    }
}

struct op_result linear_forward(const struct linear_layer *layer, const char *plan,
                                const struct linear_given *given) {
    struct linear_arguments arguments;
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    given = given == NULL ? &nothing : given;
    linear_forward_arguments(layer, plan, given, &arguments);
    if (op_call("linear_forward", arguments.value, &given->settings, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("\"%s\": %s", plan, error.text);
        memset(&result, 0, sizeof result);
    }
    return result;
}

struct linear_step linear_step(const struct linear_layer *layer, const char *plan,
                               const struct linear_given *given) {
    struct linear_arguments arguments;
    struct opaq_error error = {OPAQ_OK, ""};
    struct linear_step step = {.forward = linear_forward(layer, plan, given)};
    given = given == NULL ? &nothing : given;
    linear_backward_arguments(layer, plan, given, &step.forward, &arguments);
    const bool changes = given->main_grad != NULL || given->state != NULL;
    if (op_call(changes ? "linear_backward_changing" : "linear_backward", arguments.value, &given->settings,
                &step.backward, &error) != OPAQ_OK) {
        CHECK_FAIL("\"%s\": %s", plan, error.text);
        memset(&step.backward, 0, sizeof step.backward);
    }
    return step;
}

void linear_step_free(struct linear_step *step) {
    op_result_free(&step->forward);
    op_result_free(&step->backward);
}

struct tensor linear_quantized(const struct tensor *x, const char *text, int usage, enum linear_stream stream,
                               float scale) {
    if (text[0] == '\0') {
        struct tensor copy = tensor_make_proto(&x->view.proto);
        memcpy(copy.view.buffer[0].data, x->view.buffer[0].data, copy.view.buffer[0].bytes);
        return copy;
    }
    struct opaq_spec spec = spec_of(text);
    spec.usage = (uint8_t)usage;
    const int64_t *random = linear_seeded.settings.random;
    const struct opaq_quantize_args args = {
        .scale = spec.options & OPAQ_DELAYED ? &scale : NULL,
        .random = {(uint64_t)random[0], (uint64_t)random[1] + (uint64_t)stream}};
    return quantized(x, &spec, &args);
}

/* ---- checking ---- */

void linear_refuse(int line, const char *op, const struct opaq_value *values, enum opaq_status status,
                   const char *part) {
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    hidden_calls_pause(true);
    const enum opaq_status found = op_call(op, values, NULL, &result, &error);
    const size_t length = strlen(op);
    if (found == OPAQ_OK) {
        op_result_free(&result);
    }
    if (found != status || error.status != status || strncmp(error.text, op, length) != 0 ||
        strncmp(error.text + length, ": ", 2) != 0 || strstr(error.text, part) == NULL) {
        CHECK_FAIL("line %d: status %d, expected %d; \"%s\" does not begin with %s or say \"%s\"", line,
                   (int)found, (int)status, error.text, op, part);
    }
    CHECK(found == OPAQ_OK || op_call(op, values, NULL, &result, NULL) == status); /* no error to fill */
    hidden_calls_pause(false);
}

void linear_check_same(const struct op_result *a, const struct op_result *b, int output, const char *what) {
    const int difference = op_result_difference(a, b, output);
    if (difference >= 0 || op_result_row(a, output).count == 0) {
        CHECK_FAIL("%s: output %d %s", what, output, difference >= 0 ? "differs" : "is absent");
    }
}

bool linear_check_buffers(const struct op_result *result, int output, const struct tensor *expected,
                          const char *what) {
    const struct op_tensors row = op_result_row(result, output);
    const int count = opaq_proto_buffer_count(&expected->view.proto);
    bool good = CHECK_EQ_INT(row.count, count);
    for (int i = 0; good && i < count; ++i) {
        good = CHECK_EQ_INT(op_tensor_bytes(&row.tensor[i]), tensor_bytes(expected, i)) &&
               CHECK_BYTES(row.tensor[i].data, expected->view.buffer[i].data, tensor_bytes(expected, i),
                           "%s, output %d, buffer %d", what, output, i);
    }
    return good;
}

void linear_check_same_step(const struct linear_step *a, const struct linear_step *b, const char *what) {
    for (int i = 0; i < 5; ++i) {
        if (op_result_difference(&a->forward, &b->forward, i) >= 0) {
            CHECK_FAIL("%s: forward output %d differs", what, i);
        }
    }
    for (int i = 0; i < 3; ++i) {
        if (op_result_difference(&a->backward, &b->backward, i) >= 0) {
            CHECK_FAIL("%s: backward output %d differs", what, i);
        }
    }
}

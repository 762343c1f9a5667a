/* fuzz_experts.c: the operators of MLPs, mixtures of experts and grouped products, on valid calls: any small
 * sizes, formats, plans, routings, strides; and on such calls with one invalid argument: huge and negative
 * sizes, wrong dtypes, devices, strides, no data; and runners of such calls. libFuzzer; fuzz_run.h and
 * fuzz_runner.h have the expectations. */
#include "fuzz_arguments.h"
#include "fuzz_run.h"
#include "fuzz_runner.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const names[] = {"moe",          "mlp",          "moe_forward",    "mlp_forward",
                                    "moe_backward", "mlp_backward", "grouped_linear", "grouped_linear_backward",
                                    "linear"};

/* Values that all arguments of a call share. */
struct layout {
    const struct opaq_op *op;
    int is_moe, is_grouped, is_training, is_backward;
    int64_t tokens, choices, experts, hidden, inner, width;
    int32_t dtype, w_dtype;
    struct opaq_form gate_up, down; /* given */
    int64_t total;                  /* number of experts that ids may name */
};

/* ---- plans ---- */

static const char *const specs[] = {"fp8",
                                    "fp8.e5m2",
                                    "fp8row",
                                    "fp8blk1",
                                    "fp8blk2",
                                    "mxfp8",
                                    "mxfp4",
                                    "nvfp4",
                                    "nvfp4+rowscaled",
                                    "nvfp4+2d",
                                    "nvfp4+rht",
                                    "mxfp8+swizzle",
                                    "nvfp4+swizzle+rowscaled",
                                    "nvfp4+both+4over6",
                                    "mxfp8+both+2d",
                                    "nvfp4+columnwise",
                                    "fp8+delayed",
                                    "nvfp4+sr",
                                    "fp8+sr",
                                    "mxfp4+sr",
                                    "nvfp4+rule=modelopt",
                                    "nvfp4+rowscaled+global+rule=compressed-tensors",
                                    "nvfp4+tiled",
                                    "nvfp4+rowscaled+tiled",
                                    "mxfp4+tiled",
                                    "mxfp8+tiled",
                                    "fp8+tiled",
                                    "fp8row+tiled",
                                    "fp8blk2+tiled"};
enum { SPECS = sizeof specs / sizeof specs[0] };

static void take_spec(struct input *input, const char *name, char *text) {
    const uint8_t kind = take(input);
    if (kind % 2 == 1) {
        add_word(text, name, specs[kind / 2 % SPECS]);
    }
}

static void take_weights(struct input *input, const struct layout *layout, char *text) {
    const uint8_t kind = take(input);
    const char *first = specs[take(input) % SPECS];
    const char *second = specs[take(input) % SPECS];
    const int has_one = layout->is_grouped;
    if (kind % 4 == 1) {
        add_word(text, "w=", first);
    } else if (kind % 4 > 1 && has_one) {
        add_word(text, "w_given=", first);
    } else if (kind % 4 > 1) {
        if (kind / 4 % 8 != 0) {
            add_word(text, "gate_up_given=", first);
        }
        if (kind / 32 != 0) {
            add_word(text, "down_given=", second);
        }
    }
}

static void take_letters(struct input *input, const char *letters, char *text) {
    const uint8_t set = take(input);
    char some[8] = "";
    for (size_t i = 0; letters[i] != '\0'; ++i) {
        if (set >> i & 1) {
            some[strlen(some)] = letters[i];
        }
    }
    if (some[0] != '\0') {
        add_word(text, "grad=", some);
    }
}

static void take_number(struct input *input, const char *name, char *text) {
    static const char *const numbers[] = {"7", "0.5", "1e30", "1e-40", "1.702", "-2", "0", "3.4e38"};
    const uint8_t kind = take(input);
    if (kind % 2 == 1) {
        add_word(text, name, numbers[kind / 2 % 8]);
    }
}

static void take_words(struct input *input, const struct layout *layout, char *text) {
    text[0] = '\0';
    take_spec(input, "x=", text);
    take_weights(input, layout, text);
    if (layout->is_grouped && layout->is_training) {
        take_spec(input, "dy=", text);
        take_letters(input, layout->is_backward ? "xwb" : "", text);
    } else if (!layout->is_grouped) {
        const uint8_t act = take(input);
        take_spec(input, "h=", text);
        add_word(text, "act=", opaq_activation_name((enum opaq_activation)(act % OPAQ_ACTIVATION_COUNT)));
        if (act % OPAQ_ACTIVATION_COUNT >= OPAQ_SILU_CLAMP && act % OPAQ_ACTIVATION_COUNT <= OPAQ_SILU_STEP) {
            take_number(input, "limit=", text);
        }
        if (act / 16 % 8 == 0) {
            take_number(input, "alpha=", text);
            take_number(input, "beta=", text);
        }
        if (layout->is_training) {
            take_spec(input, "dy=", text);
            take_letters(input, layout->is_moe ? "xrgdbc" : "xgdbc", text);
        }
    }
    const uint8_t rest = take(input);
    if (layout->is_moe && rest % 4 == 1) {
        add_word(text, "weights=", "input");
    }
    if (layout->is_moe && rest / 4 % 4 == 1) {
        add_word(text, "experts=", rest % 2 ? "9" : "2147483647");
    }
    if (layout->is_moe && rest / 16 % 4 == 1) {
        add_word(text, "first=", rest % 2 ? "1" : "3");
    }
    if (rest % 8 > 4) {
        add_word(text, "precision=", rest % 8 == 5 ? "near" : rest % 8 == 6 ? "fast" : "fast32");
    }
    if (rest % 4 == 2) {
        add_word(text, "order=", "any");
    }
    if (layout->is_training && rest / 64 > 1) {
        add_word(text, "backward=", rest / 64 == 2 ? "high_precision" : "dequantized");
    }
}

/* The plan as an argument, and the sizes of the others that follow from it. */
static void fit_plan(struct input *input, struct layout *layout, struct call *call) {
    const int index = argument_of(layout->op, "plan");
    char *text = call->text[index];
    take_words(input, layout, text);
    call->value[index] = (struct opaq_value){.text = text, .count = (int64_t)strlen(text)};
    layout->total = layout->experts;
    layout->width = layout->inner;
    layout->gate_up.kind = layout->down.kind = OPAQ_FORM_PLAIN;
    if (layout->is_grouped) {
        struct opaq_linear_plan plan;
        if (opaq_linear_plan_parse(text, strlen(text), &plan, NULL) == OPAQ_OK) {
            layout->gate_up = plan.w_given;
        }
        return;
    }
    struct opaq_experts_plan plan;
    if (opaq_experts_plan_parse(text, strlen(text), &plan, NULL) == OPAQ_OK) {
        layout->gate_up = plan.gate_up_given;
        layout->down = plan.down_given;
        layout->total = plan.experts != 0 ? plan.experts : plan.first + layout->experts;
        layout->width =
            opaq_activation_is_gated((enum opaq_activation)plan.activation) ? 2 * layout->inner : layout->inner;
    }
}

/* ---- tensors ---- */

static int64_t take_dimension(struct input *input) {
    const uint8_t kind = take(input);
    return kind < 200   ? kind % 20
           : kind < 240 ? 16 * (kind % 5)
           : kind < 250 ? 128
                        : 33; /* some are multiples of a tile */
}

static void put(struct input *input, const struct layout *layout, struct call *call, const char *name,
                int32_t dtype, const int64_t *shape, int rank) {
    const int index = argument_of(layout->op, name);
    if (index >= 0) {
        forget(call, index);
        put_tensor(input, call, index, 0, dtype, shape, rank);
    }
}

static void put_weight(struct input *input, const struct layout *layout, struct call *call, const char *name,
                       const struct opaq_form *form, int64_t rows, int64_t columns) {
    char shape_name[24];
    const int64_t shape[3] = {layout->experts, rows, columns};
    const int skip = layout->is_moe || (layout->is_grouped && argument_of(layout->op, "splits") >= 0) ? 0 : 1;
    const int index = argument_of(layout->op, name);
    (void)snprintf(shape_name, sizeof shape_name, "%s_shape", name);
    const int sizes = argument_of(layout->op, shape_name);
    memcpy(call->sizes[sizes], shape + skip, (size_t)(3 - skip) * sizeof *shape);
    call->value[sizes] = (struct opaq_value){.sizes = call->sizes[sizes], .count = 3 - skip};
    put_form(input, call, index, form, layout->w_dtype, shape + skip, 3 - skip);
}

static void put_bias(struct input *input, const struct layout *layout, struct call *call, const char *name,
                     int64_t length) {
    const int64_t shape[2] = {layout->experts, length};
    const int is_stack = layout->is_moe || argument_of(layout->op, "splits") >= 0;
    if (take(input) % 2 == 0) {
        put(input, layout, call, name, layout->w_dtype, is_stack ? shape : shape + 1, is_stack ? 2 : 1);
    }
}

/* Writes integers into a tensor's memory. */
static void write_integer(struct call *call, int index, int64_t place, int64_t value) {
    const struct opaq_tensor *tensor = &call->tensor[index][0];
    if (tensor->data == NULL) {
        return;
    }
    if (tensor->dtype == OPAQ_DTYPE_I32) {
        ((int32_t *)tensor->data)[place] = (int32_t)value;
    } else {
        ((int64_t *)tensor->data)[place] = value;
    }
}

/* Ids of all kinds, rarely invalid ones, and weights; with their own strides. */
static void put_router(struct input *input, const struct layout *layout, struct call *call) {
    static const int32_t floats[] = {OPAQ_DTYPE_F32, OPAQ_DTYPE_BF16, OPAQ_DTYPE_F16, OPAQ_DTYPE_F32};
    const int ids = argument_of(layout->op, "topk_ids");
    const uint8_t kind = take(input);
    const int64_t shape[2] = {layout->tokens, layout->choices};
    put(input, layout, call, "topk_weights", floats[kind % 4], shape, 2);
    forget(call, ids);
    put_tensor(input, call, ids, 0, kind / 4 % 2 ? OPAQ_DTYPE_I32 : OPAQ_DTYPE_I64, shape, 2);
    struct opaq_tensor *tensor = &call->tensor[ids][0];
    if (kind / 8 % 4 == 0) { /* transposed, with gaps */
        tensor->strides[0] = 2;
        tensor->strides[1] = 2 * layout->tokens;
        free(call->memory[ids][0]);
        allocate(input, call, ids, 0);
    }
    const uint8_t step = take(input);
    const uint8_t odd = take(input);
    for (int64_t s = 0; s < layout->tokens * layout->choices; ++s) {
        const int64_t place =
            s / layout->choices * tensor->strides[0] + s % layout->choices * tensor->strides[1];
        int64_t id = layout->total == 0 ? -1 : (s * step + s / 3) % (layout->total < 12 ? layout->total : 12);
        id = s % 16 == odd / 16 ? (odd % 4 == 0 ? -1 : odd % 4 == 1 ? layout->total : id) : id;
        id = odd == 255 && s == 3 ? layout->total + 1 : odd == 254 && s == 5 ? -2 : id;
        write_integer(call, ids, place, id);
    }
}

/* Sizes that add up to the rows, and rarely ones that do not. */
static void put_splits(struct input *input, const struct layout *layout, struct call *call) {
    const int index = argument_of(layout->op, "splits");
    const uint8_t kind = take(input);
    int64_t left = layout->tokens;
    forget(call, index);
    put_tensor(input, call, index, 0, kind % 2 ? OPAQ_DTYPE_I32 : OPAQ_DTYPE_I64, &layout->experts, 1);
    for (int64_t e = 0; e < layout->experts; ++e) {
        const int64_t part = e + 1 == layout->experts ? left : left == 0 ? 0 : take(input) % (left + 1);
        write_integer(call, index, e, kind == 255 && e == 1 ? part + 1 : kind == 254 && e == 0 ? -1 : part);
        left -= part;
    }
}

static void put_scales(struct input *input, const struct layout *layout, struct call *call, const char *name) {
    const uint8_t kind = take(input);
    const int64_t count = kind / 8 % 2 == 0 ? 1 : layout->experts;
    const int index = argument_of(layout->op, name);
    if (index < 0 ||
        (kind % 4 != 0 && strstr(call->text[argument_of(layout->op, "plan")], "delayed") == NULL)) {
        return;
    }
    put(input, layout, call, name, OPAQ_DTYPE_F32, &count, 1);
}

static void put_others(struct input *input, struct layout *layout, struct call *call) {
    const int64_t two = 2;
    const int64_t x_shape[2] = {layout->tokens, layout->hidden};
    const int64_t y_shape[2] = {layout->tokens, layout->inner}; /* of a grouped product */
    const int64_t h_shape[3] = {layout->tokens, layout->choices, layout->width};
    const int64_t h_rows[2] = {layout->tokens, layout->width};
    put(input, layout, call, layout->is_moe ? "hidden_states" : "x", layout->dtype, x_shape, 2);
    put(input, layout, call, "dy", take(input) % 4 == 0 ? OPAQ_DTYPE_F32 : layout->dtype,
        layout->is_grouped ? y_shape : x_shape, 2);
    put(input, layout, call, "h", layout->dtype, layout->is_moe ? h_shape : h_rows, layout->is_moe ? 3 : 2);
    if (take(input) % 8 != 0) {
        put(input, layout, call, "random", OPAQ_DTYPE_I64, &two, 1);
    }
    put_scales(input, layout, call, "input_scale");
    put_scales(input, layout, call, "hidden_scale");
    const int w_dtype = argument_of(layout->op, "w_dtype");
    if (w_dtype >= 0) {
        call->value[w_dtype].integer = take(input) % 4 == 0 ? OPAQ_DTYPE_F32 : layout->dtype;
    }
}

/* ---- calls ---- */

static struct layout take_layout(struct input *input) {
    static const int32_t dtypes[] = {OPAQ_DTYPE_BF16, OPAQ_DTYPE_F32, OPAQ_DTYPE_F16, OPAQ_DTYPE_BF16};
    struct layout layout;
    memset(&layout, 0, sizeof layout);
    const char *name = names[take(input) % (sizeof names / sizeof names[0])];
    const uint8_t kind = take(input);
    layout.op = opaq_op_find(name);
    layout.is_moe = argument_of(layout.op, "topk_ids") >= 0;
    layout.is_grouped = argument_of(layout.op, "w") >= 0;
    layout.is_backward = argument_of(layout.op, "dy") >= 0;
    layout.is_training = argument_of(layout.op, "random") >= 0;
    layout.dtype = dtypes[kind % 4];
    layout.w_dtype = kind / 4 % 4 == 0 ? OPAQ_DTYPE_F32 : layout.dtype;
    layout.tokens = take(input) % 40;
    layout.choices = take(input) % 4;
    layout.experts = layout.is_moe || argument_of(layout.op, "splits") >= 0 ? take(input) % 5 : 1;
    layout.hidden = take_dimension(input);
    layout.inner = take_dimension(input);
    if (kind > 247) { /* more rows than a mixture sums up in one pass */
        layout.tokens = 1020 + take(input) % 50;
        layout.choices = layout.choices > 1 ? 1 : layout.choices;
        layout.experts = layout.experts > 2 ? 1 : layout.experts;
        layout.hidden %= 9;
        layout.inner %= 9;
    }
    return layout;
}

static void take_call(struct input *input, struct layout *layout, struct call *call) {
    const uint8_t invalid = take(input);
    fit_plan(input, layout, call);
    put_others(input, layout, call);
    if (layout->is_grouped) { /* the out features are the inner size elsewhere */
        put_weight(input, layout, call, "w", &layout->gate_up, layout->inner, layout->hidden);
        put_bias(input, layout, call, "bias", layout->inner);
    } else {
        put_weight(input, layout, call, "gate_up", &layout->gate_up, layout->width, layout->hidden);
        put_weight(input, layout, call, "down", &layout->down, layout->hidden, layout->inner);
        put_bias(input, layout, call, "gate_up_bias", layout->width);
        put_bias(input, layout, call, "down_bias", layout->hidden);
    }
    if (layout->is_moe) {
        put_router(input, layout, call);
    }
    if (argument_of(layout->op, "splits") >= 0) {
        put_splits(input, layout, call);
    }
    if (invalid < layout->op->argument_count) {
        take_argument(input, layout->op, invalid, call);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, size};
    static struct call call;
    memset(&call, 0, sizeof call);
    struct layout layout = take_layout(&input);
    take_call(&input, &layout, &call);
    run_call(layout.op, &call);
    run_runner(layout.op, &call);
    for (int i = 0; i < OPAQ_OP_ARGUMENT_LIMIT; ++i) {
        forget(&call, i);
    }
    return 0;
}

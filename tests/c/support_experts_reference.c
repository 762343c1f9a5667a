/* support_experts_reference.c: expected results of the experts' operators, by plain loops over experts. */
#include "support_experts_reference.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_product.h"
#include "support_quant.h"

static const struct experts_given nothing;

/* ---- routing ---- */

struct reference_group reference_group_of(const struct experts_layer *layer,
                                          const struct opaq_experts_plan *plan, int64_t index) {
    const int64_t slots = layer->is_routed ? layer->size.tokens * layer->size.choices : layer->size.tokens;
    struct reference_group group = {index, 0, calloc((size_t)slots + 1, sizeof(int64_t))};
    for (int64_t s = 0; s < slots && group.slot != NULL; ++s) {
        if (!layer->is_routed || layer->ids[s] == plan->first + index) {
            group.slot[group.count++] = s;
        }
    }
    return group;
}

void reference_group_free(struct reference_group *group) { free(group->slot); }

static int64_t token_of(const struct experts_layer *layer, int64_t slot) {
    return layer->is_routed ? slot / layer->size.choices : slot;
}

static float weight_of(const struct experts_layer *layer, int64_t slot) {
    return layer->is_routed ? tensor_get(&layer->weights, token_of(layer, slot), slot % layer->size.choices)
                            : 1.0f;
}

struct tensor reference_gather(const struct experts_layer *layer, const struct reference_group *group,
                               const struct tensor *from, enum reference_rows rows) {
    const int64_t columns = opaq_proto_columns(&from->view.proto);
    struct tensor made = tensor_make(group->count, columns, (enum opaq_element)from->view.proto.dtype, NULL);
    for (int64_t i = 0; i < group->count; ++i) {
        const int64_t slot = group->slot[i];
        const int64_t row = rows == REFERENCE_SLOTS ? slot : token_of(layer, slot);
        const float weight = rows == REFERENCE_WEIGHTED_TOKENS ? weight_of(layer, slot) : 1.0f;
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&made, i, c, weight * tensor_get(from, row, c));
        }
    }
    return made;
}

static bool weighs_input(const struct experts_layer *layer, const struct opaq_experts_plan *plan) {
    return layer->is_routed && plan->weights_on_input;
}

static bool weighs_output(const struct experts_layer *layer, const struct opaq_experts_plan *plan) {
    return layer->is_routed && !plan->weights_on_input;
}

static struct tensor gather_x(const struct experts_layer *layer, const struct opaq_experts_plan *plan,
                              const struct reference_group *group) {
    return reference_gather(layer, group, &layer->x,
                            weighs_input(layer, plan) ? REFERENCE_WEIGHTED_TOKENS : REFERENCE_TOKENS);
}

/* Row `index` of the biases as floats. */
static struct tensor bias_of(const struct tensor *bias, int64_t index) {
    struct tensor row = experts_rows(bias, index, 1);
    struct tensor floats = experts_converted(&row, OPAQ_F32);
    tensor_free(&row);
    return floats;
}

/* ---- exact reference ---- */

struct tensor reference_operand(const struct tensor *x, const struct opaq_form *form, const float *given,
                                const int64_t *random, int64_t stream) {
    if (form->kind != OPAQ_FORM_QUANTIZED) {
        return experts_converted(x, OPAQ_F32);
    }
    struct opaq_spec spec = form->spec;
    struct opaq_quantize_args args = {.scale = NULL};
    spec.usage = OPAQ_ROWWISE;
    if (spec.options & OPAQ_DELAYED) {
        args.scale = given;
    } else {
        args.amax_rowwise = given;
    }
    if (random != NULL) {
        args.random = (struct opaq_random){(uint64_t)random[0], (uint64_t)random[1] + (uint64_t)stream};
    }
    struct tensor q = quantized(x, &spec, &args);
    struct tensor floats = dequantized(&q, OPAQ_ROWWISE);
    tensor_free(&q);
    return floats;
}

struct tensor reference_weight(const struct tensor *stack, int64_t index, int64_t rows,
                               const struct opaq_form *here, const int64_t *random, int64_t stream) {
    if (stack->view.proto.is_quantized) {
        struct tensor floats = dequantized(stack, OPAQ_ROWWISE);
        struct tensor part = experts_rows(&floats, index * rows, rows);
        tensor_free(&floats);
        return part;
    }
    struct tensor part = experts_rows(stack, index * rows, rows);
    struct tensor floats = reference_operand(&part, here, NULL, random, stream);
    tensor_free(&part);
    return floats;
}

struct tensor reference_multiply(const struct tensor *a, const struct tensor *b, const struct tensor *bias) {
    const struct op_tensors x = op_tensors_of(a);
    const struct op_tensors w = op_tensors_of(b);
    const int64_t w_shape[2] = {w.tensor[0].shape[0], w.tensor[0].shape[1]};
    struct opaq_tensor row;
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(x.tensor),
                                                        op_list_value(&w),
                                                        {.count = 0},
                                                        op_sizes_value(w_shape, 2),
                                                        op_text_value("")};
    struct op_result result;
    struct opaq_error error;
    if (bias != NULL) {
        row = op_tensors_of(bias).tensor[0];
        row.rank = 1;
        row.shape[0] = w_shape[0];
        row.strides[0] = 1;
        values[2].tensors = &row;
    }
    struct tensor c = tensor_make(x.tensor[0].shape[0], w_shape[0], OPAQ_F32, NULL);
    if (op_call("linear", values, NULL, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("%s", error.text);
        return c;
    }
    struct product_matrix p = product_matrix_of(a, OPAQ_ROWWISE);
    struct product_matrix q = product_matrix_of(b, OPAQ_ROWWISE);
    struct product_matrix r =
        bias == NULL ? (struct product_matrix){0, 0, NULL} : product_matrix_of(bias, OPAQ_ROWWISE);
    (void)product_check(&result.outputs.tensor[0], &p, &q, r.value, NULL, "linear");
    memcpy(c.view.buffer[0].data, result.outputs.tensor[0].data, tensor_bytes(&c, 0));
    product_matrix_free(&p);
    product_matrix_free(&q);
    product_matrix_free(&r);
    op_result_free(&result);
    return c;
}

/* One product of a group: rows of x or a, quantized or not, with one weight of the stack. */
struct reference_product {
    const struct tensor *rows, *stack, *bias; /* a bias, or NULL */
    const struct opaq_form *form, *here;
    const float *scale;
    int64_t scales, index, outer, stream, w_stream;
    const int64_t *random;
};

static struct tensor multiply_group(const struct reference_product *what) {
    const float *scale = what->scale == NULL ? NULL : what->scale + (what->scales == 1 ? 0 : what->index);
    const int64_t first = what->index * EXPERTS_STREAM_STEP;
    struct tensor a = reference_operand(what->rows, what->form, scale, what->random, first + what->stream);
    struct tensor b = reference_weight(what->stack, what->index, what->outer, what->here, what->random,
                                       first + what->w_stream);
    struct tensor bias = {{.row_stride = 0}};
    if (what->bias != NULL) {
        bias = bias_of(what->bias, what->index);
    }
    struct tensor c = reference_multiply(&a, &b, what->bias == NULL ? NULL : &bias);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&bias);
    return c;
}

static void forward_group(const struct experts_layer *layer, const char *text,
                          const struct experts_given *given, const struct reference_group *group, float *sums,
                          struct reference_forward *forward) {
    const struct opaq_experts_plan plan = experts_plan_of(text);
    struct tensor x = gather_x(layer, &plan, group);
    const struct reference_product first = {&x,
                                            given->gate_up == NULL ? &layer->gate_up : given->gate_up,
                                            given->no_gate_up_bias ? NULL : &layer->gate_up_bias,
                                            &plan.x,
                                            &plan.w,
                                            given->input_scale,
                                            given->input_scales,
                                            group->index,
                                            layer->width,
                                            EXPERTS_STREAM_X,
                                            EXPERTS_STREAM_W1,
                                            given->random};
    struct tensor unrounded = multiply_group(&first);
    struct tensor h = experts_converted(&unrounded, (enum opaq_element)layer->x.view.proto.dtype);
    struct tensor a = experts_activated(&h, text);
    const struct reference_product second = {&a,
                                             given->down == NULL ? &layer->down : given->down,
                                             given->no_down_bias ? NULL : &layer->down_bias,
                                             &plan.h,
                                             &plan.w,
                                             given->hidden_scale,
                                             given->hidden_scales,
                                             group->index,
                                             layer->size.hidden,
                                             EXPERTS_STREAM_H,
                                             EXPERTS_STREAM_W2,
                                             given->random};
    struct tensor y = multiply_group(&second);
    for (int64_t i = 0; i < group->count; ++i) {
        const int64_t slot = group->slot[i];
        const float weight = weighs_output(layer, &plan) ? weight_of(layer, slot) : 1.0f;
        for (int64_t c = 0; c < layer->width; ++c) {
            tensor_set(&forward->h, slot, c, tensor_get(&h, i, c));
        }
        for (int64_t c = 0; c < layer->size.hidden; ++c) {
            float *const sum = &sums[token_of(layer, slot) * layer->size.hidden + c];
            *sum = layer->is_routed ? *sum + weight * tensor_get(&y, i, c) : tensor_get(&y, i, c);
        }
    }
    tensor_free(&x);
    tensor_free(&unrounded);
    tensor_free(&h);
    tensor_free(&a);
    tensor_free(&y);
}

struct reference_forward reference_forward(const struct experts_layer *layer, const char *plan,
                                           const struct experts_given *given) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    const int64_t slots = layer->is_routed ? layer->size.tokens * layer->size.choices : layer->size.tokens;
    const enum opaq_element dtype = (enum opaq_element)layer->x.view.proto.dtype;
    struct reference_forward forward = {tensor_make_proto(&layer->x.view.proto),
                                        tensor_make(slots, layer->width, dtype, NULL)};
    float *sums = calloc((size_t)(layer->size.tokens * layer->size.hidden) + 1, sizeof *sums);
    tensor_fill(&forward.h, FILL_ZERO, 0);
    memset(forward.h.view.buffer[0].data, 0, tensor_bytes(&forward.h, 0)); /* for slots without an expert */
    for (int64_t e = 0; e < layer->size.experts && sums != NULL; ++e) {
        struct reference_group group = reference_group_of(layer, &parsed, e);
        if (group.count > 0) {
            forward_group(layer, plan, given == NULL ? &nothing : given, &group, sums, &forward);
        }
        reference_group_free(&group);
    }
    for (int64_t i = 0; sums != NULL && i < layer->size.tokens * layer->size.hidden; ++i) {
        tensor_set(&forward.y, i / layer->size.hidden, i % layer->size.hidden, sums[i]);
    }
    free(sums);
    return forward;
}

void reference_forward_free(struct reference_forward *forward) {
    tensor_free(&forward->y);
    tensor_free(&forward->h);
}

/* ---- reference in double ---- */

enum { ACTIVATION_STEPS = 24 }; /* float32 roundings within an activation */

/* The change of a function over the interval of its argument that rounding allows. */
static double change_over(double (*of)(const struct opaq_experts_plan *plan, double x),
                          const struct opaq_experts_plan *plan, double x, double error) {
    const double here = of(plan, x);
    return error == 0.0 ? 0.0
                        : 2.0 * fmax(fabs(of(plan, x + error) - here), fabs(of(plan, x - error) - here)) +
                              2.0 * error * error;
}

/* Computes a from h. */
static struct numbers activate(const struct opaq_experts_plan *plan, const struct numbers *h, int64_t inner,
                               enum opaq_element dtype) {
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)plan->activation) != 0;
    struct numbers a = numbers_make(h->rows, inner);
    for (int64_t i = 0; i < a.rows * inner; ++i) {
        const int64_t row = i / inner * h->columns;
        const int64_t g = row + reference_gate_column(plan, inner, i % inner);
        const int64_t u = row + reference_factor_column(plan, inner, i % inner);
        const double gate = reference_gate(plan, h->value[g]);
        const double factor = reference_factor(plan, h->value[u]);
        double gate_error = change_over(reference_gate, plan, h->value[g], h->error[g]) +
                            ACTIVATION_STEPS * 0x1p-24 * (1.0 + fabs(h->value[g])) * fabs(gate) + 0x1p-120;
        const double factor_error = is_gated ? h->error[u] + 0x1p-24 * fabs(factor) : 0.0;
        if (is_gated && plan->activation != OPAQ_SWIGLU_OAI && plan->activation != OPAQ_SWIGLU_OAI_PACKED) {
            gate_error += product_rounding((int32_t)dtype, fabs(gate) + gate_error);
        }
        a.value[i] = gate * factor;
        a.error[i] = (fabs(gate) + gate_error) * factor_error + fabs(factor) * gate_error +
                     0x1p-23 * fabs(a.value[i]) + 0x1p-140;
    }
    numbers_round(&a, dtype);
    return a;
}

/* Computes dh from h and da; h is exact. */
static struct numbers activate_backward(const struct opaq_experts_plan *plan, const struct numbers *h,
                                        const struct numbers *da, enum opaq_element dtype) {
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)plan->activation) != 0;
    struct numbers dh = numbers_make(h->rows, h->columns);
    for (int64_t i = 0; i < da->rows * da->columns; ++i) {
        const int64_t row = i / da->columns * h->columns;
        const int64_t g = row + reference_gate_column(plan, da->columns, i % da->columns);
        const int64_t u = row + reference_factor_column(plan, da->columns, i % da->columns);
        const double slope = reference_gate_slope(plan, h->value[g]);
        const double factor = reference_factor(plan, h->value[u]);
        const double gate = reference_gate(plan, h->value[g]);
        const double size = fabs(da->value[i]) + da->error[i];
        const double steps = ACTIVATION_STEPS * 0x1p-24 * (1.0 + fabs(h->value[g]));
        dh.value[g] = da->value[i] * factor * slope;
        dh.error[g] =
            fabs(factor * slope) * da->error[i] + size * fabs(factor) * steps * (fabs(slope) + 2.0) + 0x1p-120;
        if (is_gated) {
            dh.value[u] = da->value[i] * gate * reference_factor_slope(plan, h->value[u]);
            dh.error[u] = fabs(gate) * da->error[i] + size * fabs(gate) * steps + 0x1p-120;
        }
    }
    numbers_round(&dh, dtype);
    return dh;
}

/* Adds row i times a weight to a token's row: one rounding for the product and one for each addition. */
static void add_row(const struct numbers *from, int64_t i, double weight, int64_t additions, struct numbers *to,
                    int64_t row) {
    for (int64_t c = 0; c < to->columns; ++c) {
        const double size =
            fabs(weight) * (fabs(from->value[i * from->columns + c]) + from->error[i * from->columns + c]);
        to->value[row * to->columns + c] += weight * from->value[i * from->columns + c];
        to->error[row * to->columns + c] +=
            fabs(weight) * from->error[i * from->columns + c] + (double)(additions + 1) * 0x1.01p-24 * size;
    }
}

static struct numbers weight_numbers(const struct tensor *stack, int64_t index, int64_t rows) {
    return numbers_rows(stack, index * rows, rows);
}

struct reference_numbers reference_forward_numbers(const struct experts_layer *layer, const char *text,
                                                   const struct experts_given *given) {
    const struct opaq_experts_plan plan = experts_plan_of(text);
    const struct experts_sizes *size = &layer->size;
    const enum opaq_element dtype = (enum opaq_element)layer->x.view.proto.dtype;
    const int64_t slots = layer->is_routed ? size->tokens * size->choices : size->tokens;
    struct reference_numbers forward = {numbers_make(size->tokens, size->hidden),
                                        numbers_make(slots, layer->width)};
    given = given == NULL ? &nothing : given;
    for (int64_t e = 0; e < size->experts; ++e) {
        struct reference_group group = reference_group_of(layer, &plan, e);
        struct tensor rows = gather_x(layer, &plan, &group);
        struct numbers x = numbers_of(&rows);
        struct numbers gate_up = weight_numbers(&layer->gate_up, e, layer->width);
        struct numbers down = weight_numbers(&layer->down, e, size->hidden);
        struct numbers bias[2] = {weight_numbers(&layer->gate_up_bias, e, 1),
                                  weight_numbers(&layer->down_bias, e, 1)};
        struct numbers h = numbers_product(&x, &gate_up, given->no_gate_up_bias ? NULL : bias[0].value);
        numbers_round(&h, dtype);
        struct numbers a = activate(&plan, &h, size->inner, dtype);
        struct numbers y = numbers_product(&a, &down, given->no_down_bias ? NULL : bias[1].value);
        for (int64_t i = 0; i < group.count; ++i) {
            const double weight = weighs_output(layer, &plan) ? (double)weight_of(layer, group.slot[i]) : 1.0;
            add_row(&y, i, weight, layer->is_routed ? size->choices : 0, &forward.y,
                    token_of(layer, group.slot[i]));
            add_row(&h, i, 1.0, -1, &forward.h, group.slot[i]);
        }
        struct numbers *const all[] = {&x, &gate_up, &down, &bias[0], &bias[1], &h, &a, &y};
        for (int i = 0; i < 8; ++i) {
            numbers_free(all[i]);
        }
        tensor_free(&rows);
        reference_group_free(&group);
    }
    return forward;
}

void reference_numbers_free(struct reference_numbers *forward) {
    numbers_free(&forward->y);
    numbers_free(&forward->h);
}

/* Row e of a stack's gradient is a flattened matrix. */
static void put_row(const struct numbers *matrix, int64_t row, struct numbers *to) {
    memcpy(to->value + row * to->columns, matrix->value, (size_t)to->columns * sizeof *to->value);
    memcpy(to->error + row * to->columns, matrix->error, (size_t)to->columns * sizeof *to->error);
}

/* a^T b, both [rows, ..]. */
static struct numbers inner_product(const struct numbers *a, const struct numbers *b) {
    struct numbers p = numbers_transposed(a);
    struct numbers q = numbers_transposed(b);
    struct numbers c = numbers_product(&p, &q, NULL);
    numbers_free(&p);
    numbers_free(&q);
    return c;
}

static struct numbers column_sums(const struct numbers *a) {
    struct numbers ones = numbers_make(a->rows, 1);
    for (int64_t i = 0; i < a->rows; ++i) {
        ones.value[i] = 1.0;
    }
    struct numbers sums = inner_product(&ones, a);
    numbers_free(&ones);
    return sums;
}

/* Sum of the products of row i of two matrices. */
static void dot_row(const struct numbers *a, const struct numbers *b, int64_t i, struct numbers *to,
                    int64_t place) {
    for (int64_t c = i * a->columns; c < (i + 1) * a->columns; ++c) {
        const double left = fabs(a->value[c]) + a->error[c];
        const double right = fabs(b->value[c]) + b->error[c];
        to->value[place] += a->value[c] * b->value[c];
        to->error[place] +=
            left * b->error[c] + right * a->error[c] + (double)(a->columns + 4) * 0x1p-24 * left * right;
    }
}

static void weigh_rows(const struct experts_layer *layer, const struct reference_group *group,
                       struct numbers *rows) {
    for (int64_t i = 0; i < rows->rows * rows->columns; ++i) {
        const double weight = (double)weight_of(layer, group->slot[i / rows->columns]);
        rows->value[i] *= weight;
        rows->error[i] = rows->error[i] * fabs(weight) + 0x1p-24 * fabs(rows->value[i]);
    }
}

static void backward_group(const struct experts_layer *layer, const struct opaq_experts_plan *plan,
                           const struct experts_given *given, const struct tensor *h_slots,
                           const struct reference_group *group, struct numbers *gradient) {
    const struct experts_sizes *size = &layer->size;
    const enum opaq_element dtype = (enum opaq_element)layer->x.view.proto.dtype;
    const bool on_output = weighs_output(layer, plan);
    const int64_t e = group->index;
    struct tensor rows[5] = {
        reference_gather(layer, group, &layer->x, REFERENCE_TOKENS), gather_x(layer, plan, group),
        reference_gather(layer, group, &layer->dy, REFERENCE_TOKENS),
        reference_gather(layer, group, &layer->dy, on_output ? REFERENCE_WEIGHTED_TOKENS : REFERENCE_TOKENS),
        reference_gather(layer, group, h_slots, REFERENCE_SLOTS)};
    struct numbers x = numbers_of(&rows[0]);
    struct numbers x_weighted = numbers_of(&rows[1]);
    struct numbers dy = numbers_of(&rows[2]);
    struct numbers dy_weighted = numbers_of(&rows[3]);
    struct numbers h = numbers_of(&rows[4]);
    struct numbers gate_up = weight_numbers(&layer->gate_up, e, layer->width);
    struct numbers down = weight_numbers(&layer->down, e, size->hidden);
    struct numbers gate_up_t = numbers_transposed(&gate_up);
    struct numbers down_t = numbers_transposed(&down);
    struct numbers a = activate(plan, &h, size->inner, dtype);
    struct numbers da = numbers_product(&dy, &down_t, NULL);
    for (int64_t i = 0; on_output && i < group->count; ++i) {
        dot_row(&a, &da, i, &gradient[EXPERTS_DROUTER], group->slot[i]);
        if (!given->no_down_bias) {
            struct numbers bias = weight_numbers(&layer->down_bias, e, 1);
            struct numbers row = numbers_rows(&rows[2], i, 1);
            dot_row(&bias, &row, 0, &gradient[EXPERTS_DROUTER], group->slot[i]);
            numbers_free(&bias);
            numbers_free(&row);
        }
    }
    if (on_output) {
        weigh_rows(layer, group, &da);
    }
    struct numbers dh = activate_backward(plan, &h, &da, dtype);
    struct numbers dx = numbers_product(&dh, &gate_up_t, NULL);
    for (int64_t i = 0; i < group->count; ++i) {
        const int64_t slot = group->slot[i];
        if (weighs_input(layer, plan)) {
            dot_row(&x, &dx, i, &gradient[EXPERTS_DROUTER], slot);
        }
        add_row(&dx, i, weighs_input(layer, plan) ? (double)weight_of(layer, slot) : 1.0,
                layer->is_routed ? size->choices : 0, &gradient[EXPERTS_DX], token_of(layer, slot));
    }
    struct numbers dgate_up = inner_product(&dh, &x_weighted);
    struct numbers ddown = inner_product(&dy_weighted, &a);
    struct numbers sums[2] = {column_sums(&dh), column_sums(&dy_weighted)};
    put_row(&dgate_up, e, &gradient[EXPERTS_DGATE_UP]);
    put_row(&ddown, e, &gradient[EXPERTS_DDOWN]);
    put_row(&sums[0], e, &gradient[EXPERTS_DGATE_UP_BIAS]);
    put_row(&sums[1], e, &gradient[EXPERTS_DDOWN_BIAS]);
    struct numbers *const all[] = {&x,    &x_weighted, &dy,     &dy_weighted, &h,      &gate_up,
                                   &down, &gate_up_t,  &down_t, &a,           &da,     &dh,
                                   &dx,   &dgate_up,   &ddown,  &sums[0],     &sums[1]};
    for (int i = 0; i < 17; ++i) {
        numbers_free(all[i]);
    }
    for (int i = 0; i < 5; ++i) {
        tensor_free(&rows[i]);
    }
}

struct reference_gradients reference_backward_numbers(const struct experts_layer *layer, const char *text,
                                                      const struct experts_given *given,
                                                      const struct tensor *h) {
    const struct opaq_experts_plan plan = experts_plan_of(text);
    const struct experts_sizes *size = &layer->size;
    struct reference_gradients made = {{numbers_make(size->tokens, size->hidden),
                                        numbers_make(size->tokens, layer->is_routed ? size->choices : 0),
                                        numbers_make(size->experts, layer->width * size->hidden),
                                        numbers_make(size->experts, size->hidden * size->inner),
                                        numbers_make(size->experts, layer->width),
                                        numbers_make(size->experts, size->hidden)}};
    for (int64_t e = 0; e < size->experts; ++e) {
        struct reference_group group = reference_group_of(layer, &plan, e);
        if (group.count > 0) {
            backward_group(layer, &plan, given == NULL ? &nothing : given, h, &group, made.gradient);
        }
        reference_group_free(&group);
    }
    return made;
}

void reference_gradients_free(struct reference_gradients *gradients) {
    for (int i = 0; i < 6; ++i) {
        numbers_free(&gradients->gradient[i]);
    }
}

/* ---- checking ---- */

static bool is_plain(const char *plan) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    const struct opaq_form forms[] = {parsed.x, parsed.h, parsed.w, parsed.gate_up_given, parsed.down_given};
    bool plain = true;
    for (int i = 0; i < 5; ++i) {
        plain = plain && forms[i].kind == OPAQ_FORM_PLAIN;
    }
    return plain;
}

/* Results of both operators; the inference operator takes scales, the training operator random numbers. */
void experts_check_forward(const struct experts_layer *layer, const char *plan,
                           const struct experts_given *given) {
    struct reference_forward expected = reference_forward(layer, plan, given);
    given = given == NULL ? &nothing : given;
    if (given->random == NULL) {
        const char *op = layer->is_routed ? "moe" : "mlp";
        struct experts_arguments arguments;
        struct op_result result = experts_call(op, layer, plan, given);
        experts_arguments(op, layer, plan, given, &arguments);
        if (CHECK_EQ_INT(result.outputs.count, 1)) {
            CHECK_BYTES(result.outputs.tensor[0].data, expected.y.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[0]), "%s, \"%s\"", op, plan);
            experts_check_again(op, arguments.value, &result, plan);
        }
        op_result_free(&result);
    }
    if (given->input_scale == NULL && given->hidden_scale == NULL) {
        const char *op = layer->is_routed ? "moe_forward" : "mlp_forward";
        struct experts_arguments arguments;
        struct op_result result = experts_call(op, layer, plan, given);
        experts_arguments(op, layer, plan, given, &arguments);
        if (CHECK_EQ_INT(result.outputs.count, 2)) {
            CHECK_BYTES(result.outputs.tensor[0].data, expected.y.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[0]), "%s, \"%s\", y", op, plan);
            CHECK_BYTES(result.outputs.tensor[1].data, expected.h.view.buffer[0].data,
                        op_tensor_bytes(&result.outputs.tensor[1]), "%s, \"%s\", h", op, plan);
            experts_check_again(op, arguments.value, &result, plan);
        }
        if (result.outputs.count == 2 && is_plain(plan)) {
            struct reference_numbers numbers = reference_forward_numbers(layer, plan, given);
            (void)numbers_check(&result.outputs.tensor[0], &numbers.y, plan);
            (void)numbers_check(&result.outputs.tensor[1], &numbers.h, plan);
            reference_numbers_free(&numbers);
        }
        op_result_free(&result);
    }
    reference_forward_free(&expected);
}

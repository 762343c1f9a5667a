/* op/experts/experts_backward.c: the operators mlp_backward and moe_backward. h is kept by the forward; everything
 * else is computed again from the arguments, with the same bytes. For one expert's rows (dy, x, h; a = activation(h);
 * r: router weights, 1 for an mlp; all but r go through the recipe's quantizers):
 *
 *     da = dy down          dr = sum of a da (+ dy . bias)        da = r da
 *     ddown = (r dy)^T a    dh = activation'(h, da)
 *     dx = dh gate_up       dgate_up = dh^T x
 *
 * With router weights on the input, x is replaced by r x, dr = sum of x dx, and r multiplies dx instead of da. */
#include <string.h>

#include "base/try.h"
#include "op/experts/experts_parts.h"
#include "op/table/op_tensor.h"

/* ---- forms ---- */

/* The outputs of moe_backward by their gradients' bits; mlp_backward has no router's. */
static const int32_t gradient_bits[] = {OPAQ_EXPERTS_X,    OPAQ_EXPERTS_ROUTER,       OPAQ_EXPERTS_GATE_UP,
                                        OPAQ_EXPERTS_DOWN, OPAQ_EXPERTS_GATE_UP_BIAS, OPAQ_EXPERTS_DOWN_BIAS};
enum { DX, DROUTER, DGATE_UP, DDOWN, DGATE_UP_BIAS, DDOWN_BIAS };

static bool has_gradient(const struct opaq_experts_plan *plan, int which) {
    return (plan->gradients & gradient_bits[which]) != 0;
}

enum opaq_status form_moe_backward(const struct op_call *call, int output, struct opaq_form *form,
                                   struct opaq_error *error) {
    (void)error;
    form->kind = has_gradient(&call->plan.experts, output) ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT;
    return OPAQ_OK;
}

enum opaq_status form_mlp_backward(const struct op_call *call, int output, struct opaq_form *form,
                                   struct opaq_error *error) {
    return form_moe_backward(call, output == DX ? DX : output + 1, form, error);
}

/* ---- one call ---- */

struct backward {
    struct experts experts;
    struct opaq_view dy, h;   /* as given */
    struct opaq_view h_rows;  /* sorted */
    struct opaq_view a;       /* activation(h), sorted */
    struct opaq_view dx_sums; /* where rows are routed */
    struct opaq_view router;  /* by slot, float32, where its gradient is wanted */
};

static bool wants(const struct backward *backward, int which) {
    return has_gradient(backward->experts.plan, which);
}

/* The output row of a gradient. */
static int output_of(const struct backward *backward, int which) {
    return backward->experts.is_routed || which < DROUTER ? which : which - 1;
}

static struct opaq_view output_view(const struct backward *backward, int which) {
    return op_plain_output(backward->experts.call, output_of(backward, which));
}

/* dy like x, h [.., width] for each row or slot, in x's dtype. */
static enum opaq_status read_gradients(struct backward *backward, struct opaq_error *error) {
    const struct experts *experts = &backward->experts;
    const struct op_call *call = experts->call;
    const struct opaq_tensor *h = op_argument(call, "h")->tensors;
    const struct opaq_tensor *dy = op_argument(call, "dy")->tensors;
    const struct opaq_proto *x = &experts->x.proto;
    TRY(read_plain(call, "dy", dy, x->shape, x->rank, -1, &backward->dy, error));
    TRY(view_of_tensor("h", h, &backward->h, error));
    TRY(check_on_device("h", h, call->device, error));
    if (h->dtype != (int32_t)experts->dtype || opaq_proto_rows(&backward->h.proto) != experts->groups.rows ||
        opaq_proto_columns(&backward->h.proto) != experts->width) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "h is %s%s, expected what the forward gave: %s, %lld x %lld",
                         dtype_name(h->dtype), shape_text(h, text, sizeof text),
                         dtype_name((int32_t)experts->dtype), (long long)experts->groups.rows,
                         (long long)experts->width);
    }
    return OPAQ_OK;
}

/* Rows in sorted order: gathered into the arena or, without routing, in place. */
static enum opaq_status gather(struct backward *backward, const struct opaq_view *from, enum row_order order,
                               bool is_weighted, struct opaq_view *rows, struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    struct work *work = &experts->call->work;
    *rows = *from;
    if (!experts->is_routed) {
        return OPAQ_OK;
    }
    TRY(experts_matrix(experts, opaq_proto_columns(&from->proto), (enum opaq_element)from->proto.dtype, rows,
                       error));
    const struct quant_matrix source = quant_matrix_make(from);
    const struct quant_matrix target = quant_matrix_make(rows);
    return work->is_measuring ? OPAQ_OK
                              : work->backend->gather_rows(&experts->groups, &source, order, is_weighted,
                                                           &target, work->execution, error);
}

/* How products read dy or dh along a usage: quantized, or plain if the backward is not quantized. */
static struct operand_form gradient_form(const struct backward *backward, enum opaq_usage along,
                                         enum experts_stream stream) {
    const struct opaq_experts_plan *plan = backward->experts.plan;
    struct operand_form form = form_along(along);
    form.quantizes = is_quantized(&plan->dy) && plan->backward == OPAQ_BACKWARD_QUANTIZED;
    form.spec = form_with_usage(&plan->dy, (int)along).spec;
    form.random = (struct random_source){.state = backward->experts.random, .stream = (int64_t)stream};
    return form;
}

static struct operand_form kept(const struct backward *backward, const struct opaq_form *form,
                                enum experts_stream stream) {
    return kept_form(form, backward->experts.plan->backward, backward->experts.random, (int64_t)stream);
}

/* dw = dy^T x and the column sums of dy, for each expert. */
static enum opaq_status weight_gradients(struct backward *backward, int which, int bias,
                                         const struct grouped_rows *dy, const struct grouped_rows *x,
                                         struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    struct work *work = &experts->call->work;
    if (wants(backward, which)) {
        const struct grouped_gradient job = {&experts->groups, *dy, *x, output_view(backward, which)};
        TRY(work_grouped_gradient(work, &job, error));
    }
    if (wants(backward, bias) && !work->is_measuring) {
        const struct opaq_view sums = output_view(backward, bias);
        const struct quant_matrix rows = quant_matrix_make(&dy->view);
        TRY(work->backend->column_sum(&experts->groups, &rows, &sums, work->execution, error));
    }
    return OPAQ_OK;
}

/* dr = sum of a da (+ dy . bias), where router weights multiply the output. */
static enum opaq_status router_gradient(struct backward *backward, const struct opaq_view *da,
                                        struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    const struct opaq_experts_plan *plan = experts->plan;
    struct work *work = &experts->call->work;
    struct operand_form seen = form_along(OPAQ_ROWWISE);
    if (plan->backward == OPAQ_BACKWARD_DEQUANTIZED &&
        is_quantized(&plan->h)) { /* the operand of the forward's product */
        seen = forward_form(&plan->h, NULL, experts->random, EXPERTS_H);
        seen.is_dequantized = true;
    }
    const struct row_dot dot = {.groups = &experts->groups,
                                .a = sorted_rows(&backward->a, seen),
                                .b = *da,
                                .result = backward->router.buffer[0].data};
    TRY(work_row_dot(work, &dot, error));
    if (experts->has_down_bias) {
        const struct row_dot bias = {
            .groups = &experts->groups,
            .a = experts_token_rows(experts, &backward->dy, false, form_along(OPAQ_ROWWISE)),
            .b = experts->down_bias,
            .is_b_per_group = true,
            .adds = true,
            .result = backward->router.buffer[0].data};
        TRY(work_row_dot(work, &bias, error));
    }
    return OPAQ_OK;
}

/* The second product's gradients: da (times r), the router's, ddown. */
static enum opaq_status backward_down(struct backward *backward, struct opaq_view *da,
                                      struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    const struct opaq_experts_plan *plan = experts->plan;
    struct work *work = &experts->call->work;
    const bool has_weights = experts->is_routed && !plan->weights_on_input;
    TRY(experts_matrix(experts, experts->inner, OPAQ_F32, da, error));
    const struct grouped_product product = {
        .groups = &experts->groups,
        .a = experts_token_rows(experts, &backward->dy, false,
                                gradient_form(backward, OPAQ_ROWWISE, EXPERTS_DY)),
        .w = {experts->down.view, kept(backward, &plan->w, EXPERTS_W2)},
        .any_order = plan->order == OPAQ_ORDER_ANY,
        .precision = plan->precision,
        .result = GROUPED_STORE,
        .c = quant_matrix_make(da)};
    TRY(work_grouped_product(work, &product, error));
    if (has_weights && wants(backward, DROUTER)) {
        TRY(router_gradient(backward, da, error));
    }
    if (has_weights && !work->is_measuring) {
        TRY(work->backend->weigh_rows(&experts->groups, &product.c, work->execution, error));
    }
    if (wants(backward, DDOWN) || wants(backward, DDOWN_BIAS)) {
        struct opaq_view weighted;
        TRY(gather(backward, &backward->dy, ROWS_BY_TOKEN, has_weights, &weighted, error));
        const struct grouped_rows dy =
            sorted_rows(&weighted, gradient_form(backward, OPAQ_COLUMNWISE, EXPERTS_DY));
        const struct grouped_rows a = sorted_rows(&backward->a, kept(backward, &plan->h, EXPERTS_H));
        TRY(weight_gradients(backward, DDOWN, DDOWN_BIAS, &dy, &a, error));
    }
    return OPAQ_OK;
}

/* dx = dh gate_up, and the router's gradient where its weights multiply the input. */
static enum opaq_status input_gradient(struct backward *backward, const struct opaq_view *dh,
                                       struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    const struct opaq_experts_plan *plan = experts->plan;
    struct grouped_product job = {.groups = &experts->groups,
                                  .a = sorted_rows(dh, gradient_form(backward, OPAQ_ROWWISE, EXPERTS_DH)),
                                  .w = {experts->gate_up.view, kept(backward, &plan->w, EXPERTS_W1)},
                                  .any_order = plan->order == OPAQ_ORDER_ANY,
                                  .precision = plan->precision};
    if (experts->is_routed) {
        job.result = GROUPED_COMBINE;
        job.sums = quant_matrix_make(&backward->dx_sums);
        job.is_weighted = plan->weights_on_input != 0;
        if (plan->weights_on_input && wants(backward, DROUTER)) {
            job.dot = quant_matrix_make(&experts->x);
            job.dot_result = backward->router.buffer[0].data;
        }
    } else {
        const struct opaq_view dx = output_view(backward, DX);
        job.result = GROUPED_STORE;
        job.c = quant_matrix_make(&dx);
    }
    return work_grouped_product(&experts->call->work, &job, error);
}

/* The first product's gradients. */
static enum opaq_status backward_gate_up(struct backward *backward, const struct opaq_view *da,
                                         struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    const struct opaq_experts_plan *plan = experts->plan;
    struct work *work = &experts->call->work;
    const bool on_input = plan->weights_on_input != 0;
    struct opaq_view dh;
    TRY(experts_matrix(experts, experts->width, experts->dtype, &dh, error));
    if (!work->is_measuring) {
        const struct quant_matrix h = quant_matrix_make(&backward->h_rows);
        const struct quant_matrix upstream = quant_matrix_make(da);
        const struct quant_matrix to = quant_matrix_make(&dh);
        TRY(work->backend->activate_backward(&experts->groups, plan, &h, &upstream, &to, work->execution,
                                             error));
    }
    if (wants(backward, DX) || (on_input && wants(backward, DROUTER))) {
        TRY(input_gradient(backward, &dh, error));
    }
    const struct grouped_rows dh_rows = sorted_rows(&dh, gradient_form(backward, OPAQ_COLUMNWISE, EXPERTS_DH));
    const struct grouped_rows x =
        experts_token_rows(experts, &experts->x, on_input, kept(backward, &plan->x, EXPERTS_X));
    return weight_gradients(backward, DGATE_UP, DGATE_UP_BIAS, &dh_rows, &x, error);
}

static enum opaq_status activate(struct backward *backward, struct opaq_error *error) {
    struct experts *experts = &backward->experts;
    struct work *work = &experts->call->work;
    TRY(gather(backward, &backward->h, ROWS_BY_SLOT, false, &backward->h_rows, error));
    TRY(experts_matrix(experts, experts->inner, experts->dtype, &backward->a, error));
    const struct quant_matrix h = quant_matrix_make(&backward->h_rows);
    const struct quant_matrix a = quant_matrix_make(&backward->a);
    return work->is_measuring
               ? OPAQ_OK
               : work->backend->activate(&experts->groups, experts->plan, &h, &a, work->execution, error);
}

/* Copies the router's gradients, by slot, to the output. */
static enum opaq_status store_router(struct backward *backward, struct opaq_error *error) {
    struct work *work = &backward->experts.call->work;
    const struct opaq_view view = output_view(backward, DROUTER);
    const struct quant_matrix to = quant_matrix_make(&view);
    struct quant_matrix from = quant_matrix_make(&backward->router);
    from.rows = to.rows;
    from.columns = to.columns;
    from.row_step = to.columns;
    return work->is_measuring ? OPAQ_OK : work->backend->convert_rows(&from, &to, work->execution, error);
}

enum opaq_status run_experts_backward(struct op_call *call, struct opaq_error *error) {
    struct backward backward;
    struct experts *experts = &backward.experts;
    struct work *work = &call->work;
    struct opaq_view da;
    memset(&backward, 0, sizeof backward);
    TRY(experts_begin(call, experts, error));
    TRY(read_gradients(&backward, error));
    const bool has_router = experts->is_routed && wants(&backward, DROUTER);
    if (experts->is_routed) {
        TRY(experts_sums(experts, &backward.dx_sums, error));
    }
    if (has_router) {
        TRY(experts_matrix(experts, 1, OPAQ_F32, &backward.router, error));
        if (!work->is_measuring) {
            TRY(work->backend->zero(backward.router.buffer[0].data, backward.router.buffer[0].bytes,
                                    work->execution, error));
        }
    }
    TRY(activate(&backward, error));
    TRY(backward_down(&backward, &da, error));
    TRY(backward_gate_up(&backward, &da, error));
    if (experts->is_routed && wants(&backward, DX)) {
        TRY(experts_store_sums(experts, &backward.dx_sums, DX, error));
    }
    return has_router ? store_router(&backward, error) : OPAQ_OK;
}

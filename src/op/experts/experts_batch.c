/* op/experts/experts_batch.c: the forward of many experts at once.
 *
 * Rows, sorted by expert, go in lots: multiplied with each expert's first weight, activated by the thread that
 * made both halves, multiplied with the second, added to their tokens. A lot has some experts' rows, or some of the rows
 * of one that has many. */
#include "op/experts/experts_batch.h"

#include <string.h>

#include "base/checked.h"
#include "cpu/gemm/packed_batch.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation.h"
#include "opaq/status.h"

enum { LOT_ROWS = 1024, STRETCH = ACTIVATION_STRETCH, Y = 0 };

/* Some rows, in the order of experts, and what becomes of them. */
struct lot {
    struct experts *experts;
    int64_t first; /* of the sorted slots, or of the rows of x */
    int64_t rows;
    int64_t count;   /* of segments */
    int64_t *source; /* the rows of x, where has_source() */
    int64_t *expert;
    struct linear_operand *gate_up, *down;
    struct packed_segment *up_segments, *down_segments;
    struct opaq_view x; /* all rows, or these together */
    struct opaq_view h; /* float32 */
    struct opaq_view a;
    struct opaq_view y; /* float32 */
};

static bool is_interleaved(const struct experts *experts) {
    return experts->plan.activation == OPAQ_SWIGLU_OAI;
}

static bool is_gated(const struct experts *experts) {
    return opaq_activation_is_gated((enum opaq_activation)experts->plan.activation) != 0;
}

/* Columns from a gate to its factor, where these are not neighbours. */
static int64_t partner_of(const struct experts *experts) {
    return is_gated(experts) && !is_interleaved(experts) ? experts->inner : 0;
}

/* Whether kernels for tiles multiply with a stack. */
static bool is_tiled(struct experts *experts, const struct weight_stack *stack, struct linear_operand *whole) {
    const struct opaq_proto *proto = &stack->view.proto;
    struct opaq_error error;
    if (!proto->is_quantized || (proto->spec.usage & OPAQ_ROWWISE) == 0 ||
        linear_operand(&experts->linear, &stack->view, OPAQ_ROWWISE, whole, &error) != OPAQ_OK) {
        return false;
    }
    if (experts->linear.is_measuring) {
        whole->job.copy[0].data = NULL; /* as if it were aligned */
    }
    const struct gemm_job job = {.a = {.plain = {.dtype = experts->dtype}}, .b = whole->gemm};
    return packed_can_run(&job, (enum packed_precision)experts->linear.plan.precision);
}

bool experts_batch_can_run(struct experts *experts) {
    const struct opaq_experts_plan *plan = &experts->plan;
    const int64_t partner = partner_of(experts);
    const int64_t limit = (int64_t)1 << 32; /* of sizes, so that memory can be counted without care */
    struct linear_operand whole;
    if (is_quantized(&plan->x) || is_quantized(&plan->h) || experts->hidden > limit || experts->width > limit ||
        experts->rows > limit || experts->gate_up.count == 0 || !is_tiled(experts, &experts->down, &whole) ||
        !is_tiled(experts, &experts->gate_up, &whole)) {
        return false;
    }
    whole.gemm.plain.rows = experts->width;
    return partner == 0 || packed_batch_can_pair(&whole.gemm, partner);
}

/* ---- which rows ---- */

/* The expert that has row `first` of all that are sorted. */
static int64_t expert_at(const struct routing *routing, int64_t first, int64_t from) {
    while (routing->first[from + 1] <= first) {
        ++from;
    }
    return from;
}

/* Rows from `first` on, at most LOT_ROWS: whole experts, or a part of one. */
static void choose_rows(struct lot *lot, int64_t all) {
    const struct experts *experts = lot->experts;
    const struct routing *routing = &experts->routing;
    lot->rows = min_int64(LOT_ROWS, all - lot->first);
    lot->count = 0;
    if (experts->linear.is_measuring) {
        lot->count = experts->is_routed ? min_int64(experts->gate_up.count, lot->rows) : 1;
        return;
    }
    int64_t expert = 0;
    for (int64_t row = 0; row < lot->rows;) {
        int64_t end = lot->rows;
        if (experts->is_routed) {
            expert = expert_at(routing, lot->first + row, expert);
            end = min_int64(end, routing->first[expert + 1] - lot->first);
        }
        lot->expert[lot->count] = expert;
        lot->up_segments[lot->count] = (struct packed_segment){.first = row, .rows = end - row};
        lot->down_segments[lot->count] = (struct packed_segment){.first = row, .rows = end - row};
        ++lot->count;
        row = end;
    }
}

/* Each segment's two weights. While measuring the first expert's stand for all. */
static enum opaq_status choose_weights(struct lot *lot, struct opaq_error *error) {
    struct experts *experts = lot->experts;
    const int64_t count = experts->linear.is_measuring ? 1 : lot->count;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t index = experts->linear.is_measuring ? 0 : lot->expert[i];
        const struct weight_use up = experts_use(experts, index, EXPERTS_W1);
        const struct weight_use down = experts_use(experts, index, EXPERTS_W2);
        enum opaq_status status =
            weight_forward_operand(&experts->linear, &experts->gate_up, &up, &lot->gate_up[i], error);
        if (status == OPAQ_OK) {
            status = weight_forward_operand(&experts->linear, &experts->down, &down, &lot->down[i], error);
        }
        if (status != OPAQ_OK) {
            return status;
        }
        lot->up_segments[i].b = lot->gate_up[i].gemm;
        lot->down_segments[i].b = lot->down[i].gemm;
    }
    return OPAQ_OK;
}

/* ---- what is done ---- */

/* Whether rows are gathered while they are prepared, and not before. */
static bool has_source(const struct experts *experts) {
    return experts->is_routed && experts->plan.weights_on_input == 0;
}

/* The rows that the first product reads. Weights on the input change them, so these are gathered. */
static enum opaq_status choose_x(struct lot *lot, struct opaq_error *error) {
    struct experts *experts = lot->experts;
    const bool is_measuring = experts->linear.is_measuring;
    const int64_t *slots = experts->is_routed && !is_measuring ? experts->routing.slot + lot->first : NULL;
    lot->x = experts->x;
    for (int64_t row = 0; has_source(experts) && !is_measuring && row < lot->rows; ++row) {
        lot->source[row] = slots[row] / experts->routing.choices;
    }
    if (!experts->is_routed || has_source(experts)) {
        return OPAQ_OK;
    }
    const struct experts_group group = {.rows = lot->rows,
                                        .by_token = {&experts->routing, slots, lot->rows, true, NULL}};
    return experts_gather(experts, &group, &experts->x, true, true, &lot->x, error);
}

/* n float32 results of a row, `step` apart, with their bias. */
static void biased_results(const float *results, const struct opaq_view *bias, int64_t column, int64_t step,
                           int n, float *to) {
    float added[STRETCH];
    for (int i = 0; i < n; ++i) {
        to[i] = results[column + i * step];
    }
    if (bias != NULL) {
        plain_load(bias->buffer[0].data, (enum opaq_element)bias->proto.dtype, column, step, n, added);
        for (int i = 0; i < n; ++i) {
            to[i] += added[i];
        }
    }
}

static const struct opaq_view *bias_of(const struct lot *lot, bool is_there, const struct opaq_view *biases,
                                       int64_t index, struct opaq_view *bias) {
    if (!is_there) {
        return NULL;
    }
    *bias = weight_bias_at(biases, lot->expert[index]);
    return bias;
}

/* Columns [begin, end) of h, with their partners, become columns of a. */
static void activate(void *argument, const struct packed_segment *segment, int64_t begin, int64_t end) {
    const struct lot *lot = argument;
    const struct experts *experts = lot->experts;
    const int64_t step = is_interleaved(experts) ? 2 : 1;
    const int64_t to_factor = is_interleaved(experts) ? 1 : experts->inner;
    const enum opaq_element dtype = experts->dtype;
    float g[STRETCH];
    float u[STRETCH];
    struct opaq_view row_bias;
    const struct opaq_view *bias =
        bias_of(lot, experts->has_gate_up_bias, &experts->gate_up_bias, segment - lot->up_segments, &row_bias);
    for (int64_t row = segment->first; row < segment->first + segment->rows; ++row) {
        const float *const h = (const float *)lot->h.buffer[0].data + row * experts->width;
        for (int64_t column = begin; column < end; column += STRETCH * step) {
            const int n = (int)min_int64(STRETCH, (end - column) / step);
            biased_results(h, bias, column, step, n, g);
            if (is_gated(experts)) {
                biased_results(h, bias, column + to_factor, step, n, u);
            }
            activation_stretch(&experts->plan, dtype, g, u, n,
                               (char *)lot->a.buffer[0].data +
                                   plain_bytes(dtype, row * experts->inner + column / step));
        }
    }
}

/* Columns [begin, end) of y get their bias and, where nothing is routed, are the output. */
static void conclude(void *argument, const struct packed_segment *segment, int64_t begin, int64_t end) {
    const struct lot *lot = argument;
    const struct experts *experts = lot->experts;
    struct opaq_view row_bias;
    const struct opaq_view *bias =
        bias_of(lot, experts->has_down_bias, &experts->down_bias, segment - lot->down_segments, &row_bias);
    const struct opaq_view output =
        experts->is_routed ? (struct opaq_view){.row_stride = 0} : linear_plain_output(&experts->linear, Y);
    for (int64_t row = segment->first; row < segment->first + segment->rows; ++row) {
        float *const y = (float *)lot->y.buffer[0].data + row * experts->hidden;
        float added[STRETCH];
        for (int64_t column = begin; column < end; column += STRETCH) {
            const int n = (int)min_int64(STRETCH, end - column);
            if (bias != NULL) {
                plain_load(bias->buffer[0].data, (enum opaq_element)bias->proto.dtype, column, 1, n, added);
                for (int i = 0; i < n; ++i) {
                    y[column + i] += added[i];
                }
            }
            if (!experts->is_routed) {
                plain_store(output.buffer[0].data, experts->dtype,
                            (lot->first + row) * experts->hidden + column, 1, n, y + column);
            }
        }
    }
}

static void multiply(struct lot *lot, const struct packed_batch *batch) {
    struct linear *linear = &lot->experts->linear;
    const size_t mark = linear->scratch.used;
    void *memory = scratch_take(&linear->scratch, packed_batch_bytes(batch));
    linear->scratch.used = mark;
    if (!linear->is_measuring) {
        packed_batch_run(batch, memory, linear->call->parallel);
    }
}

static void run_products(struct lot *lot) {
    struct experts *experts = lot->experts;
    const enum packed_precision wanted = (enum packed_precision)experts->linear.plan.precision;
    const bool finishes = experts->has_down_bias || !experts->is_routed;
    const struct packed_batch up = {.a = {.plain = quant_matrix_make(&lot->x)},
                                    .first = experts->is_routed ? 0 : lot->first,
                                    .rows = lot->rows,
                                    .source = has_source(experts) ? lot->source : NULL,
                                    .y_step = experts->width,
                                    .segments = lot->up_segments,
                                    .count = lot->count,
                                    .wanted = wanted,
                                    .y = lot->h.buffer[0].data,
                                    .partner = partner_of(experts),
                                    .finish = activate,
                                    .argument = lot};
    const struct packed_batch down = {.a = {.plain = quant_matrix_make(&lot->a)},
                                      .rows = lot->rows,
                                      .y_step = experts->hidden,
                                      .segments = lot->down_segments,
                                      .count = lot->count,
                                      .wanted = wanted,
                                      .y = lot->y.buffer[0].data,
                                      .finish = finishes ? conclude : NULL,
                                      .argument = lot};
    multiply(lot, &up);
    multiply(lot, &down);
}

static enum opaq_status run_lot(struct lot *lot, struct opaq_error *error) {
    struct experts *experts = lot->experts;
    struct linear *linear = &experts->linear;
    enum opaq_status status = choose_weights(lot, error);
    if (status == OPAQ_OK) {
        status = choose_x(lot, error);
    }
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, lot->rows, experts->width, OPAQ_F32, &lot->h, error);
    }
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, lot->rows, experts->inner, experts->dtype, &lot->a, error);
    }
    if (status == OPAQ_OK) {
        status = linear_matrix(linear, lot->rows, experts->hidden, OPAQ_F32, &lot->y, error);
    }
    if (status == OPAQ_OK) {
        run_products(lot);
    }
    return status;
}

static void add_to_tokens(const struct lot *lot, float *sums) {
    const struct experts *experts = lot->experts;
    const struct routing_gather gather = {&experts->routing, experts->routing.slot + lot->first, lot->rows,
                                          true,
                                          experts->plan.weights_on_input ? NULL : experts->routing.weight};
    const struct quant_matrix results = quant_matrix_make(&lot->y);
    routing_add(&gather, &results, sums, experts->hidden, experts->linear.call->parallel);
}

enum opaq_status experts_batch_forward(struct experts *experts, struct opaq_error *error) {
    struct scratch *scratch = &experts->linear.scratch;
    const struct routing *routing = &experts->routing;
    const bool is_measuring = experts->linear.is_measuring;
    const int64_t all = !experts->is_routed ? experts->rows
                        : is_measuring      ? routing->tokens * routing->choices
                                            : routing->first[routing->experts];
    const int64_t most = min_int64(all, experts->is_routed ? min_int64(LOT_ROWS, experts->gate_up.count) : 1);
    struct linear_operand weights[2];
    struct packed_segment segments[2] = {{.rows = 0}, {.rows = 0}};
    struct lot lot = {.experts = experts};
    float *sums = NULL;
    enum opaq_status status = experts->is_routed ? experts_sums(experts, &sums, error) : OPAQ_OK;
    lot.source =
        scratch_take_array(scratch, has_source(experts) ? min_int64(all, LOT_ROWS) : 0, sizeof *lot.source);
    lot.expert = scratch_take_array(scratch, most, sizeof *lot.expert);
    lot.gate_up = scratch_take_array(scratch, most, sizeof *lot.gate_up);
    lot.down = scratch_take_array(scratch, most, sizeof *lot.down);
    lot.up_segments = scratch_take_array(scratch, most, sizeof *lot.up_segments);
    lot.down_segments = scratch_take_array(scratch, most, sizeof *lot.down_segments);
    if (is_measuring) { /* one stands for all */
        lot.gate_up = &weights[0];
        lot.down = &weights[1];
        lot.up_segments = &segments[0];
        lot.down_segments = &segments[1];
    }
    const size_t mark = scratch->used;
    for (lot.first = 0; status == OPAQ_OK && lot.first < all; lot.first += lot.rows) {
        scratch->used = mark;
        choose_rows(&lot, all);
        status = run_lot(&lot, error);
        if (is_measuring) {
            return status; /* the first lot is the largest */
        }
        if (status == OPAQ_OK && experts->is_routed) {
            add_to_tokens(&lot, sums);
        }
    }
    if (status == OPAQ_OK && experts->is_routed && !is_measuring) {
        experts_store_sums(experts, sums, Y);
    }
    return status;
}

/* op/table/op_table.c: one row per operator. A new operator appends its row here and its functions in a file of its
 * own; schema, fake, allocation and call follow. */
#include "op/table/op_table.h"

#include <stddef.h>
#include <string.h>

/* clang-format off */
#define TENSOR(name)            {name, OPAQ_ARGUMENT_TENSOR, NULL}
#define OPTIONAL(name)          {name, OPAQ_ARGUMENT_OPTIONAL_TENSOR, "None"}
#define MAYBE(name)             {name, OPAQ_ARGUMENT_OPTIONAL_TENSOR, NULL} /* no default: None must be passed */
#define CHANGED(name)           {name, OPAQ_ARGUMENT_CHANGED_TENSOR, "None"}
#define LIST(name)              {name, OPAQ_ARGUMENT_TENSOR_LIST, NULL}
#define TEXT(name)              {name, OPAQ_ARGUMENT_TEXT, NULL}
#define SIZES(name)             {name, OPAQ_ARGUMENT_SIZES, NULL}
#define DTYPE(name)             {name, OPAQ_ARGUMENT_DTYPE, NULL}
#define INT(name, value)        {name, OPAQ_ARGUMENT_INT, value}
#define SYMINT(name)            {name, OPAQ_ARGUMENT_SYMINT, NULL}

/* outputs: name, and which arguments give shape, dtype and device */
#define LIKE(name, tensor)                          {name, OPAQ_SHAPE_OF_TENSOR, tensor, 0, tensor, 0, tensor, 0, 0}
#define SHAPED(name, sizes, dtype, device, slots)   {name, OPAQ_SHAPE_OF_SIZES, sizes, 0, dtype, 0, device, slots, 0}
#define SAVED(name, sizes, dtype, device)           {name, OPAQ_SHAPE_OF_SIZES_FLAT, sizes, 0, dtype, 0, device, 0, 0}
#define FLOATS(name, count, device)                 {name, OPAQ_SHAPE_CONSTANT, count, 0, -1, OPAQ_DTYPE_F32, device, 0, 0}
#define RANDOM(name, count, device)                 {name, OPAQ_SHAPE_CONSTANT, count, 0, -1, OPAQ_DTYPE_I64, device, 0, 1}
#define PRODUCT(name, sizes, first, dtype, device)  {name, OPAQ_SHAPE_LEADING_AND_FIRST, sizes, first, dtype, 0, device, 0, 0}
#define OUTER(name, tensor, sizes)                  {name, OPAQ_SHAPE_LEADING_AND_OUTER, tensor, sizes, tensor, 0, tensor, 0, 0}
#define SIZED(name, tensor, integer)                {name, OPAQ_SHAPE_LEADING_AND_INT, tensor, integer, tensor, 0, tensor, 0, 0}
#define SLOTS(name, tensor, sizes, dtype)           {name, OPAQ_SHAPE_TENSOR_AND_OUTER, tensor, sizes, dtype, 0, tensor, 0, 0}
#define PER_MATRIX(name, sizes, dtype, device)      {name, OPAQ_SHAPE_LEADING, sizes, 0, dtype, 0, device, 0, 0}
#define PER_ROW(name, sizes, dtype, device, slots)  {name, OPAQ_SHAPE_FIRST, sizes, 0, dtype, 0, device, slots, 0}

static const struct op_row rows[] = {
    /* x to the buffers of a quantizer, in flatten order. scale: +delayed. amax_*: given instead of computed.
     * random: int64 (seed, offset), for +sr. */
    {{"quantize", 6,
     {TENSOR("x"), TEXT("quantizer"), OPTIONAL("scale"), OPTIONAL("amax_rowwise"), OPTIONAL("amax_columnwise"),
      OPTIONAL("random")},
     1, {LIKE("buffers", 0)}, 0},
     PLAN_SPEC, 1, false, form_quantizer, run_quantize},
    /* buffers to a plain tensor, from the copy that usage names: 0 either, 1 rowwise, 2 columnwise */
    {{"dequantize", 5,
     {LIST("buffers"), TEXT("quantizer"), SIZES("shape"), DTYPE("dtype"), INT("usage", "0")},
     1, {SHAPED("y", 2, 3, 0, 0)}, 1},
     PLAN_SPEC, 1, false, NULL, run_dequantize},
    /* the same tensor with other usages or the other scale order, where that needs no new rounding */
    {{"convert", 5,
     {LIST("buffers"), TEXT("quantizer"), TEXT("to"), SIZES("shape"), DTYPE("dtype")},
     1, {SHAPED("buffers", 3, 4, 0, 0)}, 0},
     PLAN_SPECS, 1, false, form_converted, run_convert},
    /* rows from `start` on, as many as shape `to` has, of a tensor of shape `shape` */
    {{"slice_rows", 6,
     {LIST("buffers"), TEXT("quantizer"), SIZES("shape"), SIZES("to"), DTYPE("dtype"), SYMINT("start")},
     1, {SHAPED("buffers", 3, 4, 0, 0)}, 0},
     PLAN_SPEC, 1, false, form_quantizer, run_slice_rows},
    /* the inverse: each buffer holds those of equal shards of shape `shape`, one after another; `to` is the whole
     * shape */
    {{"gather_rows", 5,
     {LIST("buffers"), TEXT("quantizer"), SIZES("shape"), SIZES("to"), DTYPE("dtype")},
     1, {SHAPED("buffers", 3, 4, 0, 0)}, 0},
     PLAN_SPEC, 1, false, form_quantizer, run_gather_rows},
    /* x's amax as a rowwise copy has it, and as a columnwise one: to be reduced over ranks and given to quantize */
    {{"amax", 2,
     {TENSOR("x"), TEXT("quantizer")},
     1, {FLOATS("amax", 2, 0)}, 1},
     PLAN_SPEC, 1, false, NULL, run_amax},
    /* y = x w^T + bias by a plan (docs/linear.md), and what the backward needs that is not an argument. x, w: one plain
     * tensor or a quantized one's buffers. scale: of x, w and y, for delayed scaling. */
    {{"linear_forward", 8,
     {LIST("x"), LIST("w"), MAYBE("bias"), SIZES("x_shape"), SIZES("w_shape"), DTYPE("dtype"), TEXT("plan"),
      OPTIONAL("scale")},
     5, {PRODUCT("y", 3, 4, 5, 0), SAVED("x_saved", 3, 5, 0), SHAPED("w_saved", 4, 5, 0, 0), FLOATS("amax", 3, 0),
         RANDOM("random", 2, 0)}, 0},
     PLAN_TRAINING, 6, true, form_linear_forward, run_linear_forward},
    /* the gradients. x, w: what the forward saved, or its arguments where that is the same */
    {{"linear_backward", 9,
     {LIST("dy"), LIST("x"), LIST("w"), SIZES("x_shape"), SIZES("w_shape"), DTYPE("x_dtype"), DTYPE("w_dtype"),
      TEXT("plan"), OPTIONAL("random")},
     3, {SHAPED("dx", 3, 5, 0, 0), SHAPED("dw", 4, 6, 0, 0), PER_ROW("dbias", 4, 6, 0, 0)}, 0},
     PLAN_TRAINING, 7, true, form_linear_backward, run_linear_backward},
    /* the same with arguments that are changed: main_grad, to which dw is added; delayed scaling's state, which is
     * updated with the amaxes of the forward and of the backward */
    {{"linear_backward_changing", 15,
     {LIST("dy"), LIST("x"), LIST("w"), SIZES("x_shape"), SIZES("w_shape"), DTYPE("x_dtype"), DTYPE("w_dtype"),
      TEXT("plan"), OPTIONAL("random"), OPTIONAL("amax"), CHANGED("main_grad"), CHANGED("scale_fwd"),
      CHANGED("amax_history_fwd"), CHANGED("scale_bwd"), CHANGED("amax_history_bwd")},
     3, {SHAPED("dx", 3, 5, 0, 3), SHAPED("dw", 4, 6, 0, 1), PER_ROW("dbias", 4, 6, 0, 1)}, 0},
     PLAN_TRAINING, 7, true, form_linear_backward, run_linear_backward},
    /* linear_forward where something is rounded stochastically. PyTorch then saves the generator's state for the
     * recomputation, and takes the generator's device from `like`, any of the tensors, because it does not search
     * lists. */
    {{"linear_forward_random", 9,
     {LIST("x"), LIST("w"), MAYBE("bias"), SIZES("x_shape"), SIZES("w_shape"), DTYPE("dtype"), TEXT("plan"),
      OPTIONAL("scale"), OPTIONAL("like")},
     5, {PRODUCT("y", 3, 4, 5, 0), SAVED("x_saved", 3, 5, 0), SHAPED("w_saved", 4, 5, 0, 0), FLOATS("amax", 3, 0),
         RANDOM("random", 2, 0)}, 0},
     PLAN_TRAINING, 6, true, form_linear_forward, run_linear_forward},
    /* y = x w^T + bias for inference, which saves nothing. The plan has x=, w= and w_given= only.
     * input_scale: of a checkpoint; the scale of a delayed x, else its amax. */
    {{"linear", 6,
     {TENSOR("x"), LIST("w"), MAYBE("bias"), SIZES("w_shape"), TEXT("plan"), OPTIONAL("input_scale")},
     1, {OUTER("y", 0, 3)}, 1},
     PLAN_LINEAR, 4, true, NULL, run_linear},
    /* y = activation(x gate_up^T + bias) down^T + bias by a plan (docs/experts.md) */
    {{"mlp", 10,
     {TENSOR("x"), LIST("gate_up"), LIST("down"), MAYBE("gate_up_bias"), MAYBE("down_bias"), SIZES("gate_up_shape"),
      SIZES("down_shape"), TEXT("plan"), OPTIONAL("input_scale"), OPTIONAL("hidden_scale")},
     1, {OUTER("y", 0, 6)}, 1},
     PLAN_EXPERTS, 7, true, NULL, run_experts_forward},
    /* the same for the experts that each token selects, multiplied with their router weights and summed */
    {{"moe", 12,
     {TENSOR("hidden_states"), TENSOR("topk_weights"), TENSOR("topk_ids"), LIST("gate_up"), LIST("down"),
      MAYBE("gate_up_bias"), MAYBE("down_bias"), SIZES("gate_up_shape"), SIZES("down_shape"), TEXT("plan"),
      OPTIONAL("input_scale"), OPTIONAL("hidden_scale")},
     1, {OUTER("y", 0, 8)}, 1},
     PLAN_EXPERTS, 9, true, NULL, run_experts_forward},
    /* the same for training: y, and h, which the backward reads */
    {{"mlp_forward", 11,
     {TENSOR("x"), LIST("gate_up"), LIST("down"), MAYBE("gate_up_bias"), MAYBE("down_bias"), SIZES("gate_up_shape"),
      SIZES("down_shape"), TEXT("plan"), OPTIONAL("random"), OPTIONAL("input_scale"), OPTIONAL("hidden_scale")},
     2, {OUTER("y", 0, 6), OUTER("h", 0, 5)}, 0},
     PLAN_EXPERTS, 7, true, NULL, run_experts_forward},
    {{"moe_forward", 13,
     {TENSOR("hidden_states"), TENSOR("topk_weights"), TENSOR("topk_ids"), LIST("gate_up"), LIST("down"),
      MAYBE("gate_up_bias"), MAYBE("down_bias"), SIZES("gate_up_shape"), SIZES("down_shape"), TEXT("plan"),
      OPTIONAL("random"), OPTIONAL("input_scale"), OPTIONAL("hidden_scale")},
     2, {OUTER("y", 0, 8), SLOTS("h", 2, 7, 0)}, 0},
     PLAN_EXPERTS, 9, true, NULL, run_experts_forward},
    /* the gradients of mlp_forward */
    {{"mlp_backward", 10,
     {TENSOR("dy"), TENSOR("x"), TENSOR("h"), LIST("gate_up"), LIST("down"), SIZES("gate_up_shape"),
      SIZES("down_shape"), DTYPE("w_dtype"), TEXT("plan"), OPTIONAL("random")},
     5, {LIKE("dx", 1), SHAPED("dgate_up", 5, 7, 0, 0), SHAPED("ddown", 6, 7, 0, 0), PER_MATRIX("dgate_up_bias", 5, 7, 0),
         PER_MATRIX("ddown_bias", 6, 7, 0)}, 0},
     PLAN_EXPERTS, 8, true, form_mlp_backward, run_experts_backward},
    {{"moe_backward", 13,
     {TENSOR("dy"), TENSOR("hidden_states"), TENSOR("topk_weights"), TENSOR("topk_ids"), TENSOR("h"), LIST("gate_up"),
      LIST("down"), MAYBE("down_bias"), SIZES("gate_up_shape"), SIZES("down_shape"), DTYPE("w_dtype"), TEXT("plan"),
      OPTIONAL("random")},
     6, {LIKE("dx", 1), LIKE("dtopk_weights", 2), SHAPED("dgate_up", 8, 10, 0, 0), SHAPED("ddown", 9, 10, 0, 0),
         PER_MATRIX("dgate_up_bias", 8, 10, 0), PER_MATRIX("ddown_bias", 9, 10, 0)}, 0},
     PLAN_EXPERTS, 11, true, form_moe_backward, run_experts_backward},
    /* y = x w^T + bias for consecutive rows of x, splits[e] of them with weight e; and the gradients. The plan is that
     * of linear_forward. */
    {{"grouped_linear", 7,
     {TENSOR("x"), TENSOR("splits"), LIST("w"), MAYBE("bias"), SIZES("w_shape"), TEXT("plan"), OPTIONAL("random")},
     1, {OUTER("y", 0, 4)}, 1},
     PLAN_LINEAR, 5, true, NULL, run_grouped_linear},
    {{"grouped_linear_backward", 8,
     {TENSOR("dy"), TENSOR("x"), TENSOR("splits"), LIST("w"), SIZES("w_shape"), DTYPE("w_dtype"), TEXT("plan"),
      OPTIONAL("random")},
     3, {LIKE("dx", 1), SHAPED("dw", 4, 5, 0, 0), PER_MATRIX("dbias", 4, 5, 0)}, 0},
     PLAN_LINEAR, 6, true, form_grouped_linear_backward, run_grouped_linear_backward},
    /* two random integers, (seed, offset), for operators that round stochastically and draw none themselves */
    {{"random_state", 1,
     {TENSOR("like")},
     1, {RANDOM("random", 2, 0)}, 1},
     PLAN_NONE, 0, false, NULL, run_random_state},
    /* the update of delayed scaling, for amaxes that were reduced over ranks */
    {{"delayed_update", 3,
     {TEXT("plan"), CHANGED("scale"), CHANGED("amax_history")},
     0, {{NULL, OPAQ_SHAPE_CONSTANT, 0, 0, 0, 0, 0, 0, 0}}, 0},
     PLAN_TRAINING, 0, false, NULL, run_delayed_update},
    /* what a runner (opaq/runner.h) computes. The size is the runner's; as an argument, so that a fake needs no
     * runner. */
    {{"linear_gemm", 3,
     {TENSOR("x"), SYMINT("runner_id"), SYMINT("out_features")},
     1, {SIZED("y", 0, 2)}, 1},
     PLAN_NONE, 0, true, NULL, run_gemm},
    {{"mlp_gemm", 3,
     {TENSOR("x"), SYMINT("runner_id"), SYMINT("hidden_size")},
     1, {SIZED("y", 0, 2)}, 1},
     PLAN_NONE, 0, true, NULL, run_gemm},
    /* topk_weights, topk_ids: [rows, k], or k for each row of hidden_states in its leading sizes */
    {{"moe_gemm", 5,
     {TENSOR("hidden_states"), TENSOR("topk_weights"), TENSOR("topk_ids"), SYMINT("runner_id"), SYMINT("hidden_size")},
     1, {SIZED("y", 0, 4)}, 1},
     PLAN_NONE, 0, true, NULL, run_gemm},
    /* the gradients of their inputs, for runners of weights; what the second product read is computed again */
    {{"linear_gemm_backward", 3,
     {TENSOR("dy"), SYMINT("runner_id"), SYMINT("in_features")},
     1, {SIZED("dx", 0, 2)}, 1},
     PLAN_NONE, 0, true, NULL, run_gemm},
    {{"mlp_gemm_backward", 4,
     {TENSOR("dy"), TENSOR("x"), SYMINT("runner_id"), SYMINT("hidden_size")},
     1, {LIKE("dx", 1)}, 1},
     PLAN_NONE, 0, true, NULL, run_gemm},
    {{"moe_gemm_backward", 6,
     {TENSOR("dy"), TENSOR("hidden_states"), TENSOR("topk_weights"), TENSOR("topk_ids"), SYMINT("runner_id"),
      SYMINT("hidden_size")},
     2, {LIKE("dx", 1), LIKE("dtopk_weights", 2)}, 0},
     PLAN_NONE, 0, true, NULL, run_gemm},
};
/* clang-format on */
enum { OP_COUNT = sizeof rows / sizeof rows[0] };

int opaq_op_count(void) { return OP_COUNT; }

const struct opaq_op *opaq_op_at(int index) { return index >= 0 && index < OP_COUNT ? &rows[index].op : NULL; }

const struct opaq_op *opaq_op_find(const char *name) {
    for (int i = 0; name != NULL && i < OP_COUNT; ++i) {
        if (strcmp(rows[i].op.name, name) == 0) {
            return &rows[i].op;
        }
    }
    return NULL;
}

const struct op_row *op_row_of(const struct opaq_op *op) {
    const uintptr_t offset = (uintptr_t)op - (uintptr_t)rows;
    const bool is_row = op != NULL && offset < sizeof rows && offset % sizeof rows[0] == 0;
    return is_row ? &rows[offset / sizeof rows[0]] : NULL;
}

_Static_assert(offsetof(struct op_row, op) == 0, "op_row_of takes the address of a row's first member");

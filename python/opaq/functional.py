"""Linear layers, MLPs and mixtures of experts as functions: one forward and one backward operator each, by a
recipe.

For `linear` this file builds the plan (docs/linear.md); the library decides from it what to quantize, save and
compute. `mlp`, `moe` and `grouped_linear` are in opaq/_experts.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opaq._autocast import active, active_group
from opaq._experts import grouped_linear, mlp, moe
from opaq._operators import call_operator, expect_tensors, forms, ops
from opaq._parallel import (
    Parallel,
    agreed_amax,
    all_gather,
    all_reduce,
    check_parallel,
    copy_of,
    gather_rows,
    group_of,
    quantize_shard,
    reduce_rows,
    whole_shape,
)
from opaq._plan import (
    any_quantizer,
    given_by,
    parts_of,
    plan_for,
    plan_get,
    plan_set,
    refuse_packed_gradients,
    results_of,
    wanted_gradients,
)
from opaq._refusals import differentiable_once, refuse_transforms
from opaq.quantized_tensor import LABELS, QuantizedTensor, assemble
from opaq.quantizer import Quantizer, kept, query, with_usage
from opaq.recipe import HIGH_PRECISION, DelayedScaling, LinearQuantizers, Recipe, RecipeLike, as_recipe

__all__ = ["DelayedState", "grouped_linear", "linear", "mlp", "moe", "quantized_linear"]


class DelayedState(NamedTuple):
    """The state of delayed scaling: scales of (input, weight, output) and of (grad_output, grad_input), and
    their amax histories, [length, 3] and [length, 2]. The backward updates it."""

    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor


# ---- forward ----


def _gathered_input(plan: str) -> str:
    """The quantizer of x before it is gathered: rowwise for y, plus the copy that the backward reads."""
    saved = forms("linear_forward", plan)[1]
    rowwise = with_usage(plan_get(plan, "x"), True, False)
    return with_usage(rowwise, True, saved not in (None, rowwise))


def _gather_input(
    x: torch.Tensor, plan: str, scale: torch.Tensor | None, parallel: Parallel
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """Gathers x of a split sequence. Returns the plan for the whole of x, its tensors, and this rank's part to
    save."""
    keeps = "w" in plan_get(plan, "grad")
    if not plan_get(plan, "x"):
        return plan, [all_gather(x, parallel)], [x] if keeps else []
    text, saved = _gathered_input(plan), forms("linear_forward", plan)[1]
    rowwise = with_usage(text, True, False)
    is_delayed = scale is not None and query(text, "is_delayed")
    local = quantize_shard(x, text, parallel, scale[:1] if scale is not None and is_delayed else None)
    parts = gather_rows(copy_of(local, text, rowwise), rowwise, x.shape, x.dtype, parallel)
    kept = copy_of(local, text, saved) if saved else [x] if keeps else []
    return plan_set(plan, x="", x_given=rowwise), parts, kept


def _forward(
    x: torch.Tensor,
    source: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    plan: str,
    parallel: Parallel,
    caller: str,
) -> tuple[torch.Tensor, list[torch.Tensor], list[list[torch.Tensor]]]:
    """Returns y, the tensors of x that the backward needs, and the other results: w_saved, amax, random."""
    shape, parts = tuple(x.shape), parts_of(x)
    kept = parts
    if parallel.gathers_input:
        plan, parts, kept = _gather_input(x, plan, scale, parallel)
        shape = whole_shape(shape, parallel)
    scale = scale if any_quantizer(plan, "is_delayed", "x", "w", "y") else None
    arguments = (parts, parts_of(source), bias, shape, source.shape, x.dtype, plan, scale)
    form, *_, is_random = forms("linear_forward", plan)
    if is_random is None:
        out = call_operator(caller, ops.linear_forward, *arguments)
    else:
        out = call_operator(caller, ops.linear_forward_random, *arguments, parts[0])
    y_parts, x_saved, *others = results_of("linear_forward", plan, out)
    y = QuantizedTensor(y_parts, form, (*shape[:-1], source.shape[0]), x.dtype) if form else y_parts[0]
    if parallel.mode == "row":
        y = reduce_rows(y, parallel)
    return y, x_saved or kept, others


# ---- backward ----


def _gathered_gradient(plan: str) -> str:
    """The quantizer of dy before it is gathered; "" if it is gathered unquantized."""
    text, grad = plan_get(plan, "dy"), plan_get(plan, "grad")
    if not text or plan_get(plan, "backward"):
        return ""
    text = with_usage(text, "x" in grad, "w" in grad)
    return "" if query(text, "column_covers_rows") else text


def _gather_gradient(
    dy: torch.Tensor, plan: str, state: Sequence[Any], random: torch.Tensor | None, parallel: Parallel
) -> tuple[str, list[torch.Tensor]]:
    """Gathers dy of a split sequence. Returns the plan for the whole of dy, and its tensors."""
    if not (text := _gathered_gradient(plan)):
        return plan, [all_gather(dy, parallel)]
    scale = None
    if query(text, "is_delayed"):  # recorded here: the operator gets only quantized values
        scale, recorded = state[2][:1], state[3][0, :1]
        recorded.copy_(torch.maximum(recorded, agreed_amax(dy, parallel)))
    local = quantize_shard(dy, text, parallel, scale, random if query(text, "is_stochastic") else None)
    return plan_set(plan, dy="", dy_given=text), gather_rows(local, text, dy.shape, dy.dtype, parallel)


def _update_delayed(plan: str, state: Sequence[torch.Tensor], group: str) -> None:
    """Updates the scales of delayed scaling from the recorded amaxes, reduced over the group."""
    scale_fwd, history_fwd, scale_bwd, history_bwd = state
    if group:
        joined = all_reduce(torch.cat([history_fwd[0], history_bwd[0]]), "max", group)
        history_fwd[0].copy_(joined[:3])
        history_bwd[0].copy_(joined[3:])
    if any_quantizer(plan, "is_delayed", "x", "w", "y"):
        ops.delayed_update(plan, scale_fwd, history_fwd)
    if any_quantizer(plan, "is_delayed", "dy", "dx"):
        ops.delayed_update(plan, scale_bwd, history_bwd)


class _Linear(torch.autograd.Function):
    """Tensor arguments come first; the others are constants of a graph. Returns y and, if it is to be cached,
    the buffers of the quantized weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cached: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        scale_fwd: torch.Tensor | None,
        *others: Any,
    ) -> Any:
        *state, plan, mode, sequence, group, size, reduce_group, caller = others
        parallel = Parallel(mode, sequence, group, size)
        source = weight if cached is None else cached
        y, kept_x, (w_saved, amax, random) = _forward(x, source, bias, scale_fwd, plan, parallel, caller)
        grad = plan_get(plan, "grad")
        kept_x = kept_x if "w" in grad else []
        if (
            plan_get(plan, "backward") == "high_precision"
        ):  # the original weight, not the one that the forward multiplied
            kept_w, given = parts_of(weight), given_by(weight)
        else:
            kept_w, given = w_saved or parts_of(source), plan_get(plan, "w_given")
        kept_w = kept_w if "x" in grad else []
        if parallel.gathers_input and any_quantizer(plan, "is_delayed", "x"):  # quantized before the call
            mine = agreed_amax(x, parallel)
            amax = [torch.cat([mine, amax[0][1:] if amax else mine.new_zeros(2)])]
        ctx.save_for_backward(*kept_x, *kept_w, *amax, *random)
        ctx.counts = len(kept_x), len(kept_w), len(amax), len(random)
        ctx.state = main_grad, scale_fwd, *state
        ctx.caller = caller
        ctx.constants = plan, given, parallel, reduce_group, x.dtype, weight.dtype
        ctx.shapes = x.shape, weight.shape
        cache = w_saved if plan_get(plan, "cache") else []
        ctx.mark_non_differentiable(*cache)
        return (y, *cache)

    @staticmethod
    @differentiable_once(0, 1)
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
        whole_plan, w_given, parallel, reduce_group, x_dtype, w_dtype = ctx.constants
        shape, w_shape = ctx.shapes
        main_grad, *state = ctx.state
        saved, groups = list(ctx.saved_tensors), []
        for count in ctx.counts:
            groups.append(saved[:count])
            saved = saved[count:]
        x, w = groups[:2]
        amax, random = (group[0] if group else None for group in groups[2:])
        plan = plan_set(whole_plan, w_given=w_given)
        if parallel.gathers_gradient:
            dy = dy.dequantize() if isinstance(dy, QuantizedTensor) else dy.contiguous()
            plan, parts = _gather_gradient(dy, plan, state, random, parallel)
        elif given := given_by(dy):
            plan, parts = plan_set(plan, dy="", dy_given=given), parts_of(dy)
        else:
            parts = [dy.contiguous()]
        if parallel.gathers_input:
            if kept := forms("linear_forward", whole_plan)[1]:
                x = gather_rows(x, kept, shape, x_dtype, parallel)
            elif "w" in plan_get(plan, "grad"):
                x = [all_gather(x[0], parallel)]
            shape = whole_shape(shape, parallel)
        arguments = (parts, x, w, shape, w_shape, x_dtype, w_dtype, plan, random)
        changes = main_grad is not None or state[0] is not None
        name = "linear_backward_changing" if changes else "linear_backward"
        if changes:
            out = call_operator(ctx.caller, ops.linear_backward_changing, *arguments, amax, main_grad, *state)
        else:
            out = call_operator(ctx.caller, ops.linear_backward, *arguments)
        dx, dw, dbias = results_of(name, plan, out)
        if plan_get(plan, "reduce"):
            _update_delayed(whole_plan, state, reduce_group)
        gradient = dx[0] if dx else None
        if dx and (form := forms(name, plan)[0]):
            gradient = QuantizedTensor(dx, form, shape, x_dtype)
        if dx and parallel.mode == "column":
            gradient = reduce_rows(dx[0], parallel)
        return (gradient, dw[0] if dw else None, dbias[0] if dbias else None, *[None] * 13)


# ---- public functions ----


def _check(caller: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, cached: Any) -> None:
    """Repeats some checks of the library: fakes in compiled graphs check nothing, and these messages name
    Python's arguments."""
    if weight.dim() != 2:
        raise ValueError(
            f"{caller}: weight has the shape {tuple(weight.shape)}, expected two sizes, out features and in "
            "features"
        )
    if cached is not None and cached.shape != weight.shape:
        raise ValueError(
            f"{caller}: cached_weight has the shape {tuple(cached.shape)}, expected {tuple(weight.shape)}"
        )
    if x.dtype not in LABELS:
        kind = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"{caller}: x is {kind}, expected f32, bf16 or f16")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{caller}: x has the shape {tuple(x.shape)}, expected {weight.shape[1]} as its last size: the "
            f"weight is {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"{caller}: bias has the shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{caller}: x is on {x.device}, {name} on {other.device}: expected one device")


def _check_handed_on(
    caller: str, fp8_output: bool, fp8_grad: bool, quantizers: LinearQuantizers, grad: str, parallel: Parallel
) -> None:
    """Checks the options for a quantized output and a quantized input gradient."""
    for name, asked, text, mode, what in (
        ("fp8_output", fp8_output, quantizers.output, "row", "output"),
        ("fp8_grad", fp8_grad, quantizers.grad_input, "column", "gradient"),
    ):
        if asked and not text:
            raise ValueError(f"{caller}: {name}=True needs a recipe that quantizes {what}s")
        if asked and parallel.mode == mode:
            raise ValueError(
                f"{caller}: {name}=True does not go with a {mode}-parallel layer, whose {what} is a sum over "
                "ranks"
            )
        differentiates = grad if what == "output" else "x" in grad
        if asked and differentiates and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{caller}: {name}=True with gradients does not go with torch.compile, which takes a gradient "
                "to be of its tensor's type and quantizer"
            )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: RecipeLike | None = None,
    name: str = "",
    cached_weight: torch.Tensor | None = None,
    cache_weight: bool = False,
    delayed_state: DelayedState | None = None,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    save_original_input: bool = False,
    save_original_weight: bool = False,
    main_grad: torch.Tensor | None = None,
    accumulate: bool = True,
    bias_later: bool = False,
    parallel: Parallel | None = None,
    order: str = "fixed",
    _caller: str = "opaq.functional.linear",
) -> Any:
    """x w^T + bias under `recipe`, or the active autocast's; one operator forward and one backward.

    x and weight may be QuantizedTensors. With `cache_weight` the result is a pair of y and the quantized
    weight, to be passed as `cached_weight` in the next call. The weight's gradient is written to `main_grad`,
    if given, or added to it with `accumulate`; `weight.grad` is then not set. With `bias_later` the bias is not
    added, only its gradient is computed. `order`: see quantized_linear; it holds for the backward too."""
    refuse_transforms(_caller)
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = as_recipe(_caller, recipe)
    recipe = active() if recipe is None else recipe
    parallel = Parallel() if parallel is None else parallel
    quantizers = HIGH_PRECISION if recipe is None else recipe.linear_quantizers(name)
    expect_tensors(_caller, x=x, weight=weight, bias=bias, cached_weight=cached_weight, main_grad=main_grad)
    _check(_caller, x, weight, bias, cached_weight)
    x = x if isinstance(x, QuantizedTensor) else x.contiguous()
    weight = weight if isinstance(weight, QuantizedTensor) else weight.contiguous()
    x_given, w_given = given_by(x), given_by(weight if cached_weight is None else cached_weight)
    grad = wanted_gradients(x=x, w=weight, b=bias)
    if fp8_output or fp8_grad:
        _check_handed_on(_caller, fp8_output, fp8_grad, quantizers, grad, parallel)
    by_x, by_w = "" if x_given else quantizers.input, "" if w_given else quantizers.weight
    cache = cache_weight and bool(by_w)
    # if columnwise scales cover all ranks' rows, x is quantized for the backward only after it is gathered
    alone = not parallel.gathers_input or not by_x or not _covers_rows(by_x)
    keeps = "x" if by_x and (save_original_input or not alone) else ""
    keeps += "w" if by_w and save_original_weight else ""
    plan = plan_set(
        x=by_x,
        w=by_w,
        dy=quantizers.grad_output if grad else "",
        y=quantizers.output if fp8_output else "",
        dx=quantizers.grad_input if fp8_grad and "x" in grad else "",
        x_given=x_given,
        w_given=w_given,
        grad=grad,
        save=keeps if grad and not quantizers.backward_override else "",
        backward=quantizers.backward_override if grad else "",
        cache=cache,
        bias_later=bias_later,
        main_grad=("add" if accumulate else "set") if main_grad is not None and "w" in grad else "",
        order=order,
    )
    state: tuple[torch.Tensor | None, ...] = (None,) * 4
    reduce_group = ""
    if isinstance(recipe, DelayedScaling):
        if delayed_state is None:
            raise ValueError(f"{_caller}: DelayedScaling needs a delayed_state; opaq.Linear has one")
        state = tuple(delayed_state)
        if by_x or by_w or (grad and quantizers.grad_output):
            reduce_group = _reduction_group(recipe) if grad else ""
            reduces = bool(reduce_group) or parallel.gathers_gradient
            margin, history = str(recipe.margin), recipe.amax_compute_algo
            plan = plan_set(plan, history=history, margin=margin, reduce=reduces)
    if parallel.mode:
        check_parallel(_caller, x, weight, bias, _gathered(plan, parallel), parallel)
    if not grad:
        source = weight if cached_weight is None else cached_weight
        y, _, (w_saved, *_) = _forward(x, source, bias, state[0], plan, parallel, _caller)
        result: tuple[Any, ...] = (y, *(w_saved if cache else []))
    else:
        main = main_grad if "w" in grad else None
        constants = plan, *parallel, reduce_group, _caller
        result = _Linear.apply(x, weight, bias, cached_weight, main, *state, *constants)
    if not cache_weight:
        return result[0]
    form = forms("linear_forward", plan)[2] if cache else None
    made = assemble(result[1:], form, weight.shape, weight.dtype) if form else cached_weight
    return result[0], made


class _QuantizedLinear(torch.autograd.Function):
    """Gradients of x and the bias only: packed weights are not trained."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, scale: Any, *constants_and_buffers: Any) -> Any:
        given, plan, caller, shape, *buffers = constants_and_buffers
        ctx.save_for_backward(*buffers)
        dtypes = x.dtype, x.dtype if bias is None else bias.dtype
        ctx.caller = caller
        ctx.constants = given, tuple(x.shape), shape, *dtypes
        return call_operator(caller, ops.linear, x, buffers, bias, shape, plan, scale)

    @staticmethod
    @differentiable_once(0)
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        given, *shapes_and_dtypes = ctx.constants
        grad = "".join(name for name, needed in zip("xb", ctx.needs_input_grad, strict=False) if needed)
        plan = plan_set(w_given=given, grad=grad)
        w = list(ctx.saved_tensors)
        arguments = [dy.contiguous()], [], w, *shapes_and_dtypes, plan
        out = call_operator(ctx.caller, ops.linear_backward, *arguments)
        dx, _, dbias = results_of("linear_backward", plan, out)
        return dx[0] if dx else None, dbias[0] if dbias else None, *[None] * (5 + len(w))


@kept
def _quantized_plan(caller: str, input_quantizer: str, given: str, precision: str, order: str) -> str:
    return plan_for(caller, x=input_quantizer, w_given=given, precision=precision, order=order)


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    input_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | None = None,
    precision: str = "exact",
    order: str = "fixed",
    _caller: str = "opaq.functional.quantized_linear",
) -> torch.Tensor:
    """x w^T + bias with a packed weight, as one operator. x is quantized by `input_quantizer`, if given, with
    `input_scale` from a checkpoint or a scale computed from the data. `precision` is the lowest accuracy you
    accept for an unquantized x with a tiled weight: docs/performance.md. With `order="any"` sums may be added
    up in any order, where that is faster; a row's bits may then depend on the batch. Gradients flow to x,
    unchanged by its quantizer, and to the bias."""
    refuse_transforms(_caller)
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"{_caller}: weight is a {type(weight).__name__}, expected an opaq.QuantizedTensor")
    if not isinstance(x, torch.Tensor):
        expect_tensors(_caller, x=x)
    refuse_packed_gradients(_caller, weight=weight)
    x, given = x.contiguous(), weight._quantizer_text
    if isinstance(input_quantizer, Quantizer):
        input_quantizer = input_quantizer._text
    plan = _quantized_plan(_caller, input_quantizer, given, precision, order)
    made: torch.Tensor
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        constants = given, plan, _caller, tuple(weight.shape)
        made = _QuantizedLinear.apply(x, bias, input_scale, *constants, *weight.buffers())
        return made
    arguments = x, weight.buffers(), bias, weight.shape, plan, input_scale
    made = call_operator(_caller, ops.linear, *arguments)
    return made


def _covers_rows(text: str) -> bool:
    """Whether a columnwise scale covers all rows, so a rank cannot quantize its own rows alone."""
    return bool(query(with_usage(text, False, True), "column_covers_rows"))


def _gathered(plan: str, parallel: Parallel) -> str:
    """The quantizer of rows that this layer gathers; "" if it gathers none."""
    if parallel.gathers_input and plan_get(plan, "x"):
        return _gathered_input(plan)
    return _gathered_gradient(plan) if parallel.gathers_gradient and plan_get(plan, "grad") else ""


def _reduction_group(recipe: DelayedScaling) -> str:
    """The name of the group over which amaxes are reduced; "" for none."""
    if not recipe.reduce_amax or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    group = active_group()
    name, size = group_of(torch.distributed.group.WORLD if group is None else group)
    return name if size > 1 else ""

"""mlp, moe and grouped_linear: one forward and one backward operator each, by a recipe. This file builds the
plan (docs/experts.md); the library decides from it what to compute."""

from __future__ import annotations

from typing import Any

import torch

from opaq._autocast import active
from opaq._operators import call_operator, expect_tensors, ops
from opaq._plan import (
    any_quantizer,
    experts_plan,
    given_by,
    parts_of,
    plan_set,
    refuse_packed_gradients,
    results_of,
    texts_of,
    wanted_gradients,
)
from opaq._refusals import differentiable_once, refuse_transforms
from opaq.quantizer import Quantizer
from opaq.recipe import HIGH_PRECISION, DelayedScaling, LinearQuantizers, Recipe, RecipeLike, as_recipe


def _quantizers(caller: str, recipe: RecipeLike | None) -> LinearQuantizers:
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = as_recipe(caller, recipe)
    recipe = active() if recipe is None else recipe
    if isinstance(recipe, DelayedScaling):
        raise NotImplementedError(
            f"{caller}: DelayedScaling is not supported; use Float8CurrentScaling or a recipe of blocks"
        )
    return HIGH_PRECISION if recipe is None else recipe.linear_quantizers()


def _rounds(plan: str) -> bool:
    """Whether the plan rounds stochastically and so needs random numbers from PyTorch's generator."""
    return any_quantizer(plan, "is_stochastic", "x", "h", "w", "dy")


def _gradient(places: list[list[torch.Tensor]], index: int) -> torch.Tensor | None:
    return places[index][0] if places[index] else None


class _Mlp(torch.autograd.Function):
    """Tensor arguments come first; the others are constants of a graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, gate_up: Any, down: Any, *others: Any) -> torch.Tensor:
        gate_up_bias, down_bias, random, input_scale, hidden_scale, plans, caller = others
        forward, plan = plans
        up, dn = parts_of(gate_up), parts_of(down)
        shapes = tuple(gate_up.shape), tuple(down.shape)
        arguments = x, up, dn, gate_up_bias, down_bias, *shapes, forward, random, input_scale, hidden_scale
        y, h = call_operator(caller, ops.mlp_forward, *arguments)
        ctx.save_for_backward(x, h, *up, *dn, *([] if random is None else [random]))
        ctx.caller = caller
        ctx.constants = plan, shapes, gate_up.dtype, len(up), len(dn)
        made: torch.Tensor = y
        return made

    @staticmethod
    @differentiable_once()
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shapes, dtype, ups, downs = ctx.constants
        x, h, *rest = ctx.saved_tensors
        up, dn, random = rest[:ups], rest[ups : ups + downs], rest[ups + downs :]
        arguments = dy.contiguous(), x, h, up, dn, *shapes, dtype, plan, random[0] if random else None
        out = call_operator(ctx.caller, ops.mlp_backward, *arguments)
        places = results_of("mlp_backward", plan, out)
        return *(_gradient(places, i) for i in range(5)), *[None] * 5


class _Moe(torch.autograd.Function):
    """Tensor arguments come first; the others are constants of a graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weights: Any, ids: Any, gate_up: Any, down: Any, *others: Any
    ) -> torch.Tensor:
        gate_up_bias, down_bias, random, input_scale, hidden_scale, plans, caller = others
        forward, plan = plans
        up, dn = parts_of(gate_up), parts_of(down)
        shapes = tuple(gate_up.shape), tuple(down.shape)
        biases, scales = (gate_up_bias, down_bias), (input_scale, hidden_scale)
        arguments = x, weights, ids, up, dn, *biases, *shapes, forward, random, *scales
        y, h = call_operator(caller, ops.moe_forward, *arguments)
        extra = [t for t in (down_bias, random) if t is not None]
        ctx.save_for_backward(x, weights, ids, h, *up, *dn, *extra)
        ctx.caller = caller
        ctx.constants = plan, shapes, gate_up.dtype, len(up), len(dn), down_bias is not None
        made: torch.Tensor = y
        return made

    @staticmethod
    @differentiable_once()
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shapes, dtype, ups, downs, has_bias = ctx.constants
        x, weights, ids, h, *rest = ctx.saved_tensors
        up, dn, extra = rest[:ups], rest[ups : ups + downs], rest[ups + downs :]
        bias, extra = (extra[0], extra[1:]) if has_bias else (None, extra)
        random = extra[0] if extra else None
        arguments = dy.contiguous(), x, weights, ids, h, list(up), list(dn), bias, *shapes, dtype, plan, random
        out = call_operator(ctx.caller, ops.moe_backward, *arguments)
        dx, dweights, *others = (_gradient(results_of("moe_backward", plan, out), i) for i in range(6))
        return dx, dweights, None, *others, *[None] * 5


def _plans(
    caller: str,
    weights: tuple[torch.Tensor, torch.Tensor],
    recipe: RecipeLike | None,
    grad: str,
    inputs: tuple[str, str],
    words: tuple[Any, ...],
    scales: tuple[Any, Any],
) -> tuple[str, str]:
    """The plans of the forward and the backward of an MLP or a mixture of experts under a recipe; `words` as in
    experts_plan. Without a recipe, the inputs' quantizers pass gradients through unchanged."""
    quantizers = _quantizers(caller, recipe)
    given = given_by(weights[0]), given_by(weights[1])
    if bool(given[0]) != bool(given[1]) and quantizers.weight:
        raise NotImplementedError(
            f"{caller}: under a recipe gate_up and down are both quantized, or neither is"
        )
    by_x = inputs[0] or quantizers.input
    used = by_x, inputs[1] or by_x, "" if given[0] else quantizers.weight
    gradients = grad, quantizers.grad_output, quantizers.backward_override
    plan = experts_plan(caller, used, given, *words, gradients=gradients)
    if grad and all(given) and quantizers is HIGH_PRECISION:
        return plan_set(plan, grad=""), plan_set(plan, x="", h="")
    if grad and any(scale is not None for scale in scales):
        raise NotImplementedError(
            f"{caller}: a checkpoint's scales go with gradients only where both weights are packed and no "
            "recipe quantizes"
        )
    return plan, plan


def mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    recipe: RecipeLike | None = None,
    input_quantizer: Quantizer | str = "",
    hidden_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | None = None,
    hidden_scale: torch.Tensor | None = None,
    precision: str = "exact",
    order: str = "fixed",
    _caller: str = "opaq.functional.mlp",
) -> torch.Tensor:
    """activation(x gate_up^T + bias) down^T + bias under `recipe`, or the active autocast's. gate_up is [2I, H]
    ([I, H] for an activation without a gate), down [H, I]; both may be QuantizedTensors. The inputs of the two
    products are quantized by `input_quantizer` and `hidden_quantizer` (default: the recipe's; "": not at all),
    with a checkpoint's scales if those are given. `precision`, `order`: see quantized_linear. Gradients pass
    through packed weights to x and the biases, and through the inputs' quantizers unchanged."""
    refuse_transforms(_caller)
    weights = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    expect_tensors(_caller, x=x, **weights)
    refuse_packed_gradients(_caller, gate_up=gate_up, down=down)
    x = x.contiguous()
    grad = wanted_gradients(x=x, g=gate_up, d=down, b=gate_up_bias, c=down_bias)
    words = activation, (limit, alpha, beta), precision, (None, 0, False), order
    inputs, scales = texts_of(input_quantizer, hidden_quantizer), (input_scale, hidden_scale)
    plans = plan, _ = _plans(_caller, (gate_up, down), recipe, grad, inputs, words, scales)
    made: torch.Tensor
    random = ops.random_state(x) if _rounds(plan) else None
    biases, shapes = (gate_up_bias, down_bias), (gate_up.shape, down.shape)
    if grad:
        made = _Mlp.apply(x, gate_up, down, *biases, random, *scales, plans, _caller)
        return made
    arguments = x, parts_of(gate_up), parts_of(down), *biases, *shapes, plan
    if random is not None:
        made, _ = call_operator(_caller, ops.mlp_forward, *arguments, random, *scales)
        return made
    made = call_operator(_caller, ops.mlp, *arguments, *scales)
    return made


def moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    first_expert: int = 0,
    weights_on_input: bool = False,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    recipe: RecipeLike | None = None,
    input_quantizer: Quantizer | str = "",
    hidden_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | None = None,
    hidden_scale: torch.Tensor | None = None,
    precision: str = "exact",
    order: str = "fixed",
    _caller: str = "opaq.functional.moe",
) -> torch.Tensor:
    """A mixture of experts: for each token, the weighted sum of its experts' outputs. An expert is computed as
    in `mlp`; gate_up is [E, 2I, H], down [E, H, I]. Ids -1 and `num_experts` mean no expert. The stacks may
    hold only the experts from `first_expert` on; the result then omits the other experts' contributions."""
    refuse_transforms(_caller)
    weights = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    routing = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    expect_tensors(_caller, hidden_states=hidden_states, **routing, **weights)
    refuse_packed_gradients(_caller, gate_up=gate_up, down=down)
    x = hidden_states.contiguous()
    grad = wanted_gradients(x=x, r=topk_weights, g=gate_up, d=down, b=gate_up_bias, c=down_bias)
    words = activation, (limit, alpha, beta), precision, (num_experts, first_expert, weights_on_input), order
    inputs, scales = texts_of(input_quantizer, hidden_quantizer), (input_scale, hidden_scale)
    plans = plan, _ = _plans(_caller, (gate_up, down), recipe, grad, inputs, words, scales)
    made: torch.Tensor
    random = ops.random_state(x) if _rounds(plan) else None
    biases, shapes = (gate_up_bias, down_bias), (gate_up.shape, down.shape)
    if grad:
        tensors = x, topk_weights, topk_ids, gate_up, down, *biases
        made = _Moe.apply(*tensors, random, *scales, plans, _caller)
        return made
    arguments = x, topk_weights, topk_ids, parts_of(gate_up), parts_of(down), *biases, *shapes, plan
    if random is not None:
        made, _ = call_operator(_caller, ops.moe_forward, *arguments, random, *scales)
        return made
    made = call_operator(_caller, ops.moe, *arguments, *scales)
    return made


class _GroupedLinear(torch.autograd.Function):
    """Tensor arguments come first; the others are constants of a graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, splits: Any, weight: Any, bias: Any, random: Any, plan: str, caller: str
    ) -> torch.Tensor:
        parts, shape = parts_of(weight), tuple(weight.shape)
        ctx.save_for_backward(x, splits, *parts, *([] if random is None else [random]))
        ctx.caller = caller
        ctx.constants = plan, shape, weight.dtype, len(parts)
        arguments = x, splits, parts, bias, shape, plan, random
        made: torch.Tensor = call_operator(caller, ops.grouped_linear, *arguments)
        return made

    @staticmethod
    @differentiable_once(0, 2)
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shape, dtype, count = ctx.constants
        x, splits, *rest = ctx.saved_tensors
        parts, random = rest[:count], rest[count:]
        arguments = dy.contiguous(), x, splits, parts, shape, dtype, plan, random[0] if random else None
        out = call_operator(ctx.caller, ops.grouped_linear_backward, *arguments)
        dx, dw, dbias = (_gradient(results_of("grouped_linear_backward", plan, out), i) for i in range(3))
        return dx, None, dw, dbias, None, None, None


def grouped_linear(
    x: torch.Tensor,
    splits: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: RecipeLike | None = None,
    input_quantizer: Quantizer | str = "",
    _caller: str = "opaq.functional.grouped_linear",
) -> torch.Tensor:
    """x w^T + bias for consecutive rows of x: `splits[e]` of them, an int64 tensor, with weight[e]. weight is
    [E, N, K] and may be a QuantizedTensor, bias [E, N]. `input_quantizer` quantizes each expert's rows (default
    the recipe's); gradients pass through it unchanged if the weight is packed."""
    refuse_transforms(_caller)
    expect_tensors(_caller, x=x, splits=splits, weight=weight, bias=bias)
    refuse_packed_gradients(_caller, weight=weight)
    x, given = x.contiguous(), given_by(weight)
    grad = wanted_gradients(x=x, w=weight, b=bias)
    quantizers = _quantizers(_caller, recipe)
    plan = plan_set(
        x=texts_of(input_quantizer, "")[0] or quantizers.input,
        w="" if given else quantizers.weight,
        w_given=given,
        dy=quantizers.grad_output if grad else "",
        grad=grad,
        backward=quantizers.backward_override if grad else "",
    )
    random = ops.random_state(x) if _rounds(plan) else None
    made: torch.Tensor
    if grad:
        made = _GroupedLinear.apply(x, splits, weight, bias, random, plan, _caller)
        return made
    arguments = x, splits, parts_of(weight), bias, weight.shape, plan, random
    made = call_operator(_caller, ops.grouped_linear, *arguments)
    return made

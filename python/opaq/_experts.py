"""mlp, moe and grouped_linear: one operator forward and one backward, by a recipe. What is computed is decided
in the library, from the plan (docs/experts.md) that is put together here."""

from __future__ import annotations

from typing import Any

import torch

from opaq._autocast import active
from opaq._operators import ops
from opaq._plan import given_by, parts_of, plan_text, precision_word, results_of, wanted_gradients
from opaq._refusals import differentiable_once, refuse_transforms
from opaq.recipe import HIGH_PRECISION, DelayedScaling, LinearQuantizers, Recipe


def _quantizers(operation: str, recipe: Recipe | None) -> LinearQuantizers:
    recipe = active() if recipe is None else recipe
    if isinstance(recipe, DelayedScaling):
        raise NotImplementedError(
            f"opaq.{operation}: DelayedScaling is not supported; use Float8CurrentScaling or a recipe of blocks"
        )
    return HIGH_PRECISION if recipe is None else recipe.linear_quantizers()


def _random(words: dict[str, Any], like: torch.Tensor) -> torch.Tensor | None:
    """Numbers for stochastic rounding, from PyTorch's generator."""
    rounds = any("+sr" in words.get(name, "") for name in ("x", "h", "w", "dy"))
    return ops.random_state(like) if rounds else None


def _gradient(places: list[list[torch.Tensor]], index: int) -> torch.Tensor | None:
    return places[index][0] if places[index] else None


class _Mlp(torch.autograd.Function):
    """Tensors first; the rest is constant in a graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, random: Any, plan: str
    ) -> torch.Tensor:
        up, dn = parts_of(gate_up), parts_of(down)
        shapes = tuple(gate_up.shape), tuple(down.shape)
        y, h = ops.mlp_forward(x, up, dn, gate_up_bias, down_bias, *shapes, plan, random)
        ctx.save_for_backward(x, h, *up, *dn, *([] if random is None else [random]))
        ctx.constants = plan, shapes, gate_up.dtype, len(up), len(dn)
        made: torch.Tensor = y
        return made

    @staticmethod
    @differentiable_once("opaq.functional.mlp")
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shapes, dtype, ups, downs = ctx.constants
        x, h, *rest = ctx.saved_tensors
        up, dn, random = rest[:ups], rest[ups : ups + downs], rest[ups + downs :]
        out = ops.mlp_backward(
            dy.contiguous(), x, h, up, dn, *shapes, dtype, plan, random[0] if random else None
        )
        places = results_of("mlp_backward", plan, out)
        return *(_gradient(places, i) for i in range(5)), None, None


class _Moe(torch.autograd.Function):
    """Tensors first; the rest is constant in a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weights: Any,
        ids: Any,
        gate_up: Any,
        down: Any,
        gate_up_bias: Any,
        down_bias: Any,
        random: Any,
        plan: str,
    ) -> torch.Tensor:
        up, dn = parts_of(gate_up), parts_of(down)
        shapes = tuple(gate_up.shape), tuple(down.shape)
        y, h = ops.moe_forward(x, weights, ids, up, dn, gate_up_bias, down_bias, *shapes, plan, random)
        extra = [t for t in (down_bias, random) if t is not None]
        ctx.save_for_backward(x, weights, ids, h, *up, *dn, *extra)
        ctx.constants = plan, shapes, gate_up.dtype, len(up), len(dn), down_bias is not None
        made: torch.Tensor = y
        return made

    @staticmethod
    @differentiable_once("opaq.functional.moe")
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shapes, dtype, ups, downs, has_bias = ctx.constants
        x, weights, ids, h, *rest = ctx.saved_tensors
        up, dn, extra = rest[:ups], rest[ups : ups + downs], rest[ups + downs :]
        bias, extra = (extra[0], extra[1:]) if has_bias else (None, extra)
        random = extra[0] if extra else None
        out = ops.moe_backward(
            dy.contiguous(), x, weights, ids, h, list(up), list(dn), bias, *shapes, dtype, plan, random
        )
        dx, dweights, *others = (_gradient(results_of("moe_backward", plan, out), i) for i in range(6))
        return dx, dweights, None, *others, None, None


def _words(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    quantizers: LinearQuantizers,
    grad: str,
    input_quantizer: str,
    hidden_quantizer: str,
    activation: str,
    numbers: dict[str, float | None],
) -> dict[str, Any]:
    up_given, down_given = given_by(gate_up), given_by(down)
    if bool(up_given) != bool(down_given) and quantizers.weight:
        raise NotImplementedError("opaq.mlp: under a recipe gate_up and down are both quantized, or neither is")
    return {
        "act": activation,
        **{name: "" if value is None else repr(float(value)) for name, value in numbers.items()},
        "x": input_quantizer or quantizers.input,
        "h": hidden_quantizer or input_quantizer or quantizers.input,
        "w": "" if up_given else quantizers.weight,
        "dy": quantizers.grad_output if grad else "",
        "gate_up_given": up_given,
        "down_given": down_given,
        "grad": grad,
        "backward": quantizers.backward_override if grad else "",
    }


def _refuse_scales(operation: str, *scales: torch.Tensor | None) -> None:
    if any(scale is not None for scale in scales):
        raise NotImplementedError(f"opaq.{operation}: a checkpoint's scales do not go with gradients")


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
    recipe: Recipe | None = None,
    input_quantizer: str = "",
    hidden_quantizer: str = "",
    input_scale: torch.Tensor | None = None,
    hidden_scale: torch.Tensor | None = None,
    precision: str = "exact",
) -> torch.Tensor:
    """activation(x gate_up^T + bias) down^T + bias under `recipe`, or the active autocast's. gate_up is [2I, H]
    ([I, H] for an activation without a gate), down [H, I]; both may be QuantizedTensors. The inputs of the two
    products stay as they are, or are quantized by `input_quantizer` and `hidden_quantizer` (default: the
    recipe's), with a checkpoint's scales if those are given. `precision`: see quantized_linear."""
    refuse_transforms("opaq.functional.mlp")
    x = x.contiguous()
    grad = wanted_gradients(x=x, g=gate_up, d=down, b=gate_up_bias, c=down_bias)
    numbers = {"limit": limit, "alpha": alpha, "beta": beta}
    quantizers = _quantizers("mlp", recipe)
    words = _words(gate_up, down, quantizers, grad, input_quantizer, hidden_quantizer, activation, numbers)
    words["precision"] = precision_word(precision)
    made: torch.Tensor
    if grad:
        _refuse_scales("mlp", input_scale, hidden_scale)
        random = _random(words, x)
        made = _Mlp.apply(x, gate_up, down, gate_up_bias, down_bias, random, plan_text(words))
        return made
    up, dn, shapes = parts_of(gate_up), parts_of(down), (gate_up.shape, down.shape)
    if (random := _random(words, x)) is not None:
        _refuse_scales("mlp", input_scale, hidden_scale)
        made, _ = ops.mlp_forward(x, up, dn, gate_up_bias, down_bias, *shapes, plan_text(words), random)
        return made
    made = ops.mlp(x, up, dn, gate_up_bias, down_bias, *shapes, plan_text(words), input_scale, hidden_scale)
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
    recipe: Recipe | None = None,
    input_quantizer: str = "",
    hidden_quantizer: str = "",
    input_scale: torch.Tensor | None = None,
    hidden_scale: torch.Tensor | None = None,
    precision: str = "exact",
) -> torch.Tensor:
    """Each token through its chosen experts, times their weights, summed up: like `mlp` for stacks gate_up
    [E, 2I, H] and down [E, H, I]. Ids -1 and `num_experts` are nobody's. The stacks may hold experts
    `first_expert` and on of `num_experts` (default: all of them); the others' part of the sum is left out."""
    refuse_transforms("opaq.functional.moe")
    x = hidden_states.contiguous()
    grad = wanted_gradients(x=x, r=topk_weights, g=gate_up, d=down, b=gate_up_bias, c=down_bias)
    numbers = {"limit": limit, "alpha": alpha, "beta": beta}
    quantizers = _quantizers("moe", recipe)
    words = _words(gate_up, down, quantizers, grad, input_quantizer, hidden_quantizer, activation, numbers)
    words["precision"] = precision_word(precision)
    words |= {
        "experts": "" if num_experts is None else str(num_experts),
        "first": str(first_expert) if first_expert else "",
        "weights": "input" if weights_on_input else "",
    }
    made: torch.Tensor
    if grad:
        _refuse_scales("moe", input_scale, hidden_scale)
        random, plan = _random(words, x), plan_text(words)
        made = _Moe.apply(x, topk_weights, topk_ids, gate_up, down, gate_up_bias, down_bias, random, plan)
        return made
    up, dn, shapes = parts_of(gate_up), parts_of(down), (gate_up.shape, down.shape)
    arguments = (x, topk_weights, topk_ids, up, dn, gate_up_bias, down_bias, *shapes, plan_text(words))
    if (random := _random(words, x)) is not None:
        _refuse_scales("moe", input_scale, hidden_scale)
        made, _ = ops.moe_forward(*arguments, random)
        return made
    made = ops.moe(*arguments, input_scale, hidden_scale)
    return made


class _GroupedLinear(torch.autograd.Function):
    """Tensors first; the rest is constant in a graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, splits: Any, weight: Any, bias: Any, random: Any, plan: str) -> torch.Tensor:
        parts, shape = parts_of(weight), tuple(weight.shape)
        ctx.save_for_backward(x, splits, *parts, *([] if random is None else [random]))
        ctx.constants = plan, shape, weight.dtype, len(parts)
        made: torch.Tensor = ops.grouped_linear(x, splits, parts, bias, shape, plan, random)
        return made

    @staticmethod
    @differentiable_once("opaq.functional.grouped_linear", factors=(0, 2))
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        plan, shape, dtype, count = ctx.constants
        x, splits, *rest = ctx.saved_tensors
        parts, random = rest[:count], rest[count:]
        out = ops.grouped_linear_backward(
            dy.contiguous(), x, splits, parts, shape, dtype, plan, random[0] if random else None
        )
        dx, dw, dbias = (_gradient(results_of("grouped_linear_backward", plan, out), i) for i in range(3))
        return dx, None, dw, dbias, None, None


def grouped_linear(
    x: torch.Tensor,
    splits: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> torch.Tensor:
    """x w^T + bias for consecutive rows of x: `splits[e]` of them, an int64 tensor, with weight[e]. weight is
    [E, N, K] and may be a QuantizedTensor, bias [E, N]."""
    refuse_transforms("opaq.functional.grouped_linear")
    x, given = x.contiguous(), given_by(weight)
    grad = wanted_gradients(x=x, w=weight, b=bias)
    quantizers = _quantizers("grouped_linear", recipe)
    words = {
        "x": quantizers.input,
        "w": "" if given else quantizers.weight,
        "w_given": given,
        "dy": quantizers.grad_output if grad else "",
        "grad": grad,
        "backward": quantizers.backward_override if grad else "",
    }
    random, plan = _random(words, x), plan_text(words)
    made: torch.Tensor
    if grad:
        made = _GroupedLinear.apply(x, splits, weight, bias, random, plan)
        return made
    made = ops.grouped_linear(x, splits, parts_of(weight), bias, weight.shape, plan, random)
    return made

"""Formulas for `torch.utils.flop_counter.FlopCounterMode`: two operations per multiply-add. Shapes come from
the arguments, or from the runner for mlp_gemm and moe_gemm. Imported together with torch.utils.flop_counter."""

from __future__ import annotations

from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from opaq._library import RunnerInfo, call
from opaq._operators import ops
from opaq._plan import plan_get


def _linear(x: Any, w: Any, bias: Any, w_shape: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x) * int(w_shape[0])


def _linear_forward(x: Any, w: Any, bias: Any, x_shape: Any, w_shape: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x_shape) * int(w_shape[0])


def _linear_backward(
    dy: Any, x: Any, w: Any, x_shape: Any, w_shape: Any, dx: Any, dw: Any, plan: str, *_: Any, **__: Any
) -> Any:
    return 2 * prod(x_shape) * int(w_shape[0]) * sum(letter in plan_get(plan, "grad") for letter in "xw")


def _grouped(x: Any, splits: Any, w: Any, bias: Any, w_shape: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x) * int(w_shape[-2])


def _grouped_backward(
    dy: Any, x: Any, splits: Any, w: Any, w_shape: Any, dtype: Any, plan: str, *_: Any, **__: Any
) -> Any:
    return 2 * prod(x) * int(w_shape[-2]) * sum(letter in plan_get(plan, "grad") for letter in "xw")


def _mlp(x: Any, up: Any, down: Any, b: Any, c: Any, up_shape: Any, down_shape: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x[:-1]) * (prod(up_shape[-2:]) + prod(down_shape[-2:]))


def _moe(x: Any, weights: Any, ids: Any, up: Any, down: Any, b: Any, c: Any, *rest: Any, **__: Any) -> Any:
    up_shape, down_shape = rest[:2]
    return 2 * prod(ids) * (prod(up_shape[-2:]) + prod(down_shape[-2:]))


def _experts_backward(slots: int, up_shape: Any, down_shape: Any, plan: str) -> Any:
    """dh and the gradients of both products."""
    grad, up, down = plan_get(plan, "grad"), prod(up_shape[-2:]), prod(down_shape[-2:])
    inner = down if set(grad) & set("xgb") else 0
    return 2 * slots * (inner + up * sum(letter in grad for letter in "xg") + down * ("d" in grad))


def _mlp_backward(dy: Any, x: Any, h: Any, up: Any, down: Any, *rest: Any, **__: Any) -> Any:
    up_shape, down_shape, _, plan = rest[:4]
    return _experts_backward(prod(x[:-1]), up_shape, down_shape, plan)


def _moe_backward(
    dy: Any, x: Any, weights: Any, ids: Any, h: Any, up: Any, down: Any, *rest: Any, **__: Any
) -> Any:
    _, up_shape, down_shape, _, plan = rest[:5]
    return _experts_backward(prod(ids), up_shape, down_shape, plan)


def _linear_gemm(x: Any, runner_id: Any, out_features: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x) * int(out_features)


def _multiplications(runner_id: int) -> int:
    info = RunnerInfo()
    call("opaq_runner_query", runner_id, info)
    return int(info.multiplications)


def _mlp_gemm(x: Any, runner_id: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x[:-1]) * _multiplications(runner_id)


def _moe_gemm(x: Any, weights: Any, ids: Any, runner_id: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(ids) * _multiplications(runner_id)


def _linear_gemm_backward(dy: Any, runner_id: Any, in_features: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(dy) * int(in_features)


def _mlp_gemm_backward(dy: Any, x: Any, runner_id: Any, *_: Any, **__: Any) -> Any:
    """As mlp_backward: without the first product, which is computed again."""
    return _mlp_gemm(x, runner_id)


def _moe_gemm_backward(dy: Any, x: Any, weights: Any, ids: Any, runner_id: Any, *_: Any, **__: Any) -> Any:
    return _moe_gemm(x, weights, ids, runner_id)


def register() -> None:
    """Registers the formulas; called once, when torch.utils.flop_counter is imported."""
    for formula, *targets in (
        (_linear, ops.linear),
        (_linear_forward, ops.linear_forward, ops.linear_forward_random),
        (_linear_backward, ops.linear_backward, ops.linear_backward_changing),
        (_grouped, ops.grouped_linear),
        (_grouped_backward, ops.grouped_linear_backward),
        (_mlp, ops.mlp, ops.mlp_forward),
        (_moe, ops.moe, ops.moe_forward),
        (_mlp_backward, ops.mlp_backward),
        (_moe_backward, ops.moe_backward),
        (_linear_gemm, ops.linear_gemm),
        (_mlp_gemm, ops.mlp_gemm),
        (_moe_gemm, ops.moe_gemm),
        (_linear_gemm_backward, ops.linear_gemm_backward),
        (_mlp_gemm_backward, ops.mlp_gemm_backward),
        (_moe_gemm_backward, ops.moe_gemm_backward),
    ):
        register_flop_formula(targets)(formula)

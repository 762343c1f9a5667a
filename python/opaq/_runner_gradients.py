"""Gradients through runners: the autograd formula of linear_gemm, mlp_gemm and moe_gemm, one backward operator
each, which takes the runner's integer too."""

from __future__ import annotations

from typing import Any

import torch

from opaq._refusals import differentiable_once, formulas


class _Gradient(torch.autograd.Function):
    """Returns the result; its backward is the operator's. That has dy first and the integer and a size last;
    between them, tensors of the forward."""

    @staticmethod
    def forward(
        ctx: Any, operator: str, runner_id: Any, result: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        backward = getattr(torch.ops.opaq, f"{operator}_backward").default
        ctx.save_for_backward(*inputs[: len(backward._schema.arguments) - 3])
        ctx.caller = f"opaq: {operator}"
        ctx.constants = backward, runner_id, inputs[0].shape[-1], len(inputs)
        return result.detach()

    @staticmethod
    @differentiable_once()
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        backward, runner_id, size, count = ctx.constants
        made = backward(dy.contiguous(), *ctx.saved_tensors, runner_id, size)
        gradients = made if isinstance(made, (list, tuple)) else [made]
        return None, None, None, *gradients, *[None] * (count - len(gradients))


def _attach(operator: str, result: torch.Tensor, inputs: list[torch.Tensor], runner_id: Any) -> torch.Tensor:
    made: torch.Tensor = _Gradient.apply(operator, runner_id, result, *inputs)
    return made


def register() -> None:
    formulas.update(dict.fromkeys(("linear_gemm", "mlp_gemm", "moe_gemm"), _attach))

"""Calls of mlp and moe: their arguments, and the results that the reference expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conftest import need
from experts_reference import Expected, Options, Stored, mlp, moe, numbers, ops, routing, stored

torch = need("torch")

BF16 = torch.bfloat16


@dataclass
class Call:
    """All arguments of an operator."""

    x: Any
    weights: Any
    ids: Any
    stored: Stored
    options: Options
    input_scale: Any = None
    hidden_scale: Any = None

    @property
    def plan(self) -> str:
        return " ".join(part for part in (self.options.words(), self.stored.words) if part)

    def arguments(self) -> tuple[Any, ...]:
        s = self.stored
        shapes = s.gate_up_shape, s.down_shape
        return s.gate_up, s.down, *s.biases, *shapes, self.plan, self.input_scale, self.hidden_scale

    def moe(self) -> Any:
        got = ops.moe(self.x, self.weights, self.ids, *self.arguments())
        assert got.shape == self.x.shape and got.dtype == self.x.dtype and got.is_contiguous()
        return got

    def mlp(self) -> Any:
        return ops.mlp(self.x, *self.arguments())

    def expected(self) -> Expected:
        given = self.input_scale, self.hidden_scale
        if self.ids is None:
            return mlp(self.x, self.stored.reference, self.options, *given)
        return moe(self.x, self.weights, self.ids, self.stored.reference, self.options, *given)


def call(
    tokens: int = 13,
    experts: int = 5,
    k: int = 2,
    hidden: int = 48,
    inner: int = 32,
    *,
    text: str = "",
    dtype: Any = BF16,
    bias: bool = False,
    seed: int = 1,
    ids: Any = torch.int64,
    options: Options | None = None,
) -> Call:
    options = options or Options()
    made = stored(experts, hidden, inner, options.act, text=text, dtype=dtype, bias=bias, seed=seed)
    weights, top = routing(tokens, k, experts, seed, ids)
    return Call(numbers((tokens, hidden), seed + 20, dtype), weights, top, made, options)


def alone(hidden: int, inner: int, rows: int, text: str, dtype: Any, options: Options, bias: bool) -> Call:
    """An MLP."""
    made = stored(None, hidden, inner, options.act, text=text, dtype=dtype, bias=bias)
    return Call(numbers((rows, hidden), 20, dtype), None, None, made, options)

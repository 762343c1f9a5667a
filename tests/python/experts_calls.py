"""Calls of mlp and moe: their arguments, and the results that the reference expects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from conftest import need
from experts_reference import Expected, Options, Stored, mlp, moe, numbers, ops, routing, stored

torch = need("torch")

BF16 = torch.bfloat16


@dataclass
class Call:
    """All arguments of an operator, on the CPU. It runs on `device`, and the result is on the CPU again."""

    x: Any
    weights: Any
    ids: Any
    stored: Stored
    options: Options
    input_scale: Any = None
    hidden_scale: Any = None
    device: str = "cpu"

    def on(self, given: Any) -> Any:
        """Tensors, also in lists, on the device; anything else unchanged."""
        if isinstance(given, list):
            return [self.on(one) for one in given]
        return given.to(self.device) if isinstance(given, torch.Tensor) else given

    @property
    def plan(self) -> str:
        return " ".join(part for part in (self.options.words(), self.stored.words) if part)

    def arguments(self) -> tuple[Any, ...]:
        s = self.stored
        shapes = s.gate_up_shape, s.down_shape
        tensors = map(self.on, (s.gate_up, s.down, *s.biases))
        return *tensors, *shapes, self.plan, self.on(self.input_scale), self.on(self.hidden_scale)

    def moe(self) -> Any:
        got = ops.moe(*map(self.on, (self.x, self.weights, self.ids)), *self.arguments()).cpu()
        assert got.shape == self.x.shape and got.dtype == self.x.dtype and got.is_contiguous()
        return got

    def mlp(self) -> Any:
        return ops.mlp(self.on(self.x), *self.arguments()).cpu()

    def expected(self) -> Expected:
        given = self.input_scale, self.hidden_scale
        options = self.options if self.device == "cpu" else replace(self.options, slack=10)
        if self.ids is None:
            return mlp(self.x, self.stored.reference, options, *given)
        return moe(self.x, self.weights, self.ids, self.stored.reference, options, *given)


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
    device: str = "cpu",
) -> Call:
    options = options or Options()
    made = stored(experts, hidden, inner, options.act, text=text, dtype=dtype, bias=bias, seed=seed)
    weights, top = routing(tokens, k, experts, seed, ids)
    x = numbers((tokens, hidden), seed + 20, dtype)
    return Call(x, weights, top, made, options, device=device)


def alone(
    hidden: int,
    inner: int,
    rows: int,
    text: str,
    dtype: Any,
    options: Options,
    bias: bool,
    device: str = "cpu",
) -> Call:
    """An MLP."""
    made = stored(None, hidden, inner, options.act, text=text, dtype=dtype, bias=bias)
    return Call(numbers((rows, hidden), 20, dtype), None, None, made, options, device=device)

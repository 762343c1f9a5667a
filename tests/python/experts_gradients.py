"""Reference for the gradients of MLPs, mixtures of experts and grouped products: PyTorch's autograd in float64
on a loop over experts. Each product is an autograd function whose operands are quantized by a recipe.

    y  = x w^T      rowwise copies
    dx = dy w       dy's rowwise copy, w's columnwise one
    dw = dy^T x     columnwise copies; if both are Hadamard transformed, without transforming back

An expert's rows are quantized as a separate tensor, and so is its weight. The router weight is a factor of a
mixture's second product: dx and the router's gradient are computed from dy, dw from dy times that weight.

Nothing is rounded between the products, so this is for float32, where last-bit differences rarely change a
code; the remaining difference is measured relative to the norm of the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from conftest import need
from experts_reference import Act, ops
from opaq.recipe import Recipe

torch = need("torch")

ROWWISE, COLUMNWISE = 1, 2


@dataclass(frozen=True)
class Texts:
    """A recipe's quantizers; without a recipe nothing is quantized."""

    x: str = ""
    w: str = ""
    dy: str = ""
    backward: str = ""

    @staticmethod
    def of(recipe: Recipe | None, stochastic: bool = True) -> Texts:
        if recipe is None:
            return Texts()
        made = recipe.linear_quantizers()
        dy = made.grad_output if stochastic else made.grad_output.replace("+sr", "")
        return Texts(made.input, made.weight, dy, made.backward_override)

    @property
    def both_transformed(self) -> bool:
        return "+rht" in self.x and "+rht" in self.dy


def copy_of(values: Any, text: str, usage: int, transformed: bool = False) -> Any:
    """Quantizes and dequantizes a matrix in one of its copies; with `transformed`, without transforming back
    and padded to groups of 16 rows."""
    if not text or values.numel() == 0:
        return values
    whole, shape = text + "+both", list(values.shape)
    buffers = ops.quantize(values.float(), whole)
    if transformed:
        names = text.split("+")
        whole = "+".join([names[0], "columnwise", *(name for name in names[1:] if not name.startswith("rht"))])
        buffers, shape = columnwise_only(buffers), [-(-shape[0] // 16) * 16, shape[1]]
    return ops.dequantize(buffers, whole, shape, torch.float32, usage).double()


def columnwise_only(buffers: list[Any]) -> list[Any]:
    """The columnwise buffers; nvfp4 has data and scales of both copies, then both amaxes."""
    return [buffers[2], buffers[3], buffers[5]]


class Product(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """x w^T with a recipe's quantizers, in float64."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, texts: Texts) -> Any:
        ctx.save_for_backward(x, w)
        ctx.texts = texts
        return copy_of(x, texts.x, ROWWISE) @ copy_of(w, texts.w, ROWWISE).T

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x, w), texts = ctx.saved_tensors, ctx.texts
        return dx_of(dy, w, texts), dw_of(dy, x, texts), None


def dx_of(dy: Any, w: Any, texts: Texts) -> Any:
    if texts.backward:
        return dy @ (w if texts.backward == "high_precision" else copy_of(w, texts.w, ROWWISE))
    return copy_of(dy, texts.dy, ROWWISE) @ copy_of(w, texts.w, COLUMNWISE)


def dw_of(dy: Any, x: Any, texts: Texts) -> Any:
    if texts.backward:
        return dy.T @ (x if texts.backward == "high_precision" else copy_of(x, texts.x, ROWWISE))
    both = texts.both_transformed
    return copy_of(dy, texts.dy, COLUMNWISE, both).T @ copy_of(x, texts.x, COLUMNWISE, both)


class Weighted(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """factor * (a w^T + bias), with one factor for each row."""

    @staticmethod
    def forward(ctx: Any, a: Any, w: Any, bias: Any, factor: Any, texts: Texts) -> Any:
        ctx.save_for_backward(a, w, bias, factor)
        ctx.texts = texts
        y = copy_of(a, texts.x, ROWWISE) @ copy_of(w, texts.w, ROWWISE).T
        return factor * (y if bias is None else y + bias)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (a, w, bias, factor), texts = ctx.saved_tensors, ctx.texts
        unweighted = dx_of(dy, w, texts)
        multiplied = copy_of(a, texts.x, ROWWISE) if texts.backward == "dequantized" else a
        dfactor = (unweighted * multiplied).sum(1, keepdim=True)
        if bias is not None:
            dfactor = dfactor + (dy @ bias)[:, None]
        dw, dbias = dw_of(factor * dy, a, texts), None if bias is None else (factor * dy).sum(0)
        return factor * unweighted, dw, dbias, dfactor, None


def smooth(act: Act, h: Any) -> Any:
    """The activation in PyTorch, for autograd."""
    limit, alpha, beta = act.numbers()
    g, u = act.split(h) if act.is_gated else (h, None)
    clamps = act.name in ("silu_clamp", "swiglu_oai", "swiglu_oai_packed")
    if clamps:
        g, u = torch.clamp(g, max=limit), torch.clamp(u, -limit, limit)
    if act.name.startswith("gelu_tanh"):
        made = torch.nn.functional.gelu(g, approximate="tanh")
    elif act.name.startswith("gelu"):
        made = torch.nn.functional.gelu(g)
    elif act.name.startswith("relu2"):
        made = torch.relu(g) ** 2
    else:
        made = g * torch.sigmoid(alpha * g)
    if act.name == "silu_step":
        made, u = torch.clamp(made, max=limit), torch.clamp(u, -limit, limit)
    if u is None:
        return made
    return made * (u + beta if clamps else u)


def hidden(x: Any, gate_up: Any, bias: Any, act: Act, texts: Texts) -> Any:
    h = Product.apply(x, gate_up, texts)
    return smooth(act, h if bias is None else h + bias)


def mlp(x: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, act: Act, texts: Texts) -> Any:
    a = hidden(x.reshape(-1, x.shape[-1]), gate_up, gate_up_bias, act, texts)
    y = Product.apply(a, down, texts)
    y = y if down_bias is None else y + down_bias
    return y.reshape(*x.shape[:-1], y.shape[-1])


def moe(
    x: Any,
    router: Any,
    ids: Any,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Any,
    act: Act,
    texts: Texts,
    *,
    first: int = 0,
    on_input: bool = False,
) -> Any:
    rows, k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
    top, factors = ids.reshape(-1, k), router.reshape(-1, k)
    total = torch.zeros_like(rows)
    for number in range(gate_up.shape[0]):
        token, slot = (top == first + number).nonzero(as_tuple=True)
        factor = factors[token, slot][:, None]
        biases = [None if b is None else b[number] for b in (gate_up_bias, down_bias)]
        if on_input:
            y = mlp(rows[token] * factor, gate_up[number], down[number], *biases, act, texts)
        else:
            a = hidden(rows[token], gate_up[number], biases[0], act, texts)
            y = Weighted.apply(a, down[number], biases[1], factor, texts)
        total = total.index_add(0, token, y)
    return total.reshape(x.shape)


def grouped_linear(x: Any, splits: Any, weight: Any, bias: Any, texts: Texts) -> Any:
    parts = []
    for number, rows in enumerate(x.split(splits.tolist())):
        y = Product.apply(rows, weight[number], texts)
        parts.append(y if bias is None else y + bias[number])
    return torch.cat(parts)


# --------------------------------------------------------------------------------------------------- comparing


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference relative to that of the expected tensor."""
    distance, size = (got.double() - want.double()).norm(), want.double().norm()
    return float(distance / size) if size > 0 else math.inf if distance > 0 else 0.0


def cosine(got: Any, want: Any) -> float:
    a, b = got.double().reshape(-1), want.double().reshape(-1)
    return float(a @ b / (a.norm() * b.norm()))


def moved(tensors: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: None if t is None else t.to(device) for name, t in tensors.items()}


def leaves(tensors: dict[str, Any], wanted: str, dtype: Any = None) -> dict[str, Any]:
    """Copies; those whose letter is in `wanted` require gradients."""
    made = {}
    for name, tensor in tensors.items():
        own = None if tensor is None else tensor.detach().clone().to(dtype or tensor.dtype)
        made[name] = own if own is None else own.requires_grad_(name in wanted)
    return made

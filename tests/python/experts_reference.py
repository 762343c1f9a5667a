"""Reference for gated MLPs and mixtures of experts in plain PyTorch: a loop over experts on dequantized
weights, with products in float64, and the error that a result may have.

Computation of a row in an expert:

    h = x gate_up^T + bias      x quantized; rounded to x's dtype
    a = activation(h)           the activated gate is rounded to x's dtype, and so is the product with up
    y = a down^T + bias         a quantized; float32
    out = sum of weight * y     float32, experts ascending, rounded once

Values that are not unique (sums in another order, exponentials with an error in the last place, and the results
of rounding and quantizing them) are tracked as ranges. In bf16 and f16 most ranges are single numbers; then the
quantizer gets the same input as the library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conftest import need

torch = need("torch")
need("opaq.quantized_tensor")  # registers the operators

ops = torch.ops.opaq

UNIT = 2.0**-24  # unit roundoff of float32: half a unit in the last place, relative
HALF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
FLUSHED = 4e-37  # |z * sigmoid(z)| where exp(-z) overflows float32: 89 / exp(88.7)


def rounded(values: Any, dtype: Any) -> Any:
    """Rounded to float32, in which everything is computed, and then to the dtype; returned in float64."""
    return values.float().to(dtype).double()


# ---------------------------------------------------------------------------------------------- activations

GATED = ("silu", "silu_clamp", "swiglu_oai", "swiglu_oai_packed", "silu_step", "gelu", "gelu_tanh", "relu2")
UNGATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")


@dataclass(frozen=True)
class Act:
    """An activation: its name in a plan, and its parameters."""

    name: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None

    @property
    def is_gated(self) -> bool:
        return not self.name.endswith("_no_mul")

    @property
    def rounds_once(self) -> bool:
        return self.name.startswith("swiglu_oai")

    def width(self, inner: int) -> int:
        """Rows of gate_up."""
        return 2 * inner if self.is_gated else inner

    def words(self) -> str:
        numbers = {"limit": self.limit, "alpha": self.alpha, "beta": self.beta}
        given = (f"{name}={value:g}".replace("e+", "e") for name, value in numbers.items() if value is not None)
        return " ".join([f"act={self.name}", *given])

    def numbers(self) -> tuple[float, float, float]:
        """limit, alpha and beta with their defaults, rounded to float32."""
        defaults = (7.0, 1.702, 1.0) if self.rounds_once else (math.inf, 1.0, 0.0)
        given = (self.limit, self.alpha, self.beta)
        chosen = [d if g is None else g for g, d in zip(given, defaults, strict=True)]
        limit, alpha, beta = torch.tensor(chosen, dtype=torch.float32).tolist()
        return limit, alpha, beta

    def split(self, h: Any) -> tuple[Any, Any]:
        """Gate and up; interleaved only in the interleaved activation."""
        if self.name == "swiglu_oai":
            return h[..., ::2], h[..., 1::2]
        half = h.shape[-1] // 2
        return h[..., :half], h[..., half:]


ACTS = {
    "silu": Act("silu"),
    "silu_clamp": Act("silu_clamp", limit=1.5),
    "silu_clamp alpha beta": Act("silu_clamp", limit=2.5, alpha=1.25, beta=0.5),
    "swiglu_oai": Act("swiglu_oai"),
    "swiglu_oai numbers": Act("swiglu_oai", limit=1.5, alpha=1.25, beta=0.25),
    "swiglu_oai_packed": Act("swiglu_oai_packed"),
    "swiglu_oai_packed numbers": Act("swiglu_oai_packed", limit=2.0, alpha=1.0, beta=0.0),
    "silu_step": Act("silu_step", limit=1.25),
    **{name: Act(name) for name in ("gelu", "gelu_tanh", "relu2", *UNGATED)},
}


@dataclass
class Range:
    """Ranges of numbers of a dtype, in float64: middle, low and high."""

    middle: Any
    low: Any
    high: Any

    @property
    def radius(self) -> Any:
        """The distance from the middle; 0 where all three are equal, also if they are not finite."""
        wide = torch.maximum(self.high - self.middle, self.middle - self.low)
        return torch.where((self.low == self.high) | self.middle.isnan(), 0.0, wide)

    def part(self, pick: Callable[[Any], Any]) -> Range:
        return Range(pick(self.middle), pick(self.low), pick(self.high))

    def holds(self, got: Any) -> Any:
        """Which numbers are in the range; a NaN is in a range that is NaN. If only an end is NaN, which comes
        from infinity times zero, every number is in the range."""
        inside = (got >= self.low) & (got <= self.high)
        open_end = self.low.isnan() | self.high.isnan()
        return torch.where(self.middle.isnan(), got.isnan(), inside | open_end)


def exactly(values: Any) -> Range:
    return Range(values, values, values)


def activated_gate(name: str, g: Any, alpha: float) -> tuple[Any, Any]:
    """The gate's function in float64, and the error bound of a float32 evaluation: a few roundings; the
    relative error of an exponential is |z| times that of its argument z."""
    if name.startswith("gelu") and "tanh" not in name:
        value, z = 0.5 * g * torch.erfc(-g * math.sqrt(0.5)), torch.zeros_like(g)
    elif name.startswith("gelu"):
        z = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        value = g * torch.sigmoid(z)  # sigmoid(2t) is (1 + tanh(t)) / 2
    elif name.startswith("relu2"):
        return torch.relu(g) ** 2, torch.zeros_like(g)
    else:
        z = alpha * g
        value = g * torch.sigmoid(z)
    exact_argument = name.startswith("silu") and alpha == 1
    slack = (8 + (0 if exact_argument else 4) * z.abs()) * UNIT * value.abs() + FLUSHED
    return value, torch.where(value.isfinite() & slack.isfinite(), slack, 0.0)


def within(values: list[Any]) -> Range:
    """The range of some values, of which the first is the middle."""
    low, high = values[0], values[0]
    for value in values[1:]:
        low, high = torch.minimum(low, value), torch.maximum(high, value)
    return Range(values[0], low, high)


def activate(act: Act, h: Range, dtype: Any) -> Range:
    """The activation's formula with its roundings."""
    limit, alpha, beta = act.numbers()
    clamps = act.name in ("silu_clamp", "swiglu_oai", "swiglu_oai_packed")
    g = h.part(lambda t: act.split(t)[0]) if act.is_gated else h
    ends = [g.middle, g.low, g.high]
    if clamps:
        ends = [torch.clamp(end, max=limit) for end in ends]
    found = [activated_gate(act.name, end, alpha) for end in ends]
    gate = within([found[0][0], *(v - s for v, s in found), *(v + s for v, s in found)])
    if act.name == "silu_step":
        gate = gate.part(lambda t: torch.clamp(t, max=limit))
    if not act.rounds_once:
        gate = gate.part(lambda t: rounded(t, dtype))
    if not act.is_gated:
        return gate
    u = h.part(lambda t: act.split(t)[1])
    if clamps or act.name == "silu_step":
        u = u.part(lambda t: torch.clamp(t, -limit, limit))
    if clamps:
        u = u.part(lambda t: (t + beta).float().double())
    ends = [gate.low, gate.high, torch.clamp(torch.zeros_like(gate.low), gate.low, gate.high)]
    pairs = [(gate.middle, u.middle), *((a, b) for a in ends for b in (u.low, u.high))]
    product = within([a * b for a, b in pairs])
    if act.rounds_once:
        product.low = product.low - 4 * UNIT * product.low.abs().nan_to_num(0, 0, 0)
        product.high = product.high + 4 * UNIT * product.high.abs().nan_to_num(0, 0, 0)
    return product.part(lambda t: rounded(t, dtype))


# ------------------------------------------------------------------------------------ products and quantizers


def decoded(text: str, values: Any, dtype: Any, given: Any = None) -> Any:
    """Quantizes and dequantizes a tensor of this dtype, to float64. `given` is its scale or its amax."""
    if not text or values.numel() == 0:
        return values
    named = {} if given is None else {"scale" if "+delayed" in text else "amax_rowwise": given}
    buffers = ops.quantize(values.to(dtype), text, **named)
    return ops.dequantize(buffers, text, values.shape, torch.float32).double()


def through(text: str, values: Range, dtype: Any, given: Any = None) -> tuple[Any, Any]:
    """Quantizes and dequantizes the middle of the ranges, and bounds the distance for other numbers in them.
    Scales depend on the largest values, so whole tensors are tried: all high ends, all low ends, all larger and
    all smaller magnitudes."""
    middle, radius = decoded(text, values.middle, dtype, given), values.radius
    if not text or not radius.any():
        return middle, radius if not text else torch.zeros_like(middle)
    far, sign = radius * (4 if dtype is torch.float32 else 1), torch.sign(values.middle)
    steps = (far, -far, sign * far, -sign * far)
    others = [decoded(text, rounded(values.middle + step, dtype), dtype, given) for step in steps]
    return middle, torch.stack([(other - middle).abs() for other in others]).amax(0)


def multiply(a: Any, radius: Any, w: Any, bias: Any, slack: int) -> tuple[Any, Any]:
    """a w^T + bias, and its error: the bound of docs/linear.md plus the error propagated from a."""
    more = 0.0 if bias is None else bias
    exact, terms = a @ w.T + more, a.abs() @ w.abs().T + abs(more)
    carried, depth = radius @ w.abs().T, a.shape[1]
    return exact, carried + (min(depth, 256) + -(-depth // 256) + 2 + slack) * UNIT * (terms + carried)


@dataclass
class Expected:
    """An expected result, and the error bound of the library's result before it is rounded to its dtype."""

    exact: Any
    error: Any

    def off(self, got: Any) -> float:
        """The largest error divided by its bound: must be at most 1."""
        assert got.shape == self.exact.shape, (tuple(got.shape), tuple(self.exact.shape))
        if got.numel() == 0:
            return 0.0
        allowed = self.error + HALF[got.dtype] * (self.exact.abs() + self.error) + TINY[got.dtype]
        off = (got.detach().double() - self.exact).abs() / allowed
        return float(off.nan_to_num(math.inf).max())


@dataclass(frozen=True)
class Options:
    """The options of a plan apart from the weights."""

    act: Act = Act("silu")
    x: str = ""
    h: str = ""
    on_input: bool = False
    total: int | None = None
    first: int = 0
    slack: int = 0  # added to the bound's factor: the further roundings of a GPU's products, docs/cuda.md

    def words(self) -> str:
        parts = [f"x={self.x}" if self.x else "", f"h={self.h}" if self.h else "", self.act.words()]
        parts += [f"experts={self.total} first={self.first}" if self.total is not None else ""]
        parts += ["weights=input" if self.on_input else ""]
        return " ".join(part for part in parts if part)


@dataclass
class Weights:
    """The weights, [..., rows, columns], plain or dequantized, in float64; biases or None."""

    gate_up: Any
    down: Any
    gate_up_bias: Any = None
    down_bias: Any = None

    def expert(self, number: int) -> Weights:
        return Weights(*(None if t is None else t[number] for t in vars(self).values()))


def expert(x: Any, w: Weights, options: Options, x_given: Any = None, h_given: Any = None) -> Expected:
    """One expert, or an MLP, on its rows."""
    dtype = x.dtype
    values = decoded(options.x, x.double(), dtype, x_given)
    exact, error = multiply(values, torch.zeros_like(values), w.gate_up, w.gate_up_bias, options.slack)
    h = Range(*(rounded(t, dtype) for t in (exact, exact - error, exact + error)))
    a, radius = through(options.h, activate(options.act, h, dtype), dtype, h_given)
    return Expected(*multiply(a, radius, w.down, w.down_bias, options.slack))


def mlp(x: Any, w: Weights, options: Options, x_given: Any = None, h_given: Any = None) -> Expected:
    made = expert(x.reshape(-1, x.shape[-1]), w, options, x_given, h_given)
    shape = (*x.shape[:-1], w.down.shape[-2])
    return Expected(made.exact.reshape(shape), made.error.reshape(shape))


def moe(
    hidden: Any,
    topk_weights: Any,
    topk_ids: Any,
    w: Weights,
    options: Options,
    x_given: Any = None,
    h_given: Any = None,
) -> Expected:
    """A loop over experts; an expert's rows are one matrix, in the order of tokens and then slots."""
    x = hidden.reshape(-1, hidden.shape[-1])
    top, router = (t.reshape(len(x), t.shape[-1]) for t in (topk_ids, topk_weights.double()))
    shape = (len(x), w.down.shape[-2])
    exact, error, sizes = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    count = torch.zeros(len(x), 1, dtype=torch.float64)
    for number in range(w.gate_up.shape[0]):
        token, slot = (top == options.first + number).nonzero(as_tuple=True)
        rows, factor = x[token], router[token, slot][:, None]
        if options.on_input:
            rows, factor = (rows.float() * factor.float()).to(x.dtype), torch.ones_like(factor)
        given = (g[number : number + 1] if g is not None and len(g) > 1 else g for g in (x_given, h_given))
        one = expert(rows, w.expert(number), options, *given)
        exact.index_add_(0, token, factor * one.exact)
        error.index_add_(0, token, factor.abs() * one.error)
        sizes.index_add_(0, token, factor.abs() * (one.exact.abs() + one.error))
        count.index_add_(0, token, torch.ones_like(factor))
    return Expected(*(t.reshape(hidden.shape) for t in (exact, error + (count + 2) * UNIT * sizes)))


# --------------------------------------------------------------------------------- exact bits of the definition


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once. A float64 holds the product exactly; an inexact sum is rounded to
    odd, so that rounding it to float32 is correct (no double rounding)."""
    product, added = a.double() * b.double(), c.double()
    total = product + added
    back = total - product
    error = (product - (total - back)) + (added - back)
    beyond = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    even = (total.view(torch.int64) & 1) == 0
    return torch.where((error != 0) & even, beyond, total).float()


def defined_product(a: Any, w: Any, bias: Any) -> Any:
    """docs/linear.md: float32 sums over k in blocks of 256, each addition of a product rounded once."""
    a, w = a.float(), w.float()
    total = torch.zeros(a.shape[0], w.shape[0])
    for begin in range(0, a.shape[1], 256):
        part = torch.zeros_like(total)
        for k in range(begin, min(begin + 256, a.shape[1])):
            part = fused(a[:, k : k + 1], w[:, k], part)
        total = total + part
    return total if bias is None else total + bias.float()


def defined_moe(hidden: Any, topk_weights: Any, topk_ids: Any, w: Weights, options: Options) -> Any:
    """The same loop with every operation in float32 and in the defined order. The activation is relu2, whose
    result does not depend on the processor."""
    assert options.act.name.startswith("relu2")
    dtype, total = hidden.dtype, torch.zeros(len(hidden), w.down.shape[-2])
    for number in range(w.gate_up.shape[0]):
        token, slot = (topk_ids == options.first + number).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        mine, rows, factor = w.expert(number), hidden[token], topk_weights[token, slot].float()[:, None]
        if options.on_input:
            rows, factor = (rows.float() * factor).to(dtype), None
        h = defined_product(decoded(options.x, rows.double(), dtype), mine.gate_up, mine.gate_up_bias)
        a = activate(options.act, exactly(h.to(dtype).double()), dtype).middle
        y = defined_product(decoded(options.h, a, dtype), mine.down, mine.down_bias)
        for row, place in enumerate(token.tolist()):  # in a loop: a token may occur twice
            total[place] = total[place] + (y[row] if factor is None else factor[row] * y[row])
    return total.to(dtype)


# ------------------------------------------------------------------------------------------ tensors for tests


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = torch.float32, size: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def routing(tokens: int, k: int, experts: int, seed: int, dtype: Any = torch.int64) -> tuple[Any, Any]:
    """Router weights between 0 and 1, and distinct experts for each token if there are enough."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, experts, generator=generator)
    if k > experts:
        ids = torch.randint(0, experts, (tokens, k), generator=generator)
    else:
        ids = scores.topk(k, dim=-1).indices
    return torch.sigmoid(torch.randn(tokens, k, generator=generator)), ids.to(dtype)


@dataclass
class Stored:
    """Weights in the form of the operator's arguments, and in that of the reference."""

    gate_up: list[Any]
    down: list[Any]
    gate_up_shape: list[int]
    down_shape: list[int]
    words: str
    reference: Weights
    biases: tuple[Any, Any]


def stored(
    experts: int | None,
    hidden: int,
    inner: int,
    act: Act,
    *,
    text: str = "",
    dtype: Any = torch.float32,
    bias: bool = False,
    seed: int = 0,
) -> Stored:
    """Weights of a mixture, or of one MLP if experts is None. Rows differ in magnitude, so that scales
    differ."""
    leading = () if experts is None else (experts,)
    shapes = (*leading, act.width(inner), hidden), (*leading, hidden, inner)
    plain = []
    for number, shape in enumerate(shapes):
        rows = torch.exp2(torch.arange(math.prod(shape[:-1])) % 3 - 1.0).reshape(*shape[:-1], 1)
        plain.append((numbers(shape, seed + number, size=shape[-1] ** -0.5) * rows).to(dtype))
    biases = [numbers(s[:-1], seed + 7 + i, dtype, 0.5) if bias else None for i, s in enumerate(shapes)]
    if text:
        parts = [ops.quantize(w, text) for w in plain]
        back = [ops.dequantize(p, text, s, torch.float32) for p, s in zip(parts, shapes, strict=True)]
    else:
        parts, back = [[w] for w in plain], plain
    reference = Weights(*(t if t is None else t.double() for t in (*back, *biases)))
    words = f"gate_up_given={text} down_given={text}" if text else ""
    return Stored(*parts, *map(list, shapes), words, reference, (biases[0], biases[1]))

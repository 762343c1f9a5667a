"""What a gated MLP and a mixture of such experts compute, a second time, in plain PyTorch: a loop over experts
on dequantized weights, products in float64, and how far a result may be from that.

The path of a row through an expert:

    h = x gate_up^T + bias      x as its quantizer leaves it; rounded to x's dtype
    a = activation(h)           rounded to x's dtype: the activated gate before it is multiplied, and the result
    y = a down^T + bias         a as its quantizer leaves it; float32
    out = sum of weight * y     float32, experts ascending, rounded once

What is not one number but a few (a sum in another order, an exponential that is a unit off, and what rounding
and quantizing make of that) is carried as a range. Where a range is one number, which is the rule in bf16 and
f16, a quantizer sees the very bytes that the library saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conftest import need

torch = need("torch")
need("opaq.quantized_tensor")  # which registers the operators

ops = torch.ops.opaq

UNIT = 2.0**-24  # half a unit of a float32 in its last place, relative
HALF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
FLUSHED = 4e-37  # z * sigmoid(z) where exp(-z) is beyond float32: 89 / exp(88.7)


def rounded(values: Any, dtype: Any) -> Any:
    """To float32, in which everything is computed, and from there to the dtype; in float64."""
    return values.float().to(dtype).double()


# ---------------------------------------------------------------------------------------------- activations

GATED = ("silu", "silu_clamp", "swiglu_oai", "swiglu_oai_packed", "silu_step", "gelu", "gelu_tanh", "relu2")
UNGATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")


@dataclass(frozen=True)
class Act:
    """An activation by its name in a plan, and its numbers."""

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
        """limit, alpha and beta with their defaults, as float32 holds them."""
        defaults = (7.0, 1.702, 1.0) if self.rounds_once else (math.inf, 1.0, 0.0)
        given = (self.limit, self.alpha, self.beta)
        chosen = [d if g is None else g for g, d in zip(given, defaults, strict=True)]
        limit, alpha, beta = torch.tensor(chosen, dtype=torch.float32).tolist()
        return limit, alpha, beta

    def split(self, h: Any) -> tuple[Any, Any]:
        """Gate and up; interleaved only in the form of that name."""
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
    """Numbers of a dtype, in float64, that are between two others."""

    middle: Any
    low: Any
    high: Any

    @property
    def radius(self) -> Any:
        """How far from the middle; 0 where the three are one, also where that is not finite."""
        wide = torch.maximum(self.high - self.middle, self.middle - self.low)
        return torch.where((self.low == self.high) | self.middle.isnan(), 0.0, wide)

    def part(self, pick: Callable[[Any], Any]) -> Range:
        return Range(pick(self.middle), pick(self.low), pick(self.high))

    def holds(self, got: Any) -> Any:
        """Which of these numbers are in the range; a NaN is where there is one. An end that is NaN is one at
        which an infinity met a zero: anything may be there."""
        inside = (got >= self.low) & (got <= self.high)
        open_end = self.low.isnan() | self.high.isnan()
        return torch.where(self.middle.isnan(), got.isnan(), inside | open_end)


def exactly(values: Any) -> Range:
    return Range(values, values, values)


def activated_gate(name: str, g: Any, alpha: float) -> tuple[Any, Any]:
    """The gate's function in float64, and how far a float32 evaluation may be from it: a few roundings, of
    which those of an exponential's argument z become |z| times larger."""
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
    """The first is the middle."""
    low, high = values[0], values[0]
    for value in values[1:]:
        low, high = torch.minimum(low, value), torch.maximum(high, value)
    return Range(values[0], low, high)


def activate(act: Act, h: Range, dtype: Any) -> Range:
    """The formulas, with the roundings that they have."""
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
    """What a quantizer leaves of a tensor of this dtype, in float64. `given` is its scale or its amax."""
    if not text or values.numel() == 0:
        return values
    named = {} if given is None else {"scale" if "+delayed" in text else "amax_rowwise": given}
    buffers = ops.quantize(values.to(dtype), text, **named)
    return ops.dequantize(buffers, text, values.shape, torch.float32).double()


def through(text: str, values: Range, dtype: Any, given: Any = None) -> tuple[Any, Any]:
    """What a quantizer leaves of the middle, and how far what it leaves of others in the range is from that.
    Scales follow the largest values, so whole tensors are tried: all up, all down, all larger, all smaller."""
    middle, radius = decoded(text, values.middle, dtype, given), values.radius
    if not text or not radius.any():
        return middle, radius if not text else torch.zeros_like(middle)
    far, sign = radius * (4 if dtype is torch.float32 else 1), torch.sign(values.middle)
    steps = (far, -far, sign * far, -sign * far)
    others = [decoded(text, rounded(values.middle + step, dtype), dtype, given) for step in steps]
    return middle, torch.stack([(other - middle).abs() for other in others]).amax(0)


def multiply(a: Any, radius: Any, w: Any, bias: Any) -> tuple[Any, Any]:
    """a w^T + bias, and its error: the bound of docs/linear.md, and what a's own error makes."""
    more = 0.0 if bias is None else bias
    exact, terms = a @ w.T + more, a.abs() @ w.abs().T + abs(more)
    carried, depth = radius @ w.abs().T, a.shape[1]
    return exact, carried + (min(depth, 256) + -(-depth // 256) + 2) * UNIT * (terms + carried)


@dataclass
class Expected:
    """What a result is, and how far the library's may be from it before it is rounded to its dtype."""

    exact: Any
    error: Any

    def off(self, got: Any) -> float:
        """The largest error in units of what is allowed: at most 1."""
        assert got.shape == self.exact.shape, (tuple(got.shape), tuple(self.exact.shape))
        if got.numel() == 0:
            return 0.0
        allowed = self.error + HALF[got.dtype] * (self.exact.abs() + self.error) + TINY[got.dtype]
        off = (got.detach().double() - self.exact).abs() / allowed
        return float(off.nan_to_num(math.inf).max())


@dataclass(frozen=True)
class Options:
    """What a plan says besides the weights."""

    act: Act = Act("silu")
    x: str = ""
    h: str = ""
    on_input: bool = False
    total: int | None = None
    first: int = 0

    def words(self) -> str:
        parts = [f"x={self.x}" if self.x else "", f"h={self.h}" if self.h else "", self.act.words()]
        parts += [f"experts={self.total} first={self.first}" if self.total is not None else ""]
        parts += ["weights=input" if self.on_input else ""]
        return " ".join(part for part in parts if part)


@dataclass
class Weights:
    """What is multiplied, [..., rows, columns]: plain or dequantized, in float64; biases or None."""

    gate_up: Any
    down: Any
    gate_up_bias: Any = None
    down_bias: Any = None

    def expert(self, number: int) -> Weights:
        return Weights(*(None if t is None else t[number] for t in vars(self).values()))


def expert(x: Any, w: Weights, options: Options, x_given: Any = None, h_given: Any = None) -> Expected:
    """One expert, or an MLP, on the rows that it gets."""
    dtype = x.dtype
    values = decoded(options.x, x.double(), dtype, x_given)
    exact, error = multiply(values, torch.zeros_like(values), w.gate_up, w.gate_up_bias)
    h = Range(*(rounded(t, dtype) for t in (exact, exact - error, exact + error)))
    a, radius = through(options.h, activate(options.act, h, dtype), dtype, h_given)
    return Expected(*multiply(a, radius, w.down, w.down_bias))


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
    """Expert by expert; an expert's rows ascend by token and then by slot, and are one matrix."""
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


# ------------------------------------------------------------------------------------- bit for bit, as defined


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once: a float64 holds the product, and of a sum that it does not hold the
    neighbour whose last bit is odd, which float32's rounding cannot take for a tie."""
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
    """The same loop, every operation in float32 and in its place. The activation is relu2, which has nothing
    that processors differ in."""
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
        for row, place in enumerate(token.tolist()):  # one by one: a token may come twice
            total[place] = total[place] + (y[row] if factor is None else factor[row] * y[row])
    return total.to(dtype)


# ------------------------------------------------------------------------------------------ tensors for tests


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = torch.float32, size: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def routing(tokens: int, k: int, experts: int, seed: int, dtype: Any = torch.int64) -> tuple[Any, Any]:
    """Router weights between 0 and 1, and different experts for each token where there are enough."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, experts, generator=generator)
    if k > experts:
        ids = torch.randint(0, experts, (tokens, k), generator=generator)
    else:
        ids = scores.topk(k, dim=-1).indices
    return torch.sigmoid(torch.randn(tokens, k, generator=generator)), ids.to(dtype)


@dataclass
class Stored:
    """Weights as an operator takes them, and as the reference does."""

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
    """Weights of a mixture, or of one MLP if experts is None. Rows differ in size, so that scales do."""
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

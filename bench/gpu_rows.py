"""The rows of bench_gpu.py: what is timed beside what, and the values that a row has to reach.

Operators are called as PyTorch sees them (torch.ops.opaq), with weights that are already quantized. A
weight-only product is compared with F.linear in bfloat16, FP8 products with torch._scaled_mm, a mixture of many
tokens with torch._grouped_mm. `floor` counts the bytes that have to be read and written once, and the
operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from gpu_timing import Call, Rates, Subject, cold
from opaq import functional, recipe
from opaq._library import OpaqError
from opaq._operators import buffer_rows, forms, ops
from opaq._plan import experts_plan

BF16, F32 = torch.bfloat16, torch.float32
WHOLE = 256 << 20  # bytes of the tensors that the quantizers read


@dataclass
class Work:
    """A row's subjects. `share`: the figure is floor / time; `rate`: operations / time / 1e12; `limit`: the
    time in us; otherwise it is the peer's time / ours."""

    ours: Subject
    peer: Subject | None = None
    moved: float = 0.0
    operations: float = 0.0
    speed: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Row:
    """`of`: what the figure compares with: a peer's name, "floor", "copy", "TFLOP/s" or "us"."""

    case: str
    of: str
    must: float
    aim: float
    make: Callable[[Rates], Work] = field(repr=False)

    @property
    def less_is_better(self) -> bool:
        return self.of == "us"


class Unavailable(Exception):
    """This build does not have what a row is about."""


# ---- data


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=BF16) * scale


DEVICE = "cuda"
_kept: dict[Any, Any] = {}  # the weights of the previous row


def kept(key: Any, make: Call) -> Any:
    """The value of `make` for this key, which is kept until another key of the same kind (its first item) is
    wanted."""
    for old in [old for old in _kept if old[0] == key[0] and old != key]:
        del _kept[old]
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


def forget() -> None:
    """Releases the kept weights."""
    _kept.clear()


def weights_of(text: str, n: int, k: int) -> list[list[torch.Tensor]]:
    """Copies of a quantized weight's buffers, cold."""
    return kept(("w", text, n, k), lambda: cold(ops.quantize(normal(n, k, seed=1, scale=0.02), text)))


def plain_weights(n: int, k: int) -> list[torch.Tensor]:
    return kept(("bf16", n, k), lambda: [one[0] for one in cold([normal(n, k, seed=1, scale=0.02)])])


def random_buffers(text: str, shape: Sequence[int], seed: int = 2) -> list[torch.Tensor]:
    """Buffers of random codes and scales near 1/50, made on the device: a stack of experts is too large to
    quantize."""
    generator, made = torch.Generator(device=DEVICE).manual_seed(seed), []
    for row in buffer_rows(text):
        size = row.shape(shape)
        if row.role == "data":
            codes = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_(0, 256, generator=generator)
            if text.startswith(("fp8", "mxfp8")):
                codes &= 0xBF  # no NaN, and below 2
            made.append(codes)
        elif row.element in ("e4m3", "e8m0"):  # 2^-6 to 2^-4
            low, high = (0x08, 0x18) if row.element == "e4m3" else (121, 124)
            made.append(torch.randint(low, high, size, generator=generator, device=DEVICE, dtype=torch.uint8))
        else:
            value = 448.0 * 6.0 * 0.5 if row.role == "amax" else 0.02
            made.append(torch.full(size, value, device=DEVICE))
    return made


def nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# ---- dense products


def weight_only(text: str, m: int, n: int, k: int, rates: Rates, words: str = "") -> Work:
    """y = x w^T with x in bf16 and a packed weight; `words`: further words of the plan."""
    x, weights, plain = normal(m, k), weights_of(text, n, k), plain_weights(n, k)
    ours = [partial(ops.linear, x, w, None, [n, k], f"w_given={text}{words}") for w in weights]
    peer = [partial(torch.nn.functional.linear, x, w) for w in plain]
    moved = nbytes(weights[0]) + 2 * m * (k + n)
    return Work(Subject(ours), Subject(peer), moved, 2.0 * m * n * k)


def given_product(texts: tuple[str, str], m: int, n: int, k: int, words: str = "") -> list[Call]:
    """y = x w^T where both are quantized already."""
    x, plan = ops.quantize(normal(m, k), texts[0]), f"x_given={texts[0]} w_given={texts[1]}{words}"
    try:
        forms("linear_forward", plan)
    except OpaqError as error:
        raise Unavailable(f"the plan has no word{words}") from error
    tail = None, [m, k], [n, k], BF16, plan
    return [partial(ops.linear_forward, x, w, *tail) for w in weights_of(texts[1], n, k)]


def fp8_tensor(m: int, n: int, k: int, words: str, rates: Rates) -> Work:
    """FP8 with one scale for each tensor, beside torch._scaled_mm."""
    ours = given_product(("fp8", "fp8"), m, n, k, words)
    (codes, scale), weights = ops.quantize(normal(m, k), "fp8"), weights_of("fp8", n, k)
    x8 = codes.view(torch.float8_e4m3fn)
    peer = [
        partial(
            torch._scaled_mm,
            x8,
            w[0].view(torch.float8_e4m3fn).t(),
            scale.reshape(()),
            w[1].reshape(()),
            out_dtype=BF16,
            use_fast_accum=True,
        )
        for w in weights
    ]
    return Work(Subject(ours), Subject(peer), m * k + n * k + 2 * m * n, 2.0 * m * n * k, 2.0)


def fp8_block(m: int, n: int, k: int, rates: Rates) -> Work:
    ours, x = given_product(("fp8blk1", "fp8blk2"), m, n, k), normal(m, k)
    peer = [partial(torch.nn.functional.linear, x, w) for w in plain_weights(n, k)]
    return Work(Subject(ours), Subject(peer), m * k + n * k + 2 * m * n, 2.0 * m * n * k, 2.0)


def step_of(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, made: Any, order: str = "fixed") -> Any:
    """Forward and backward of a linear layer, through autograd."""
    plain = torch.nn.functional.linear
    y = plain(x, w) if made is None else functional.linear(x, w, recipe=made, order=order)
    return torch.autograd.grad(y, [x, w], dy)


def training(made: Any, size: int, speed: float, order: str, rates: Rates) -> Work:
    x, dy = normal(size, size).requires_grad_(), normal(size, size, seed=3)
    leaves = [w.detach().requires_grad_() for w in plain_weights(size, size)]
    ours = [partial(step_of, x, w, dy, made, order) for w in leaves]
    peer = [partial(step_of, x, w, dy, None) for w in leaves]
    return Work(Subject(ours), Subject(peer), 2.0 * 5 * size * size, 6.0 * size**3, speed)


# ---- quantizers


def quantized_bytes(text: str, shape: Sequence[int]) -> int:
    """The bytes of the codes and scales of a quantizer, by the format table."""
    sizes = {None: 1, "e4m3": 1, "e8m0": 1, "f32": 4}
    return sum(prod(row.shape(shape)) * sizes.get(row.element, 1) for row in buffer_rows(text))


def quantizing(text: str, reads: int, rates: Rates) -> Work:
    """Quantizing a large tensor beside copying as many bytes; `reads`: how often the definition reads the
    tensor."""
    shape = [WHOLE // 2 // 8192, 8192]
    x = kept(("x", *shape), lambda: normal(*shape))
    moved = reads * x.nbytes + quantized_bytes(text, shape)
    source, target = kept(
        ("copy", moved), lambda: torch.empty(2, moved // 2, dtype=torch.uint8, device=DEVICE)
    ).unbind()
    ours = Subject([partial(ops.quantize, x, text)], "stream")
    return Work(ours, Subject([partial(target.copy_, source)], "stream"), moved)


def both_beside_two(text: str, rates: Rates) -> Work:
    """Rowwise and columnwise in one call, beside one call for each."""
    shape = [WHOLE // 2 // 8192, 8192]
    x = kept(("x", *shape), lambda: normal(*shape))

    def two() -> None:
        ops.quantize(x, text)
        ops.quantize(x, f"{text}+columnwise")

    ours = Subject([partial(ops.quantize, x, f"{text}+both")], "stream")
    return Work(ours, Subject([two], "stream"), x.nbytes + quantized_bytes(f"{text}+both", shape))


def small_quantizing(text: str, rates: Rates) -> Work:
    x = normal(64, 8192)
    return Work(Subject([partial(ops.quantize, x, text)]), None, x.nbytes + quantized_bytes(text, x.shape))


# ---- mixtures of experts


@dataclass(frozen=True)
class Mixture:
    name: str
    hidden: int
    inner: int
    experts: int
    top: int

    def shapes(self) -> tuple[list[int], list[int]]:
        return [self.experts, 2 * self.inner, self.hidden], [self.experts, self.hidden, self.inner]


DEEPSEEK = Mixture("DeepSeek-V3", 7168, 2048, 256, 8)
QWEN = Mixture("Qwen3", 2048, 768, 128, 8)
GPT_OSS = Mixture("gpt-oss", 2880, 2880, 128, 4)


def stacks_of(text: str, of: Mixture) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    up, down = of.shapes()
    return kept(("stack", text, of), lambda: (random_buffers(text, up), random_buffers(text, down)))


def routings(of: Mixture, tokens: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights of successive calls. Calls of one token use other experts each time, as far as there are
    any."""
    generator, made = torch.Generator(device=DEVICE).manual_seed(4), []
    order = torch.randperm(of.experts, generator=generator, device=DEVICE)
    for turn in range(count):
        if tokens == 1:
            ids = order.roll(turn * of.top)[: of.top].reshape(1, -1).clone()
        else:
            ids = torch.rand(tokens, of.experts, generator=generator, device=DEVICE).topk(of.top).indices
        made.append((ids, torch.rand(ids.shape, generator=generator, device=DEVICE).softmax(-1)))
    return made


def moe_calls(text: str, of: Mixture, tokens: int, count: int) -> tuple[list[Call], list[Any], torch.Tensor]:
    up, down = stacks_of(text, of)
    x, chosen = normal(tokens, of.hidden), routings(of, tokens, count)
    by = "fp8blk1" if text == "fp8blk2" else ""
    plan = experts_plan("bench_gpu", (by, by, ""), (text, text), "silu", (None, None, None), "exact")
    tail = up, down, None, None, *of.shapes(), plan
    return [partial(ops.moe, x, weights, ids, *tail) for ids, weights in chosen], chosen, x


def mixture_bytes(text: str, of: Mixture, tokens: int, chosen: Sequence[Any]) -> float:
    """The bytes of the experts that a call uses, on average, and of its tokens."""
    visited = sum(len(ids.unique()) for ids, _ in chosen) / len(chosen)
    each = sum(nbytes(stack) for stack in stacks_of(text, of)) / of.experts
    return visited * each + 4 * tokens * of.hidden


def moe_reading(text: str, of: Mixture, tokens: int, rates: Rates) -> Work:
    """A few tokens: the weights have to be read."""
    count = of.experts // of.top if tokens == 1 else 4
    calls, chosen, _ = moe_calls(text, of, tokens, count)
    return Work(Subject(calls), None, mixture_bytes(text, of, tokens, chosen))


def grouped_peer(of: Mixture, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, whole: bool) -> Call:
    """The mixture with torch._grouped_mm in bf16. The tokens' order is made beforehand; `whole`: gathering the
    tokens and adding their results up are timed as well."""

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        up, down = of.shapes()
        return normal(*up, seed=5, scale=0.02), normal(*down, seed=6, scale=0.02)

    up, down = kept(("plain stack", of), plain)
    order = ids.flatten().argsort(stable=True)
    token, place = order // of.top, order.argsort()
    ends = ids.flatten().bincount(minlength=of.experts).cumsum(0).to(torch.int32)
    gathered, factors = x[token], weights.to(BF16)[..., None]

    def run() -> torch.Tensor:
        rows = x[token] if whole else gathered
        gate, value = torch._grouped_mm(rows, up.transpose(1, 2), ends).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * value
        y = torch._grouped_mm(h, down.transpose(1, 2), ends)
        return (y[place].view(-1, of.top, of.hidden) * factors).sum(1) if whole else y

    return run


def moe_prefill(text: str, of: Mixture, tokens: int, whole: bool | None, rates: Rates) -> Work:
    """Many tokens. `whole`: whether the peer is the whole mixture or only its products and activation; None: no
    peer."""
    calls, chosen, x = moe_calls(text, of, tokens, 1)
    peer = None if whole is None else Subject([grouped_peer(of, *chosen[0], x, whole)])
    operations = 6.0 * tokens * of.top * of.hidden * of.inner
    speed = 2.0 if text.startswith("fp8") else 1.0
    return Work(Subject(calls), peer, mixture_bytes(text, of, tokens, chosen), operations, speed)


# ---- the host


def host_linear(rates: Rates) -> Work:
    """An eager call of so little work that the GPU waits for the host."""
    x, plain = normal(1, 1024), normal(1024, 1024, seed=1)
    w = ops.quantize(plain, "nvfp4")
    ours = partial(ops.linear, x, w, None, [1024, 1024], "w_given=nvfp4")
    peer = partial(torch.nn.functional.linear, x, plain)
    return Work(Subject([ours], "host"), Subject([peer], "host"))


def host_moe(rates: Rates) -> Work:
    calls, _, _ = moe_calls("nvfp4", QWEN, 1, 8)
    return Work(Subject(calls, "host"))


# ---- the table


def _dense(text: str) -> Iterator[Row]:
    name = text.upper()
    table: dict[tuple[int, int], tuple[tuple[int, float, float], ...]] = {
        (8192, 8192): (
            (1, 2.8, 3.2),
            (8, 2.6, 2.9),
            (16, 2.2, 3.1),
            (32, 2.2, 2.5),
            (64, 1.9, 2.3),
            (128, 1.3, 1.5),
            (512, 0.95, 1.05),
            (4096, 0.95, 1.0),
        ),
        (4096, 4096): ((1, 2.6, 3.1), (16, 1.9, 2.5), (64, 1.4, 1.6)),
        (28672, 4096): ((1, 3.0, 3.3), (8, 2.6, 2.9), (32, 1.9, 2.2)),
    }
    for (n, k), musts in table.items():
        for m, must, aim in musts:
            make = partial(weight_only, text, m, n, k)
            yield Row(f"{name} exact {n}x{k} M={m}", "bf16", must, aim, make)
            if m > 64:
                make = partial(weight_only, text, m, n, k, words=" order=any")
                yield Row(f"{name} exact {n}x{k} M={m} order=any", "bf16", must, aim, make)


def rows() -> list[Row]:
    """All rows, those that share weights beside each other."""
    made = [*_dense("nvfp4"), *_dense("mxfp4")]
    for m, must, aim in ((1, 1.6, 1.8), (4096, 0.85, 1.0)):
        make = partial(weight_only, "mxfp8", m, 8192, 8192)
        made.append(Row(f"MXFP8 exact 8192x8192 M={m}", "bf16", must, aim, make))
    for m, must, aim in ((1, 1.0, 1.05), (16, 1.0, 1.05), (64, 1.0, 1.05), (4096, 0.98, 1.02)):
        for words in ("", " order=any"):
            make = partial(fp8_tensor, m, 8192, 8192, words)
            made.append(Row(f"FP8 tensor 8192x8192 M={m}{words}", "_scaled_mm", must, aim, make))
    make = partial(fp8_block, 4096, 4096, 7168)
    made.append(Row("FP8 block 4096x7168 M=4096", "bf16", 1.45, 1.75, make))

    for text in ("fp8row", "mxfp8", "nvfp4"):
        reads = 2 if text == "nvfp4" else 1  # the amax of the tensor comes first
        made.append(Row(f"quantize {text} 256 MB", "copy", 0.85, 0.94, partial(quantizing, text, reads)))
    for text in ("mxfp8", "fp8blk1", "nvfp4"):
        reads = 2 if text == "nvfp4" else 1  # the amax of the tensor comes first
        make = partial(quantizing, f"{text}+both", reads)
        made.append(Row(f"quantize {text} row+column", "copy", 0.75, 0.9, make))
        made.append(Row(f"quantize {text} row+column", "two calls", 1.3, 1.4, partial(both_beside_two, text)))
    made.append(Row("quantize fp8 current scaling", "copy", 0.8, 0.9, partial(quantizing, "fp8", 2)))
    for text in ("fp8row", "mxfp8", "nvfp4"):
        made.append(Row(f"quantize {text} 64x8192", "us", 4.0, 2.5, partial(small_quantizing, text)))

    for name, by, speed, must, aim in (
        ("FP8 current", recipe.Float8CurrentScaling(), 2.0, 1.25, 1.5),
        ("FP8 block", recipe.Float8BlockScaling(), 2.0, 1.1, 1.3),
        ("MXFP8", recipe.MXFP8BlockScaling(), 1.0, 0.6, 0.8),
        ("NVFP4", recipe.NVFP4BlockScaling(), 1.0, 0.6, 0.8),
    ):
        for order, words in (("fixed", ""), ("any", " order=any")):
            make = partial(training, by, 4096, speed, order)
            made.append(Row(f"Linear fwd+bwd {name} 4096^3{words}", "bf16", must, aim, make))
    made.append(Row("host time of opaq::linear", "F.linear", 1.0, 1.0, host_linear))

    made.append(Row("MoE host time of opaq::moe", "us", 15.0, 10.0, host_moe))
    for text, of, m, must, aim in (
        ("nvfp4", QWEN, 1, 0.35, 0.6),
        ("nvfp4", QWEN, 64, 0.55, 0.75),
        ("mxfp4", GPT_OSS, 1, 0.4, 0.6),
        ("mxfp4", GPT_OSS, 64, 0.6, 0.75),
        ("nvfp4", DEEPSEEK, 1, 0.55, 0.75),
        ("nvfp4", DEEPSEEK, 16, 0.65, 0.83),
        ("nvfp4", DEEPSEEK, 64, 0.65, 0.86),
    ):
        make = partial(moe_reading, text, of, m)
        made.append(Row(f"MoE {text.upper()} {of.name} M={m}", "floor", must, aim, make))
    name = "MoE NVFP4 DeepSeek-V3 M=4096"
    made.append(Row(name, "_grouped_mm", 1.0, 1.2, partial(moe_prefill, "nvfp4", DEEPSEEK, 4096, True)))
    made.append(Row(name, "its products", 0.0, 0.0, partial(moe_prefill, "nvfp4", DEEPSEEK, 4096, False)))
    make = partial(moe_prefill, "fp8blk2", DEEPSEEK, 4096, None)
    made.append(Row("MoE FP8 block DeepSeek-V3 M=4096", "TFLOP/s", 650.0, 800.0, make))
    return made

"""Reference for linear layers under each recipe: quantized by tests/golden's reference, which shares no code
with the library, and multiplied in float64.

    y  = x w^T + bias    the rowwise copies of x and w
    dx = dy w            the rowwise copy of dy, the columnwise one of w
    dw = dy^T x          the columnwise copies; if both are Hadamard transformed, without transforming back
    dbias                column sums of dy before quantizing

A product over K terms may differ from the reference by (min(K, 256) + ceil(K / 256) + 2) * 2^-24 * sum |a| |b|,
and by one rounding to the dtype it is stored in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import reference_quantizer as rq
from conftest import need
from opaq.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from torch_cases import numpy_of

torch = need("torch")

Doubles = NDArray[np.float64]
STREAM_DY = 2  # added to the random offset for dy


@dataclass(frozen=True)
class Case:
    """A recipe, and the quantizers that it must select."""

    make: Callable[[], Recipe | None]
    x: str = ""
    w: str = ""
    dy: str = ""
    backward: str = ""

    @property
    def is_delayed(self) -> bool:
        return "+delayed" in self.x

    @property
    def is_stochastic(self) -> bool:
        return "+sr" in self.dy


def factory(role: QuantizerRole) -> str | None:
    return {"input": "fp8row", "weight": "mxfp4", "output": "mxfp8"}.get(role.tensor_type)


FP8 = "fp8+delayed", "fp8+delayed", "fp8.e5m2+delayed"
BLOCK = "fp8blk1+pow2", "fp8blk2+pow2", "fp8blk1+pow2"
CASES = {
    "none": Case(lambda: None),
    "delayed": Case(lambda: DelayedScaling(amax_history_len=4), *FP8),
    "delayed e4m3 recent": Case(
        lambda: DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_compute_algo="most_recent"),
        *("fp8+delayed",) * 3,
    ),
    "current": Case(Float8CurrentScaling, "fp8", "fp8", "fp8.e5m2"),
    "current pow2": Case(lambda: Float8CurrentScaling(True), "fp8+pow2", "fp8+pow2", "fp8.e5m2+pow2"),
    "block": Case(Float8BlockScaling, *BLOCK),
    "block f32": Case(lambda: Float8BlockScaling(True), "fp8blk1", "fp8blk2", "fp8blk1"),
    "block 1d": Case(lambda: Float8BlockScaling(w_block_scaling_dim=1), *("fp8blk1+pow2",) * 3),
    "mxfp8": Case(MXFP8BlockScaling, "mxfp8", "mxfp8", "mxfp8"),
    "mxfp8 2d hybrid": Case(
        lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
        *("mxfp8", "mxfp8+2d", "mxfp8.e5m2"),
    ),
    "nvfp4": Case(NVFP4BlockScaling, "nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),
    "nvfp4 no sr": Case(
        lambda: NVFP4BlockScaling(disable_stochastic_rounding=True), "nvfp4+rht", "nvfp4+2d", "nvfp4+rht"
    ),
    "nvfp4 no rht": Case(lambda: NVFP4BlockScaling(disable_rht=True), "nvfp4", "nvfp4+2d", "nvfp4+sr"),
    "nvfp4 no 2d": Case(
        lambda: NVFP4BlockScaling(disable_2d_quantization=True), "nvfp4+rht", "nvfp4", "nvfp4+rht+sr"
    ),
    "nvfp4 plain": Case(lambda: NVFP4BlockScaling(True, True, True), "nvfp4", "nvfp4", "nvfp4"),
    "nvfp4 rowscaled": Case(
        lambda: NVFP4BlockScaling(row_scaled_activation=True), "nvfp4+rht+rowscaled", "nvfp4+2d", "nvfp4+rht+sr"
    ),
    "nvfp4 4over6": Case(
        lambda: NVFP4BlockScaling(True, nvfp4_4over6="all"), "nvfp4+4over6", "nvfp4+2d+4over6", "nvfp4+sr"
    ),
    "custom": Case(lambda: CustomRecipe(factory), "fp8row", "mxfp4", ""),
}
OVERRIDES = {
    f"{name} {override}": replace(CASES[name], make=make, backward=override)
    for override in ("high_precision", "dequantized")
    for name, make in {
        "current": lambda o=override: Float8CurrentScaling(backward_override=o),
        "block": lambda o=override: Float8BlockScaling(backward_override=o),
        "mxfp8": lambda o=override: MXFP8BlockScaling(backward_override=o),
        "nvfp4": lambda o=override: NVFP4BlockScaling(backward_override=o),
    }.items()
}


# ------------------------------------------------------------------------------------------ delayed scaling


@dataclass
class Delayed:
    """The state of delayed scaling: scales and amax histories of (x, w, y) and of (dy, dx)."""

    scale_fwd: NDArray[np.float32]
    amax_history_fwd: NDArray[np.float32]
    scale_bwd: NDArray[np.float32]
    amax_history_bwd: NDArray[np.float32]

    def update(self, recipe: DelayedScaling, forward: tuple[float, ...], backward: tuple[float, ...]) -> None:
        smaller = 57344.0 if recipe.fp8_format is Format.HYBRID else 448.0
        roll(self.scale_fwd, self.amax_history_fwd, forward, 448.0, recipe)
        roll(self.scale_bwd, self.amax_history_bwd, backward, smaller, recipe)


def new_delayed(length: int) -> Delayed:
    one, none = np.ones, np.zeros
    return Delayed(one(3, "f4"), none((length, 3), "f4"), one(2, "f4"), none((length, 2), "f4"))


def roll(
    scale: NDArray[np.float32],
    history: NDArray[np.float32],
    amaxes: tuple[float, ...],
    largest: float,
    recipe: DelayedScaling,
) -> None:
    """The rule of Transformer Engine's kernel_bulk (common/recipe/delayed_scaling.cu), on lists: the scale
    follows from the history with the newest amax at its end; the oldest entry still counts, and is dropped
    then."""
    for i, amax in enumerate(amaxes):
        column = [float(v) for v in history[:, i]]
        last = max(column[0], amax)
        seen = 0.0
        if last != 0:
            candidates = [*column[1:], last]
            seen = max(candidates)
            column = [0.0, *candidates[1:]]
        history[:, i] = column
        chosen = last if recipe.amax_compute_algo == "most_recent" else seen
        if 0 < chosen < np.inf:
            quotient = np.float32(largest * 2.0**-recipe.margin) / np.float32(chosen)
            scale[i] = min(quotient, np.finfo(np.float32).max)


# ------------------------------------------------------------------------------------------------ products


@dataclass
class Product:
    """A product, the sum of the magnitudes of its terms, and their number."""

    exact: Doubles
    terms: Doubles
    depth: int

    def error(self, got: Any) -> float:
        """The largest error divided by its bound: must be at most 1."""
        half = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
        tiny = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[got.dtype]
        assert tuple(got.shape) == self.exact.shape, (tuple(got.shape), self.exact.shape)
        if got.numel() == 0:
            return 0.0
        sums = (min(self.depth, 256) + -(-self.depth // 256) + 2) * 2.0**-24 * self.terms
        allowed = sums + half * (np.abs(self.exact) + sums) + tiny
        error = np.abs(got.detach().double().cpu().numpy() - self.exact) / allowed
        return float(np.max(np.where(np.isnan(error), np.inf, error)))


def product(a: Doubles, b: Doubles, shape: tuple[int, ...], bias: Doubles | None = None) -> Product:
    """a b^T + bias."""
    more = 0.0 if bias is None else bias
    exact, terms = a @ b.T + more, np.abs(a) @ np.abs(b).T + np.abs(more)
    return Product(exact.reshape(shape), terms.reshape(shape), a.shape[1])


@dataclass
class Linear:
    """One layer's operands, and the expected results."""

    case: Case
    x: Any
    w: Any
    bias: Any
    dy: Any
    delayed: Delayed | None = None
    random: tuple[int, int] = (0, 0)
    copies: dict[str, rq.Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scales = {}
        if self.delayed is not None:
            fwd, bwd = self.delayed.scale_fwd, self.delayed.scale_bwd
            scales = {"x": float(fwd[0]), "w": float(fwd[1]), "dy": float(bwd[0])}
        for name in ("x", "w", "dy"):
            text, matrix = getattr(self.case, name), self.matrix(name)
            if text and matrix is not None:
                seed, offset = self.random
                given = scales.get(name)
                self.copies[name] = rq.quantize(text + "+both", matrix, given, seed, offset + STREAM_DY)

    def matrix(self, name: str) -> Any:
        tensor = getattr(self, name)
        return None if tensor is None else numpy_of(tensor.reshape(-1, tensor.shape[-1]).contiguous())

    def operand(self, name: str, usage: int, transformed: bool = False) -> Doubles:
        """x, w or dy quantized and dequantized, in float64."""
        if name not in self.copies:
            return np.asarray(self.matrix(name).astype(np.float64))
        result = self.copies[name]
        if transformed:
            rows, columns = result.shape
            left, rows = replace(result.spec, rht=None), rq.round_up(rows, 16)
            return rq.dequantize_copy(left, result.copies[usage], usage, rows, columns).astype(np.float64)
        return result.dequantize(usage).astype(np.float64)

    def y(self) -> Product:
        a, b = self.operand("x", rq.ROWWISE), self.operand("w", rq.ROWWISE)
        bias = None if self.bias is None else self.bias.detach().double().cpu().numpy()
        return product(a, b, (*self.x.shape[:-1], self.w.shape[0]), bias)

    def _backward(self, name: str) -> tuple[Doubles, Doubles]:
        """dy and the other operand; dw sums over the rows of dy."""
        forward = Linear(replace(self.case, dy=""), self.x, self.w, None, self.dy)
        plain = Linear(Case(lambda: None), self.x, self.w, None, self.dy)
        source = forward if self.case.backward == "dequantized" else plain
        return source.operand("dy", rq.ROWWISE), source.operand(name, rq.ROWWISE)

    def dx(self) -> Product:
        if self.case.backward:
            dy, w = self._backward("w")
        else:
            dy, w = self.operand("dy", rq.ROWWISE), self.operand("w", rq.COLUMNWISE)
        return product(dy, w.T, tuple(self.x.shape))

    def dw(self) -> Product:
        if self.case.backward:
            dy, x = self._backward("x")
        else:
            both = "+rht" in self.case.x and "+rht" in self.case.dy
            dy, x = (self.operand(name, rq.COLUMNWISE, both) for name in ("dy", "x"))
        return product(dy.T, x.T, tuple(self.w.shape))

    def dbias(self) -> Product:
        dy = self.matrix("dy").astype(np.float64)
        return Product(dy.sum(0), np.abs(dy).sum(0), dy.shape[0])

    def amaxes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The amaxes that delayed scaling records in a step: of (x, w, y) and of (dy, dx)."""
        x, w, dy = (float(self.copies[name].amax or 0) for name in ("x", "w", "dy"))
        return (x, w, 0.0), (dy, 0.0)


def values(shape: tuple[int, ...], seed: int, device: str, dtype: Any = torch.float32) -> Any:
    """Normal numbers whose magnitude differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        made = made * torch.exp2(torch.randint(-3, 4, (*shape[:-1], 1), generator=generator).float())
    return made.to(device, dtype)

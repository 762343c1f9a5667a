"""Shared by the cases of linear_rank.py: recipes, layers whole and in parts, a step of a layer, comparisons,
and a recorder of collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import opaq
from opaq.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_sr": NVFP4BlockScaling(),
}
# Limits of the relative error between two ways of quantizing the same layer.
LOOSE = {"bf16": 0.008, "delayed": 0.03, "current": 0.1, "block": 0.01, "mxfp8": 0.03}
LOOSE |= {"nvfp4": 0.2, "nvfp4_sr": 0.35}
BY_BLOCK = ("bf16", "block", "mxfp8")  # no scale covers more than a block, and shards have whole blocks
BATCH, FEATURES = 2, 128  # features of a shard; a rank has 64 x BATCH rows
SCALES = {"scale_fwd": (60.0, 5000.0, 1.0), "scale_bwd": (9000.0, 1.0)}
BF16_STEP = 2.0**-8
RATE = 2.0**-3  # learning rate: large enough that a step changes parameters considerably


class Rank(NamedTuple):
    rank: int
    world: int
    folder: Path
    device: str = "cpu"  # of all tensors that a case makes; on "cuda" each rank has a GPU

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.part(tensor, 0)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self.world, dim)[self.rank].contiguous()


class Result(NamedTuple):
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor | None


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that are the same on every rank and device."""
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * scale
    return made.bfloat16().to(torch.get_default_device())


def using(recipe: Recipe | None, group: Any = None) -> AbstractContextManager[Any]:
    return opaq.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


def alone(recipe: Recipe | None) -> Recipe | None:
    """The recipe without reductions over ranks, for a reference that one process computes."""
    return replace(recipe, reduce_amax=False) if isinstance(recipe, DelayedScaling) else recipe


def fill(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None, **state: Any) -> Any:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
        for name, values in (SCALES | state).items():
            getattr(layer, name).copy_(torch.tensor(values))
    return layer


def whole_layer(weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Any:
    made = opaq.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, **options)
    return fill(made, weight, bias)


def split_layer(me: Rank, weight: torch.Tensor, bias: torch.Tensor | None, mode: str, **options: Any) -> Any:
    """This rank's part of a layer."""
    options = {"tp_group": dist.group.WORLD, **options}
    shape = weight.shape[1], weight.shape[0]
    made = opaq.Linear(*shape, bias=bias is not None, dtype=weight.dtype, parallel_mode=mode, **options)
    bias = me.part(bias, 0) if bias is not None and mode == "column" else bias
    return fill(made, me.part(weight, 0 if mode == "column" else 1), bias)


def run(layer: Any, x: torch.Tensor, dy: torch.Tensor, recipe: Recipe | None, seed: int = 0) -> Result:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    with using(recipe):
        y = layer(x)
    y.backward(dy)
    return Result(y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad)


def same(made: Any, expected: Any, *what: Any) -> None:
    assert made.dtype == expected.dtype and made.shape == expected.shape, (what, made, expected)
    different = int((made != expected).sum())
    assert different == 0, f"{what}: {different} of {made.numel()} values differ: {made} is not {expected}"


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def near(made: torch.Tensor, expected: torch.Tensor, bound: float, *what: Any) -> None:
    """Compares the relative error of the norm with a bound."""
    assert made.shape == expected.shape, (what, made.shape, expected.shape)
    error = float((made.double() - expected.double()).norm() / expected.double().norm())
    assert error <= bound, f"{what}: the error is {error:.4f}, expected at most {bound}"


def same_sum(made: torch.Tensor, parts: list[torch.Tensor], *what: Any) -> None:
    """Compares with the sum of the parts in bfloat16, in any order; with two parts exactly."""
    if len(parts) == 2:
        return same(made, parts[0] + parts[1], *what)
    exact = sum(part.double() for part in parts)
    bound = (len(parts) - 1) * BF16_STEP * sum(part.double().abs() for part in parts)
    worst = float(((made.double() - exact).abs() - bound).max())
    assert worst <= 0, f"{what}: a sum over ranks is off by {worst} more than rounding"
    return None


def of_all(me: Rank, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, gathered without opaq."""
    found = [torch.empty_like(tensor) for _ in range(me.world)]
    dist.all_gather(found, tensor.contiguous())
    return found


class Collectives(TorchDispatchMode):
    """Records the functional collectives that are called: name, dtype and bytes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function._schema.name.removeprefix("_c10d_functional::")
        if function.namespace == "_c10d_functional" and name != "wait_tensor":
            self.seen.append((name, str(arguments[0].dtype).removeprefix("torch."), arguments[0].nbytes))
        return function(*arguments, **keywords or {})


def of_quantizer(text: str, shape: Any) -> list[tuple[str, str, int]]:
    """The all-gathers of a tensor's buffers, by the library's prototype."""
    if not text:
        return [("all_gather_into_tensor", "bfloat16", 2 * shape.numel())]
    buffers = opaq.proto(tuple(shape), "bfloat16", opaq.Quantizer(text))
    dtypes = ["float32" if buffer.element == "f32" else "uint8" for buffer in buffers]
    return [("all_gather_into_tensor", d, b.bytes) for d, b in zip(dtypes, buffers, strict=True)]

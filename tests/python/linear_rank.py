"""One rank of test_linear_distributed.py: `linear_rank.py <rank> <world> <folder> [<case>...]`. It runs the
cases of its world in order, on gloo, and notes each one that held in <folder>/done<rank>.

It is long because all cases share one start of the processes, which costs more than most of them."""

from __future__ import annotations

import datetime
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import opaq
from distributed_rank import RecordedAllGather
from opaq.functional import DelayedState
from opaq.recipe import (
    CustomRecipe,
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
# By how much two ways of quantizing the same layer may differ, as a part of the result.
LOOSE = {"bf16": 0.008, "delayed": 0.03, "current": 0.1, "block": 0.01, "mxfp8": 0.03}
LOOSE |= {"nvfp4": 0.2, "nvfp4_sr": 0.35}
BY_BLOCK = ("bf16", "block", "mxfp8")  # no figure covers more than a block, and shards are cut between blocks
BATCH, FEATURES = 2, 128  # a shard's features; rows on a rank: 64 by 2
SCALES = {"scale_fwd": (60.0, 5000.0, 1.0), "scale_bwd": (9000.0, 1.0)}
BF16_STEP = 2.0**-8
RATE = 2.0**-3  # of learning: parameters move by some part of what they are


# ---- values, layers, comparisons ----


class Rank(NamedTuple):
    rank: int
    world: int
    folder: Path

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
    """The same on every rank."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def using(recipe: Recipe | None, group: Any = None) -> AbstractContextManager[Any]:
    return opaq.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


def alone(recipe: Recipe | None) -> Recipe | None:
    """For what one process computes by itself."""
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
    """Near each other as a whole, and not by being nothing."""
    assert made.shape == expected.shape, (what, made.shape, expected.shape)
    error = float((made.double() - expected.double()).norm() / expected.double().norm())
    assert error <= bound, f"{what}: the error is {error:.4f}, expected at most {bound}"


def same_sum(made: torch.Tensor, parts: list[torch.Tensor], *what: Any) -> None:
    """The sum in bfloat16, in any order; of two there is only one."""
    if len(parts) == 2:
        return same(made, parts[0] + parts[1], *what)
    exact = sum(part.double() for part in parts)
    bound = (len(parts) - 1) * BF16_STEP * sum(part.double().abs() for part in parts)
    worst = float(((made.double() - exact).abs() - bound).max())
    assert worst <= 0, f"{what}: a sum over ranks is off by {worst} more than rounding"
    return None


def of_all(me: Rank, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each rank's, by a collective that is not opaq's."""
    found = [torch.empty_like(tensor) for _ in range(me.world)]
    dist.all_gather(found, tensor.contiguous())
    return found


class Collectives(TorchDispatchMode):
    """What the functional collectives inside were given: name, dtype, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function._schema.name.removeprefix("_c10d_functional::")
        if function.namespace == "_c10d_functional" and name != "wait_tensor":
            self.seen.append((name, str(arguments[0].dtype).removeprefix("torch."), arguments[0].nbytes))
        return function(*arguments, **keywords or {})


def of_quantizer(text: str, shape: Any) -> list[tuple[str, str, int]]:
    """The gathering of a tensor's buffers, by the library's prototype."""
    if not text:
        return [("all_gather_into_tensor", "bfloat16", 2 * shape.numel())]
    buffers = opaq.proto(tuple(shape), "bfloat16", opaq.Quantizer(text))
    dtypes = ["float32" if buffer.element == "f32" else "uint8" for buffer in buffers]
    return [("all_gather_into_tensor", d, b.bytes) for d, b in zip(dtypes, buffers, strict=True)]


# ---- tensor and sequence parallelism ----


class Problem(NamedTuple):
    """One layer, whole: column parallel with FEATURES out features on each rank, or row parallel with as many
    in features."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    @staticmethod
    def make(me: Rank, mode: str) -> Problem:
        split = FEATURES * me.world
        out, into = (split, FEATURES) if mode == "column" else (FEATURES, split)
        rows = (64 * me.world, BATCH)
        return Problem(
            numbers(*rows, into, seed=1),
            numbers(*rows, out, seed=2, scale=0.01),
            numbers(out, into, seed=3, scale=0.05),
            numbers(out, seed=4),
        )


def expect(
    me: Rank, p: Problem, mode: str, recipe: Recipe | None, **options: Any
) -> tuple[Result, list[torch.Tensor]]:
    """What this rank's part gives in one process by itself, and the summands of the sum over ranks: of dx if
    mode is column, of y if it is row."""
    if mode == "column":
        layer = whole_layer(me.part(p.weight, 0), me.part(p.bias, 0), **options)
        made = run(layer, p.x, me.part(p.dy, -1), alone(recipe))
        return made, of_all(me, made.dx)
    made = run(whole_layer(me.part(p.weight, 1), None, **options), me.part(p.x, -1), p.dy, alone(recipe))
    return made, of_all(me, made.y)


def given(me: Rank, p: Problem, mode: str, sequence: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy as this rank gets them."""
    cut = me.rows if sequence else lambda tensor: tensor
    if mode == "column":
        return cut(p.x), me.part(p.dy, -1)
    return me.part(p.x, -1), cut(p.dy)


def check_split(me: Rank, p: Problem, mode: str, sequence: bool, name: str, made: Result) -> None:
    """A sharded layer's results against one process': by bits on this rank's part of the weight, and by bits or
    bounded on the whole weight."""
    what = mode, sequence, name
    recipe = RECIPES[name]
    expected, summands = expect(me, p, mode, recipe)
    whole = run(whole_layer(p.weight, p.bias), p.x, p.dy, alone(recipe))
    rows = me.rows if sequence else lambda tensor: tensor
    if mode == "column":
        same(made.y, expected.y, "y", *what)
        same(made.dw, expected.dw, "dw", *what)
        same(made.db, expected.db, "db", *what)
        same_sum(made.dx, [rows(s) for s in summands], "dx", *what)
        wholes = me.part(whole.y, -1), me.part(whole.dw, 0), me.part(whole.db, 0)
        pairs = list(zip((made.y, made.dw, made.db), wholes, strict=True))
        summed = made.dx, rows(whole.dx)
    else:
        if name == "nvfp4_sr" and sequence:  # each rank rounds its own rows by the same random numbers
            near(made.dx, expected.dx, LOOSE[name], "dx", *what)
            near(made.dw, expected.dw, LOOSE[name], "dw", *what)
        else:
            same(made.dx, expected.dx, "dx", *what)
            same(made.dw, expected.dw, "dw", *what)
        same_sum(made.y, [rows(s) for s in summands] + [p.bias.expand_as(rows(p.dy))], "y", *what)
        near(made.db, p.dy.double().sum((0, 1)), 0.01, "db", *what)
        pairs = [(made.dx, me.part(whole.dx, -1)), (made.dw, me.part(whole.dw, 1))]
        summed = made.y, rows(whole.y)
    for mine, theirs in pairs:
        if name in BY_BLOCK:
            same(mine, theirs, "whole", *what)
        near(mine, theirs, LOOSE[name], "whole", *what)
    near(*summed, LOOSE[name], "whole sum", *what)


def traffic(p: Problem, x: Any, dy: Any, mode: str, sequence: bool, recipe: Recipe | None) -> list[Any]:
    """What the collectives of a step must be given: quantized bytes where rows are gathered, and amaxes."""
    q = recipe.linear_quantizers() if recipe else opaq.recipe.LinearQuantizers()
    rows, out = p.x.shape[0] * BATCH, p.weight.shape[0]
    found: list[tuple[str, str, int]] = []
    if mode == "column" and sequence:
        found += of_quantizer(q.input, x.shape)  # for y
        found += of_quantizer(q.input and q.input + "+columnwise", x.shape)  # for dw
        found += [("reduce_scatter_tensor", "bfloat16", 2 * rows * FEATURES)]
    elif mode == "column":
        found += [("all_reduce", "bfloat16", 2 * rows * FEATURES)]
    elif sequence:
        found += [("reduce_scatter_tensor", "bfloat16", 2 * rows * out), ("all_reduce", "bfloat16", 2 * out)]
        found += of_quantizer(q.grad_output and q.grad_output + "+both", dy.shape)
    else:
        found += [("all_reduce", "bfloat16", 2 * rows * out)]
    if sequence and isinstance(recipe, (Float8CurrentScaling, NVFP4BlockScaling)):
        found += [("all_reduce", "float32", 8)]  # the gathered tensor's amax, of both copies
    if isinstance(recipe, DelayedScaling):
        found += [("all_reduce", "float32", 20)] + [("all_reduce", "float32", 4)] * sequence
    return sorted(found)


def tensor_parallel(me: Rank) -> None:
    """Column and row, with and without a split sequence, by every recipe: results, and bytes on the wire."""
    for mode in ("column", "row"):
        p = Problem.make(me, mode)
        for sequence in (False, True):
            x, dy = given(me, p, mode, sequence)
            for name, recipe in RECIPES.items():
                layer = split_layer(me, p.weight, p.bias, mode, sequence_parallel=sequence)
                with Collectives() as collectives:
                    made = run(layer, x, dy, recipe)
                check_split(me, p, mode, sequence, name, made)
                expected = traffic(p, x, dy, mode, sequence, recipe)
                assert sorted(collectives.seen) == expected, (mode, sequence, name, collectives.seen, expected)


def check_parts(me: Rank, made: Result, expected: Result, summands: list[Any], mode: str, *what: Any) -> None:
    """By bits, with a split sequence and, in a row-parallel layer, without a bias."""
    rows = [me.rows(summand) for summand in summands]
    same(made.dw, expected.dw, "dw", mode, *what)
    if mode == "column":
        same(made.y, expected.y, "y", mode, *what)
        same(made.db, expected.db, "db", mode, *what)
        same_sum(made.dx, rows, "dx", mode, *what)
    else:
        same(made.dx, expected.dx, "dx", mode, *what)
        same_sum(made.y, rows, "y", mode, *what)


def by_row(role: Any) -> str:
    return "fp8row.e5m2" if role.tensor_type == "grad_output" else "fp8row"


def options(me: Rank) -> None:
    """With a split sequence: everything else that a layer can be told goes on working, by bits."""
    mxfp8, current = RECIPES["mxfp8"], RECIPES["current"]
    nvfp4 = NVFP4BlockScaling(disable_stochastic_rounding=True, row_scaled_activation=True)
    told: list[tuple[Recipe | None, dict[str, Any]]] = [
        (replace(mxfp8, backward_override="high_precision"), {}),
        (replace(mxfp8, backward_override="dequantized"), {}),
        (replace(current, backward_override="high_precision"), {}),
        (replace(current, backward_override="dequantized"), {}),
        (mxfp8, {"save_original_input": True}),
        (current, {"save_original_input": True, "save_original_weight": True}),
        (nvfp4, {}),  # the columnwise copy has scales that cover all rows: gathered as it is
        (CustomRecipe(by_row), {}),
    ]
    for mode in ("column", "row"):
        p = Problem.make(me, mode)
        x, dy = given(me, p, mode, sequence=True)
        bias = p.bias if mode == "column" else None
        for recipe, more in told:
            made = run(split_layer(me, p.weight, bias, mode, sequence_parallel=True, **more), x, dy, recipe)
            check_parts(me, made, *expect(me, p, mode, recipe, **more), mode, recipe, more)
        for name, recipe in RECIPES.items():
            if recipe is not None and (name, mode) != ("nvfp4_sr", "row"):
                with opaq.quantized_model_init(recipe=recipe):
                    layer = split_layer(me, p.weight, bias, mode, sequence_parallel=True)
                    assert isinstance(layer.weight, opaq.QuantizedTensor)
                    expected = expect(me, p, mode, recipe)
                check_parts(me, run(layer, x, dy, recipe), *expected, mode, name, "quantized parameters")
        expected, summands = expect(me, p, mode, mxfp8)
        for number, group in enumerate(groups_of(me)):
            layer = split_layer(me, p.weight, bias, mode, sequence_parallel=True, tp_group=group)
            check_parts(me, run(layer, x, dy, mxfp8), expected, summands, mode, "group", number)

        # a cached weight; nothing to differentiate; one of two gradients; a fused gradient
        layer = split_layer(me, p.weight, bias, mode, sequence_parallel=True, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        for first in (True, False):
            inp = x.clone().requires_grad_()
            with using(mxfp8):
                y = layer(inp, is_first_microbatch=first)
            y.backward(dy)
            fused = (layer.weight.main_grad / (1 if first else 2)).bfloat16()
            whole = Result(y.detach(), inp.grad, fused, expected.db)  # the bias has a gradient as always
            check_parts(me, whole, expected, summands, mode, "microbatch", first)
        layer = split_layer(me, p.weight, bias, mode, sequence_parallel=True)
        with torch.no_grad(), using(mxfp8):
            same(layer(x), y, mode, "no_grad")
        for of_x, of_w in ((True, False), (False, True)):
            layer.weight.requires_grad_(of_w)
            layer.zero_grad()
            inp = x.clone().requires_grad_(of_x)
            with using(mxfp8):
                layer(inp).backward(dy)
            assert (inp.grad is not None, layer.weight.grad is not None) == (of_x, of_w)
            same(inp.grad if of_x else layer.weight.grad, whole.dx if of_x else expected.dw, mode, of_x, of_w)

    # a row-parallel layer's bias in its caller's hands has the gradient of the whole sequence too
    p = Problem.make(me, "row")
    x, dy = given(me, p, "row", sequence=True)
    layer = split_layer(me, p.weight, p.bias, "row", sequence_parallel=True, return_bias=True)
    y, bias = layer(x)
    (y + bias).backward(dy)
    near(layer.bias.grad, p.dy.double().sum((0, 1)), 0.01, "returned bias")


def groups_of(me: Rank) -> list[Any]:
    """The world, named in other ways."""
    mesh = init_device_mesh("cpu", (1, me.world), mesh_dim_names=("data", "tensor"))
    return [dist.new_group(), init_device_mesh("cpu", (me.world,)), mesh["tensor"]]


# ---- models of two layers ----


class Pair(nn.Module):
    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.between: Any = nn.functional.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.between(self.up(x)))
        return made


class PairValues(NamedTuple):
    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor]
    x: torch.Tensor
    dy: torch.Tensor

    @staticmethod
    def make(me: Rank, width: int = FEATURES, seed: int = 10) -> PairValues:
        """Of width features, and as many for each rank inside."""
        inside = width * me.world
        rows = 64 * me.world, BATCH, width
        return PairValues(
            (numbers(inside, width, seed=10, scale=0.1), numbers(width, inside, seed=11, scale=0.05)),
            (numbers(inside, seed=12, scale=0.1), numbers(width, seed=13, scale=0.1)),
            numbers(*rows, seed=seed + 4),
            numbers(*rows, seed=seed + 5, scale=0.01),
        )

    def whole(self, **options: Any) -> Pair:
        return Pair(*(whole_layer(w, b, **options) for w, b in zip(self.weights, self.biases, strict=True)))

    def split(self, me: Rank, **options: Any) -> Pair:
        layers = zip(self.weights, self.biases, ("column", "row"), strict=True)
        return Pair(*(split_layer(me, w, b, mode, **options) for w, b, mode in layers))


def train(
    model: Any,
    x: torch.Tensor,
    dy: torch.Tensor,
    recipe: Recipe | None,
    call: Any = None,
    steps: int = 3,
    grow: float = 0.25,
) -> dict[str, torch.Tensor]:
    """Steps of SGD. Returns the last y and dx, the parameters and their last gradients, and the buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        inp = (x * (1 + step * grow)).requires_grad_()
        optimizer.zero_grad()
        torch.manual_seed(step)
        with using(recipe):
            y = (model if call is None else call)(inp)
        y.backward(dy)
        optimizer.step()
    found = {"y": y.detach(), "dx": inp.grad, **{name: b.clone() for name, b in model.named_buffers()}}
    for name, parameter in model.named_parameters():
        found |= {name: parameter.detach().clone(), f"{name}.grad": parameter.grad}
    return {name: local(tensor) for name, tensor in found.items()}


def same_training(made: dict[str, Any], expected: dict[str, Any], *what: Any) -> None:
    assert made.keys() == expected.keys(), (what, made.keys(), expected.keys())
    for name, tensor in expected.items():
        same(made[name], tensor, name, *what)


def compiled(model: Any, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


def near_whole(me: Rank, v: PairValues, made: dict[str, Any], recipe: Any, rows: int, *what: Any) -> None:
    """A split pair's training against one process' of the same weights; rows: the dimension of x that is split,
    -1 for none. What is compared of a parameter is how far it moved."""
    name = str(what[0])
    whole = v.whole()
    expected = train(whole, v.x, v.dy, alone(recipe))
    cut = (lambda tensor: me.part(tensor, rows)) if rows >= 0 else lambda tensor: tensor
    for key in ("y", "dx"):
        near(made[key], cut(expected[key]), LOOSE[name], key, *what)
    starts = {"up.weight": v.weights[0], "down.weight": v.weights[1]}
    starts |= {"up.bias": v.biases[0], "down.bias": v.biases[1]}
    split = {"up.weight": 0, "down.weight": 1, "up.bias": 0}
    for key, start in starts.items():
        moved = expected[key].double() - start.double()
        mine = me.part(moved, split[key]) if key in split else moved
        start = me.part(start, split[key]) if key in split else start
        near(made[key].double() - start.double(), mine, LOOSE[name], key, *what)


def pair(me: Rank) -> None:
    """Column, gelu, row: three steps of SGD as in one process, and compiled as eager."""
    v = PairValues.make(me)
    for sequence in (True, False):
        x, dy = (me.rows(v.x), me.rows(v.dy)) if sequence else (v.x, v.dy)
        for name, recipe in RECIPES.items():
            made = train(v.split(me, sequence_parallel=sequence), x, dy, recipe)
            near_whole(me, v, made, recipe, 0 if sequence else -1, name, sequence)
            if me.world == 2 and (sequence or name == "delayed"):
                model = v.split(me, sequence_parallel=sequence)
                again = train(model, x, dy, recipe, call=compiled(model, "aot_eager"))
                same_training(again, made, name, "compiled", sequence)


def inductor(me: Rank) -> None:
    """The same, compiled to machine code, with a function in between that no compiler approximates."""
    v = PairValues.make(me)
    for name in ("delayed", "mxfp8"):
        models = [v.split(me, sequence_parallel=True) for _ in range(2)]
        for model in models:
            model.between = nn.functional.relu
        given = me.rows(v.x), me.rows(v.dy), RECIPES[name]
        made = train(models[0], *given)
        again = train(models[1], *given, call=compiled(models[1], "inductor"))
        same_training(again, made, name, "inductor")


# ---- delayed scaling's largest values, over ranks ----


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def scales_of(layer: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(layer, name).clone() for name in DelayedState._fields}


def delayed_steps(layer: Any, xs: Any, dys: Any, recipe: Any, group: Any, call: Any) -> dict[str, Any]:
    for x, dy in zip(xs, dys, strict=True):
        with using(recipe, group):
            y = call(x.clone().requires_grad_())
        y.backward(dy)
    return scales_of(layer)


def check_scales(state: dict[str, Any], seen: list[tuple[float, float, float]], *what: Any) -> None:
    """The state after steps that saw these largest values of x, w and dy."""
    kinds = zip(*seen, strict=True)
    x, w, dy = ([torch.tensor(amax) for amax in amaxes] for amaxes in kinds)
    for made, amaxes, most in zip(
        (*state["scale_fwd"][:2], state["scale_bwd"][0]), (x, w, dy), (448, 448, 57344), strict=True
    ):
        same(made, torch.tensor(float(most)) / max(amaxes), "scale", *what)
    steps = len(seen)
    history = torch.stack([torch.stack(x), torch.stack(w)], 1)
    same(state["amax_history_fwd"][-steps:, :2], history, "history", *what)
    same(state["amax_history_bwd"][-steps:, 0], torch.stack(dy), "history", *what)
    assert not state["amax_history_fwd"][:-steps].any() and not state["amax_history_bwd"][:-steps].any(), what


def delayed(me: Rank) -> None:
    """Largest values are reduced over the group that autocast names, or all ranks; computed here by hand."""
    pairs = [list(range(first, first + 2)) for first in range(0, me.world, 2)]
    mine = me.rank // 2
    named = [dist.new_group(members) for members in pairs][mine]
    mesh = init_device_mesh("cpu", (me.world // 2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    steps = 2
    whole_xs = [numbers(me.world * 64, BATCH, FEATURES, seed=20 + i) for i in range(steps)]
    whole_dys = [numbers(me.world * 64, BATCH, FEATURES, seed=30 + i, scale=0.01) for i in range(steps)]
    weight = numbers(FEATURES, FEATURES, seed=40, scale=0.05)
    xs, dys = [me.rows(x) for x in whole_xs], [me.rows(dy) for dy in whole_dys]
    members = {"world": list(range(me.world)), "group": pairs[mine], "mesh": pairs[mine]}
    for kind, group, recipe in (
        ("world", None, DelayedScaling()),
        ("group", named, DelayedScaling()),
        ("mesh", mesh, DelayedScaling()),
        ("alone", None, DelayedScaling(reduce_amax=False)),
    ):
        among = members.get(kind, [me.rank])
        seen = []
        for x, dy in zip(whole_xs, whole_dys, strict=True):
            parts = [(x.chunk(me.world)[i], dy.chunk(me.world)[i]) for i in among]
            seen.append((max(largest(p) for p, _ in parts), largest(weight), max(largest(p) for _, p in parts)))
        layer, again = (whole_layer(weight, None) for _ in range(2))
        made = delayed_steps(layer, xs, dys, recipe, group, layer)
        check_scales(made, seen, kind)
        if me.world == 2 and kind in ("group", "mesh"):
            call = compiled(again, "aot_eager")
            same_training(delayed_steps(again, xs, dys, recipe, group, call), made, kind)
        if kind == "world":
            for name, tensor in made.items():
                for other in of_all(me, tensor):
                    same(other, tensor, "of all ranks", name)

    # a layer in parts: what is gathered has the largest value of the whole, whatever the recipe reduces
    for mode in ("column", "row"):
        for reduce in (True, False):
            p = Problem.make(me, mode)
            x, dy = given(me, p, mode, sequence=True)
            layer, again = (split_layer(me, p.weight, None, mode, sequence_parallel=True) for _ in range(2))
            recipe = DelayedScaling(reduce_amax=reduce, amax_compute_algo="most_recent")
            made = delayed_steps(layer, [x] * steps, [dy] * steps, recipe, None, layer)
            mine = largest(layer.weight)
            amaxes = largest(p.x), largest(p.weight), largest(p.dy)
            if not reduce:
                amaxes = (amaxes[0], mine, largest(dy)) if mode == "column" else (largest(x), mine, amaxes[2])
            check_scales(made, [amaxes] * steps, mode, reduce)
            if me.world == 2 and reduce == (mode == "column"):
                call = compiled(again, "aot_eager")
                again_made = delayed_steps(again, [x] * steps, [dy] * steps, recipe, None, call)
                same_training(again_made, made, mode, reduce)


# ---- DTensor ----


def layouts(me: Rank, sequence: bool) -> dict[str, Any]:
    """PyTorch's plan for a pair; with a sequence that is split along dimension 1 outside of it, or not."""
    if not sequence:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}


def dtensor(me: Rank) -> None:
    """PyTorch's ColwiseParallel and RowwiseParallel: each layer by bits, and pairs of them in training."""
    mesh = init_device_mesh("cpu", (me.world,))
    for mode, style in (("column", ColwiseParallel()), ("row", RowwiseParallel())):
        p = Problem.make(me, mode)
        x, dy = given(me, p, mode, sequence=False)
        for name, recipe in RECIPES.items():
            layer = parallelize_module(whole_layer(p.weight, p.bias), mesh, style)
            made = run(layer, x, dy, recipe)
            assert all(isinstance(gradient, DTensor) for gradient in (made.dw, made.db)), name
            whole = run(whole_layer(p.weight, p.bias), p.x, p.dy, alone(recipe))
            for mine, theirs in ((made.dw, whole.dw), (made.db, whole.db)):
                near(mine.full_tensor(), theirs, LOOSE[name], mode, name, "full_tensor")
            if mode == "column":
                expected, summands = expect(me, p, mode, recipe)
                same(made.y, expected.y, "y", mode, name)
                same(made.db.to_local(), expected.db, "db", mode, name)
                same_sum(made.dx, summands, "dx", mode, name)
            else:  # the first rank adds the bias
                alike = whole_layer(me.part(p.weight, 1), p.bias if me.rank == 0 else None)
                expected = run(alike, me.part(p.x, -1), p.dy, alone(recipe))
                same_sum(made.y, of_all(me, expected.y), "y", mode, name)
                same(made.dx, expected.dx, "dx", mode, name)
            same(made.dw.to_local(), expected.dw, "dw", mode, name)
            if name in BY_BLOCK:
                same(made.dw.full_tensor(), whole.dw, "dw", mode, name)
    odd_layers(me, mesh)
    v = PairValues.make(me)
    v = v._replace(x=v.x.transpose(0, 1).contiguous(), dy=v.dy.transpose(0, 1).contiguous())
    for sequence in (True, False):
        x, dy = (me.part(v.x, 1), me.part(v.dy, 1)) if sequence else (v.x, v.dy)
        for name, recipe in RECIPES.items():
            model = parallelize_module(v.whole(), mesh, layouts(me, sequence))
            made = train(model, x, dy, recipe)
            near_whole(me, v, made, recipe, 1 if sequence else -1, name, "DTensor", sequence)
            if me.world == 2 and sequence == (name in ("bf16", "delayed", "mxfp8", "nvfp4_sr")):
                model = parallelize_module(v.whole(), mesh, layouts(me, sequence))
                again = train(model, x, dy, recipe, call=compiled(model, "aot_eager"))
                same_training(again, made, name, "DTensor, compiled", sequence)


def odd_layers(me: Rank, mesh: Any) -> None:
    """Features that ranks share unevenly; DTensors in and out; a quantized weight in parts."""
    recipe = RECIPES["mxfp8"]
    out = FEATURES * me.world - 1
    weight, bias, x = numbers(out, FEATURES, seed=60), numbers(out, seed=61), numbers(64, FEATURES, seed=62)
    dy = numbers(64, out, seed=63)
    expected = run(whole_layer(weight, bias), x, dy, recipe)
    layer = parallelize_module(whole_layer(weight, bias), mesh, ColwiseParallel(output_layouts=Replicate()))
    made = run(layer, x, dy, recipe)
    same(made.y, expected.y, "uneven", "y")
    same(made.dw.full_tensor(), expected.dw, "uneven", "dw")
    same(made.db.full_tensor(), expected.db, "uneven", "db")
    near(made.dx, expected.dx, LOOSE["mxfp8"], "uneven", "dx")

    v = PairValues.make(me)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    models = [parallelize_module(v.whole(), mesh, how) for how in (plan, layouts(me, False))]
    with using(recipe):
        ys = [model(v.x) for model in models]
    assert isinstance(ys[0], DTensor)
    same(ys[0].to_local(), ys[1], "DTensors in between")

    p = Problem.make(me, "column")
    with opaq.quantized_model_init(recipe=recipe):
        layer, alike = whole_layer(p.weight, p.bias), whole_layer(p.weight, p.bias)
    parallelize_module(layer, mesh, ColwiseParallel())
    assert isinstance(layer.weight.to_local(), opaq.QuantizedTensor)
    made, whole = run(layer, *given(me, p, "column", False), recipe), run(alike, p.x, p.dy, recipe)
    same(made.y, me.part(whole.y, -1), "quantized", "y")
    same(made.dw.full_tensor(), whole.dw, "quantized", "dw")


# ---- FSDP2 ----


def blocks(
    me: Rank,
    v: PairValues,
    recipe: Recipe | None,
    quantized: bool,
    sharded: bool,
    backend: str = "",
    **options: Any,
) -> Any:
    """Two pairs after one another, each compiled by itself before it is sharded."""
    with opaq.quantized_model_init(enabled=quantized, recipe=recipe), using(recipe):
        model = nn.Sequential(v.whole(**options), v.whole(**options))
    for block in model:
        if backend:
            block.compile(fullgraph=True, backend=backend)
        if sharded:
            fully_shard(block, mesh=init_device_mesh("cpu", (me.world,)), reshard_after_forward=True)
            block.recorded = RecordedAllGather()
            block.set_custom_all_gather(block.recorded)
    return fully_shard(model, mesh=init_device_mesh("cpu", (me.world,))) if sharded else model


def plain(tensor: Any) -> Any:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.dequantize() if isinstance(tensor, opaq.QuantizedTensor) else tensor


def data_parallel(
    me: Rank, model: Any, v: PairValues, recipe: Recipe | None, step: Any, steps: int = 2
) -> dict[str, torch.Tensor]:
    """Each rank trains on its rows. Gradients that nobody has averaged are averaged here."""
    for number in range(steps):
        x = (me.rows(v.x) * (1 + number / 4)).requires_grad_()
        model.zero_grad()
        torch.manual_seed(number)
        with using(recipe):
            y = model(x)
        y.backward(me.rows(v.dy))
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= me.world
        step(model)
    found = {"y": y.detach(), "dx": x.grad, **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        found |= {name: plain(parameter.detach()), f"{name}.grad": plain(parameter.grad)}
    return found


def descend(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=RATE).step()


def keep(model: Any) -> None:
    """No step."""


def requantize(model: Any) -> None:
    """A step on values that are held besides, the first time the quantized ones, and quantized again. An amax
    that covers the tensor is agreed on by the ranks."""
    for parameter in model.parameters():
        mine, gradient = local(parameter).detach(), local(parameter.grad)
        if not isinstance(mine, opaq.QuantizedTensor):
            mine.sub_(gradient, alpha=RATE)
            continue
        held = vars(parameter).setdefault("held", mine.dequantize(torch.float32))
        held.sub_(gradient, alpha=RATE)
        value, text = held.to(mine.dtype), str(mine.quantizer)
        amaxes: dict[str, torch.Tensor] = {}
        if mine.quantizer.format in ("fp8", "nvfp4"):
            amax = torch.ops.opaq.amax(value, text)
            dist.all_reduce(amax, dist.ReduceOp.MAX)
            amaxes = {"amax_rowwise": amax[:1], "amax_columnwise": amax[1:]}
        mine.copy_(opaq.quantize_tensor(value, text, **amaxes))


def check_gathered(model: Any, v: PairValues, recipe: Recipe, name: str) -> None:
    """FSDP2 has sent quantized bytes and the biases' floats."""
    quantizer = recipe.linear_quantizers().weight.replace("+delayed", "") + "+both"
    for block in model:
        shards = [block.up.weight.to_local().shape, block.down.weight.to_local().shape]
        expected = sum(b for shard in shards for _, _, b in of_quantizer(quantizer, shard))
        expected += block.up.bias.to_local().nbytes + block.down.bias.to_local().nbytes
        sent = block.recorded.sent
        assert len(sent) >= 4 and set(sent) == {(torch.uint8, expected)}, (name, sent, expected)


def fsdp(me: Rank) -> None:
    """Sharded parameters, plain and quantized, compiled or not, train as whole ones do."""
    v = PairValues.make(me, width=128 * me.world)  # every quantizer can be cut
    for quantized in (False, True):
        for name, recipe in RECIPES.items():
            if quantized and recipe is None:
                continue
            step = requantize if quantized else descend
            expected = data_parallel(me, blocks(me, v, recipe, quantized, False), v, recipe, step)
            sharded = blocks(me, v, recipe, quantized, True)
            made = data_parallel(me, sharded, v, recipe, step)
            same_training(made, expected, "FSDP2", quantized, name)
            assert not torch.equal(made["0.up.weight"], plain(v.weights[0])), (name, "nothing was learnt")
            assert all(isinstance(p, DTensor) for p in sharded.parameters())
            if quantized:
                check_gathered(sharded, v, recipe, name)
            if name in (("mxfp8", "current") if quantized else ("delayed", "nvfp4_sr")):
                torch._dynamo.reset()
                model = blocks(me, v, recipe, quantized, True, "aot_eager")
                made = data_parallel(me, model, v, recipe, step)
                same_training(made, expected, "FSDP2, compiled", quantized, name)
            if name in ("mxfp8", "current") and not quantized:
                model = blocks(me, v, recipe, quantized, True, save_original_weight=True)
                made = data_parallel(me, model, v, recipe, step)
                same_training(made, expected, "FSDP2, weights quantized again", name)


def from_meta(me: Rank) -> None:
    """Trainers make a model on the meta device, shard it, allocate it and load a plain model's state: the keys
    are that model's, and it trains as one that was sharded where it is."""
    v = PairValues.make(me, width=128 * me.world)
    mesh, whole_state = init_device_mesh("cpu", (me.world,)), StateDictOptions(full_state_dict=True)
    for name in ("bf16", "delayed"):
        recipe = RECIPES[name]
        whole = v.whole()
        for layer in (whole.up, whole.down):  # as they are at first
            layer.scale_fwd.fill_(1)
            layer.scale_bwd.fill_(1)
        expected = data_parallel(me, fully_shard(whole, mesh=mesh), v, recipe, descend)
        for how in ("load", "reset and load", "assign"):
            state, model = v.whole().state_dict(), fully_shard(v.whole().to("meta"), mesh=mesh)
            if how != "assign":
                torch.use_deterministic_algorithms(True)  # fills what nobody has initialized with NaN
                model.to_empty(device="cpu")
                torch.use_deterministic_algorithms(False)
            if how == "reset and load":
                for layer in (model.up, model.down):
                    layer.reset_parameters()
            if how == "assign":
                parts = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in state.items()}
                model.load_state_dict(parts, assign=True)
            else:
                set_model_state_dict(model, state, options=whole_state)
            assert list(model.state_dict()) == list(state), (name, how, model.state_dict().keys())
            made = data_parallel(me, model, v, recipe, descend)
            same_training(made, expected, "from the meta device", name, how)


def scramble(model: Any) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            mine = local(parameter)
            mine.copy_(numbers(*mine.shape, seed=80 + number))
        for name, buffer in model.named_buffers():
            local(buffer).fill_(7.0 if "scale" in name else 0.0)
    return model


def check_moved(me: Rank, model: Any, source: Any, x: torch.Tensor, recipe: Recipe | None, *what: Any) -> None:
    """The same bytes on this rank where both are sharded, the same output, the same state."""
    for (name, mine), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        if isinstance(mine, DTensor) == isinstance(theirs, DTensor):
            mine, theirs = local(mine), local(theirs)
        else:
            mine, theirs = (t.full_tensor() if isinstance(t, DTensor) else t for t in (mine, theirs))
        assert torch.equal(mine.detach(), theirs.detach()), (name, what)
    for (name, buffer), other in zip(model.named_buffers(), source.buffers(), strict=True):
        if isinstance(recipe, DelayedScaling):
            same(plain(buffer), plain(other), name, *what)
    with torch.no_grad(), using(alone(recipe)):
        same(model(x), source(x), "y", *what)


def state_dicts(me: Rank) -> None:
    """From sharded to whole and back, and through a checkpoint, delayed scaling's state too."""
    v = PairValues.make(me, width=128 * me.world)
    whole_state = StateDictOptions(full_state_dict=True)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for quantized in (False, True):
        for name in ("delayed", "mxfp8", "current"):
            recipe = RECIPES[name]
            source = blocks(me, v, recipe, quantized, sharded=True)
            data_parallel(me, source, v, recipe, keep if quantized else descend, steps=1)
            moved = []
            for sharded in (False, True):
                model = scramble(blocks(me, v, recipe, quantized, sharded))
                full = get_model_state_dict(source, options=whole_state)
                assert isinstance(full["0.up.weight"], opaq.QuantizedTensor) == quantized, name
                assert not any(isinstance(tensor, DTensor) for tensor in full.values()), name
                assert ("0.up.scale_fwd" in full) == (name == "delayed"), (name, full.keys())
                if sharded:
                    set_model_state_dict(model, full, options=whole_state)
                else:
                    model.load_state_dict(full)
                moved.append(("full", model))
            if not quantized:  # the other ranks receive values, and would quantize their part of them alone
                model = scramble(blocks(me, v, recipe, quantized, sharded=True))
                full = get_model_state_dict(source, options=whole_state)
                set_model_state_dict(model, full if me.rank == 0 else {}, options=from_first)
                moved.append(("broadcast", model))
            path = me.folder / f"{name}{quantized}"
            checkpoint.save(get_model_state_dict(source), checkpoint_id=path)
            for sharded in (True,) if quantized else (True, False):
                model = scramble(blocks(me, v, recipe, quantized, sharded))
                state = get_model_state_dict(model)
                checkpoint.load(state, checkpoint_id=path)
                set_model_state_dict(model, state)
                moved.append(("checkpoint", model))
            for how, model in moved:
                check_moved(me, model, source, me.rows(v.x), recipe, name, quantized, how)

    # what parallelize_module has split
    v, recipe = PairValues.make(me), RECIPES["delayed"]
    mesh = init_device_mesh("cpu", (me.world,))
    with using(recipe):
        source, whole, other = v.whole(), scramble(v.whole()), scramble(v.whole())
    parallelize_module(source, mesh, layouts(me, False))
    parallelize_module(other, mesh, layouts(me, False))
    train(source, v.x, v.dy, recipe)
    whole.load_state_dict(get_model_state_dict(source, options=whole_state))
    for (name, mine), theirs in zip(whole.state_dict().items(), source.state_dict().values(), strict=True):
        same(mine, plain(theirs), name, "DTensor to whole")
    set_model_state_dict(other, whole.state_dict(), options=whole_state)
    check_moved(me, other, source, v.x, recipe, "whole to DTensor")


def two_dimensions(me: Rank) -> None:
    """Tensor parallelism inside of FSDP2, on a mesh of 2 by 2, against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    here = Rank(mesh["tensor"].get_local_rank(), 2, me.folder)
    data = Rank(mesh["data"].get_local_rank(), 2, me.folder)
    v = PairValues.make(here)
    for name in ("delayed", "mxfp8"):
        recipe = RECIPES[name]
        for kind in ("DTensor", "tp_group"):
            if kind == "DTensor":
                model = parallelize_module(v.whole(), mesh["tensor"], layouts(here, False))
            else:
                model = v.split(here, tp_group=mesh["tensor"])
            fully_shard(model, mesh=mesh["data"])
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            expected = v.whole()
            for _ in range(2):
                optimizer.zero_grad()
                with using(recipe):
                    y = model(data.rows(v.x))
                y.backward(data.rows(v.dy))
                optimizer.step()
            made = {n: plain(p.detach()) for n, p in model.named_parameters()}
            train(expected, v.x, v.dy / 2, alone(recipe), steps=2, grow=0)
            for key, start in v.whole().named_parameters():
                ends = [start.detach().double(), expected.get_parameter(key).detach().double()]
                if kind == "tp_group" and key != "down.bias":
                    ends = [here.part(end, 1 if key == "down.weight" else 0) for end in ends]
                near(made[key].double() - ends[0], ends[1] - ends[0], LOOSE[name], key, name, kind)


# ---- what cannot be done ----


def refusals(me: Rank) -> None:
    """The same clear sentence on every rank, and no rank in a collective that others do not enter."""
    p = {mode: Problem.make(me, mode) for mode in ("column", "row")}
    mxfp8, block, current = RECIPES["mxfp8"], RECIPES["block"], RECIPES["current"]

    def layer(mode: str, sequence: bool = True, **more: Any) -> Any:
        bias = p[mode].bias if mode == "column" else None
        return split_layer(me, p[mode].weight, bias, mode, sequence_parallel=sequence, **more)

    def call(mode: str, x: Any, recipe: Any = None, sequence: bool = True, **more: Any) -> Any:
        made = layer(mode, sequence)

        def forward() -> None:
            with using(recipe):
                made(x, **more)

        return forward

    def rows(count: int, mode: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(count, 1, FEATURES, dtype=dtype)

    mesh = init_device_mesh("cpu", (1, me.world), mesh_dim_names=("data", "tensor"))
    odd = FEATURES * me.world + 1
    linear = opaq.Linear
    quantized = opaq.quantize_tensor(rows(64, "column"), "mxfp8+both")
    of_x = f"{me.world} ranks cannot be gathered as"
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: linear(FEATURES, odd, parallel_mode="column", tp_group=dist.group.WORLD),
            ValueError,
            f"{odd} out features cannot be divided among {me.world} ranks",
        ),
        (
            lambda: linear(odd, FEATURES, parallel_mode="row", tp_group=dist.group.WORLD),
            ValueError,
            f"{odd} in features cannot be divided among {me.world} ranks",
        ),
        (lambda: layer("column", tp_group="world"), TypeError, "expected a ProcessGroup or a DeviceMesh"),
        (lambda: layer("column", tp_group=mesh), ValueError, "has 2 dimensions, expected one"),
        (lambda: layer("row", tp_size=me.world + 1), ValueError, f"but tp_group has {me.world} ranks"),
        (lambda: layer("row", tp_group=None, tp_size=me.world), ValueError, "but there is no tp_group"),
        (call("row", rows(me.world * 64 + 1, "row")), ValueError, "cannot be divided among"),
        (call("row", rows(1, "row")), ValueError, "1 as the first size of x cannot be divided among"),
        (call("column", rows(48, "column"), mxfp8), ValueError, f"48 rows on each of {of_x} mxfp8+both"),
        (call("column", rows(64, "column"), block), ValueError, "multiple of 128"),
        (call("row", rows(48 * me.world, "row"), mxfp8), ValueError, f"48 rows on each of {of_x} mxfp8+col"),
        (call("row", rows(64 * me.world, "row"), block), ValueError, "multiple of 128"),
        (call("row", rows(128, "row"), mxfp8, fp8_output=True), ValueError, "with a row-parallel layer"),
        (call("column", rows(64, "column"), mxfp8, fp8_grad=True), ValueError, "with a column-parallel layer"),
        (call("column", torch.ones(FEATURES, dtype=torch.bfloat16)), ValueError, "no sequence to divide"),
        (call("column", quantized, mxfp8), NotImplementedError, "x is quantized already"),
    ]
    for mode in ("column", "row"):
        for sequence in (False, True):
            wrong = torch.ones(64, 1, FEATURES + 1, dtype=torch.bfloat16)
            cases += [
                (call(mode, wrong, current, sequence), ValueError, f"expected {FEATURES} as its last size"),
                (call(mode, rows(64, mode, torch.int32), None, sequence), ValueError, "x is torch.int32"),
                (call(mode, rows(64, mode, torch.float64), mxfp8, sequence), ValueError, "x is torch.float64"),
                (
                    call(mode, rows(64, mode, torch.float16), current, sequence),
                    ValueError,
                    "weight is torch.bf",
                ),
            ]
    for function, kind, text in cases:
        with Collectives() as collectives:
            try:
                function()
                said = "nothing"
            except (TypeError, ValueError, NotImplementedError) as error:
                said = f"{type(error).__name__}: {error}"
        assert said.startswith(kind.__name__) and text in said, (said, text)
        assert not collectives.seen, (said, collectives.seen)
        every: list[Any] = [None] * me.world
        dist.all_gather_object(every, said)
        assert every == [said] * me.world, every

    # what is refused to gradients only: without them rows have no columnwise copy that would be cut
    made = layer("column")
    x = numbers(48 * me.world, 1, FEATURES, seed=50)
    with torch.no_grad(), using(mxfp8):
        alike = whole_layer(me.part(p["column"].weight, 0), me.part(p["column"].bias, 0))
        same(made(me.rows(x)), alike(x), "without gradients")


# by name: the case, and how many ranks it runs on
CASES = {
    function.__name__: (function, worlds)
    for function, worlds in (
        (refusals, (2, 4)),
        (tensor_parallel, (2, 4)),
        (options, (2,)),
        (delayed, (2, 4)),
        (pair, (2, 4)),
        (dtensor, (2, 4)),
        (state_dicts, (2,)),
        (fsdp, (2,)),
        (from_meta, (2,)),
        (two_dimensions, (4,)),
        (inductor, (2,)),
    )
}


def main() -> None:
    me = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(me.folder / "store").as_uri(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=120),
    )
    wanted = sys.argv[4:]
    for name, (function, worlds) in CASES.items():
        if me.world in worlds and (not wanted or name in wanted):
            begin = time.monotonic()
            print(f"== {name}", flush=True)
            function(me)
            dist.barrier()
            print(f"== {time.monotonic() - begin:.1f} s", flush=True)
            with (me.folder / f"done{me.rank}").open("a") as done:
                done.write(f"{name}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

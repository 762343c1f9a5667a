"""Cases of linear_rank.py: column- and row-parallel layers, with and without sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import opaq
from linear_rank_layers import (
    BATCH,
    BY_BLOCK,
    FEATURES,
    LOOSE,
    RECIPES,
    Collectives,
    Rank,
    Result,
    alone,
    near,
    numbers,
    of_all,
    of_quantizer,
    run,
    same,
    same_sum,
    split_layer,
    using,
    whole_layer,
)
from opaq.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe


class Problem(NamedTuple):
    """The tensors of one whole layer: column parallel with FEATURES out features on each rank, or row parallel
    with as many in features."""

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
    """The result of this rank's part in one process, and the summands of the sum over ranks: of dx if mode is
    column, of y if it is row."""
    if mode == "column":
        layer = whole_layer(me.part(p.weight, 0), me.part(p.bias, 0), **options)
        made = run(layer, p.x, me.part(p.dy, -1), alone(recipe))
        return made, of_all(me, made.dx)
    made = run(whole_layer(me.part(p.weight, 1), None, **options), me.part(p.x, -1), p.dy, alone(recipe))
    return made, of_all(me, made.y)


def given(me: Rank, p: Problem, mode: str, sequence: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of x and dy."""
    cut = me.rows if sequence else lambda tensor: tensor
    if mode == "column":
        return cut(p.x), me.part(p.dy, -1)
    return me.part(p.x, -1), cut(p.dy)


def check_split(me: Rank, p: Problem, mode: str, sequence: bool, name: str, made: Result) -> None:
    """Compares a sharded layer's results with those of one process: bit by bit with this rank's part of the
    weight, and bit by bit or with a bound with the whole weight."""
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
        if name == "nvfp4_sr" and sequence:  # all ranks round their rows with the same random numbers
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
    """The expected collectives of a step: quantized bytes where rows are gathered, and amaxes."""
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
    """Column and row, with and without sequence parallelism, with every recipe: results and transferred
    bytes."""
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
    """Compares bit by bit, with sequence parallelism; a row-parallel layer has no bias."""
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
    """The layer's other options with sequence parallelism, bit by bit."""
    mxfp8, current = RECIPES["mxfp8"], RECIPES["current"]
    nvfp4 = NVFP4BlockScaling(disable_stochastic_rounding=True, row_scaled_activation=True)
    variants: list[tuple[Recipe | None, dict[str, Any]]] = [
        (replace(mxfp8, backward_override="high_precision"), {}),
        (replace(mxfp8, backward_override="dequantized"), {}),
        (replace(current, backward_override="high_precision"), {}),
        (replace(current, backward_override="dequantized"), {}),
        (mxfp8, {"save_original_input": True}),
        (current, {"save_original_input": True, "save_original_weight": True}),
        (nvfp4, {}),  # scales of the columnwise copy cover all rows, so x is gathered before quantizing
        (CustomRecipe(by_row), {}),
    ]
    for mode in ("column", "row"):
        p = Problem.make(me, mode)
        x, dy = given(me, p, mode, sequence=True)
        bias = p.bias if mode == "column" else None
        for recipe, more in variants:
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

        # a cached weight, no gradients, one of two gradients, gradient accumulation in main_grad
        layer = split_layer(me, p.weight, bias, mode, sequence_parallel=True, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        for first in (True, False):
            inp = x.clone().requires_grad_()
            with using(mxfp8):
                y = layer(inp, is_first_microbatch=first)
            y.backward(dy)
            fused = (layer.weight.main_grad / (1 if first else 2)).bfloat16()
            whole = Result(y.detach(), inp.grad, fused, expected.db)  # the gradient of the bias is not fused
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

    # return_bias: the bias of a row-parallel layer gets the gradient of the whole sequence too
    p = Problem.make(me, "row")
    x, dy = given(me, p, "row", sequence=True)
    layer = split_layer(me, p.weight, p.bias, "row", sequence_parallel=True, return_bias=True)
    y, bias = layer(x)
    (y + bias).backward(dy)
    near(layer.bias.grad, p.dy.double().sum((0, 1)), 0.01, "returned bias")


def groups_of(me: Rank) -> list[Any]:
    """Other groups with the same ranks as the world."""
    mesh = init_device_mesh(me.device, (1, me.world), mesh_dim_names=("data", "tensor"))
    return [dist.new_group(), init_device_mesh(me.device, (me.world,)), mesh["tensor"]]

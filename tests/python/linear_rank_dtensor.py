"""A case of linear_rank.py: PyTorch's DTensor parallelism."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import opaq
from linear_rank_layers import (
    BY_BLOCK,
    FEATURES,
    LOOSE,
    RECIPES,
    Rank,
    alone,
    near,
    numbers,
    of_all,
    run,
    same,
    same_sum,
    using,
    whole_layer,
)
from linear_rank_pairs import PairValues, compiled, near_whole, same_training, train
from linear_rank_parallel import Problem, expect, given


def layouts(me: Rank, sequence: bool) -> dict[str, Any]:
    """PyTorch's parallelization plan for a pair; with sequence parallelism along dimension 1, or without."""
    if not sequence:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}


def dtensor(me: Rank) -> None:
    """PyTorch's ColwiseParallel and RowwiseParallel: each layer bit by bit, and pairs of them in training."""
    mesh = init_device_mesh(me.device, (me.world,))
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
    """Features that are not divisible by the ranks; DTensors as inputs and outputs; a sharded quantized
    weight."""
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

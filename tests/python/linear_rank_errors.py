"""A case of linear_rank.py: errors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import opaq
from linear_rank_layers import (
    FEATURES,
    RECIPES,
    Collectives,
    Rank,
    numbers,
    same,
    split_layer,
    using,
    whole_layer,
)
from linear_rank_parallel import Problem


def errors(me: Rank) -> None:
    """Every rank raises the same message, before any collective."""
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

    mesh = init_device_mesh(me.device, (1, me.world), mesh_dim_names=("data", "tensor"))
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
                (call(mode, rows(64, mode, torch.int32), None, sequence), ValueError, "x is int32"),
                (call(mode, rows(64, mode, torch.float64), mxfp8, sequence), ValueError, "x is float64"),
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
                message = "nothing"
            except (TypeError, ValueError, NotImplementedError) as error:
                message = f"{type(error).__name__}: {error}"
        assert message.startswith(kind.__name__) and text in message, (message, text)
        assert not collectives.seen, (message, collectives.seen)
        every: list[Any] = [None] * me.world
        dist.all_gather_object(every, message)
        assert every == [message] * me.world, every

    # an error with gradients only: without them there is no columnwise copy, whose blocks would be divided
    made = layer("column")
    x = numbers(48 * me.world, 1, FEATURES, seed=50)
    with torch.no_grad(), using(mxfp8):
        alike = whole_layer(me.part(p["column"].weight, 0), me.part(p["column"].bias, 0))
        same(made(me.rows(x)), alike(x), "without gradients")

"""One rank of test_convert_training.py: `training_rank.py <device> <rank> <world> <folder>`. A model that is
converted before or after FSDP2's fully_shard trains like one that is not sharded: with the same bits on
processors, within rounding on a GPU, which the ranks share."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import opaq
from opaq.recipe import MXFP8BlockScaling
from test_convert_training import net, tokens

RECIPE = MXFP8BlockScaling()


def train(model: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(steps):
        y = model(tokens())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return seen


def same(a: Any, b: Any) -> bool:
    """Equal; on a GPU, whose embedding adds gradients in no fixed order, nearly."""
    if a.device.type == "cpu":
        return torch.equal(a, b)
    return bool((a - b).norm() <= 0.01 * b.norm())


def whole(parameter: Any) -> Any:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def shard(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(device: str, rank: str, world: str, folder: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(int(rank))
    torch.set_default_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.FileStore(str(Path(folder) / "store"), int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=120),
    )
    mesh = init_device_mesh(device, (int(world),))
    alone = net()
    opaq.convert_training(alone, RECIPE)
    expected = train(alone)
    for order in ("before", "after", "before, compiled"):
        model = net()
        if order.startswith("before"):
            assert len(opaq.convert_training(model, RECIPE).converted) == 6
        if order.endswith("compiled"):
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        shard(model, mesh)
        if order == "after":
            assert len(opaq.convert_training(model, RECIPE).converted) == 6
        got = train(model)
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert same(a, b), (order, number, float((a - b).abs().max()))
        for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert same(whole(a), b), (order, name)
        assert opaq.revert_training(model) == 6
        assert type(model.blocks[0].up) is torch.nn.Linear
        model(tokens())
    model = net()
    fully_shard(model.blocks[0].up, mesh=mesh)
    left = opaq.convert_training(model, RECIPE).left
    assert left["blocks.0.up"] == "fully_shard was called on the layer itself; convert before that", left
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

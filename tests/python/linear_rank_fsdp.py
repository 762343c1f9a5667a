"""Cases of linear_rank.py: FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import opaq
from distributed_rank import RecordedAllGather
from linear_rank_dtensor import layouts
from linear_rank_layers import LOOSE, RATE, RECIPES, Rank, alone, local, near, of_quantizer, using
from linear_rank_pairs import PairValues, same_training, train
from opaq.recipe import Recipe


def blocks(
    me: Rank,
    v: PairValues,
    recipe: Recipe | None,
    quantized: bool,
    sharded: bool,
    backend: str = "",
    **options: Any,
) -> Any:
    """Two pairs in sequence, each compiled separately before it is sharded."""
    with opaq.quantized_model_init(enabled=quantized, recipe=recipe), using(recipe):
        model = nn.Sequential(v.whole(**options), v.whole(**options))
    for block in model:
        if backend:
            block.compile(fullgraph=True, backend=backend)
        if sharded:
            fully_shard(block, mesh=init_device_mesh(me.device, (me.world,)), reshard_after_forward=True)
            block.recorded = RecordedAllGather()
            block.set_custom_all_gather(block.recorded)
    return fully_shard(model, mesh=init_device_mesh(me.device, (me.world,))) if sharded else model


def plain(tensor: Any) -> Any:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.dequantize() if isinstance(tensor, opaq.QuantizedTensor) else tensor


def data_parallel(
    me: Rank, model: Any, v: PairValues, recipe: Recipe | None, step: Any, steps: int = 2
) -> dict[str, torch.Tensor]:
    """Each rank trains on its rows. Gradients of parameters that are not sharded are averaged here."""
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
    """An optimizer step on float32 master weights, which start with the dequantized values, followed by
    quantizing. An amax of the whole tensor is reduced over the ranks."""
    for parameter in model.parameters():
        mine, gradient = local(parameter).detach(), local(parameter.grad)
        if not isinstance(mine, opaq.QuantizedTensor):
            mine.sub_(gradient, alpha=RATE)
            continue
        master = vars(parameter).setdefault("master", mine.dequantize(torch.float32))
        master.sub_(gradient, alpha=RATE)
        value, text = master.to(mine.dtype), str(mine.quantizer)
        amaxes: dict[str, torch.Tensor] = {}
        if mine.quantizer.format in ("fp8", "nvfp4"):
            amax = torch.ops.opaq.amax(value, text)
            dist.all_reduce(amax, dist.ReduceOp.MAX)
            amaxes = {"amax_rowwise": amax[:1], "amax_columnwise": amax[1:]}
        mine.copy_(opaq.quantize_tensor(value, text, **amaxes))


def check_gathered(model: Any, v: PairValues, recipe: Recipe, name: str) -> None:
    """Checks that FSDP2 has sent only quantized bytes and the biases."""
    quantizer = recipe.linear_quantizers().weight.replace("+delayed", "") + "+both"
    for block in model:
        shards = [block.up.weight.to_local().shape, block.down.weight.to_local().shape]
        expected = sum(b for shard in shards for _, _, b in of_quantizer(quantizer, shard))
        expected += block.up.bias.to_local().nbytes + block.down.bias.to_local().nbytes
        sent = block.recorded.sent
        assert len(sent) >= 4 and set(sent) == {(torch.uint8, expected)}, (name, sent, expected)


def fsdp(me: Rank) -> None:
    """Sharded parameters, plain and quantized, compiled or not, train like whole ones."""
    v = PairValues.make(me, width=128 * me.world)  # whole blocks with every quantizer
    for quantized in (False, True):
        for name, recipe in RECIPES.items():
            if quantized and recipe is None:
                continue
            step = requantize if quantized else descend
            expected = data_parallel(me, blocks(me, v, recipe, quantized, False), v, recipe, step)
            sharded = blocks(me, v, recipe, quantized, True)
            made = data_parallel(me, sharded, v, recipe, step)
            same_training(made, expected, "FSDP2", quantized, name)
            assert not torch.equal(made["0.up.weight"], plain(v.weights[0])), (
                name,
                "the weight did not change",
            )
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
                same_training(made, expected, "FSDP2, save_original_weight", name)


def from_meta(me: Rank) -> None:
    """A model is created on the meta device, sharded, allocated and loaded with a plain model's state, as
    trainers do: it has the keys of that state, and trains like one that was never on the meta device."""
    v = PairValues.make(me, width=128 * me.world)
    mesh, whole_state = init_device_mesh(me.device, (me.world,)), StateDictOptions(full_state_dict=True)
    for name in ("bf16", "delayed"):
        recipe = RECIPES[name]
        whole = v.whole()
        for layer in (whole.up, whole.down):  # the initial scales
            layer.scale_fwd.fill_(1)
            layer.scale_bwd.fill_(1)
        expected = data_parallel(me, fully_shard(whole, mesh=mesh), v, recipe, descend)
        for how in ("load", "reset and load", "assign"):
            state, model = v.whole().state_dict(), fully_shard(v.whole().to("meta"), mesh=mesh)
            if how != "assign":
                torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
                model.to_empty(device=me.device)
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


def two_dimensions(me: Rank) -> None:
    """Tensor parallelism within FSDP2, on a 2 x 2 mesh, against one process."""
    mesh = init_device_mesh(me.device, (2, 2), mesh_dim_names=("data", "tensor"))
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

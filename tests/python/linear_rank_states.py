"""A case of linear_rank.py: state dicts and checkpoints of sharded models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import opaq
from linear_rank_dtensor import layouts
from linear_rank_fsdp import blocks, data_parallel, descend, keep, plain
from linear_rank_layers import RECIPES, Rank, alone, local, numbers, same, using
from linear_rank_pairs import PairValues, train
from opaq.recipe import DelayedScaling, Recipe


def scramble(model: Any) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            mine = local(parameter)
            mine.copy_(numbers(*mine.shape, seed=80 + number))
        for name, buffer in model.named_buffers():
            local(buffer).fill_(7.0 if "scale" in name else 0.0)
    return model


def check_moved(me: Rank, model: Any, source: Any, x: torch.Tensor, recipe: Recipe | None, *what: Any) -> None:
    """Checks that parameters, output and state are equal; parameters on this rank if both models are
    sharded."""
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
    """From sharded to whole and back, and through a checkpoint, including delayed scaling's state."""
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
            if not quantized:  # other ranks receive values, and would quantize their shards separately
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

    # models sharded by parallelize_module
    v, recipe = PairValues.make(me), RECIPES["delayed"]
    mesh = init_device_mesh(me.device, (me.world,))
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

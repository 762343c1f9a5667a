"""A case of linear_rank.py: reductions of delayed scaling's amaxes over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from linear_rank_layers import BATCH, FEATURES, Rank, numbers, of_all, same, split_layer, using, whole_layer
from linear_rank_pairs import compiled, same_training
from linear_rank_parallel import Problem, given
from opaq.functional import DelayedState
from opaq.recipe import DelayedScaling


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
    """Checks the state after steps with these amaxes of x, w and dy."""
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
    """Amaxes are reduced over autocast's group, or over all ranks."""
    pairs = [list(range(first, first + 2)) for first in range(0, me.world, 2)]
    mine = me.rank // 2
    named = [dist.new_group(members) for members in pairs][mine]
    mesh = init_device_mesh(me.device, (me.world // 2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
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

    # a sharded layer: gathered tensors have the amax of the whole, with and without reduce_amax
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

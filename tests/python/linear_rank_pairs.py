"""Cases of linear_rank.py: models of two layers, column-parallel and row-parallel, in training and compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from linear_rank_layers import (
    BATCH,
    FEATURES,
    LOOSE,
    RATE,
    RECIPES,
    Rank,
    alone,
    local,
    near,
    numbers,
    same,
    split_layer,
    using,
    whole_layer,
)
from opaq.recipe import Recipe


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
        """`width` input and output features, and `width` hidden features for each rank."""
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
    """Trains with SGD. Returns the last y and dx, the parameters and their last gradients, and the buffers."""
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
    """Compares the training of a sharded pair with that of one process. `rows` is the dimension of x that is
    sharded, -1 for none. Of parameters the change is compared."""
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
    """Column, gelu, row: three steps of SGD against one process, and compiled against eager."""
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
    """The same with Inductor, and with relu instead of gelu, which Inductor approximates differently."""
    v = PairValues.make(me)
    for name in ("delayed", "mxfp8"):
        models = [v.split(me, sequence_parallel=True) for _ in range(2)]
        for model in models:
            model.between = nn.functional.relu
        given = me.rows(v.x), me.rows(v.dy), RECIPES[name]
        made = train(models[0], *given)
        again = train(models[1], *given, call=compiled(models[1], "inductor"))
        same_training(again, made, name, "inductor")

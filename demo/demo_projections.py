"""Quantization error of each projection: the cosine of its output to that of bf16.

First, DeepSeek-like blocks with random weights and activations (deepseek_block.py describes them): each
projection alone, with its bf16 input; then the shared expert and the routed experts, each as a single operator,
in which the errors of three products add up without a norm or a residual in between. Then a small GPT, trained
by this program and packed by opaq.quantize_. The exit status is 1 if a mean cosine or the trained model's loss
is outside its limit."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

import opaq
from deepseek_block import EXPERTS, Block, gated
from opaq import functional
from tiny_gpt import MasterAdamW, Text, TinyGPT

ROOT = Path(__file__).resolve().parent.parent
linear = torch.nn.functional.linear


class Way(NamedTuple):
    """Quantizers of weights and inputs, the lowest accepted cosine of one projection, and the largest accepted
    relative difference of the trained model's loss to bf16's."""

    weight: str
    inputs: str
    limit: float
    loss: float

    @property
    def limit_of_three(self) -> float:
        """The limit of an MLP. A cosine of `limit` is a noise-to-signal ratio of 1 / limit^2 - 1; an MLP has
        three such contributions: gate, up projection and down projection."""
        return (1 + 3 * (self.limit**-2 - 1)) ** -0.5


WAYS = {
    "nvfp4": Way("nvfp4", "nvfp4", 0.990, 0.03),
    "nvfp4 weights": Way("nvfp4", "", 0.995, 0.03),
    "4over6": Way("nvfp4+4over6=mse", "nvfp4+4over6=mse", 0.990, 0.03),
    "4over6 weights": Way("nvfp4+4over6=mse", "", 0.995, 0.03),
    "mxfp8": Way("mxfp8", "mxfp8", 0.999, 0.01),
    "fp8 block": Way("fp8blk2", "fp8blk1", 0.999, 0.01),
}
Cosines = dict[str, float]  # by way


class Row(NamedTuple):
    """A projection: its cosines in each block."""

    name: str
    shape: tuple[int, ...]
    is_whole: bool
    blocks: list[Cosines]

    def limit(self, way: str) -> float:
        return WAYS[way].limit_of_three if self.is_whole else WAYS[way].limit

    def mean(self, way: str) -> float:
        return mean(block[way] for block in self.blocks)

    def lowest(self, way: str) -> float:
        return min(block[way] for block in self.blocks)

    def wrong(self) -> list[str]:
        below = [way for way in WAYS if not self.mean(way) >= self.limit(way)]  # NaN too
        return [
            f"{self.name}, {way}: the mean cosine is {self.mean(way):.5f}, the limit {self.limit(way):.4f}."
            for way in below
        ]

    def numbers(self) -> dict[str, Any]:
        cosines = {
            way: {"mean": self.mean(way), "lowest": self.lowest(way), "limit": self.limit(way)} for way in WAYS
        }
        return {"name": self.name, "shape": self.shape, "cosines": cosines}

    def __str__(self) -> str:
        cells = [f"{self.mean(way):.4f} {self.lowest(way):.4f}" for way in WAYS]
        if len(self.blocks) == 1:
            cells = [f"{self.mean(way):.4f}" for way in WAYS]
        return f"{self.name:16} {'x'.join(map(str, self.shape)):>13} " + " ".join(f"{c:>15}" for c in cells)


def cosine(y: torch.Tensor, want: torch.Tensor) -> float:
    a, b = y.double().flatten(), want.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


# ---- random blocks ----


def single(x: torch.Tensor, weight: torch.Tensor) -> Cosines:
    """One projection."""
    want, found = linear(x, weight), {}
    for way, how in WAYS.items():
        packed = opaq.quantize_tensor(weight, how.weight)
        found[way] = cosine(functional.quantized_linear(x, packed, input_quantizer=how.inputs), want)
    return found


def grouped(inputs: list[torch.Tensor], weight: torch.Tensor) -> Cosines:
    """One projection of all experts, each with its own rows."""
    want, found = torch.cat([linear(x, w) for x, w in zip(inputs, weight, strict=True)]), {}
    for way, how in WAYS.items():
        packed = opaq.quantize_tensor(weight, how.weight)
        parts = []
        for e, x in enumerate(inputs):
            one = packed[e : e + 1].view(weight.shape[1:])
            parts.append(functional.quantized_linear(x, one, input_quantizer=how.inputs))
        found[way] = cosine(torch.cat(parts), want)
    return found


def whole(want: torch.Tensor, up: torch.Tensor, down: torch.Tensor, run: Callable[..., Any]) -> Cosines:
    """An MLP or a mixture of experts as one operator."""
    found = {}
    for way, how in WAYS.items():
        packed = [opaq.quantize_tensor(weight, how.weight) for weight in (up, down)]
        found[way] = cosine(run(*packed, input_quantizer=how.inputs), want)
    return found


def measured(block: Block) -> Iterator[tuple[str, tuple[int, ...], bool, Cosines]]:
    weights, inputs = block.weights, block.inputs
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj", "shared.gate_up"):
        yield name, tuple(weights[name].shape), False, single(inputs[name], weights[name])
    x, up, down = inputs["shared.gate_up"], weights["shared.gate_up"], weights["shared.down"]
    a = gated(linear(x, up))
    yield "shared.down", tuple(down.shape), False, single(a, down)
    found = whole(linear(a, down), up, down, lambda *w, **q: functional.mlp(x, *w, **q))
    yield "shared expert", tuple(up.shape), True, found

    x, up, down = inputs["experts.gate_up"], weights["experts.gate_up"], weights["experts.down"]
    routed = [(block.router_ids == e).nonzero() for e in range(EXPERTS)]
    mine = [x[places[:, 0]] for places in routed]
    yield "experts.gate_up", tuple(up.shape), False, grouped(mine, up)
    parts = [gated(linear(part, w)) for part, w in zip(mine, up, strict=True)]
    yield "experts.down", tuple(down.shape), False, grouped(parts, down)
    total = torch.zeros(x.shape)
    for places, part, w in zip(routed, parts, down, strict=True):
        token, slot = places.T
        total.index_add_(0, token, linear(part, w).float() * block.router_weights[token, slot, None])
    chosen = block.router_weights, block.router_ids
    found = whole(total, up, down, lambda *w, **q: functional.moe(x, *chosen, *w, **q))
    yield "routed experts", tuple(up.shape), True, found


def random_rows(seeds: range, tokens: int) -> list[Row]:
    rows: dict[str, Row] = {}
    for seed in seeds:
        for name, shape, is_whole, found in measured(Block(seed, tokens)):
            rows.setdefault(name, Row(name, shape, is_whole, [])).blocks.append(found)
    return list(rows.values())


# ---- a trained model ----


def trained(text: Text, steps: int) -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(text.vocabulary)
    optimizer = MasterAdamW(model, 3e-3, steps)
    for tokens, targets in text.batches(steps, 0):
        model(tokens, targets).backward()
        optimizer.step()
    return model


def trained_rows(model: TinyGPT, text: Text) -> tuple[list[Row], dict[str, float]]:
    """The cosines of its linear layers and its validation losses."""
    validation, seen = text.validation(), {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, opaq.Linear)}
    handles = [
        module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
        for name, module in layers.items()
    ]
    model(*validation[0])
    for handle in handles:
        handle.remove()
    rows = {name: Row(name, tuple(module.weight.shape), False, [{}]) for name, module in layers.items()}
    losses = {"bf16": mean(model(*batch).item() for batch in validation)}
    for way, how in WAYS.items():
        packed = copy.deepcopy(model)
        opaq.quantize_(packed, how.weight, activations=how.inputs, ignore=("head",), progress=False)
        for name, (x, y) in seen.items():
            rows[name].blocks[0][way] = cosine(packed.get_submodule(name)(x), y)
        losses[way] = mean(packed(*batch).item() for batch in validation)
    return list(rows.values()), losses


# ---- output ----


def print_header(title: str) -> None:
    print(f"{title}\n{'projection':16} {'weight':>13} " + " ".join(f"{way:>15}" for way in WAYS))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="rows of the input (default 128)")
    parser.add_argument(
        "--blocks", type=int, default=4, help="number of random blocks, with seeds 0, 1, ... (default 4)"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps of the small GPT (default 200)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build/demo",
        help="folder for projections.json (default build/demo in the repository)",
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    began = time.perf_counter()
    text = Text()
    model = trained(text, given.steps)
    with torch.no_grad():
        print_header(f"cosine to bf16, {given.blocks} random blocks, {given.tokens} tokens: mean and lowest")
        rows = random_rows(range(given.blocks), given.tokens)
        for row in rows:
            print(row)
        for name, is_whole in (("limit", False), ("of a whole MLP", True)):
            limits = [way.limit_of_three if is_whole else way.limit for way in WAYS.values()]
            print(f"{name:30} " + " ".join(f"{limit:8.4f}       " for limit in limits))
        print_header("\ncosine to bf16, a trained GPT of width 128")
        learned, losses = trained_rows(model, text)
        for row in learned:
            print(row)
        ratios = {way: losses[way] / losses["bf16"] - 1 for way in WAYS}
        print(f"{'loss to bf16':30} " + " ".join(f"{100 * ratios[way]:>+13.2f} %" for way in WAYS))
    wrong = [sentence for row in (*rows, *learned) for sentence in row.wrong()]
    for way, ratio in ratios.items():
        if not abs(ratio) <= WAYS[way].loss:
            wrong.append(f"the trained model in {way} is {100 * ratio:+.2f} % from bf16's loss.")
    given.out.mkdir(parents=True, exist_ok=True)
    parts = {"random": [row.numbers() for row in rows], "trained": [row.numbers() for row in learned]}
    result = {"tokens": given.tokens, "blocks": given.blocks, **parts, "losses": losses, "wrong": wrong}
    path = given.out / "projections.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{time.perf_counter() - began:.0f} s; the numbers are in {path}")
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Times a mixture of experts with tiled NVFP4 weights, beside reading the experts' weights and beside PyTorch.

    bench_moe.py [--json FILE] [--rounds N] [--threads N]

128 experts of hidden size 2048 and intermediate size 768; each token uses 8 of them. With one token (M = 1)
every call uses other experts, so that their weights are not in the caches; 64 tokens use nearly all. "read
floor" is the time of reading as many bytes as the used experts have, in the same rounds; the floor is its best,
or the time of the operations at the peak rate of the kernel's arithmetic, whichever is longer. "torch f32 loop"
is the same routing with plain float32 weights: a loop over experts with two products and the activation for the
tokens of each. The results of both are compared first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import measuring
import opaq
from measuring import Limits, Turns, figure, ratio, record
from opaq._explain import kernel_of
from opaq.functional import moe

HIDDEN, INTER, EXPERTS, TOP = 2048, 768, 128, 8
PRECISIONS = ("exact", "near", "fast")
LOOP = "torch f32 loop"
TURNS = EXPERTS // TOP
# By precision and tokens: the peer or limit, required value, target.
TARGETS = {("fast", 1): ("read floor", 0.7, 0.85), ("fast", 64): (LOOP, 3.0, 5.0)}
ERRORS = {"exact": 1e-5, "near": 2e-4, "fast": 4e-2}


def loop(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> Any:
    """The mixture in plain PyTorch."""
    y, linear = torch.zeros_like(x), torch.nn.functional.linear
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        gate, value = linear(x[token], up[expert]).chunk(2, dim=-1)
        h = linear(torch.nn.functional.silu(gate) * value, down[expert])
        y.index_add_(0, token, h * weights[token, place, None])
    return y


def routings(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights of successive calls. A single token uses all experts within TURNS calls."""
    if tokens == 1:
        ids = list(torch.randperm(EXPERTS).reshape(TURNS, 1, TOP))
    else:
        ids = [torch.rand(tokens, EXPERTS).topk(TOP).indices for _ in range(2)]
    return [(one, torch.rand(one.shape).softmax(-1)) for one in ids]


def bytes_of_expert(*stacks: Any) -> float:
    return sum(buffer.nbytes for stack in stacks for buffer in stack.buffers()) / EXPERTS


def measure(threads: int, rounds: int, plain: list[torch.Tensor], tiles: list[Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    limits, records = Limits(threads), []
    for tokens in (1, 64):
        x, chosen = torch.randn(tokens, HIDDEN), routings(tokens)
        visited = sum(len(ids.unique()) for ids, _ in chosen) / len(chosen)

        def run(precision: str, x: torch.Tensor = x) -> Callable[[Any], Any]:
            return lambda one: moe(x, one[1], one[0], *tiles, precision=precision)

        bytes_read = visited * bytes_of_expert(*tiles)
        subjects: dict[str, Callable[[], Any]] = limits.samples()
        subjects[LOOP] = Turns(lambda one, x=x: loop(x, one[1], one[0], *plain), chosen)
        for precision in PRECISIONS:
            subjects[f"reading, {precision}"] = limits.sample("read", bytes_read)
            subjects[f"nvfp4 {precision}"] = Turns(run(precision), chosen)
        want = loop(x, chosen[0][1], chosen[0][0], *plain)
        for precision in PRECISIONS:
            far = float((run(precision)(chosen[0]) - want).norm() / want.norm())
            if not far < ERRORS[precision]:
                raise SystemExit(f"bench_moe: {precision} is wrong: its error is {far:.1e}")
        times = measuring.interleave(subjects, measuring.rounds_of(tokens, rounds))
        operations = 2.0 * tokens * TOP * 3 * HIDDEN * INTER
        loop_floor = max(visited * 3 * HIDDEN * INTER * 4 / limits.read, operations / limits.floats)
        records.append(record(LOOP, tokens, threads, times[LOOP], "", loop_floor))
        for precision in PRECISIONS:
            name = f"nvfp4 {precision}"
            ratios = {LOOP: ratio(times[LOOP], times[name])}
            ratios["read floor"] = ratio(times[f"reading, {precision}"], times[name])
            of, *wanted = TARGETS.get((precision, tokens), (LOOP,))
            figures = [figure(ratios[of], of, *wanted), *(figure(ratios[o], o) for o in ratios if o != of)]
            peak = limits.floats if precision == "exact" else limits.bytes
            kernel = kernel_of(tiles[0]._quantizer_text, "", torch.float32, precision)
            floor = max(bytes_read / limits.read, operations / peak)
            records.append(record(name, tokens, threads, times[name], kernel, floor, figures))
    return [*records, {"peaks": limits.best, "threads": threads}]


def main() -> None:
    given = measuring.arguments("Times a mixture of experts with tiled weights.").parse_args()
    given.rounds = given.rounds or 8
    torch.manual_seed(0)
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    with torch.no_grad():
        tiles = [opaq.quantize_tensor(torch.randn(shape) * 0.02, "nvfp4").tiled() for shape in shapes]
        plain = [stack.dequantize(torch.float32) for stack in tiles]
        counts = [given.threads] if given.threads else sorted({1, measuring.processors()})
        records = [one for count in counts for one in measure(count, given.rounds, plain, tiles)]
    peaks = [one for one in records if "peaks" in one]
    records = [one for one in records if "peaks" not in one]
    about = measuring.machine(counts[-1]) | {"rounds": given.rounds}
    print(f"opaq {about['version']}, torch {about['torch']}, {about['cpu']}, {given.rounds} rounds")
    measuring.show(records)
    measuring.write(given.json, about | {"peaks": peaks, "results": records})


if __name__ == "__main__":
    main()

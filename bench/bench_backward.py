"""Times gradients of inputs through packed weights, beside PyTorch's products with plain weights.

    bench_backward.py [--json FILE] [--rounds N] [--threads N] [--only TEXT] [--rows M,...]

dx = dy w with N = K = 4096 and 1, 64 and 512 rows, weights in rows and in tiles, dy in bfloat16 and in float32;
beside PyTorch's `dy @ w` in both. Weights are not in the caches: calls rotate over copies that together are
larger. All subjects with the same number of rows are timed alternately, and a figure is the median of the
rounds' ratios. Every product that is timed is first compared with that of the dequantized weight in double."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import measuring
import opaq
from measuring import Turns, copies, figure, ratio, record

SIZE = 4096
ROWS = (1, 64, 512)
QUANTIZERS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2")
PEERS = {"torch bf16": torch.bfloat16, "torch f32": torch.float32}
ERRORS = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6}
# Required with 512 rows: at most 1.3 times PyTorch's time. In bf16 for formats whose weights are exact in bf16
# apart from one factor.
MUST = 0.77
TARGETS = {
    **{(f"{text}{how}, bf16", "torch bf16"): MUST for text in QUANTIZERS[:4] for how in ("", "+tiled")},
    **{(f"{text}{how}, f32", "torch f32"): MUST for text in QUANTIZERS for how in ("", "+tiled")},
}
backward = torch.ops.opaq.linear_backward


class Case:
    """The gradient through one weight; calls rotate over copies of its buffers."""

    def __init__(self, weight: Any, dtype: torch.dtype) -> None:
        self.name = f"{weight._quantizer_text}, {'bf16' if dtype == torch.bfloat16 else 'f32'}"
        self.dtype, self.bytes = dtype, sum(buffer.nbytes for buffer in weight.buffers())
        self.plan = f"w_given={weight._quantizer_text} grad=x"
        self.buffers = copies(weight.buffers(), self.bytes, lambda each: [one.clone() for one in each])
        self.check(weight)

    def product(self, dy: torch.Tensor, buffers: list[torch.Tensor]) -> Any:
        shapes = [len(dy), SIZE], [SIZE, SIZE]
        return backward([dy], [], buffers, *shapes, self.dtype, self.dtype, self.plan)[0]

    def check(self, weight: Any) -> None:
        dy = torch.randn(3, SIZE).to(self.dtype)
        want = dy.double() @ weight.dequantize(torch.float32).double()
        wrong = float((self.product(dy, self.buffers[0]).double() - want).norm() / want.norm())
        if not wrong < ERRORS[self.dtype]:
            raise SystemExit(f"bench_backward: {self.name} is wrong: its error is {wrong:.1e}")

    def call(self, dy: torch.Tensor) -> Turns:
        given = dy.to(self.dtype)
        return Turns(lambda buffers: self.product(given, buffers), self.buffers)


def peers_of(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Turns]]:
    def peer(dtype: torch.dtype) -> Callable[[torch.Tensor], Turns]:
        plain = weight.to(dtype)
        plains = copies(plain, plain.nbytes, lambda one: one.clone())

        def call(dy: torch.Tensor) -> Turns:
            given = dy.to(dtype)
            return Turns(lambda one: given @ one, plains)

        return call

    return {name: peer(dtype) for name, dtype in PEERS.items()}


def figures_of(case: Case, rows: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The speed relative to each peer."""
    made = []
    for name in PEERS:
        must = TARGETS.get((case.name, name), 0.0) if rows == max(ROWS) else 0.0
        made.append(figure(ratio(times[name], times[case.name]), name, must, max(must, 1.0)))
    return made


def measure(threads: int, rounds: int, only: str, all_rows: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weight = torch.randn(SIZE, SIZE) * 0.02
    packed = [opaq.quantize_tensor(weight, text) for text in QUANTIZERS]
    weights = [each for one in packed for each in (one, one.tiled())]
    wanted = [(one, dtype) for one in weights for dtype in ERRORS]
    cases = [case for one, dtype in wanted if only in (case := Case(one, dtype)).name]
    peers, records = peers_of(weight), []
    for rows in all_rows:
        dy = torch.randn(rows, SIZE)
        subjects: dict[str, Callable[[], Any]] = {name: make(dy) for name, make in peers.items()}
        subjects |= {case.name: case.call(dy) for case in cases}
        times = measuring.interleave(subjects, measuring.rounds_of(rows, rounds))
        records += [record(name, rows, threads, times[name]) for name in peers]
        records += [
            record(case.name, rows, threads, times[case.name], figures=figures_of(case, rows, times))
            for case in cases
        ]
    for one in records:
        one["n"] = one["k"] = SIZE
    return records


def main() -> None:
    parser = measuring.arguments("Times gradients of inputs through packed weights beside PyTorch's.")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--rows", type=lambda text: [int(m) for m in text.split(",")], default=ROWS)
    given = parser.parse_args()
    rounds = given.rounds or 4
    counts = [given.threads] if given.threads else sorted({1, measuring.processors()})
    with torch.no_grad():
        records = [one for count in counts for one in measure(count, rounds, given.only, given.rows)]
    about = measuring.machine(counts[-1]) | {"rounds": rounds}
    print(f"opaq {about['version']}, torch {about['torch']}, {about['cpu']}, {rounds} rounds")
    measuring.show(records)
    measuring.write(given.json, about | {"results": records})


if __name__ == "__main__":
    main()

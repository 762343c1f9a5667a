"""Times linear layers with tiled weights through the public operators, beside PyTorch's and NumPy's products.

    bench_linear.py [--json FILE] [--rounds N] [--threads N] [--only TEXT] [--rows M,...]

N = K = 4096; 1, 8, 64 and 512 rows of float32, or of bfloat16 if the case says so. Weights are not in the
caches: calls rotate over copies that together are larger. Peers run in the same rounds:

    torch f32, bf16    F.linear (MKL, oneDNN)
    numpy f32          x @ w.T (NumPy's BLAS)
    torch int8         quantized::linear_dynamic: int8 weights, x quantized to int8 in each call
    torch int4         _weight_int4pack_mm_for_cpu: int4 weights in groups of 32, x in bf16

Each number of threads runs in a separate process, because some libraries read it only when they start. A last
pair of processes limits opaq to AVX2 (OPAQ_CPU=avx2), but not the peers. "best f32" is the faster of torch f32
and numpy f32 in each round. The floor is the time of reading the weight or that of computing at the peak rate
of the kernel's arithmetic, whichever is longer, each at the best of all rounds. Every product that is timed is
first compared with that of the dequantized weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import measuring
import opaq
from measuring import Limits, Turns, copies, figure, ratio, record
from opaq._explain import kernel_of
from opaq.functional import quantized_linear

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cases"))
from tiled_cases import ERRORS, TIMED, TIMED_CODES  # noqa: E402

SIZE = 4096
ROWS = (1, 8, 64, 512)
BEST = "best f32"
Call = Callable[[torch.Tensor], Any]

# Required value and target of a case: (case, rows, of, must, aim).
TARGETS = (
    *((f"nvfp4 exact{how}", 1, "torch f32", 5.0, 6.0) for how in ("", ", bf16")),
    *(
        (f"{name} exact{how}", 1, "torch f32", 3.0, 3.6)
        for name in ("fp8", "mxfp8")
        for how in ("", ", bf16", ", subnormal")
    ),
    *((f"{name} exact, subnormal", 1, "read", 0.75, 0.9) for name in ("fp8", "mxfp8")),
    ("nvfp4 fast", 512, BEST, 2.3, 2.7),
    ("nvfp4 near", 512, BEST, 1.2, 1.4),
    *((f"{name} exact{how}", 512, BEST, 0.95, 0.95) for name in TIMED for how in ("", ", bf16")),
    ("nvfp4 x nvfp4", 512, "VNNI peak", 0.40, 0.50),
)
AVX2_ROWS = (1, 512)
TARGETS_AVX2 = (("nvfp4 fast", 512, BEST, 1.0, 1.3),)


# ---- cases ----


def subnormal_weight(quantizer: str) -> torch.Tensor:
    """Values that are subnormal in e4m3, except for a large one in each block."""
    weight = (torch.rand(SIZE, SIZE) * 2 - 1) * (2.0**-6 / 448)
    weight[:, :: 32 if quantizer == "mxfp8" else SIZE] = 1.0
    return weight


def error_of(weight: Any, given: str, dtype: torch.dtype, precision: str) -> float:
    """The error of a few rows' product with a part of a tiled weight, against sums in double."""
    x = torch.randn(3, SIZE).to(dtype)
    seen = opaq.quantize_tensor(x, given).dequantize(torch.float32) if given else x
    want = seen.double() @ weight.dequantize(torch.float32)[: SIZE // 8].double().T
    got = quantized_linear(x, weight, input_quantizer=given, precision=precision)[:, : SIZE // 8]
    return float((got.double() - want).norm() / want.norm())


class Case:
    """A product with a tiled weight: the copies that calls rotate over, the kernel, the bytes of one copy."""

    def __init__(
        self, name: str, weights: list[Any], given: str, precision: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.name, self.weights, self.given, self.precision = name, weights, given, precision
        self.dtype, self.bytes = dtype, bytes_of(weights[0])
        self.kernel = kernel_of(weights[0]._quantizer_text, given, dtype, precision)
        wrong = error_of(weights[0], given, dtype, precision)
        if not wrong < (ERRORS["exact" if given else precision] if dtype == torch.float32 else 2.0**-8):
            raise SystemExit(f"bench_linear: {name} is wrong: its error is {wrong:.1e}")

    def call(self, x: torch.Tensor) -> Turns:
        x, keywords = x.to(self.dtype), {"input_quantizer": self.given, "precision": self.precision}
        return Turns(lambda weight: quantized_linear(x, weight, **keywords), self.weights)

    def floor_s(self, rows: int, limits: Limits) -> float:
        """A kernel with bfloat16 instructions has twice the peak rate of float32."""
        rates = {"_exact_": limits.floats, "_bf16_": 2 * limits.floats}
        peak = next((rate for part, rate in rates.items() if part in self.kernel), limits.bytes)
        return max(self.bytes / limits.read, operations(rows) / peak)


def operations(rows: int) -> float:
    return 2.0 * rows * SIZE * SIZE


def bytes_of(weight: Any) -> int:
    return sum(buffer.nbytes for buffer in weight.buffers())


def tiled_copies(weight: torch.Tensor, quantizer: str) -> list[Any]:
    first = opaq.quantize_tensor(weight, quantizer).tiled()
    return copies(first, bytes_of(first), lambda tensor: tensor.clone())


def opaq_cases(weight: torch.Tensor, only: str) -> list[Case]:
    cases = []
    for quantizer, precisions in TIMED.items():
        wanted = [name for name in precisions if only in f"{quantizer} {name}"]
        codes = quantizer in TIMED_CODES and only in f"{quantizer} x {quantizer}"
        half = f"{quantizer} exact, bf16"
        if wanted or codes or only in half:
            tiles = tiled_copies(weight, quantizer)
            cases += [Case(f"{quantizer} {name}", tiles, "", name) for name in wanted]
            cases += [Case(half, tiles, "", "exact", torch.bfloat16)] if only in half else []
            cases += [Case(f"{quantizer} x {quantizer}", tiles, quantizer, "exact")] if codes else []
    for quantizer in ("fp8", "mxfp8"):
        name = f"{quantizer} exact, subnormal"
        if only in name:
            cases.append(Case(name, tiled_copies(subnormal_weight(quantizer), quantizer), "", "exact"))
    return cases


# ---- peers ----


def with_input(call: Callable[[Any, Any], Any], x: Any, weights: list[Any]) -> Turns:
    return Turns(lambda weight: call(x, weight), weights)


def f32_peers(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Turns]]:
    weights = copies(weight, weight.nbytes, lambda tensor: tensor.clone())
    linear = torch.nn.functional.linear
    peers = {"torch f32": lambda x: Turns(lambda w: linear(x, w), weights)}
    try:
        import numpy  # noqa: F401
    except ImportError:
        return peers
    arrays = [one.numpy() for one in weights]
    return peers | {"numpy f32": lambda x: with_input(lambda a, w: a @ w.T, x.numpy(), arrays)}


def other_peers(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Turns]]:
    linear, half = torch.nn.functional.linear, weight.bfloat16()
    halves = copies(half, half.nbytes, lambda tensor: tensor.clone())

    warnings.filterwarnings("ignore", message=".*deprecated.*")  # PyTorch's int8 quantization

    codes = torch.quantize_per_tensor(weight, float(weight.abs().max()) / 127, 0, torch.qint8)
    pack_int8 = torch.ops.quantized.linear_prepack
    int8 = copies(pack_int8(codes, None), SIZE**2, lambda _: pack_int8(codes, None))
    nibbles = torch.randint(0, 16, (SIZE, SIZE), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    int4 = copies(packed, packed.nbytes, lambda tensor: tensor.clone())
    scales = torch.full((SIZE // 32, SIZE, 2), 0.01, dtype=torch.bfloat16)
    dynamic, mixed = torch.ops.quantized.linear_dynamic, torch._weight_int4pack_mm_for_cpu
    return {
        "torch bf16": lambda x: with_input(linear, x.bfloat16(), halves),
        "torch int8": lambda x: Turns(lambda w: dynamic(x, w, True), int8),
        "torch int4": lambda x: with_input(lambda a, w: mixed(a, w, 32, scales), x.bfloat16(), int4),
    }


# ---- running ----


LIMITS = {"read": "read", "VNNI peak": "bytes"}  # a figure's limit: its kind in measuring.Limits


def targets_of(case: Case, rows: int, targets: Any) -> dict[str, tuple[float, float]]:
    return {of: (must, aim) for name, m, of, must, aim in targets if (name, m) == (case.name, rows)}


def subjects_of(case: Case, x: torch.Tensor, limits: Limits, targets: Any) -> dict[str, Callable[[], Any]]:
    """The limits for which the product has a target, then the product."""
    work = {"read": case.bytes, "bytes": operations(len(x))}
    wanted = [of for of in targets_of(case, len(x), targets) if of in LIMITS]
    made = {f"{of}, {case.name}": limits.sample(LIMITS[of], work[LIMITS[of]]) for of in wanted}
    return made | {case.name: case.call(x)}


def figures_of(case: Case, rows: int, times: dict[str, list[float]], targets: Any) -> list[dict[str, Any]]:
    """The speed relative to each peer, and the shares of limits that have a target."""
    mine = times[case.name]
    peers = [name for name in times if name.startswith(("torch", "numpy"))]
    ratios = {name: ratio(times[name], mine) for name in peers}
    fastest = [
        min(each) for each in zip(*(times[name] for name in peers if name.endswith(" f32")), strict=True)
    ]
    ratios[BEST] = ratio(fastest, mine)
    wanted = targets_of(case, rows, targets)
    ratios |= {of: ratio(times[f"{of}, {case.name}"], mine) for of in wanted if of in LIMITS}
    made = [figure(ratios[of], of, *limits) for of, limits in wanted.items()]
    return made + [figure(ratios[name], name) for name in ratios if name not in wanted]


def measure(
    threads: int, rounds: int, only: str, all_rows: Sequence[int], is_avx2: bool
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weight, limits = torch.randn(SIZE, SIZE) * 0.02, Limits(threads)
    cases, targets = opaq_cases(weight, only), TARGETS_AVX2 if is_avx2 else TARGETS
    peers = f32_peers(weight) | ({} if is_avx2 else other_peers(weight))
    records = []
    for rows in all_rows:
        x = torch.randn(rows, SIZE)
        some = {
            name: make(x) for name, make in peers.items() if rows < 512 or name != "torch int4"
        }  # it takes long
        mine = [case for case in cases if rows in (1, 512) or "subnormal" not in case.name]
        subjects: dict[str, Callable[[], Any]] = {**limits.samples(), **some}
        for case in mine:
            subjects |= subjects_of(case, x, limits, targets)
        times = measuring.interleave(subjects, measuring.rounds_of(rows, rounds))
        records += [record(name, rows, threads, times[name]) for name in some]
        for case in mine:
            figures, floor = figures_of(case, rows, times, targets), case.floor_s(rows, limits)
            records.append(record(case.name, rows, threads, times[case.name], case.kernel, floor, figures))
    for one in records:
        one["n"] = one["k"] = SIZE
    return [*records, {"peaks": limits.best, "threads": threads}]


def in_process(threads: int, given: Any, avx2: bool) -> list[dict[str, Any]]:
    """Runs measure() in a process with `threads` threads, which some libraries read when they start."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    environment["OPENBLAS_THREAD_TIMEOUT"] = (
        "4"  # short, so that its idle threads do not spin during the next subject
    )
    if avx2:
        environment["OPAQ_CPU"] = "avx2"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [
            sys.executable,
            __file__,
            "--child",
            "--threads",
            str(threads),
            "--rounds",
            str(given.rounds),
        ]
        command += ["--only", "nvfp4 fast" if avx2 else given.only, "--json", str(path)]
        rows = [m for m in given.rows if m in AVX2_ROWS or not avx2]
        command += ["--rows", ",".join(map(str, rows))]
        subprocess.run(command, check=True, env=environment)
        made: list[dict[str, Any]] = json.loads(path.read_text())
    for one in made:
        one["features"] = "avx2" if avx2 else ""
    return made


def main() -> None:
    parser = measuring.arguments("Times linear layers with tiled weights beside their peers.")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--rows", type=lambda text: [int(m) for m in text.split(",")], default=ROWS)
    parser.add_argument(
        "--child", action="store_true", help="internal: measure in this process, write a list of records"
    )
    given = parser.parse_args()
    given.rounds = given.rounds or 4
    if given.child:
        is_avx2 = os.environ.get("OPAQ_CPU") == "avx2"
        with torch.no_grad():
            made = measure(given.threads, given.rounds, given.only, given.rows, is_avx2)
        given.json.write_text(json.dumps(made))
        return
    counts = [given.threads] if given.threads else sorted({1, measuring.processors()})
    records = [one for count in counts for one in in_process(count, given, False)]
    if given.only in "nvfp4 fast" and "avx512" in measuring.machine(1)["features"]:
        records += [one for count in counts for one in in_process(count, given, True)]
    peaks = [one for one in records if "peaks" in one]
    records = [one for one in records if "peaks" not in one]
    about = measuring.machine(counts[-1]) | {"rounds": given.rounds}
    print(f"opaq {about['version']}, torch {about['torch']}, {about['cpu']}, {given.rounds} rounds")
    for features in ("", "avx2"):
        if some := [one for one in records if one["features"] == features]:
            print(f"\n{'opaq with AVX2 only' if features else 'all instruction sets of the processor'}")
            measuring.show(some)
    measuring.write(given.json, about | {"peaks": peaks, "results": records})


if __name__ == "__main__":
    main()

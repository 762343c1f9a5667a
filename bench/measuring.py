"""Shared by the benchmarks in Python: rounds over all subjects and this machine's limits, figures with required
values and targets, a table and JSON.

Machines are noisy, and a fast phase may affect only one subject. So a round calls every subject several times,
one after another, and keeps the minimum of each; a figure is the median of the rounds' ratios, with the
quartiles and the ratio of the minima of all rounds. A time is the minimum of all rounds; its spread is the
median divided by the minimum. Nothing here depends on formats: shapes, bytes and kernels come from opaq."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import opaq
from opaq import _library

COLD_BYTES = 300 << 20  # copies that calls rotate over are larger than this, and thus than any cache
TOLD = (
    "torch f32",
    "torch bf16",
    "best f32",
    "torch f32 loop",
    "read floor",
)  # the figures of every table; the JSON has all
PAUSE_S = 0.002  # until the threads of the previous subject's pool sleep


def processors() -> int:
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """The processor's name, if the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Limits:
    """Samples of this machine's peak rates on `threads` threads, and the best of them. The samples come from a
    library that is built into bench/ and has its own threads."""

    KINDS = ("read", "floats", "bytes", "copy")  # in the order of bench_peaks.h

    def __init__(self, threads: int) -> None:
        library = ctypes.CDLL(str(Path(_library.path).resolve().parent / "bench" / "libbench_limits.so"))
        library.bench_limits_open.restype = ctypes.c_void_p
        library.bench_limits_sample.restype = library.bench_limits_best.restype = ctypes.c_double
        library.bench_limits_sample.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_double]
        library.bench_limits_best.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.library, self.handle = library, library.bench_limits_open(threads)
        if self.handle is None:
            raise SystemExit("measuring: out of memory for measuring the machine's limits")

    def sample(self, kind: str, work: float) -> Sample:
        """A subject with about `work` bytes or operations."""
        return Sample(lambda: self.library.bench_limits_sample(self.handle, self.KINDS.index(kind), work))

    def samples(self) -> dict[str, Sample]:
        """Subjects of every round, so that all limits are known."""
        return {"read": self.sample("read", 16 << 20)} | {
            kind: self.sample(kind, 1e8) for kind in ("floats", "bytes")
        }

    @property
    def best(self) -> dict[str, float]:
        """The best rates, per second."""
        return {
            f"{kind}_per_second": self.library.bench_limits_best(self.handle, i)
            for i, kind in enumerate(self.KINDS)
        }

    @property
    def read(self) -> float:
        return self.best["read_per_second"]

    @property
    def floats(self) -> float:
        return self.best["floats_per_second"]

    @property
    def bytes(self) -> float:
        return self.best["bytes_per_second"]


class Sample:
    """A subject that measures its own seconds."""

    def __init__(self, call: Callable[[], float]) -> None:
        self.call = call

    def __call__(self) -> float:
        return self.call()


class Turns:
    """Calls that rotate over arguments, so that none is in a cache when it is used again."""

    def __init__(self, call: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
        self.call, self.arguments, self.next = call, arguments, 0

    def __call__(self) -> Any:
        self.next = (self.next + 1) % len(self.arguments)
        return self.call(self.arguments[self.next])


def copies(first: Any, size: int, copy: Callable[[Any], Any]) -> list[Any]:
    """`first` and as many copies as exceed the caches."""
    return [first, *(copy(first) for _ in range(COLD_BYTES // size))]


def interleave(
    subjects: dict[str, Callable[[], Any]], rounds: int, sample_s: float = 0.02
) -> dict[str, list[float]]:
    """For each subject the minimum seconds of each round. A round calls it until sample_s seconds are over, at
    least once and at most eight times."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    gc.collect()
    gc.disable()
    for current in range(-1, rounds):  # -1 warms up
        for name, call in subjects.items():
            time.sleep(PAUSE_S)
            spent, taken = 0.0, []
            for _ in range(8):
                start = time.perf_counter()
                result = call()
                taken.append(result if isinstance(call, Sample) else time.perf_counter() - start)
                spent += taken[-1]
                if spent > sample_s:
                    break
            if current >= 0:
                times[name].append(min(taken))
    gc.enable()
    return times


def rounds_of(rows: int, rounds: int) -> int:
    """One row takes little time, so it gets more rounds."""
    return 4 * rounds if rows == 1 else rounds


def spread(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) / min(seconds)


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The ratio of two lists of times of the same rounds."""
    each = sorted(a / b for a, b in zip(above, below, strict=True))
    quarter = (len(each) + 1) // 4
    made = {"value": statistics.median(each), "low": each[quarter], "high": each[-1 - quarter]}
    return made | {"of_minima": min(above) / min(below)}


def figure(made: dict[str, float], of: str, must: float = 0.0, aim: float = 0.0) -> dict[str, Any]:
    """A ratio, what it refers to (`of`), and whether it reaches `must` and `aim`, unless `must` is 0."""
    made_figure: dict[str, Any] = {**made, "of": of}
    if must:
        value = made["value"]
        made_figure |= {"must": must, "aim": aim}
        made_figure["reached"] = "aim" if value >= aim else "must" if value >= must else "MISSED"
    return made_figure


def record(
    case: str,
    m: int,
    threads: int,
    seconds: Sequence[float],
    kernel: str = "",
    floor_s: float = 0.0,
    figures: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    made: dict[str, Any] = {"case": case, "m": m, "threads": threads, "kernel": kernel}
    made |= {"seconds": min(seconds), "rounds": len(seconds), "median_over_best": spread(seconds)}
    made |= {"floor_seconds": floor_s, "share_of_floor": floor_s / min(seconds), "figures": list(figures)}
    return made


def show(records: Sequence[dict[str, Any]]) -> None:
    print(f"{'case':34} {'M':>4} {'T':>2} {'best us':>10} {'floor us':>10} {'share':>6} {'spread':>6}  figures")
    for one in records:
        texts = []
        for f in one["figures"]:
            if "must" not in f and f["of"] not in TOLD:
                continue
            limits = f" (must {f['must']:g}, aim {f['aim']:g}: {f['reached']})" if "must" in f else ""
            texts.append(f"{f['value']:.2f} ({f['low']:.2f}-{f['high']:.2f}) of {f['of']}{limits}")
        floor = f"{one['floor_seconds'] * 1e6:10.1f} {one['share_of_floor']:6.2f}"
        print(
            f"{one['case']:34} {one['m']:4} {one['threads']:2} {one['seconds'] * 1e6:10.1f} "
            f"{floor if one['floor_seconds'] else ' ' * 17} {one['median_over_best']:6.2f}  "
            f"{', '.join(texts)}{'  ' + one['kernel'] if one['kernel'] else ''}"
        )


def machine(threads: int) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        features = " ".join(opaq.library_info()["cpu"])
    made = {"cpu": cpu_name(), "features": features, "threads": threads, "version": opaq.__version__}
    return made | {"torch": torch.__version__}


def arguments(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, help="rounds over all subjects")
    parser.add_argument("--threads", type=int, default=0, help="0: one, and then one per processor")
    return parser


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

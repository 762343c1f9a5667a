"""What the benchmarks in Python share: rounds that visit every subject, this machine's limits between them,
figures that are compared with what they must be, a table and JSON.

A figure is made of minima over all rounds; the spread beside it is the median over the minimum. Nothing here
knows a format: shapes, bytes and kernels are asked from opaq."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import opaq
from opaq import _library

COLD_BYTES = 300 << 20  # copies that are visited in turn take more than this, and more than any cache
TOLD = (
    "torch f32",
    "best f32",
    "torch f32 loop",
    "read floor",
)  # what a table always says; all else is in the JSON
PAUSE_S = 0.002  # for the threads of a pool to go to sleep before another pool works


def processors() -> int:
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Peaks:
    """The best seen of this machine's limits on so many threads, with everything it has: OPAQ_CPU does not
    limit them. bench_peaks lies beside the library, in bench/."""

    def __init__(self, threads: int) -> None:
        self.program = Path(_library.path).resolve().parent / "bench" / "bench_peaks"
        self.threads = threads
        self.best: dict[str, float] = {}

    def update(self) -> None:
        command = [str(self.program), "--threads", str(self.threads), "--rounds", "2", "--json", "-"]
        environment = {name: value for name, value in os.environ.items() if name != "OPAQ_CPU"}
        made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for name, value in json.loads(made.stdout).items():
            if name.endswith("_per_second"):
                self.best[name] = max(value, self.best.get(name, 0.0))

    @property
    def read(self) -> float:
        return self.best["read_bytes_per_second"]

    @property
    def floats(self) -> float:
        return self.best["float_operations_per_second"]

    @property
    def bytes(self) -> float:
        return self.best["byte_operations_per_second"]


class Turns:
    """Calls with one argument after another, so that none is in a cache when its turn comes again."""

    def __init__(self, call: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
        self.call, self.arguments, self.next = call, arguments, 0

    def __call__(self) -> Any:
        self.next = (self.next + 1) % len(self.arguments)
        return self.call(self.arguments[self.next])


def copies(first: Any, size: int, copy: Callable[[Any], Any]) -> list[Any]:
    """As many as make a subject cold."""
    return [first, *(copy(first) for _ in range(COLD_BYTES // size))]


def interleave(
    subjects: dict[str, Callable[[], Any]], rounds: int, between: Callable[[], None], sample_s: float = 0.02
) -> dict[str, list[float]]:
    """Seconds of each call. A round calls every subject for sample_s, at least once and at most eight times."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    gc.collect()
    gc.disable()
    for current in range(-1, rounds):  # -1 warms up
        between()
        for name, call in subjects.items():
            time.sleep(PAUSE_S)
            spent = 0.0
            for _ in range(8):
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                spent += seconds
                if current >= 0:
                    times[name].append(seconds)
                if spent > sample_s:
                    break
    gc.enable()
    return times


def rounds_of(rows: int, rounds: int) -> int:
    """One row takes little time, and depends on the memory's best moments: it has more rounds."""
    return 4 * rounds if rows == 1 else rounds


def spread(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) / min(seconds)


def figure(value: float, of: str, must: float = 0.0, aim: float = 0.0) -> dict[str, Any]:
    """One number and what it is a share or a multiple of. Without `must` it is only told."""
    made: dict[str, Any] = {"value": value, "of": of}
    if must:
        reached = "aim" if value >= aim else "must" if value >= must else "MISSED"
        made |= {"must": must, "aim": aim, "reached": reached}
    return made


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
    made |= {"seconds": min(seconds), "samples": len(seconds), "median_over_best": spread(seconds)}
    made |= {"floor_seconds": floor_s, "share_of_floor": floor_s / min(seconds), "figures": list(figures)}
    return made


def show(records: Sequence[dict[str, Any]]) -> None:
    print(f"{'case':34} {'M':>4} {'T':>2} {'best us':>10} {'floor us':>10} {'share':>6} {'spread':>6}  figures")
    for one in records:
        told = []
        for f in one["figures"]:
            if "must" not in f and f["of"] not in TOLD:
                continue
            limits = f" (must {f['must']:g}, aim {f['aim']:g}: {f['reached']})" if "must" in f else ""
            told.append(f"{f['value']:.2f} of {f['of']}{limits}")
        floor = f"{one['floor_seconds'] * 1e6:10.1f} {one['share_of_floor']:6.2f}"
        print(
            f"{one['case']:34} {one['m']:4} {one['threads']:2} {one['seconds'] * 1e6:10.1f} "
            f"{floor if one['floor_seconds'] else ' ' * 17} {one['median_over_best']:6.2f}  "
            f"{', '.join(told)}{'  ' + one['kernel'] if one['kernel'] else ''}"
        )


def machine(threads: int) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        features = " ".join(opaq.library_info()["cpu"])
    made = {"cpu": cpu_name(), "features": features, "threads": threads, "version": opaq.__version__}
    return made | {"torch": torch.__version__}


def arguments(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rounds", type=int, help="rounds over all subjects")
    parser.add_argument("--threads", type=int, default=0, help="0: one, and then one per processor")
    return parser


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

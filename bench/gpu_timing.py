"""Timing on a GPU, shared by the rows of bench_gpu.py.

A subject is a list of calls that differ in the memory they read, so that weights are never in the L2 cache:
copies of more than COLD_BYTES together. A round runs every subject once, alternately; a figure is the median of
the rounds' ratios, with the quartiles. Three ways of running a subject:

    graph   a CUDA graph of at least LAUNCHES calls, replayed once a round: no time of the host in it
    stream  as many calls, queued one after another; for copies, which a graph would give to the copy engine
    host    the time until HOST_CALLS calls have returned, with the GPU idle before

Kernels that take longer than LONG_S are also timed alone, ALONE times, after IDLE_S without work: if timed
alternately, both sides run at the clock that the longer one's power allows. Subjects that are too slow for a
row's budget get fewer calls and rounds, which the table states."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
COLD_BYTES = 640 << 20
LAUNCHES = 20
ROUNDS = 9
QUICK_ROUNDS = 7
HOST_CALLS = 40
LONG_S = 100e-6
IDLE_S = 0.6
ALONE = 3
BUDGET_S = 2.5  # of a row's measurement


def copies_of(size: int) -> int:
    """How many copies of `size` bytes exceed COLD_BYTES."""
    return max(1, -(-COLD_BYTES // size))


def cold(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, and as many copies of them as exceed the L2 cache."""
    count = copies_of(sum(t.nbytes for t in tensors))
    return [list(tensors), *([t.clone() for t in tensors] for _ in range(count - 1))]


def timed(run: Call) -> float:
    """The GPU's seconds for what `run` queues."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


@dataclass
class Subject:
    """Calls to time, and how; prepare() makes `seconds` usable: it returns the seconds of one call."""

    calls: Sequence[Call]
    how: str = "graph"
    launches: int = 0
    graph: Any = field(default=None, repr=False)

    def warm_up(self) -> float:
        """Runs each kind of call twice on a stream of its own, as capturing needs; the seconds of the
        second."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.calls[0]()
            spent = timed(self.calls[-1])
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        return spent

    def prepare(self, launches: int) -> None:
        self.launches = launches
        if self.how == "graph":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._queue()
            self.graph.replay()
        torch.cuda.synchronize()

    def _queue(self) -> None:
        for i in range(self.launches):
            self.calls[i % len(self.calls)]()

    def seconds(self) -> float:
        if self.how == "host":
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self._queue()
            spent = time.perf_counter() - begin
            torch.cuda.synchronize()
            return spent / self.launches
        run = self._queue if self.graph is None else self.graph.replay
        return timed(run) / self.launches

    def close(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


@dataclass
class Times:
    """The seconds of one call: by round, alternately, and alone after a pause (0: not measured)."""

    seconds: dict[str, list[float]]
    alone: dict[str, float]
    launches: int


def timed_alternately(subjects: dict[str, Subject], quick: bool) -> Times:
    """Times the subjects alternately."""
    gc.collect()
    spent = {name: subject.warm_up() for name, subject in subjects.items()}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    wanted = max(LAUNCHES, *(len(subject.calls) for subject in subjects.values()))
    if any(subject.how == "host" for subject in subjects.values()):
        wanted = HOST_CALLS
    launches = max(1, min(wanted, int(BUDGET_S / (sum(spent.values()) * (rounds + 2)))))
    rounds = max(3, min(rounds, int(BUDGET_S / (sum(spent.values()) * launches))))
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    try:
        for subject in subjects.values():
            subject.prepare(launches)
        gc.disable()
        for current in range(-1, rounds):  # -1 warms up
            for name, subject in subjects.items():
                taken = subject.seconds()
                if current >= 0:
                    seconds[name].append(taken)
        alone = dict.fromkeys(subjects, 0.0)
        for name, subject in subjects.items():
            if (
                subject.how != "host"
                and LONG_S < statistics.median(seconds[name]) < BUDGET_S / launches / ALONE
            ):
                alone[name] = statistics.median(_after_idle(subject) for _ in range(1 if quick else ALONE))
        return Times(seconds, alone, launches)
    finally:
        gc.enable()
        for subject in subjects.values():
            subject.close()


def _after_idle(subject: Subject) -> float:
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    return subject.seconds()


@dataclass(frozen=True)
class Rates:
    """This GPU's rates, measured in this run: bytes read and written per second by a kernel that copies, and
    floating-point operations per second of a bf16 product."""

    copy: float
    flops: float

    def floor(self, moved: float, operations: float = 0.0, speed: float = 1.0) -> float:
        """The least seconds for as many bytes and operations; `speed`: the tensor cores' rate over bf16's."""
        return max(moved / self.copy, operations / (self.flops * speed))


def measure_rates(rows: int = 4096, size: int = 8192) -> Rates:
    """The best of some tries, each after a pause. The copies are of 1 GiB and outside of a graph, so that a
    kernel makes them."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copied = Subject([lambda: target.copy_(source)], "stream", 4)
    fastest = min(copied.seconds() for _ in range(8))
    a = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product = Subject([lambda: torch.mm(a, b.t())], "stream", 8)
    product.seconds()
    best = min(_after_idle(product) for _ in range(3))
    return Rates(2 * source.nbytes / fastest, 2.0 * rows * size**2 / best)

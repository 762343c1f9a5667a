"""Times the CUDA back end beside PyTorch's own operators, in one process.

    bench_gpu.py [--json FILE] [--rows PATTERN] [--seconds LIMIT] [--quick]

A line for each row of gpu_rows.py: the time of one call of opaq's operator, the peer's, the figure that counts
with its quartiles over the rounds, the value it must reach and the one aimed at, the floor (bytes at the
measured bandwidth of a copy, or operations at the measured rate of a bf16 product, twice that for FP8) and its
share of the time; then the figure of both timed alone after a pause, for kernels above 100 us, and how many
calls a round had if they are fewer than 20. How it is measured: gpu_timing.py. A row that fails prints its
error. --rows selects rows by a regular expression; after --seconds no row is started; --quick takes fewer
rounds. Exit 1 if a row fails."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import gpu_rows
import opaq
from gpu_rows import Row, Unavailable, Work
from gpu_timing import LAUNCHES, Rates, Times, measure_rates, timed_alternately
from measuring import figure, ratio

HEAD = f"{'case':40} {'us':>9} {'peer us':>9}  {'figure (q1-q3)':23} {'of':11} {'must':>5} {'aim':>5} {'':7} "
HEAD += f"{'floor us':>8} {'share':>5}  alone"


def figure_of(row: Row, work: Work, times: Times, floor: float) -> tuple[dict[str, Any], float]:
    """The row's figure, and the same of the times alone (0: not measured)."""
    ours, alone = times.seconds["ours"], times.alone["ours"]
    if row.of == "us":
        made = ratio(ours, [1e-6] * len(ours))
        shown = {**made, "of": row.of, "must": row.must, "aim": row.aim}
        shown["reached"] = (
            "aim" if made["value"] <= row.aim else "must" if made["value"] <= row.must else "MISSED"
        )
        return shown, alone * 1e6
    above, after = [floor] * len(ours), floor
    if row.of == "TFLOP/s":
        above, after = [work.operations * 1e-12] * len(ours), work.operations * 1e-12
    elif work.peer is not None:
        above, after = times.seconds["peer"], times.alone["peer"]
    return figure(ratio(above, ours), row.of, row.must, row.aim), after / alone if alone and after else 0.0


def measure(row: Row, rates: Rates, quick: bool) -> dict[str, Any]:
    work = row.make(rates)
    subjects = {"ours": work.ours} | ({} if work.peer is None else {"peer": work.peer})
    times = timed_alternately(subjects, quick)
    floor = rates.floor(work.moved, work.operations, work.speed)
    made, alone = figure_of(row, work, times, floor)
    seconds = {name: statistics.median(each) for name, each in times.seconds.items()}
    about = {
        "case": row.case,
        "seconds": seconds["ours"],
        "peer_seconds": seconds.get("peer", 0.0),
        "figure": made,
    }
    about |= {"floor_seconds": floor, "share_of_floor": floor / seconds["ours"], "alone": alone}
    return about | {
        "alone_seconds": times.alone,
        "launches": times.launches,
        "rounds": len(times.seconds["ours"]),
    }


def show(row: Row, one: dict[str, Any]) -> None:
    f, peer, floor = one["figure"], one["peer_seconds"], one["floor_seconds"]
    digits = 1 if f["value"] >= 100 else 2
    texts = [f"{f[name]:.{digits}f}" for name in ("value", "low", "high")]
    limits = f"{row.must:5g} {row.aim:5g} {f['reached']:7}" if "reached" in f else " " * 19
    line = f"{row.case:40} {one['seconds'] * 1e6:9.2f} {f'{peer * 1e6:9.2f}' if peer else ' ' * 9}  "
    line += f"{f'{texts[0]} ({texts[1]}-{texts[2]})':23} {row.of:11} {limits} "
    line += f"{floor * 1e6:8.2f} {one['share_of_floor']:5.2f}" if floor else " " * 14
    line += f"  {one['alone']:.2f}" if one["alone"] else ""
    print(line + (f"  [{one['launches']} calls]" if one["launches"] < LAUNCHES else ""), flush=True)


def machine() -> dict[str, Any]:
    about = torch.cuda.get_device_properties(0)
    made = {"gpu": about.name, "processors": about.multi_processor_count, "torch": torch.__version__}
    return made | {"cuda": torch.version.cuda, "version": opaq.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the CUDA back end beside PyTorch.")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rows", default="", help="only rows whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=230.0, help="no row is started later (230)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    given = parser.parse_args()
    begin = time.monotonic()
    if not torch.cuda.is_available() or "cuda" not in opaq.library_info()["backends"]:
        raise SystemExit("bench_gpu: there is no GPU that both PyTorch and opaq can use.")
    rates, about = measure_rates(), machine()
    measured = f"copy {rates.copy * 1e-12:.2f} TB/s, bf16 {rates.flops * 1e-12:.0f} TFLOP/s"
    print(f"opaq {about['version']}, torch {about['torch']}, {about['gpu']}: {measured}")
    print(HEAD)
    done, failed, late = [], [], []
    for row in (row for row in gpu_rows.rows() if re.search(given.rows, row.case)):
        if time.monotonic() - begin > given.seconds:
            late.append(row.case)
            continue
        try:
            with torch.set_grad_enabled("fwd+bwd" in row.case):
                done.append(measure(row, rates, given.quick))
            show(row, done[-1])
        except Unavailable as error:
            print(f"{row.case:40} not available: {error}", flush=True)
        except Exception as error:  # the next rows are still of interest
            failed.append({"case": row.case, "of": row.of, "error": f"{type(error).__name__}: {error}"})
            print(f"{row.case:40} FAILED: {str(error).splitlines()[0][:160]}", flush=True)
        if torch.cuda.mem_get_info()[0] < 48 << 30:
            torch.cuda.empty_cache()
    missed = [one["case"] for one in done if one["figure"].get("reached") == "MISSED"]
    spent = time.monotonic() - begin
    counts = f"{len(missed)} missed, {len(failed)} failed, {len(late)} not started"
    print(f"{len(done)} rows in {spent:.0f} s; {counts}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        rates_made = {"copy_per_second": rates.copy, "bf16_per_second": rates.flops}
        made = about | rates_made | {"seconds": spent, "results": done, "failed": failed, "not_started": late}
        given.json.write_text(json.dumps(made, indent=1) + "\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

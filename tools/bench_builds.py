#!/usr/bin/env python3
"""bench_builds.py OLD NEW [options]: compares the speed of two checkouts, each with a build folder.

Runs the benchmarks of both checkouts alternately and compares every figure that both have: the figure of NEW
divided by that of OLD, as the median over the turns, with minimum and maximum; the other way round for figures
that are better if smaller. Each figure is itself a ratio to a hardware limit or a peer of the same rounds, so
changes in the machine's speed cancel twice. Ratios of two opaq results ("two passes", "x of M=1") are skipped:
their parts are compared separately. --strict: exit 1 if a figure is below --least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_summary import LESS_IS_BETTER, READERS

Place = tuple[str, str, int, str, int]
BETWEEN_OPAQ_RESULTS = ("two passes", "x of M=1")


def run(checkout: Path, arguments: argparse.Namespace) -> dict[Place, float]:
    """Runs the benchmarks of a checkout once; returns its figures."""
    command = ["tools/run_benches.sh", arguments.folder, "--benches", arguments.benches]
    command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
    subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    wanted = arguments.benches.split(",")
    figures = {}
    for name, read in READERS.items():
        path = checkout / arguments.folder / "bench" / f"{name}.json"
        if name.removeprefix("bench_").removesuffix("_avx2") in wanted and path.exists():
            for entry in read(name, json.loads(path.read_text())):
                if entry.of not in BETWEEN_OPAQ_RESULTS and entry.ratio.value > 0:
                    value = entry.ratio.value
                    place = (entry.source, entry.case, entry.m, entry.of, entry.threads)
                    figures[place] = 1.0 / value if entry.of in LESS_IS_BETTER else value
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--folder", default="build", help="the build folder in each checkout (build)")
    parser.add_argument("--benches", default="packed,linear,moe,llama", help="as for run_benches.sh")
    parser.add_argument("--rounds", type=int, help="rounds of each benchmark (default: run_benches.sh chooses)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout (3)")
    parser.add_argument(
        "--least", type=float, default=0.97, help="ratios below this are listed at the end (0.97)"
    )
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a ratio is below --least")
    arguments = parser.parse_args()

    ratios: dict[Place, list[float]] = {}
    for turn in range(arguments.turns):
        order = (arguments.old, arguments.new) if turn % 2 == 0 else (arguments.new, arguments.old)
        made = {}
        for checkout in order:
            print(f"turn {turn + 1} of {arguments.turns}: {checkout}", file=sys.stderr, flush=True)
            made[checkout] = run(checkout, arguments)
        for place in made[arguments.old].keys() & made[arguments.new].keys():
            ratios.setdefault(place, []).append(made[arguments.new][place] / made[arguments.old][place])
    rows = sorted((place, statistics.median(found), min(found), max(found)) for place, found in ratios.items())
    form = "{:18} {:40} {:>5} {:15} {:>2} {:>7} {:>13}"
    print(form.format("bench", "case", "M", "of", "T", "new/old", "range"))
    for place, median, low, high in rows:
        print(form.format(*place, f"{median:.3f}", f"{low:.3f}-{high:.3f}"))
    slower = [(place, median) for place, median, _, _ in rows if median < arguments.least]
    whole = statistics.median(row[1] for row in rows)
    print(f"\n{len(rows)} figures, median {whole:.3f}; {len(slower)} below {arguments.least:g}")
    for place, median in slower:
        print(f"  {place[0]} {place[1]}, M = {place[2]}, of {place[3]}, {place[4]} threads: {median:.3f}")
    if arguments.json:
        records = [
            {"place": place, "median": median, "low": low, "high": high} for place, median, low, high in rows
        ]
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    return 1 if arguments.strict and slower else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""bench_chart.py SUMMARY.JSON CHART.SVG: draws a bar chart of speed relative to PyTorch from the output of
`make bench` (build/bench/summary.json). README.md shows the chart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape


class Bar(NamedTuple):
    label: str
    bench: str
    case: str
    m: int
    of: str


BARS = (
    Bar("Llama, 8 layers, decoding, NVFP4; PyTorch float32", "bench_llama", "nvfp4 fast", 1, "torch f32"),
    Bar("Llama, 8 layers, decoding, NVFP4; PyTorch bfloat16", "bench_llama", "nvfp4 fast", 1, "torch bf16"),
    Bar("128 experts, 64 tokens, NVFP4; a loop in PyTorch", "bench_moe", "nvfp4 fast", 64, "torch f32 loop"),
    Bar(
        "Linear, 1 bf16 row, NVFP4, exact; PyTorch float32", "bench_linear", "nvfp4 exact, bf16", 1, "torch f32"
    ),
    Bar(
        "Linear, 1 bf16 row, MXFP8, exact; PyTorch float32", "bench_linear", "mxfp8 exact, bf16", 1, "torch f32"
    ),
    Bar("Linear, 1 bf16 row, FP8, exact; PyTorch float32", "bench_linear", "fp8 exact, bf16", 1, "torch f32"),
    Bar("Linear, 512 rows, NVFP4, fast; best float32", "bench_linear", "nvfp4 fast", 512, "best f32"),
)
ROW, LEFT, WIDTH, RIGHT, TOP = 26, 350, 380, 70, 44


def result_of(summary: dict[str, Any], bar: Bar) -> dict[str, Any]:
    for row in summary["rows"]:
        if (row["bench"], row["case"], row["m"], row["of"]) == bar[1:] and row["results"]:
            found: dict[str, Any] = row["results"][-1]  # of all threads
            return found
    raise SystemExit(f"bench_chart.py: the summary has no {bar.bench}, {bar.case}, M = {bar.m}, of {bar.of}")


def chart(summary: dict[str, Any]) -> str:
    results = [result_of(summary, bar) for bar in BARS]
    largest = max(result["high"] for result in results)
    height = TOP + ROW * len(BARS) + 12
    cpu, threads = summary["machine"].get("cpu", "this machine"), results[-1]["threads"]
    title = f"opaq, times as fast as PyTorch: {cpu}, {threads} threads; medians, lines are quartiles"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{LEFT + WIDTH + RIGHT}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="bold" fill="#222222">{escape(title)}</text>',
    ]
    for i, (bar, result) in enumerate(zip(BARS, results, strict=True)):
        y, scale = TOP + ROW * i, WIDTH / largest
        value, low, high = (result[name] * scale for name in ("value", "low", "high"))
        middle = y + ROW / 2 - 3
        lines += [
            f'<text x="{LEFT - 8}" y="{middle + 4.5}" text-anchor="end" fill="#222222">',
            f"{escape(bar.label)}</text>",
            f'<rect x="{LEFT}" y="{y}" width="{value:.1f}" height="{ROW - 6}" fill="#2f6f9f"/>',
            f'<path d="M{LEFT + low:.1f} {middle}H{LEFT + high:.1f}" stroke="#111111"/>',
            f'<text x="{LEFT + high + 6:.1f}" y="{middle + 4.5}" fill="#222222">{result["value"]:.1f}x</text>',
        ]
    x = LEFT + WIDTH / largest
    lines.append(f'<path d="M{x:.1f} {TOP - 4}V{height - 8}" stroke="#888888" stroke-dasharray="3 3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: bench_chart.py SUMMARY.JSON CHART.SVG")
    Path(sys.argv[2]).write_text(chart(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()

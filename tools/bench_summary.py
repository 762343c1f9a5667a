#!/usr/bin/env python3
"""bench_summary.py <folder> [options]: prints one table of the benchmarks' results in a folder.

A row's figure is the median over rounds in which opaq and its peer were timed alternately. Beside it are the
quartiles, the ratio of the minima of all rounds, the required value ("must") and the target ("aim"). The median
is compared with both; rows below the required value are listed at the end. Rows measured on one thread and on
all threads show both, and the figure of all threads decides. Writes <folder>/summary.json with the rows and the
benchmarks' results. --markdown prints the table of that file in Markdown instead; --into docs/performance.md
writes it there, between its two marks. --strict: exit 1 if a row is below its required value. <name>.others
beside a benchmark's results is the share of processor time that other programs took meanwhile; above DISTURBED
the table says that figures of all threads are unreliable. The table also has the times of measurement, because
benchmarks can be run separately.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = (
    *("bench_peaks", "bench_packed", "bench_packed_avx2", "bench_quant", "bench_gemm"),
    *("bench_linear", "bench_backward", "bench_moe", "bench_llama", "bench_overhead"),
)


class Ratio(NamedTuple):
    """The median of all rounds, their quartiles, and the ratio of the minima of all rounds."""

    value: float
    low: float
    high: float
    of_minima: float


class Entry(NamedTuple):
    """One figure of one benchmark."""

    source: str
    case: str
    m: int
    of: str
    threads: int
    ratio: Ratio
    must: float
    aim: float
    seconds: float
    floor_s: float
    spread: float
    kernel: str


class Row(NamedTuple):
    """The figures that a row of the table shows."""

    title: str
    source: str
    case: str
    m: int
    of: str
    must: float = 0.0  # overrides the benchmark's value, like aim
    aim: float = 0.0


FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8blk")
ROWS = (
    Row("NVFP4 M=1 fast", "bench_packed", "nvfp4 fast", 1, "read"),
    Row("NVFP4 M=1 exact", "bench_packed", "nvfp4 exact", 1, "read"),
    Row("NVFP4 M=1 exact", "bench_linear", "nvfp4 exact", 1, "torch f32"),
    Row("NVFP4 M=1 exact", "bench_packed", "nvfp4 bf16", 1, "read"),
    Row("NVFP4 M=1 exact", "bench_linear", "nvfp4 exact, bf16", 1, "torch f32"),
    Row("MXFP4 M=1 fast", "bench_packed", "mxfp4 fast", 1, "read"),
    *(
        row
        for name in ("fp8", "mxfp8")
        for row in (
            Row(f"{name.upper()} M=1 exact", "bench_packed", f"{name} exact", 1, "read"),
            Row(f"{name.upper()} M=1 exact", "bench_linear", f"{name} exact", 1, "torch f32"),
            Row(f"{name.upper()} M=1 exact", "bench_packed", f"{name} bf16", 1, "read"),
            Row(f"{name.upper()} M=1 exact", "bench_linear", f"{name} exact, bf16", 1, "torch f32"),
            Row(f"{name.upper()} M=1 exact", "bench_linear", f"{name} exact, subnormal", 1, "read"),
            Row(f"{name.upper()} M=1 exact", "bench_linear", f"{name} exact, subnormal", 1, "torch f32"),
        )
    ),
    Row("NVFP4 M=8 fast", "bench_packed", "nvfp4 fast", 8, "x of M=1"),
    Row("NVFP4 M=64 fast", "bench_packed", "nvfp4 fast", 64, "bytes"),
    Row("NVFP4 M=512 fast", "bench_packed", "nvfp4 fast", 512, "bytes"),
    Row("NVFP4 M=512 fast", "bench_linear", "nvfp4 fast", 512, "best f32"),
    Row("NVFP4 x NVFP4 M=512", "bench_linear", "nvfp4 x nvfp4", 512, "VNNI peak"),
    Row("NVFP4 M=512 near", "bench_linear", "nvfp4 near", 512, "best f32"),
    *(Row("M=512 exact", "bench_packed", f"{name} exact", 512, "fma") for name in FORMATS),
    *(Row("M=512 exact", "bench_packed", f"{name} bf16", 512, "fma", 0.80, 0.88) for name in FORMATS),
    *(
        Row("M=512 exact", "bench_linear", f"{name} exact{how}", 512, "best f32")
        for how in ("", ", bf16")
        for name in (*FORMATS[:-1], "fp8blk2")
    ),
    Row("MXFP4 M=512 fast", "bench_packed", "mxfp4 fast", 512, "bytes"),
    Row("AVX2 NVFP4 M=1", "bench_packed_avx2", "nvfp4 fast", 1, "read", 0.75, 0.85),
    Row("AVX2 NVFP4 M=512 fast", "bench_linear", "nvfp4 fast, avx2", 512, "best f32"),
    *(
        Row(f"bf16 -> {name.upper()}", "bench_quant", f"{name} quantize", 0, "copy")
        for name in ("nvfp4", "mxfp4", "mxfp8", "fp8")
    ),
    *(
        Row("row + column", "bench_quant", f"{name} both", 0, "two passes")
        for name in ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk1", "fp8blk2")
    ),
    Row("NVFP4 -> bf16", "bench_quant", "nvfp4 dequantize", 0, "copy"),
    *(
        Row("M=512 dx", "bench_backward", f"{name}{how}, {dtype}", 512, f"torch {dtype}")
        for dtype in ("bf16", "f32")
        for name in FORMATS[:-1]
        for how in ("", "+tiled")
    ),
    Row("MoE M=1 fast", "bench_moe", "nvfp4 fast", 1, "read floor"),
    Row("MoE M=64 fast", "bench_moe", "nvfp4 fast", 64, "torch f32 loop"),
    Row("Llama decode fast", "bench_llama", "nvfp4 fast", 1, "torch f32"),
    Row("Llama decode fast", "bench_llama", "nvfp4 fast", 1, "torch bf16"),
)
DISTURBED = 0.03  # share of processor time of other programs above which the table has a warning
MARKS = ("<!-- tools/bench_summary.py build/bench --into docs/performance.md -->\n", "<!-- end -->\n")
LESS_IS_BETTER = ("x of M=1", "product")


# ---- reading ----


def ratio_of(one: Any, name: str) -> Ratio:
    return Ratio(one[name], one["low"], one["high"], one["of_minima"])


def packed_entries(source: str, content: Any) -> list[Entry]:
    made = []
    for one in content["results"]:
        of, ratio = one["limit"], ratio_of(one, "share")
        floor = one["seconds"] * ratio.of_minima if of in ("read", "fma", "bytes") else 0.0
        place = source, one["case"], one["m"], of, one["threads"]
        limits, times = (one["must"], one["aim"]), (one["seconds"], floor, one["median_over_best"])
        made.append(Entry(*place, ratio, *limits, *times, one["kernel"]))
    return made


def quant_entries(source: str, content: Any) -> list[Entry]:
    made, kernels = [], {}
    for one in content["results"]:
        if one["operation"] == "copy" or one["dtype"] != "bf16":
            continue
        if one["operation"] == "quantize":
            kernels[one["spec"]] = one["kernel"]
        case = f"{one['spec']} {one['operation']}"
        ratio, limits = ratio_of(one, "share_of_floor"), (one.get("must", 0.0), one.get("aim", 0.0))
        place = source, case, 0, "copy", content["threads"]
        times = one["seconds"], one["seconds"] * ratio.of_minima, one["median_over_best"]
        made.append(Entry(*place, ratio, *limits, *times, one["kernel"]))
    for one in content["both"]:
        place = source, f"{one['format']} both", 0, "two passes", content["threads"]
        limits, times = (one["must"], one["aim"]), (one["both_seconds"], 0.0, one["median_over_best"])
        kernel = kernels.get(one["format"] + "+both", "")
        made.append(Entry(*place, ratio_of(one, "ratio"), *limits, *times, kernel))
    return made


def figure_entries(source: str, content: Any) -> list[Entry]:
    made = []
    for one in content["results"]:
        case = one["case"] + (", avx2" if one.get("features") else "")
        for f in one["figures"]:
            place = source, case, one["m"], f["of"], one["threads"]
            limits = f.get("must", 0.0), f.get("aim", 0.0)
            times = one["seconds"], one["floor_seconds"], one["median_over_best"]
            made.append(Entry(*place, ratio_of(f, "value"), *limits, *times, one["kernel"]))
    return made


READERS = {
    "bench_packed": packed_entries,
    "bench_packed_avx2": packed_entries,
    "bench_quant": quant_entries,
    "bench_linear": figure_entries,
    "bench_backward": figure_entries,
    "bench_moe": figure_entries,
    "bench_llama": figure_entries,
}


# ---- judging ----


def judge(entry: Entry, must: float, aim: float) -> str:
    sign = -1.0 if entry.of in LESS_IS_BETTER else 1.0
    value = sign * entry.ratio.value
    return "aim" if value >= sign * aim else "must" if value >= sign * must else "MISSED"


def summarize(contents: dict[str, Any], measured: dict[str, str], others: dict[str, float]) -> dict[str, Any]:
    entries = [
        entry for name, read in READERS.items() if name in contents for entry in read(name, contents[name])
    ]
    rows = []
    for row in ROWS:
        found = [e for e in entries if (e.source, e.case, e.m, e.of) == (row.source, row.case, row.m, row.of)]
        found.sort(key=lambda entry: entry.threads)
        made: dict[str, Any] = {
            "row": row.title,
            "bench": row.source,
            "case": row.case,
            "m": row.m,
            "of": row.of,
        }
        made |= {"reached": "not measured", "results": []}
        for entry in found:
            must, aim = row.must or entry.must, row.aim or entry.aim
            made |= {
                "must": must,
                "aim": aim,
                "reached": judge(entry, must, aim),
            }  # the last entry, that of all threads, stays
            result = {"threads": entry.threads, **entry.ratio._asdict(), "reached": made["reached"]}
            result |= {"seconds": entry.seconds, "floor_seconds": entry.floor_s}
            made["results"].append(result | {"median_over_best": entry.spread, "kernel": entry.kernel})
        rows.append(made)
    machine = contents.get("bench_linear") or contents.get("bench_packed") or {}
    about = {name: machine[name] for name in ("version", "torch", "cpu", "features") if name in machine}
    rounds = {name: content["rounds"] for name, content in contents.items() if "rounds" in content}
    peaks = [contents["bench_peaks"]] if "bench_peaks" in contents else []
    made = {
        "machine": about,
        "measured": measured,
        "others": others,
        "rounds": rounds,
        "peaks": peaks,
        "rows": rows,
    }
    return made | {"benches": contents}


# ---- printing ----


def title_of(row: dict[str, Any]) -> str:
    """The row's title, with the case if the title does not name it."""
    return (
        f"{row['row']}: {row['case']}"
        if row["row"] in ("M=512 exact", "M=512 dx", "row + column")
        else str(row["row"])
    )


def extra_of(row: dict[str, Any]) -> str:
    if row["row"] in ("M=512 exact", "M=512 dx", "row + column"):
        return ""
    return ", subnormal" if "subnormal" in row["case"] else ", bf16" if "bf16" in row["case"] else ""


def about(summary: dict[str, Any]) -> str:
    machine = summary["machine"]
    parts = [f"opaq {machine.get('version', '?')}", machine.get("cpu", ""), machine.get("features", "")]
    parts += [f"torch {machine['torch']}"] if "torch" in machine else []
    for one in summary["peaks"]:
        read, copy = one["read_bytes_per_second"] * 1e-9, one["copy_bytes_per_second"] * 1e-9
        floats, integers = one["float_operations_per_second"] * 1e-9, one["byte_operations_per_second"] * 1e-9
        parts.append(f"{one['threads']} threads: read {read:.1f} GB/s, copy {copy:.1f} GB/s")
        parts.append(f"{floats:.0f} GFLOP/s, {integers:.0f} GOP/s of bytes")
    rounds = ", ".join(f"{name.removeprefix('bench_')} {count}" for name, count in summary["rounds"].items())
    text = "; ".join(part for part in parts if part) + f"\nrounds: {rounds}"
    times = sorted(summary["measured"].values())
    text += f"\nmeasured: {times[0]} to {times[-1]}" if times else ""
    disturbed = {name: share for name, share in summary["others"].items() if share > DISTURBED}
    if disturbed:
        shares = ", ".join(
            f"{name.removeprefix('bench_')} {100 * share:.0f}%" for name, share in disturbed.items()
        )
        text += (
            f"\nDISTURBED, figures of all threads are unreliable; processor time of other programs: {shares}"
        )
    return text


def print_table(summary: dict[str, Any]) -> None:
    print(about(summary))
    head = ["row", "T", "us", "floor us", "figure", "quartiles", "minima", "of"]
    head += ["must", "aim", "reached", "spread", "kernel"]
    form = "{:36} {:>2} {:>10} {:>10} {:>7} {:>11} {:>6} {:15} {:>5} {:>5} {:10} {:>6}  {}"
    print("\n" + form.format(*head))
    for row in summary["rows"]:
        title = title_of(row) + extra_of(row)
        if not row["results"]:
            print(form.format(title, "", "", "", "", "", "", row["of"], "", "", "not measured", "", ""))
        for one in row["results"]:
            decides = one is row["results"][-1]
            floor = f"{one['floor_seconds'] * 1e6:.1f}" if one["floor_seconds"] else ""
            spread = f"{one['median_over_best']:.2f}" if one["median_over_best"] else ""
            reached = one["reached"] if decides else f"({one['reached'].lower()})"
            quartiles, minima = f"{one['low']:.2f}-{one['high']:.2f}", f"{one['of_minima']:.2f}"
            times = f"{one['seconds'] * 1e6:.1f}", floor
            numbers = one["threads"], *times, f"{one['value']:.3f}", quartiles, minima, row["of"]
            limits = f"{row['must']:g}", f"{row['aim']:g}", reached, spread, one["kernel"]
            print(form.format(title, *numbers, *limits))
            title = ""


def misses(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in summary["rows"] if row["reached"] == "MISSED"]


def print_misses(summary: dict[str, Any]) -> None:
    missed = misses(summary)
    left = [row for row in summary["rows"] if not row["results"]]
    reached = len(summary["rows"]) - len(missed) - len(left)
    print(f"\n{reached} of {len(summary['rows'])} rows reach their required value, {len(missed)} do not")
    for row in missed:
        value, how = row["results"][-1]["value"], "at most" if row["of"] in LESS_IS_BETTER else "at least"
        print(f"  {title_of(row)}{extra_of(row)}: {value:.3f} of {row['of']}, {how} {row['must']:g}")
    if left:
        print(f"not measured: {', '.join(sorted({title_of(row) for row in left}))}")


def markdown(summary: dict[str, Any]) -> str:
    lines = [about(summary).replace("\n", "; ") + ".", ""]
    lines.append("| row | one thread | all threads | quartiles | minima | of | must | aim | reached | kernel |")
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in summary["rows"]:
        if not row["results"]:
            continue
        last = row["results"][-1]
        one = next((r for r in row["results"] if r["threads"] == 1), None)
        single = f"{one['value']:.2f}" if one else ""
        whole = f"{last['value']:.2f}" if last["threads"] != 1 else ""
        limits = f"{row['must']:g} | {row['aim']:g} | {row['reached']} | `{last['kernel']}`"
        beside = f"{last['low']:.2f}-{last['high']:.2f} | {last['of_minima']:.2f}"
        lines.append(
            f"| {title_of(row)}{extra_of(row)} | {single} | {whole} | {beside} | {row['of']} | {limits} |"
        )
    return "\n".join(lines) + "\n"


def put_into(path: Path, text: str) -> None:
    """Replaces the text between the two MARKS of a file."""
    before, mark, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"bench_summary.py: {path} has no {MARKS[0].strip()} with {MARKS[1].strip()} after it")
    path.write_text(before + mark + text + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints one table of the benchmarks' results in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the table of summary.json as Markdown")
    parser.add_argument("--into", type=Path, help="write that table into this file, between its marks")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a row is below its required value")
    given = parser.parse_args()
    path = given.folder / "summary.json"
    if given.into:
        put_into(given.into, markdown(json.loads(path.read_text())))
        return 0
    if given.markdown:
        print(markdown(json.loads(path.read_text())), end="")
        return 0
    files = {name: given.folder / f"{name}.json" for name in SOURCES}
    contents = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    stamps = {name: datetime.fromtimestamp(files[name].stat().st_mtime) for name in contents}
    measured = {name: stamp.isoformat(" ", "minutes") for name, stamp in stamps.items()}
    notes = {name: files[name].with_suffix(".others") for name in contents}
    others = {name: float(note.read_text()) for name, note in notes.items() if note.exists()}
    summary = summarize(contents, measured, others)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print_table(summary)
    print_misses(summary)
    print(f"written: {path}")
    return 1 if given.strict and misses(summary) else 0


if __name__ == "__main__":
    raise SystemExit(main())

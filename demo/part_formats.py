"""Part 1: size and rounding error of every format on one weight, measured by the program demo_formats."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import terminal
from demo_page import Listing, Part, Picture, Table

if TYPE_CHECKING:
    from run_demo import Settings

# Descriptions of the quantizers, in the table's order; the program chooses which are measured.
NOTES = {
    "fp8": "E4M3, one scale per tensor",
    "fp8row": "E4M3, one scale per row",
    "fp8blk1": "E4M3, a float scale per 128 elements",
    "fp8blk2": "E4M3, a float scale per 128x128",
    "mxfp8": "E4M3, a power-of-two scale per 32",
    "mxfp4": "E2M1, a power-of-two scale per 32",
    "nvfp4": "E2M1, an E4M3 scale per 16, one per tensor",
    "fp8.e5m2": "fp8 with E5M2 elements",
    "fp8blk2+pow2": "fp8blk2 with power-of-two scales",
    "mxfp8+2d": "mxfp8 with a scale per 32x32",
    "mxfp4+rule=ocp": "mxfp4 with the scale rule of the OCP specification",
    "nvfp4+2d": "nvfp4 with a scale per 16x16",
    "nvfp4+rowscaled": "nvfp4 with one float scale per row",
    "nvfp4+4over6": "nvfp4 with a largest code of 4 or 6 for each block",
}


def run(part: Part, settings: Settings) -> None:
    path = settings.formats
    if path is None:
        path = settings.out / "formats.json"
        status, output, errors = terminal.output_of([settings.build / "demo" / "demo_formats", "--json", path])
        terminal.say(output.rstrip())
        if status != 0:
            raise RuntimeError(f"demo_formats ended with status {status}: {errors.strip()}")
    figures = json.loads(path.read_text(encoding="utf-8"))
    rows = figures["formats"]
    shape = f"{figures['rows']} x {figures['columns']}"
    part.figures = figures
    part.blocks.append(
        f"One bf16 weight of {shape}, normal with a standard deviation of 0.02, with one element in 1024 "
        "(on average) multiplied by 25. SQNR is the power of the weight divided by the power of the "
        "rounding error, in decibels: 6 dB more is half the error. Bytes include the scales."
    )
    if importlib.util.find_spec("matplotlib") is not None:
        import pictures

        pictures.formats(rows, settings.out / "formats.svg")
        best = "; ".join(
            f"{row['quantizer']}: {row['bits']:.2f} bits, {row['sqnr_db']:.1f} dB" for row in rows[:7]
        )
        part.blocks.append(
            Picture(
                "formats.svg",
                f"Two bar charts with a bar per format: bits per element, and SQNR in decibels. {best}.",
                "Size and accuracy of each format. Longer bars on the left cost more memory; longer bars on "
                "the right mean smaller errors.",
            )
        )
    cells = [
        (
            f"`{row['quantizer']}`",
            NOTES.get(row["quantizer"], ""),
            f"{row['bits'] / 8:.3f}",
            f"{row['bits'] / 16:.3f}",
            f"{row['sqnr_db']:.2f}",
            f"{row['cosine']:.6f}",
            f"{row['largest_error']:.2e}",
            f"{row['quantize_rate']:.0f}",
            f"{row['dequantize_rate']:.0f}",
        )
        for row in rows
    ]
    header = (
        "quantizer",
        "elements and scales",
        "bytes/element",
        "of bf16",
        "SQNR, dB",
        "cosine",
        "largest error",
        "quantize, M/s",
        "dequantize, M/s",
    )
    part.blocks.append(
        Table(
            f"The seven formats and variants of them; M/s: million elements per second, {figures['threads']} "
            "threads",
            header,
            cells,
            (0, 1),
        )
    )
    by_name = {row["quantizer"]: row for row in rows}
    for four, eight in (("nvfp4", "fp8"), ("mxfp4", "mxfp8")):
        if not by_name[four]["bits"] < by_name[eight]["bits"]:
            part.wrong.append(f"{four} takes {by_name[four]['bits']} bits per element, no fewer than {eight}.")
        if not 10 < by_name[four]["sqnr_db"] < by_name[eight]["sqnr_db"]:
            part.wrong.append(
                f"{four} has an SQNR of {by_name[four]['sqnr_db']:.2f} dB, expected between 10 dB and that of "
                f"{eight}."
            )
    status, output, errors = terminal.output_of([settings.build / "demo" / "demo_rules"])
    if status != 0:
        part.wrong.append(f"demo_rules ended with status {status}: {errors.strip()}")
    part.blocks.append(
        Listing("Scale rules of different software on the same blocks (docs/formats.md)", output, True)
    )
    nvfp4 = by_name["nvfp4"]
    part.headline = (
        f"NVFP4 takes {nvfp4['bits'] / 8:.3f} bytes per element ({nvfp4['bits'] / 16:.2f} of bf16) at "
        f"{nvfp4['sqnr_db']:.1f} dB; MXFP8 {by_name['mxfp8']['bits'] / 8:.3f} at "
        f"{by_name['mxfp8']['sqnr_db']:.1f} dB."
    )

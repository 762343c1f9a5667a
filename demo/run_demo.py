"""`make demo`: runs the parts of the demonstration and writes one page, build/demo/index.html.

    formats    size and error of every format on one weight
    graph      the graph of a layer before and after conversion
    training   a small GPT trained in bf16 and in every recipe
    serving    a trained model, quantized by the command, verified, loaded packed; it generates text

A part whose packages are missing is skipped with a note. The exit status is 1 if a check of a part fails, 130
after Ctrl-C. This file and demo_page.py need the standard library only."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import terminal
from demo_page import Part, write_page

ROOT = Path(__file__).resolve().parent.parent
PARTS = {  # name: title, and the packages that it needs
    "formats": ("Every format on one weight", ()),
    "graph": ("The graph of a layer before and after conversion", ("torch", "numpy")),
    "training": ("Training curves of the recipes", ("torch", "numpy")),
    "serving": (
        "A trained model, quantized, verified and served packed",
        ("torch", "numpy", "transformers", "safetensors"),
    ),
}


@dataclass(frozen=True)
class Settings:
    """The argument of every part."""

    build: Path  # the build folder: the library, the command and the demonstration's programs
    out: Path
    formats: Path | None  # output of demo_formats --json; None: the part runs it
    device: str  # "cpu" or "cuda"
    seed: int


def missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def usable_device(wanted: str) -> str:
    """`wanted`, or for "auto" a GPU where PyTorch and opaq both support it, else the CPU."""
    if wanted == "cpu" or missing(("torch",)):
        return "cpu"
    import torch

    from opaq import _library

    has_backend = _library.library.opaq_device_check(_library.Device(1, 0), None) == 0
    if torch.cuda.is_available() and has_backend:
        return "cuda"
    if wanted == "cuda":
        raise SystemExit(
            f"run_demo.py: --device cuda: torch.cuda.is_available() is {torch.cuda.is_available()}, opaq's "
            f"CUDA back end is {'usable' if has_backend else 'missing'}"
        )
    return "cpu"


def describe_machine(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "opaq": terminal.output_of([settings.build / "opaq", "--version"])[1].strip(),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "device": settings.device,
        "Python": platform.python_version(),
    }
    if not missing(("torch",)):
        import torch

        found["PyTorch"] = f"{torch.__version__}, {torch.get_num_threads()} threads"
        if settings.device == "cuda":
            found["device"] = torch.cuda.get_device_name()
    if not missing(("transformers",)):
        found["transformers"] = importlib.metadata.version("transformers")
    load = os.getloadavg()[0]
    found["load before the start"] = f"{load:.1f} running processes (1 minute)"
    return found


def processor() -> str:
    """The processor's name in /proc/cpuinfo, or the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run_part(name: str, settings: Settings) -> Part:
    title, packages = PARTS[name]
    part = Part(name, title)
    began = time.perf_counter()
    lacking = missing(packages)
    if lacking:
        part.skipped = f"{sys.executable} has no {', '.join(lacking)}."
        return part
    try:
        importlib.import_module(f"part_{name}").run(part, settings)
    except Exception as error:  # the page is written without this part's results
        traceback.print_exc()
        part.wrong.append(f"{type(error).__name__}: {error}")
    part.seconds = time.perf_counter() - began
    return part


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build folder (default build)")
    parser.add_argument("--out", type=Path, help="folder of the page (default: demo in the build folder)")
    parser.add_argument("--formats", type=Path, help="output of demo_formats --json (default: run it)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help="which parts (default: all)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if usable, else the CPU"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, batches and generated text (default 0)"
    )
    return parser.parse_args()


def main() -> int:
    terminal.stop_on_interrupt()
    terminal.quiet_imports()
    began = time.perf_counter()
    given = arguments()
    build = given.build.resolve()
    out = (given.out or build / "demo").resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OPAQ_LIBRARY", str(build / "libopaq.so"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT / "python"))
    terminal.say(f"The page will be {out / 'index.html'}; parts: {', '.join(given.parts)}.")
    settings = Settings(build, out, given.formats, usable_device(given.device), given.seed)
    machine = describe_machine(settings)
    parts = []
    for number, name in enumerate(given.parts, 1):
        terminal.say(f"{number}/{len(given.parts)} {PARTS[name][0]}")
        part = run_part(name, settings)
        parts.append(part)
        terminal.say(f"    {part.result} in {part.seconds:.0f} s. {part.outcome}")
    seconds = time.perf_counter() - began
    path = write_page(out, machine, parts, seconds)
    failed = [f"{part.name}: {sentence}" for part in parts for sentence in part.wrong]
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    terminal.say(f"Finished in {seconds:.0f} s{', with errors' if failed else ''}. Open {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

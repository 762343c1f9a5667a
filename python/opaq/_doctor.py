"""`python -m opaq doctor`: reports Python packages, their versions and which parts of opaq need them, followed
by the report of the command `opaq doctor`, which describes the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import opaq
from opaq import _library

# Optional packages, and what does not work without them.
_PACKAGES = {
    "torch": "the operators, the layers and everything that takes a torch.Tensor are missing (needs 2.11)",
    "numpy": "opaq.quantize and opaq.dequantize of arrays are missing",
    "ml_dtypes": "NumPy arrays of bfloat16 are missing",
    "transformers": "opaq.Config and loading packed checkpoints with from_pretrained are missing",
    "peft": "LoRA beside packed weights is missing",
    "vllm": "serving with vLLM is missing",
    "tqdm": "opaq.quantize_ shows no progress",
}


def command() -> str | None:
    """The program `opaq`: OPAQ_COMMAND, beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("opaq")
    given = os.environ.get("OPAQ_COMMAND")
    return given or (str(beside) if os.access(beside, os.X_OK) else shutil.which("opaq"))


def _run(program: str, *options: str) -> str:
    done = subprocess.run([program, "doctor", *options], capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch_trouble() -> str:
    """Why the operators are missing although PyTorch is installed; "" if they are not missing."""
    try:
        import torch

        if torch.ops.opaq.quantize is None:
            return "torch.ops.opaq is empty"
    except Exception as error:  # any error of the import is part of the report
        return f"{type(error).__name__}: {error}"
    return ""


def examine() -> dict[str, Any]:
    """The whole report as a dict; `machine` is the output of the command `opaq doctor --json`, None if it
    cannot run."""
    packages = {name: _package(name) for name in _PACKAGES}
    findings = [
        {"subject": name, "text": f"not installed: {_PACKAGES[name]}"}
        for name, found in packages.items()
        if found is None
    ]
    if packages["torch"] is not None and (trouble := _torch_trouble()):
        findings.append({"subject": "torch", "text": f"the operators cannot be loaded: {trouble}"})
    program, machine = command(), None
    try:
        machine = None if program is None else json.loads(_run(program, "--json"))
    except (OSError, RuntimeError, ValueError) as error:
        findings.append({"subject": "command", "text": f"{program} cannot run: {error}"})
    if program is None:
        text = "the program opaq is not on PATH: checkpoints cannot be quantized or verified from the shell"
        findings.append({"subject": "command", "text": text})
    if machine is not None and machine["version"] != opaq.__version__:
        text = f"{program} is opaq {machine['version']}, the library {opaq.__version__}: install them together"
        findings.append({"subject": "command", "text": text})
    return {
        "version": opaq.__version__,
        "library": str(_library.path),
        "package": str(Path(__file__).parent),
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "packages": packages,
        "findings": findings,
        "machine": machine,
    }


def main(arguments: list[str]) -> int:
    """Prints the report; the exit status is 2 for unknown arguments."""
    if unknown := [argument for argument in arguments if argument != "--json"]:
        print(f"opaq doctor: unknown argument {unknown[0]!r}, expected only --json", file=sys.stderr)
        return 2
    found = examine()
    if arguments:
        print(json.dumps(found, indent=2))
        return 0
    print(f"opaq {found['version']}")
    for key in ("library", "package", "python"):
        print(f"  {key:16}  {found[key]}")
    for name, installed in found["packages"].items():
        print(f"  {name:16}  {installed or 'not installed'}")
    print()
    for finding in found["findings"]:
        print(f"{finding['subject']}: {finding['text']}")
    if found["machine"] is not None:
        print(f"\n{_run(found['machine']['command'])}", end="")
    return 0

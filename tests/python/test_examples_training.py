"""The training examples run, and their loss decreases."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, need

need("torch")
need("opaq")
need("transformers")
need("peft")
need("accelerate")


def run(*words: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_example_of_training(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "python_train.py"), folder=tmp_path)
    losses = [float(number) for number in re.findall(r"loss (\S+)", output)]
    assert losses[3] < 0.2 * losses[0]
    assert losses[4] < 2 * losses[3] + 0.01


@pytest.mark.slow
def test_example_of_lora(tmp_path: Path) -> None:
    """A few steps; test_peft_training.py checks the loss."""
    output = run(str(ROOT / "examples" / "python_lora.py"), "2", "2", folder=tmp_path)
    assert output.count("base 0.309 of bf16") == 2

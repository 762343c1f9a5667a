"""The code blocks of the pages about training run as they stand, and so do the examples."""

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

PAGES = ["lora", "training", "reproducibility"]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.S)
    )
]


def run(*words: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_block_of_a_page(block: str, tmp_path: Path) -> None:
    run("-c", block, folder=tmp_path)


def test_every_page_has_blocks() -> None:
    assert len(BLOCKS) >= 5


def test_example_of_training(tmp_path: Path) -> None:
    said = run(str(ROOT / "examples" / "python_train.py"), folder=tmp_path)
    losses = [float(number) for number in re.findall(r"loss (\S+)", said)]
    assert losses[3] < 0.2 * losses[0]
    assert losses[4] < 2 * losses[3] + 0.01


@pytest.mark.slow
def test_example_of_lora(tmp_path: Path) -> None:
    """Some steps; test_peft_training.py looks at what it finds."""
    said = run(str(ROOT / "examples" / "python_lora.py"), "2", "2", folder=tmp_path)
    assert said.count("base 0.309 of bf16") == 2

"""The examples with torchtitan and Megatron-core run, and their losses decrease. Run by `make test-trainers`,
which installs both; skipped without them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, need

need("torch")
need("opaq")


def losses(folder: Path, *words: str) -> list[float]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(number) for number in re.findall(r"loss (\S+)", done.stdout)]


def test_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    found = losses(tmp_path, str(ROOT / "examples" / "python_torchtitan.py"))
    assert len(found) == 4 and found[-1] < 0.2 * found[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    found = losses(tmp_path, *launcher, str(ROOT / "examples" / "python_megatron.py"))
    assert len(found) == 4 and found[-1] < 0.05 * found[0]

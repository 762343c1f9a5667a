"""The checked-in golden files equal the output of their scripts, byte for byte."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import GOLDEN

CHECKED_IN = sorted(path.name for path in GOLDEN.glob("*.golden"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    for script in sorted(GOLDEN.glob("write_*.py")):
        command = [sys.executable, "-B", str(script), str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_one_file_per_format(written: Path) -> None:
    assert len(CHECKED_IN) == 7
    assert sorted(path.name for path in written.iterdir()) == CHECKED_IN


@pytest.mark.parametrize("name", CHECKED_IN)
def test_file_is_what_the_script_writes(written: Path, name: str) -> None:
    new, old = (written / name).read_bytes(), (GOLDEN / name).read_bytes()
    same = next((i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
    assert new == old, f"{len(new)} bytes written, {len(old)} checked in, the first difference at {same}"

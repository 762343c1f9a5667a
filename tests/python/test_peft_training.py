"""LoRA and DoRA over packed weights reach the same loss as over bf16, in less memory: a small trained model,
and the peak memory of a process that trains adapters of a larger one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, need, skip_test

torch = need("torch")
need("transformers")
need("peft")
memory = need("test_checkpoint_memory")
pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "python_lora.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def base(example: dict[str, Any]) -> Any:
    return example["pretrained"](150)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_fine_tuning_ends_where_bf16_does(example: dict[str, Any], base: Any, options: dict[str, Any]) -> None:
    found = example["compare"](base, 60, **options)
    print(found)
    plain, packed = found["bf16"], found["nvfp4"]
    assert plain["after"] < 0.9 * plain["before"]  # the loss decreases
    assert packed["after"] < 1.02 * plain["after"]
    assert packed["merged"] < 1.02 * plain["after"]
    assert packed["bytes"] < 0.45 * plain["bytes"]


def run(folder: Path, kind: str) -> dict[str, Any]:
    if not Path("/proc/self/smaps").exists():
        skip_test("there is no /proc/self/smaps, so memory cannot be measured")
    program = Path(__file__).with_name("lora_process.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(memory.MIB)  # so that glibc returns freed memory to the system
    command = [sys.executable, str(program), str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("memory:"))
    found: dict[str, Any] = json.loads(line.removeprefix("memory:"))
    print(kind, {key: value // memory.MIB if value > memory.MIB else value for key, value in found.items()})
    assert found["gradients"] == 2 * 7 * memory.SIZES["llama"]["num_hidden_layers"]
    return found


def test_peak_memory_of_a_larger_model(tmp_path: Path) -> None:
    """464 MiB of linear weights in bf16. The peak includes the adapters, their gradients and the
    activations."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "plain").mkdir()
    memory.write_packed(tmp_path / "packed", "llama")
    memory.write_plain(tmp_path / "plain", "llama")
    packed, plain = run(tmp_path / "packed", "packed"), run(tmp_path / "plain", "plain")
    assert packed["packed"] == 7 * memory.SIZES["llama"]["num_hidden_layers"]
    assert packed["base"] < 0.45 * plain["base"]
    assert packed["step"] < 0.45 * plain["step"]
    assert packed["own"] < 0.5 * plain["base"]  # also while loading: no copy in high precision

"""Work runs on PyTorch's threads, by the number of torch.set_num_threads, and on the calling thread if they
fail. A probe that wraps torch_parallel_for counts calls and threads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import need, skip_test

torch = need("torch")
CODE = """
import torch, opaq
torch.set_num_threads({threads})
x = torch.linspace(-3, 3, 512 * 512).reshape(512, 512)
q = torch.ops.opaq.quantize(x, "nvfp4+both")
y = torch.ops.opaq.dequantize(q, "nvfp4+both", x.shape, torch.float32)
n = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
main_grad = torch.ones(64, 96)  # work that adds: doing a piece twice would show
opaq.functional.linear(
    n, torch.nn.Parameter(torch.ones(64, 96)), main_grad=main_grad
).sum().backward()
routing = torch.tensor([[0, 1]] * 64), torch.full((64, 2), 0.5)
z = opaq.functional.moe(n, routing[1], routing[0], torch.ones(2, 64, 96) / 96, torch.ones(2, 96, 32) / 32)
made = [*q, y, main_grad, z]
print(*(hash(bytes(memoryview(t.contiguous().view(torch.uint8).numpy()).cast("B"))) for t in made))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        skip_test("there is no C compiler")
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    source = Path(__file__).with_name("parallel_for_probe.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def run(threads: int, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONHASHSEED": "0", **environment}
    code = CODE.format(threads=threads)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def alone() -> str:
    """The result of one thread."""
    return run(1).stdout


def test_threads_are_pytorchs(probe: Path, alone: str) -> None:
    for threads in (1, 3):
        probed = run(threads, LD_PRELOAD=str(probe))
        counted = re.search(r"probe: (\d+) calls on (\d+) threads", probed.stderr)
        assert counted, probed.stderr
        assert int(counted[1]) > 0 and int(counted[2]) == threads
        assert probed.stdout == alone


@pytest.mark.parametrize("when", ["before", "after"])
def test_work_is_done_once_where_threads_fail(when: str, probe: Path, alone: str) -> None:
    failed = run(2, LD_PRELOAD=str(probe), PROBE_FAIL=when)
    assert "probe: " in failed.stderr and failed.stdout == alone

"""opaq.Linear on 2 and on 4 real gloo ranks: tensor and sequence parallelism, DTensor, FSDP2, delayed scaling's
reductions, what is refused. What each rank does and checks is in linear_rank.py; here the ranks are started
once for each number of them, watched and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, leave_out, need

torch = need("torch")
if not torch.distributed.is_available():
    leave_out("this PyTorch was built without torch.distributed")
need("opaq")

SECONDS = 600
SCRIPT = Path(__file__).with_name("linear_rank.py")
CASES = need("linear_rank").CASES


class Ranks:
    """The cases that held on each rank of a world, and what the ranks said."""

    def __init__(self, world: int, folder: Path) -> None:
        self.said = ""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        logs = [folder / f"rank{rank}.log" for rank in range(world)]
        ranks = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(SCRIPT), str(rank), str(world), str(folder)]
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        try:
            wait(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self.said = "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
        done = [folder / f"done{rank}" for rank in range(world)]
        self.held = [file.read_text().split("\n") if file.exists() else [] for file in done]
        self.ended = [process.returncode for process in ranks]


def wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, one has failed and the others had the time to say so, or it takes too long."""
    end = time.monotonic() + SECONDS
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        if any(process.poll() for process in ranks):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    return {world: Ranks(world, tmp_path_factory.mktemp(f"world{world}")) for world in (2, 4)}


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world in (2, 4) for case in CASES if world in CASES[case][1]]
)
def test_on_ranks(world: int, case: str, worlds: dict[int, Ranks]) -> None:
    ranks = worlds[world]
    assert all(case in held for held in ranks.held), f"{case} did not hold on every rank:\n{ranks.said}"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_end(world: int, worlds: dict[int, Ranks]) -> None:
    assert worlds[world].ended == [0] * world, worlds[world].said

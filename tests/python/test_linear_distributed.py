"""opaq.Linear on 2 and on 4 real ranks, on processors by gloo and, where there are as many GPUs, by NCCL:
tensor and sequence parallelism, DTensor, FSDP2, delayed scaling's reductions, errors. The ranks run
linear_rank.py, which is started once for each number of ranks and device. Ranks cannot share a GPU: NCCL
refuses it, and PyTorch 2.11 crashes in gloo's functional collectives of CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from conftest import need, skip_test, slow_but
from rank_processes import RankProcesses, need_gpus

torch = need("torch")
if not torch.distributed.is_available():
    skip_test("this PyTorch was built without torch.distributed")
need("opaq")

SECONDS = 600
SCRIPT = Path(__file__).with_name("linear_rank.py")
CASES = need("linear_rank").CASES


class Ranks(RankProcesses):
    """The cases that passed on each rank of a world."""

    def __init__(self, world: int, device: str, folder: Path) -> None:
        super().__init__(SCRIPT, world, folder, SECONDS, device)
        done = [folder / f"done{rank}" for rank in range(world)]
        self.held = [file.read_text().split("\n") if file.exists() else [] for file in done]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Ranks]:
    """The ranks of a world, started for the first test that needs them."""
    return cache(lambda world, device: Ranks(world, device, tmp_path_factory.mktemp(f"{device}{world}")))


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=[pytest.mark.slow] if world == 4 else [])
        for world in (2, 4)
        for case in CASES
        if world in CASES[case][1]
    ],
)
def test_on_ranks(world: int, case: str, device: str, worlds: Callable[[int, str], Ranks]) -> None:
    need_gpus(device, world)
    ranks = worlds(world, device)
    assert all(case in held for held in ranks.held), f"{case} did not pass on every rank:\n{ranks.output}"


@pytest.mark.parametrize("world", slow_but([2, 4], 2))
def test_ranks_end(world: int, device: str, worlds: Callable[[int, str], Ranks]) -> None:
    need_gpus(device, world)
    assert worlds(world, device).ended == [0] * world, worlds(world, device).output

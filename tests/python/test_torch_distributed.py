"""Quantized weights under FSDP2 and torch.distributed.checkpoint, on two real gloo ranks. distributed_rank.py
has the cases that each rank runs and checks; here the processes are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import need, skip_test, slow_but
from rank_processes import RankProcesses

torch = need("torch")
if not torch.distributed.is_available():
    skip_test("this PyTorch was built without torch.distributed")
opaq = need("opaq")

WORLD = 2
SECONDS = 180
SCRIPT = Path(__file__).with_name("distributed_rank.py")


@pytest.mark.parametrize("case", slow_but(["gather", "train", "refuse", "checkpoint"], "train"))
def test_on_two_ranks(case: str, tmp_path: Path) -> None:
    ranks = RankProcesses(SCRIPT, WORLD, tmp_path, SECONDS, case)
    assert ranks.ended == [0] * WORLD, f"{case}, at most {SECONDS} s:\n{ranks.output}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_without_ranks(tmp_path: Path) -> None:
    """A state_dict saved and loaded by one process without a process group."""
    dcp = need("torch.distributed.checkpoint")
    generator = torch.Generator().manual_seed(0)
    made = {
        text: opaq.quantize_tensor(torch.randn(37, 64, generator=generator), text)
        for text in ("fp8+both", "fp8blk1+both", "mxfp8+both+swizzle", "nvfp4+both+rht")
    }
    dcp.save({"layers": made}, checkpoint_id=tmp_path, no_dist=True)
    state = {"layers": {text: torch.zeros_like(tensor) for text, tensor in made.items()}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for text, tensor in made.items():
        assert torch.equal(state["layers"][text], tensor), text
    wrong = {"layers": {text: opaq.quantize_tensor(torch.zeros(37, 64), "fp8row") for text in made}}
    with pytest.raises(BaseException, match="cannot be copied into"):
        dcp.load(wrong, checkpoint_id=tmp_path, no_dist=True)

"""opaq.integrations.megatron in Megatron-core's own MLP, on one and on two gloo ranks: megatron_rank.py. Run
by `make test-trainers`, which installs Megatron-core; skipped without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import need
from rank_processes import RankProcesses

need("torch")
need("opaq")
pytest.importorskip("megatron.core")


@pytest.mark.parametrize("world", [1, 2])
def test_ranks(world: int, tmp_path: Path) -> None:
    ranks = RankProcesses(Path(__file__).with_name("megatron_rank.py"), world, tmp_path, 240)
    assert ranks.ended == [0] * world, ranks.output

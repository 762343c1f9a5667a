"""A thread keeps the scratch memory of its calls for the next one, and gives it back when it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import leave_out, need

torch = need("torch")
import opaq  # noqa: E402
from opaq.functional import moe  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP = 8, 256, 128, 2


@pytest.fixture(scope="module")
def stacks() -> list[Any]:
    torch.manual_seed(0)
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    return [opaq.quantize_tensor(torch.randn(shape) * 0.1, "nvfp4").tiled() for shape in shapes]


def call(stacks: list[Any], tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP).indices
    return moe(x, torch.full((tokens, TOP), 0.5), ids, *stacks, precision="fast")


def own_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        leave_out("the system does not tell a process' own memory")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_memory_of_an_earlier_call_does_not_show(stacks: list[Any]) -> None:
    """Larger, smaller and larger again, with what was left in it by others."""
    sizes = (1, 700, 3, 40, 700, 1)
    first = {}
    for tokens in sizes:
        made = []
        thread = threading.Thread(target=lambda tokens=tokens, made=made: made.append(call(stacks, tokens)))
        thread.start()
        thread.join()
        first[tokens] = made[0]  # on a thread of its own, so in fresh memory
    for tokens in sizes:
        assert torch.equal(call(stacks, tokens), first[tokens])


def test_threads_that_end_give_it_back(stacks: list[Any]) -> None:
    def run() -> None:
        call(stacks, 2000)

    grown = []
    for _ in range(24):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        grown.append(own_bytes())
    assert grown[-1] - grown[3] < 64 << 20, [size >> 20 for size in grown]


def test_threads_at_once_have_their_own(stacks: list[Any]) -> None:
    want = {tokens: call(stacks, tokens) for tokens in (5, 60, 300)}
    wrong = []

    def run(tokens: int) -> None:
        for _ in range(10):
            if not torch.equal(call(stacks, tokens), want[tokens]):
                wrong.append(tokens)

    threads = [threading.Thread(target=run, args=(tokens,)) for tokens in want for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

"""A thread keeps the scratch memory of its calls for the next one, and frees it when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import need, skip_test

torch = need("torch")
import opaq  # noqa: E402
from opaq.functional import moe  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP = 8, 256, 128, 2


def made_stacks() -> list[Any]:
    torch.manual_seed(0)
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    return [opaq.quantize_tensor(torch.randn(shape) * 0.1, "nvfp4").tiled() for shape in shapes]


@pytest.fixture(scope="module")
def stacks() -> list[Any]:
    return made_stacks()


def call(stacks: list[Any], tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP).indices
    return moe(x, torch.full((tokens, TOP), 0.5), ids, *stacks, precision="fast")


def test_contents_of_reused_memory_have_no_effect(stacks: list[Any]) -> None:
    """Larger, smaller and larger again, in memory that other calls have written."""
    sizes = (1, 700, 3, 40, 700, 1)
    first = {}
    for tokens in sizes:
        made = []
        thread = threading.Thread(target=lambda tokens=tokens, made=made: made.append(call(stacks, tokens)))
        thread.start()
        thread.join()
        first[tokens] = made[0]  # computed in a new thread, so in fresh memory
    for tokens in sizes:
        assert torch.equal(call(stacks, tokens), first[tokens])


GROWN = """
import sys, threading
sys.path.insert(0, {folder!r})
from test_torch_scratch import call, made_stacks
stacks = made_stacks()
for _ in range(24):
    thread = threading.Thread(target=call, args=(stacks, 2000))
    thread.start()
    thread.join()
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def test_threads_that_end_free_it() -> None:
    """With one malloc arena: otherwise threads leave memory in up to eight arenas per processor."""
    if not Path("/proc/self/status").exists():
        skip_test("the system does not report the memory of a process")
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    code = GROWN.format(folder=str(Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    grown = [int(line) >> 10 for line in ran.stdout.split()]
    assert len(grown) == 24 and grown[-1] - grown[3] < 64, grown


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

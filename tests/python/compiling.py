"""Shared by the tests of compiled code. Importing `fresh_compiler` makes it a fixture of all tests of the
importing module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conftest import need

torch = need("torch")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Any, **keywords: Any) -> Any:
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **keywords})


def fail_on_recompile() -> Any:
    return torch.compiler.set_stance("fail_on_recompile")

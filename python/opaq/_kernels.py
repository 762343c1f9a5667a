"""The kernels of this build by name, and forcing some of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from opaq import _library


def kernels() -> dict[str, bool]:
    """Every kernel of this build, and whether this processor can run it."""
    found: dict[str, bool] = {}
    can_run = ctypes.c_int()
    while name := _library.library.opaq_kernel_at(len(found), ctypes.byref(can_run)):
        found[name.decode()] = bool(can_run.value)
    return found


def force_kernels(*names: str) -> None:
    """From now on these kernels do what they can do, in the whole process; without names nothing is forced any
    more. The environment variable OPAQ_KERNEL does the same with names between commas. Not while operations
    run."""
    _library.call("opaq_kernel_force", ",".join(names).encode())


@contextmanager
def forced_kernels(*names: str) -> Iterator[None]:
    """The same for a block of code."""
    before = _library.library.opaq_kernel_forced()
    force_kernels(*names)
    try:
        yield
    finally:
        _library.call("opaq_kernel_force", before)

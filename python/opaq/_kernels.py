"""Lists the kernels of this build and forces some of them, by name."""

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
    """Makes the whole process use these kernels wherever they apply; without names, ends the forcing. The
    environment variable OPAQ_KERNEL does the same, with names separated by commas. No operation may be
    running."""
    _library.call("opaq_kernel_force", ",".join(names).encode())


@contextmanager
def forced_kernels(*names: str) -> Iterator[None]:
    """`force_kernels` for a `with` block; restores the previous setting."""
    before = _library.library.opaq_kernel_forced()
    force_kernels(*names)
    try:
        yield
    finally:
        _library.call("opaq_kernel_force", before)

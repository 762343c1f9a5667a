"""Returns freed memory to the system after weights were packed."""

from __future__ import annotations

import ctypes
import os


def return_freed() -> None:
    """glibc keeps freed blocks below a size that grows up to 32 MiB for later allocations, and most weights are
    smaller: after packing, a process would hold the plain weights' memory too. Nothing to do with other C
    libraries."""
    trim = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

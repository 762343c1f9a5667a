"""Which versions of transformers the integration supports."""

from __future__ import annotations

import re
import warnings

# NEWEST is the version in requirements/peers.txt, which all Python tests run with. OLDEST is the one in
# requirements/transformers_oldest.txt: tools/test_transformers_range.sh.
OLDEST, NEWEST = (5, 16), (5, 22)


def minor_version(version: str) -> tuple[int, ...]:
    """(5, 16) of "5.16.0"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_version(version: str) -> None:
    """An older one is refused; a newer one may work."""
    found = minor_version(version)
    expected = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found < OLDEST:
        raise ImportError(f"opaq: transformers {version} is installed, expected {expected}")
    if found > NEWEST:
        warnings.warn(f"opaq: transformers {version} is newer than those tested, {expected}", stacklevel=3)

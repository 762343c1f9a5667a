"""Warnings of the functions that change a whole model: each is given once per call, with numbers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from opaq._names import Names

DEFAULT_IGNORE = ("lm_head",)  # may match nothing without a warning


def patterns_of(caller: str, ignore: Any) -> tuple[str, ...]:
    """The patterns of an argument `ignore`: one text or several."""
    given = (ignore,) if isinstance(ignore, str) else ignore
    patterns = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{caller}: ignore is {ignore!r}, expected names of modules; () ignores nothing")
    return patterns


def warn_unmatched(caller: str, ignore: Iterable[str], modules: Collection[str], stacklevel: int = 3) -> None:
    """Warns of patterns of `ignore` that match no module."""
    given = list(dict.fromkeys(ignore))
    unmatched = []
    for pattern in given:
        names = Names([pattern])
        if pattern not in DEFAULT_IGNORE and not any(name in names for name in modules):
            unmatched.append(pattern)
    if not unmatched:
        return
    ends = {name.rpartition(".")[2] for name in modules} | set(modules)
    nearest = get_close_matches(unmatched[0], ends, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    warnings.warn(
        f"{caller}: {len(unmatched)} of {len(given)} patterns of ignore match none of the {len(modules)} "
        f"modules: {', '.join(map(repr, unmatched))}{hint}",
        stacklevel=stacklevel + 1,
    )


def warn_nothing_done(
    caller: str, done: str, modules: int, left: Mapping[str, str], stacklevel: int = 3
) -> None:
    """Warns of a model in which nothing was converted, with the reasons by how often they occur."""
    if left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(left.values()).most_common())
        found = f"none of the {len(left)} linear layers and experts was {done}: {reasons}"
    else:
        found = f"nothing was {done}: none of the {modules} modules is a torch.nn.Linear or known experts"
    warnings.warn(f"{caller}: {found}", stacklevel=stacklevel + 1)

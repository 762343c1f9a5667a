"""Patterns for names of modules, as `ignore` lists have them."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase


def _matches(name: str, pattern: str) -> bool:
    """A regular expression after "re:", else a name or the end of one, with * and ? if there are any."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_named(name: str, patterns: Collection[str]) -> bool:
    """Whether a module is meant, by its own name or by that of a module it is in."""
    parts = name.split(".")
    return any(_matches(".".join(parts[: i + 1]), pattern) for i in range(len(parts)) for pattern in patterns)

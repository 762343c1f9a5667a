"""Names of modules, as lists like `ignore` have them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate


class Names:
    """Modules by their names: whole names or ends of names, which may have * and ? in them, and regular
    expressions after "re:". A module is meant by its own name or by that of a module it is in."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self._expressions.append(re.compile(pattern[3:]))
            elif set(pattern) & set("*?["):
                self._expressions += [re.compile(translate(p)) for p in (pattern, f"*.{pattern}")]
            else:
                self._exact.add(pattern)

    def __contains__(self, name: str) -> bool:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if any(".".join(parts[begin:end]) in self._exact for begin in range(end)):
                return True
            if any(expression.match(".".join(parts[:end])) for expression in self._expressions):
                return True
        return False

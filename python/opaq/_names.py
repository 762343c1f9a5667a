"""Patterns of module names, as in `ignore`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

from opaq._library import call, library


class Names:
    """A list of patterns: full module names or their last components, globs with * and ?, and regular
    expressions after "re:". A pattern also matches everything inside a module that it matches. Matching is the
    library's (opaq/pattern.h) and takes time proportional to the size of the pattern."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._exact: set[str] = set()
        self._list = ctypes.c_void_p()
        call("opaq_patterns_create", self._list)
        weakref.finalize(self, library.opaq_patterns_destroy, self._list)
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                self._add(pattern)
            elif set(pattern) & set("*?["):
                self._add(pattern)
                self._add(f"*.{pattern}")
            else:
                self._exact.add(pattern)

    def _add(self, pattern: str) -> None:
        call("opaq_patterns_add", self._list, pattern.encode(errors="surrogatepass"))

    def __reduce__(self) -> tuple[type[Names], tuple[tuple[str, ...]]]:
        return Names, (self.patterns,)

    def __contains__(self, name: str) -> bool:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if any(".".join(parts[begin:end]) in self._exact for begin in range(end)):
                return True
            whole = ".".join(parts[:end]).encode(errors="surrogatepass")
            if library.opaq_patterns_find(self._list, whole) >= 0:
                return True
        return False

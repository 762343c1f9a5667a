"""Errors with a hint for names that opaq does not have: public names whose package is not installed,
misspelled names, names of other libraries. They must be AttributeErrors, for hasattr(), help() and tab
completion. `from opaq import name` replaces the text of an AttributeError, so a finder raises the same text as
an ImportError."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

_PACKAGES = {"numpy": "NumPy", "torch": "PyTorch", "transformers": "transformers"}
_texts: dict[str, str] = {}  # by the module name that `from opaq import name` imports: "opaq.Linear"


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _texts:
            raise ImportError(_texts[name], name=name)


_finder = _Finder()


def refuse(name: str, text: str, error: BaseException | None = None) -> NoReturn:
    """Raises an AttributeError; `from opaq import name` raises an ImportError with the same text."""
    _texts[f"opaq.{name}"] = text
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)  # at the end: modules that exist are found first
    raise AttributeError(text) from error


def explain(name: str, error: ModuleNotFoundError) -> NoReturn:
    """Raises an AttributeError for `opaq.name` that names the missing package; re-raises any other error."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        raise error
    needs = f"{_PACKAGES[package]}, which is not installed: pip install 'opaq[{package}]'"
    refuse(name, f"opaq.{name} needs {needs}", error)

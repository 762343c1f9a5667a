"""The error of a public name whose package is not installed. It has to be an AttributeError, for hasattr(),
help() and tab completion; `from opaq import name` would replace its text, so a finder repeats it as an
ImportError."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

_PACKAGES = {"numpy": "NumPy", "torch": "PyTorch", "transformers": "transformers"}
_texts: dict[str, str] = {}  # by the name that `from opaq import name` looks for, "opaq.Linear"


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _texts:
            raise ImportError(_texts[name], name=name)


_finder = _Finder()


def explain(name: str, error: ModuleNotFoundError) -> NoReturn:
    """Raises for `opaq.name` what says which package is missing; another error as it is."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        raise error
    text = f"opaq.{name} needs {_PACKAGES[package]}, which is not installed: pip install 'opaq[{package}]'"
    _texts[f"opaq.{name}"] = text
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    raise AttributeError(text) from error

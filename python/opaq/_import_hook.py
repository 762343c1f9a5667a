"""Acts on modules that this package completes without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class _Finder:
    """Finds one module as the other finders do, and sees when it has been executed."""

    def __init__(self, module: str, act: Callable[[Any], None]) -> None:
        self.module, self.act = module, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                self.act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def when_imported(module: str, act: Callable[[Any], None]) -> None:
    """Calls `act` with the module: now if it has been imported, else when it is."""
    if module in sys.modules:
        act(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Finder(module, act))

"""Calls functions when other modules are imported, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class _Finder:
    """Delegates to the other finders and runs the callbacks of a module after its execution."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.callbacks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                for callback in self.callbacks.pop(name, ()):
                    callback(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def when_imported(module: str, callback: Callable[[Any], None]) -> None:
    """Calls `callback(module)`: now if the module is imported, otherwise after its import."""
    if (loaded := sys.modules.get(module)) is not None:
        callback(loaded)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.callbacks.setdefault(module, []).append(callback)


def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch._dynamo.allow_in_graph, without importing torch._dynamo, which takes as long as PyTorch itself."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(function))
    return function

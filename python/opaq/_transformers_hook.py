"""Registers opaq with transformers when transformers first meets a checkpoint of opaq's, in either order of the
two imports. Imports neither transformers nor what opaq needs for it until then."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_MODULE = "transformers.quantizers.auto"
_METHODS = ("opaq", "modelopt")  # what opaq.integrations.transformers registers


def _register_before(owner: Any, name: str) -> None:
    """`owner.name`, which takes a quantization_config last, registers opaq before it looks one of opaq's up."""
    original = getattr(owner, name)

    def looked_up(*arguments: Any, **keywords: Any) -> Any:
        config = [*arguments, *keywords.values(), {}][0]
        method = config.get("quant_method") if hasattr(config, "get") else getattr(config, "quant_method", "")
        if method in _METHODS:
            importlib.import_module("opaq.integrations.transformers")
        return original(*arguments, **keywords)

    setattr(owner, name, staticmethod(looked_up))


def _watch(module: Any) -> None:
    _register_before(module.AutoHfQuantizer, "supports_quant_method")
    _register_before(module.AutoQuantizationConfig, "from_dict")


class _Finder:
    """Finds one module as the other finders do, and sees when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Once, at `import opaq`."""
    if _MODULE in sys.modules:
        _watch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())

"""Registers opaq with transformers when transformers first meets a checkpoint of opaq's, in either order of the
two imports. Imports neither transformers nor what opaq needs for it until then."""

from __future__ import annotations

import importlib
from typing import Any

from opaq._import_hook import when_imported

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


def install() -> None:
    """Once, at `import opaq`."""
    when_imported("transformers.quantizers.auto", _watch)

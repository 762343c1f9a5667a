"""Registers opaq with transformers when transformers first reads a configuration for opaq, in either order of
the two imports. Does not import transformers or the integration until then."""

from __future__ import annotations

import importlib
from typing import Any

from opaq._import_hook import when_imported

_METHODS = ("opaq", "modelopt")  # quant_methods that opaq.integrations.transformers registers


def _register_before(owner: Any, name: str) -> None:
    """Makes `owner.name`, whose last argument is a quantization_config, register opaq first if it needs it."""
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
    """Installs the hooks; called once, at `import opaq`."""
    when_imported("transformers.quantizers.auto", _watch)

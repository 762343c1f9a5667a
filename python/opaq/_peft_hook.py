"""Makes PEFT's LoRA take opaq.QuantizedLinear, in either order of the two imports. Imports neither PEFT nor
what opaq needs for it: opaq.integrations.peft is imported when the first packed layer gets an adapter."""

from __future__ import annotations

import importlib
from typing import Any

from opaq._import_hook import when_imported


def _add_dispatcher(module: Any) -> None:
    """`LoraModel._create_new_module` asks opaq first; a module that the user's LoraConfig maps stays
    theirs."""
    original = module.LoraModel._create_new_module

    def create(lora_config: Any, adapter_name: str, target: Any, **keywords: Any) -> Any:
        if isinstance(target, importlib.import_module("opaq.packed").PackedModule):
            mapped = lora_config._custom_modules or {}
            if not any(isinstance(target, kind) for kind in mapped):
                dispatch = importlib.import_module("opaq.integrations.peft").dispatch
                return dispatch(target, adapter_name, lora_config, **keywords)
        return original(lora_config, adapter_name, target, **keywords)

    module.LoraModel._create_new_module = staticmethod(create)


def _complete_all_linear(module: Any) -> None:
    """target_modules="all-linear" means packed linear layers too."""
    original = module._maybe_include_all_linear_layers

    def include(peft_config: Any, model: Any) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        made = original(peft_config, model)
        if isinstance(asked, str) and asked != made.target_modules and hasattr(made, "lora_alpha"):
            made.target_modules |= importlib.import_module("opaq.integrations.peft").packed_names(model)
        return made

    module._maybe_include_all_linear_layers = include


def install() -> None:
    """Once, at `import opaq`."""
    when_imported("peft.tuners.tuners_utils", _complete_all_linear)
    when_imported("peft.tuners.lora.model", _add_dispatcher)

"""Makes PEFT's LoRA accept opaq.QuantizedLinear, in either order of the two imports. Does not import PEFT;
opaq.integrations.peft is imported when the first packed layer gets an adapter."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from opaq._import_hook import when_imported


def _add_dispatcher(module: Any) -> None:
    """Makes `LoraModel._create_new_module` try opaq first, except for modules that the user's LoraConfig
    maps."""
    original = module.LoraModel._create_new_module

    def create(lora_config: Any, adapter_name: str, target: Any, **keywords: Any) -> Any:
        if "opaq.packed" in sys.modules and keywords.get("parameter_name"):
            dispatch = importlib.import_module("opaq.integrations.peft").dispatch_parameter
            if (made := dispatch(target, adapter_name, lora_config, **keywords)) is not None:
                return made
        elif isinstance(target, importlib.import_module("opaq.packed").PackedModule):
            mapped = lora_config._custom_modules or {}
            if not any(isinstance(target, kind) for kind in mapped):
                dispatch = importlib.import_module("opaq.integrations.peft").dispatch
                return dispatch(target, adapter_name, lora_config, **keywords)
        return original(lora_config, adapter_name, target, **keywords)

    module.LoraModel._create_new_module = staticmethod(create)


def _complete_all_linear(module: Any) -> None:
    """Makes target_modules="all-linear" include packed linear layers."""
    original = module._maybe_include_all_linear_layers

    def include(peft_config: Any, model: Any) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        made = original(peft_config, model)
        if isinstance(asked, str) and asked != made.target_modules and hasattr(made, "lora_alpha"):
            made.target_modules |= importlib.import_module("opaq.integrations.peft").packed_names(model)
        return made

    module._maybe_include_all_linear_layers = include


def _refuse_saved_packed(module: Any) -> None:
    """Refuses packed modules in modules_to_save, which would train a copy of them."""
    original = module.ModulesToSaveWrapper.__init__

    def initialize(self: Any, module_to_save: Any, adapter_name: str, *rest: Any, **keywords: Any) -> None:
        if "opaq.packed" in sys.modules:
            importlib.import_module("opaq.integrations.peft").check_saved(module_to_save)
        original(self, module_to_save, adapter_name, *rest, **keywords)

    module.ModulesToSaveWrapper.__init__ = initialize


def install() -> None:
    """Installs the hooks; called once, at `import opaq`."""
    when_imported("peft.tuners.tuners_utils", _complete_all_linear)
    when_imported("peft.tuners.lora.model", _add_dispatcher)
    when_imported("peft.utils.other", _refuse_saved_packed)

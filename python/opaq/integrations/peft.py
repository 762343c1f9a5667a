"""PEFT: LoRA and DoRA adapters beside packed linear layers, whose weights stay packed: docs/lora.md. PEFT
creates them through opaq._peft_hook."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from opaq._noise import sqnr
from opaq.packed import QuantizedLinear
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor

_log = logging.getLogger("opaq.peft")
# Initializations of adapters that do not change the base weight, which is packed.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


class LoraQuantizedLinear(PeftLinear):
    """PEFT's lora.Linear around an opaq.QuantizedLinear: y = packed product + adapters, as PEFT computes them.

    `merge` quantizes the float32 sum like the old weight and sets `merge_sqnr`, its
    signal-to-quantization-noise ratio in decibels. The old packed weight is kept, so `unmerge` is exact."""

    base_layer: Any
    merged_adapters: list[str]

    def __init__(self, base_layer: QuantizedLinear, adapter_name: str, config: Any, **keywords: Any) -> None:
        self._check(config)
        self.__dict__["_before_merge"] = None  # weight and bias without any adapter, while some are merged
        self.__dict__["merge_sqnr"] = None
        super().__init__(base_layer, adapter_name, config=config, **keywords)

    @staticmethod
    def _check(config: Any) -> None:
        initialization = config.init_lora_weights
        if not any(initialization is known or initialization == known for known in _INITIALIZATIONS):
            known = ", ".join(repr(choice) for choice in _INITIALIZATIONS)
            raise NotImplementedError(
                f"opaq: init_lora_weights={initialization!r} changes or decomposes the base weight, which is "
                f"packed; expected one of {known}"
            )

    def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
        """Overridden because PEFT warns about unknown classes."""
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Supports plain LoRA and DoRA; PEFT refuses the other variants by name."""
        known = super().lora_variants
        return {key: known[key] for key in ((), ("use_dora",))}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **keywords: Any) -> None:
        self._check(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **keywords)

    # ---- merging ----

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts the weight and bias from before the first merge too, which are no parameters."""
        super()._apply(fn, recurse)
        if self._before_merge is not None:
            self.__dict__["_before_merge"] = tuple(
                None if kept is None else nn.Parameter(fn(kept.detach()), requires_grad=kept.requires_grad)
                for kept in self._before_merge
            )
        return self

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merges adapters into a new packed weight. All merged adapters are added to the weight from before the
        first merge, so it is rounded once. An error leaves the layer unchanged."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        layer = self.base_layer
        if not names or not isinstance(layer, QuantizedLinear):
            if names:  # merge() is running on the plain copy: PEFT computes
                super().merge(safe_merge=safe_merge, adapter_names=names)
            return
        merged = list(self.merged_adapters)
        before = self._before_merge or (layer.weight, layer.bias)
        plain = QuantizedLinear.from_weight(before[0].detach().to(torch.float32), before[1]).to_linear()
        if before[1] is not None:
            plain.bias = nn.Parameter(before[1].detach().to(torch.float32, copy=True))
        self.base_layer, self.merged_adapters = plain, []
        try:
            super().merge(safe_merge=safe_merge, adapter_names=merged + names)
            values = plain.weight.detach()
            packed = quantize_tensor(values.contiguous(), str(layer.weight.tiled(False)._quantizer_text))
            ratio = sqnr(values, packed)
            packed = packed.tiled(packed._quantizer_text != layer.quantizer).to(layer.weight.dtype)
        except BaseException:
            self.merged_adapters = merged
            raise
        finally:
            self.base_layer = layer
        layer.weight = nn.Parameter(packed, requires_grad=False)
        if plain.bias is not None:
            layer.bias = nn.Parameter(
                plain.bias.detach().to(before[1].dtype), requires_grad=layer.bias.requires_grad
            )
        self.__dict__["_before_merge"], self.__dict__["merge_sqnr"] = before, ratio
        _log.info("merged %s into %s: SQNR %.2f dB", ", ".join(names), layer.quantizer, ratio)

    def unmerge(self) -> None:
        """Restores the packed weight from before the first merge, bit for bit."""
        layer = self.base_layer
        if not isinstance(layer, QuantizedLinear) or not self.merged:
            super().unmerge()
            return
        assert self._before_merge is not None
        device = layer.weight.device
        layer.weight, layer.bias = (
            None if kept is None else nn.Parameter(kept.detach().to(device), requires_grad=kept.requires_grad)
            for kept in self._before_merge
        )
        self.merged_adapters = []
        self.__dict__["_before_merge"] = self.__dict__["merge_sqnr"] = None

    def __repr__(self) -> str:
        return str(super().__repr__()).replace("lora.LoraQuantizedLinear", "lora.QuantizedLinear")


def dispatch(target: Any, adapter_name: str, config: Any, **keywords: Any) -> Any:
    """The LoRA layer for a packed module."""
    if not isinstance(target, QuantizedLinear):
        raise NotImplementedError(
            f"opaq: LoRA adapters of an opaq.{type(target).__name__} are not supported, only of "
            "opaq.QuantizedLinear"
        )
    return LoraQuantizedLinear(target, adapter_name, config, **keywords)


def check_target_parameter(target: Any, name: str) -> None:
    """Refuses an adapter of a packed weight by target_parameters, which PEFT would add to a plain copy."""
    module = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    weight = getattr(module, name, None)
    if isinstance(weight, QuantizedTensor):
        raise NotImplementedError(
            f"opaq: target_parameters names {name} of a {type(module).__name__}, which is packed "
            f"({weight._quantizer_text}, {tuple(weight.shape)}); packed linear layers have adapters by "
            "target_modules, and other weights are adapted if they stay plain: ignore= of opaq.quantize_ or "
            "opaq.Config"
        )


def check_saved(module: nn.Module) -> None:
    """Refuses a module of modules_to_save that has packed weights."""
    packed = {
        f"{name} {tuple(parameter.shape)} ({parameter._quantizer_text})"
        for name, parameter in module.named_parameters()
        if isinstance(parameter, QuantizedTensor)
    }
    if packed:
        raise NotImplementedError(
            f"opaq: modules_to_save names a module (opaq.{type(module).__name__}) with {len(packed)} packed "
            f"weights, which cannot be trained: {', '.join(sorted(packed)[:3])}. Name it in target_modules for "
            "a LoRA adapter instead, or keep it plain with ignore= of opaq.quantize_ or opaq.Config"
        )


def packed_names(model: nn.Module) -> set[str]:
    """The packed linear layers of "all-linear": without the output layer and layers that have an adapter."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    wrapped = {module.base_layer for module in model.modules() if isinstance(module, BaseTunerLayer)}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and module is not head and module not in wrapped
    }

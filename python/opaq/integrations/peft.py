"""PEFT: LoRA and DoRA adapters beside packed linear layers, whose weights stay packed: docs/lora.md. PEFT
creates them through opaq._peft_hook."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from opaq import _stored
from opaq._noise import sqnr
from opaq.moe import GroupedLinear
from opaq.packed import PackedModule, QuantizedLinear, zeros
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor

_log = logging.getLogger("opaq.peft")
# Initializations of adapters that do not change the base weight, which is packed.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


def _check(config: Any) -> None:
    initialization = config.init_lora_weights
    if not any(initialization is known or initialization == known for known in _INITIALIZATIONS):
        known = ", ".join(repr(choice) for choice in _INITIALIZATIONS)
        raise NotImplementedError(
            f"opaq: init_lora_weights={initialization!r} changes or decomposes the base weight, which is "
            f"packed; expected one of {known}"
        )


def _packed_parts(values: torch.Tensor, like: QuantizedTensor) -> QuantizedTensor:
    """Quantizes a weight that a checkpoint stores in parts (experts; gate and up), which have one global scale
    each: rows that had the same one before still do, so that it can be stored again."""
    text, flat = str(like._quantizer_text), values.reshape(-1, values.shape[-1]).cpu()
    made, first = zeros(values.shape, text, values.dtype, "cpu"), 0
    factors = _stored.export_rows(like.detach().cpu(), 0, len(flat))[2]
    assert factors is not None
    for end in [*(factors.diff().nonzero().flatten() + 1).tolist(), len(flat)]:
        one = quantize_tensor(flat[first:end].contiguous(), text.replace("+rowscaled", ""))
        _stored.import_rows(made, first, *_stored.export_rows(one, 0, end - first))
        first = end
    moved: QuantizedTensor = made.to(like.device)
    return moved


def _packed_like(values: torch.Tensor, like: QuantizedTensor) -> tuple[QuantizedTensor, float]:
    """float32 values quantized, and in tiles or rows, as another weight is, and their SQNR."""
    rows = like.detach().tiled(False)
    text = str(rows._quantizer_text)
    is_in_parts = "+rowscaled" in text and "+global" in text
    packed = _packed_parts(values, rows) if is_in_parts else quantize_tensor(values.contiguous(), text)
    ratio = sqnr(values, packed)
    return packed.tiled(text != like._quantizer_text).to(like.dtype), ratio


class _KeepsBase(nn.Module):
    """Moves and casts the parameters from before the first merge too, which are not registered."""

    _before_merge: tuple[Any, ...] | None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._before_merge is not None:
            self.__dict__["_before_merge"] = tuple(
                None if kept is None else nn.Parameter(fn(kept.detach()), requires_grad=kept.requires_grad)
                for kept in self._before_merge
            )
        return self


class LoraQuantizedLinear(_KeepsBase, PeftLinear):
    """PEFT's lora.Linear around an opaq.QuantizedLinear: y = packed product + adapters, as PEFT computes them.

    `merge` quantizes the float32 sum like the old weight and sets `merge_sqnr`, its
    signal-to-quantization-noise ratio in decibels. The old packed weight is kept, so `unmerge` is exact."""

    base_layer: Any
    merged_adapters: list[str]

    def __init__(self, base_layer: QuantizedLinear, adapter_name: str, config: Any, **keywords: Any) -> None:
        _check(config)
        self.__dict__["_before_merge"] = None  # weight and bias without any adapter, while some are merged
        self.__dict__["merge_sqnr"] = None
        super().__init__(base_layer, adapter_name, config=config, **keywords)

    def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
        """Overridden because PEFT warns about unknown classes."""
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Supports plain LoRA and DoRA; PEFT refuses the other variants by name."""
        known = super().lora_variants
        return {key: known[key] for key in ((), ("use_dora",))}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **keywords: Any) -> None:
        _check(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **keywords)

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
            packed, ratio = _packed_like(plain.weight.detach(), layer.weight)
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


class ParamWrapper(_KeepsBase, PeftParamWrapper):
    """PEFT's lora.ParamWrapper, which it knows by its name, around packed experts of transformers or an
    opaq.GroupedLinear: their forward computes the adapters beside the packed stack. `merge` is as in
    LoraQuantizedLinear."""

    base_layer: Any
    merged_adapters: list[str]

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: Any, **keywords: Any) -> None:
        self.__dict__["_before_merge"] = self.__dict__["merge_sqnr"] = None
        super().__init__(base_layer, adapter_name, config=config, **keywords)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **keywords: Any) -> None:
        _check(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **keywords)

    def _is_packed(self) -> bool:
        return isinstance(self.get_param(), QuantizedTensor)

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """a [experts, rank, in features], b [experts, out features, rank], and their product's factor."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        a = a.reshape(self.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return a, b.contiguous(), self.scaling[adapter]

    def forward(self, x: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not self._is_packed() or "adapter_names" in keywords:
            return super().forward(x, *arguments, **keywords)
        if self.disable_adapters and self.merged:
            self.unmerge()
        if not self.disable_adapters and not self.merged:
            found = [self._factors(name) for name in self.active_adapters if name in self.lora_A]
            if found:
                keywords["adapters"] = {**keywords.get("adapters", {}), self.parameter_name: found}
        return self.base_layer(x, *arguments, **keywords)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merges adapters into a new packed stack. An error leaves it unchanged."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names or not self._is_packed():
            super().merge(safe_merge=safe_merge, adapter_names=names)
            return
        weight = self.get_param()
        before = self._before_merge or (weight,)
        values = before[0].detach().dequantize(torch.float32)
        for name in [*self.merged_adapters, *names]:
            a, b, scaling = self._factors(name)
            values.baddbmm_(b.float(), a.float(), alpha=scaling)
            if safe_merge and not values.isfinite().all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        packed, ratio = _packed_like(values, weight)
        self.get_base_layer().register_parameter(self.parameter_name, nn.Parameter(packed, requires_grad=False))
        self.merged_adapters += names
        self.__dict__["_before_merge"], self.__dict__["merge_sqnr"] = before, ratio
        _log.info("merged %s into %s: SQNR %.2f dB", ", ".join(names), packed._quantizer_text, ratio)

    def unmerge(self) -> None:
        """Restores the packed stack from before the first merge, bit for bit."""
        if not self._is_packed() or not self.merged:
            super().unmerge()
            return
        assert self._before_merge is not None
        kept = self._before_merge[0].detach().to(self.get_param().device)
        self.get_base_layer().register_parameter(self.parameter_name, nn.Parameter(kept, requires_grad=False))
        self.merged_adapters = []
        self.__dict__["_before_merge"] = self.__dict__["merge_sqnr"] = None


def _refuse_module(kind: str) -> NoReturn:
    raise NotImplementedError(
        f"opaq: LoRA adapters of an opaq.{kind} are not supported, only of opaq.QuantizedLinear and, by "
        "target_parameters, of packed experts of transformers and a packed opaq.GroupedLinear"
    )


def dispatch(target: Any, adapter_name: str, config: Any, **keywords: Any) -> Any:
    """The LoRA layer for a packed module."""
    if not isinstance(target, QuantizedLinear):
        _refuse_module(type(target).__name__)
    if config.fan_in_fan_out:  # as PEFT does for nn.Linear; merging would transpose the adapter
        warnings.warn(
            "opaq: fan_in_fan_out is set to False: packed weights are not transposed",
            stacklevel=2,
        )
        config.fan_in_fan_out = False
    return LoraQuantizedLinear(target, adapter_name, config, **keywords)


def dispatch_parameter(target: Any, adapter_name: str, config: Any, **keywords: Any) -> Any:
    """The LoRA layer for a packed weight in target_parameters; None for a plain one, which PEFT adapts. To a
    packed one PEFT would add the adapter in a plain copy."""
    name = keywords["parameter_name"]
    module = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    weight = getattr(module, name, None)
    kind = type(module).__name__
    if not isinstance(weight, QuantizedTensor):
        if isinstance(module, PackedModule):
            _refuse_module(kind)
        return None
    what = f"{weight._quantizer_text}, {tuple(weight.shape)}"
    if isinstance(module, PackedModule) and not isinstance(module, GroupedLinear):
        raise NotImplementedError(
            f"opaq: target_parameters names {name} of an opaq.{kind}, which is packed ({what}); packed linear "
            "layers have adapters by target_modules, packed experts of transformers and an opaq.GroupedLinear "
            "by target_parameters"
        )
    scales = getattr(module, "input_scales", None)
    if scales is not None and any(scale is not None for scale in scales.buffers()):
        raise NotImplementedError(
            f"opaq: target_parameters names {name} of a {kind}, which is packed ({what}) and whose inputs have "
            "a checkpoint's scales; adapters of such experts are not supported"
        )
    return ParamWrapper(target, adapter_name, config=config, **keywords)


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

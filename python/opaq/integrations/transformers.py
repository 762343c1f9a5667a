"""Hugging Face transformers: a registered quantizer. `from_pretrained` with the quantization_config
`opaq.Config("nvfp4")` quantizes while it loads; checkpoints that are quantized already (opaq/checkpoint.py)
stay packed, and `save_pretrained` writes them back: docs/transformers.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from opaq.integrations.transformers_version import check_version

check_version(transformers.__version__)

# ruff: noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from opaq import _stacked
from opaq._memory import return_freed
from opaq._names import Names
from opaq._operators import buffer_names
from opaq._warnings import DEFAULT_IGNORE, warn_nothing_done, warn_unmatched
from opaq.checkpoint import Header, Layout, Scheme, json_kind, read_layout
from opaq.integrations.transformers_experts import InputScales, why_not
from opaq.integrations.transformers_weights import (
    Assemble,
    Files,
    Import,
    Part,
    Place,
    Quantize,
    check_parts,
    export,
    parts_of,
    placer,
    scale_buffer,
    stacks,
)
from opaq.model import ORDERS, PRECISIONS, dequantize_, set_order, tile_loaded
from opaq.packed import QuantizedLinear, why_not_packed, zeros
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer, query

__all__ = ["Config", "OpaqHfQuantizer", "why_not"]

METHOD = "opaq"
_SAVED = "saved"  # stands for a precision that is not given
_SAVED_KEYS = ("quant_method", "quantizer", "activations", "ignore", "precision", "order")
_PRECISION_KEY = "opaq_precision"  # in the model's configuration, beside a quantization_config of others


def _checked_precision(precision: Any) -> str | None:
    if precision is not None and precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(f"opaq.Config: precision is {precision!r}, expected None or one of {known}")
    return precision  # type: ignore[no-any-return]


# ---- the configuration ----


@register_quantization_config(METHOD)
class Config(QuantizationConfigMixin):
    """The value of `quantization_config`.

    `Config("nvfp4")` quantizes an unquantized checkpoint while it loads: all linear layers and experts except
    those that `ignore` matches, and their inputs by the quantizer `activations` ("": not at all). `Config()`
    loads a checkpoint that is already quantized, by its own configuration. With a `precision` the weights of a
    model on the CPU are tiled after loading, as by `opaq.quantize_`; None leaves them in rows. It is saved with
    the model; the default is the saved one, else "exact". `order` is that of `opaq.quantize_`; it is saved by
    models in opaq's own format."""

    def __init__(
        self,
        quantizer: str | Quantizer = "",
        *,
        activations: str | Quantizer = "",
        ignore: Sequence[str] = DEFAULT_IGNORE,
        precision: str | None = _SAVED,
        order: str = "fixed",
        checkpoint: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = METHOD
        for key, text in (("quantizer", quantizer), ("activations", activations)):
            if not isinstance(text, (str, Quantizer)):
                raise ValueError(f"opaq.Config: {key} is {text!r}, expected the text of a quantizer")
        if not isinstance(ignore, (str, list, tuple, set)) or any(not isinstance(n, str) for n in ignore):
            raise ValueError(f"opaq.Config: ignore is {ignore!r}, expected names of modules")
        self.is_precision_given = precision is not _SAVED
        self.precision = _checked_precision(precision if self.is_precision_given else "exact")
        if order not in ORDERS:
            raise ValueError(f"opaq.Config: order is {order!r}, expected one of {', '.join(ORDERS)}")
        self.order = order
        self.quantizer, self.activations = (
            str(Quantizer(str(text))) if str(text) else "" for text in (quantizer, activations)
        )
        for key, text in (("quantizer", self.quantizer), ("activations", self.activations)):
            if reason := why_not_packed(text):
                raise ValueError(f"opaq.Config: {key}={text!r} {reason}")
        self.ignore = [ignore] if isinstance(ignore, str) else list(ignore)
        if checkpoint is not None and not isinstance(checkpoint, Mapping):
            kind = f"{checkpoint!r}, {json_kind(checkpoint)}"
            raise ValueError(f"opaq.Config: checkpoint is {kind}, expected a quantization_config, an object")
        self.checkpoint = None if checkpoint is None else deepcopy(dict(checkpoint))

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Called by transformers: a Config from the `quantization_config` of a config.json, opaq's own or
        not."""
        if not isinstance(config_dict, Mapping):
            kind = f"{config_dict!r}, {json_kind(config_dict)}"
            raise ValueError(f"opaq.Config: the quantization_config is {kind}, expected an object")
        is_own = config_dict.get("quant_method") == METHOD
        if is_own and (unknown := config_dict.keys() - _SAVED_KEYS):
            raise ValueError(
                f"opaq: the checkpoint's quantization_config has {', '.join(map(repr, sorted(unknown)))}, "
                f"expected only {', '.join(_SAVED_KEYS)}"
            )
        made = cls(**config_dict) if is_own else cls(checkpoint=config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: the checkpoint's own configuration, or this one."""
        if self.checkpoint is not None:
            return deepcopy(self.checkpoint)
        own = {"quantizer": self.quantizer, "activations": self.activations, "ignore": list(self.ignore)}
        own |= {} if self.order == "fixed" else {"order": self.order}
        return {"quant_method": METHOD, **own, "precision": self.precision}


if "modelopt" not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # no other library has registered it
    register_quantization_config("modelopt")(Config)

_merge = AutoHfQuantizer.merge_quantization_configs


def _merge_configs(stored: Any, given: Any) -> Any:
    """Accepts an opaq.Config for checkpoints of other methods; transformers refuses a configuration whose class
    is not that of the checkpoint's method."""
    if not isinstance(given, Config):
        return _merge(stored, given)
    if given.quantizer:
        raise ValueError(
            f"opaq: the checkpoint is quantized already, so opaq.Config({given.quantizer!r}) cannot quantize "
            "it; opaq.Config() loads it as it is"
        )
    made = Config.from_dict(stored if isinstance(stored, Mapping) else stored.to_dict())
    if given.is_precision_given:
        made.precision, made.is_precision_given = given.precision, True
    made.order = made.order if given.order == "fixed" else given.order
    return made


AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge_configs)


# ---- packed parameters ----


class _Packing(NamedTuple):
    """How a parameter is packed: its quantizer, its input's, and whether the checkpoint has an input scale."""

    quantizer: str
    input_quantizer: str = ""
    has_scale: bool = False


def _packable(model: nn.Module) -> Iterator[str]:
    """The parameters that can be packed."""
    for name, module in model.named_modules():
        leaves = ("weight",) if isinstance(module, nn.Linear) else _stacked.weight_names(module)
        yield from (f"{name}.{leaf}" for leaf in leaves)


def _pack_linear(module: nn.Linear, packing: _Packing) -> QuantizedLinear:
    device = module.weight.device
    made = QuantizedLinear(
        module.in_features,
        module.out_features,
        module.bias is not None,
        quantizer=packing.quantizer,
        input_quantizer=packing.input_quantizer,
        dtype=module.weight.dtype,
        device=device,
    )
    made.input_scale = torch.empty(1, device=device) if packing.has_scale else None
    return made


def _pack_experts(name: str, module: Any, packings: Mapping[str, _Packing]) -> None:
    if reason := _stacked.why_not(module):
        raise NotImplementedError(f"opaq: {name} cannot run packed: {reason}")
    if len(packings) != 2:
        raise ValueError(f"opaq: of {name} only {', '.join(packings)} is quantized")
    made = {}
    for key, packing in packings.items():
        plain = getattr(module, key)
        made[key] = zeros(_stacked.rowwise_shape(module, plain), packing.quantizer, plain.dtype, plain.device)
    _stacked.put(module, made, "", "exact", "fixed")
    module.input_scales = InputScales()
    for key, packing in packings.items():
        role = "hidden" if key == "down_proj" else "input"
        setattr(module, f"{role}_quantizer", packing.input_quantizer)
        if packing.has_scale:
            scale = torch.empty(made[key].shape[0], device=made[key].device)
            setattr(module.input_scales, f"{role}_scale", scale)


def _pack(model: Any, packings: Mapping[str, _Packing]) -> None:
    experts: dict[str, dict[str, _Packing]] = {}
    for parameter, packing in packings.items():
        name, _, leaf = parameter.rpartition(".")
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and leaf == "weight":
            model.set_submodule(name, _pack_linear(module, packing))
        elif leaf in _stacked.weight_names(module):
            experts.setdefault(name, {})[leaf] = packing
        else:
            kind = f"{name} ({type(module).__name__}) is no linear layer and no experts"
            raise NotImplementedError(f"opaq: {parameter} is quantized, but {kind}")
    for name, both in experts.items():
        _pack_experts(name, model.get_submodule(name), both)


def _makes(transform: Any, parameters: Iterable[str]) -> bool:
    """Whether a transform is a converter whose result is one of these parameters."""
    if not isinstance(transform, WeightConverter):
        return False
    back = transform.reverse_transform()
    return any(back.rename_source_key(name)[1] is not None for name in parameters)


def _converter_like(transform: Any, sources: list[str], targets: list[str], op: ConversionOps) -> Any:
    """A converter for the same part of the model. Versions before 5.21 have no method for this."""
    made = WeightConverter(sources, targets, [op])
    for name in ("scope_prefix", "base_model_prefix"):
        if hasattr(transform, name):
            setattr(made, name, getattr(transform, name))
    return made


# ---- the quantizer ----


@register_quantizer(METHOD)
class OpaqHfQuantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads and saves a model."""

    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.layout: Layout | None = None  # of a checkpoint that others quantized
        self.parts: dict[str, list[Part]] = {}  # what it has for each packed parameter
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the parameters that stay plain
        self.transforms: list[Any] = []
        if quantization_config.checkpoint is not None:
            self.layout = read_layout(quantization_config.checkpoint)
        elif not quantization_config.quantizer:
            raise ValueError(
                "opaq: the checkpoint has no quantization_config, so opaq.Config() does not say how to quantize"
                ' it; opaq.Config("nvfp4") does'
            )

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("opaq: packed weights cannot be offloaded to disk")

    # ---- before loading ----

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if not self.pre_quantized:
            self._pack_to_quantize(model)
        else:
            with Files(checkpoint_files or ()) as files:
                if self.layout is None:
                    self._pack_own(model, files.headers)
                else:
                    self._pack_parts(model, self.layout, files)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def _pack_to_quantize(self, model: Any) -> None:
        config, tied = self.quantization_config, model.all_tied_weights_keys
        kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
        ignored, shared = Names([*config.ignore, *kept]), {*tied.keys(), *tied.values()}
        packing = _Packing(config.quantizer, config.activations)
        packable = list(_packable(model))
        found = [name for name in packable if name not in ignored and name not in shared]
        modules = [name for name, _ in model.named_modules()]
        warn_unmatched("opaq.Config", config.ignore, modules)
        if not found:
            left = {name: "ignored" if name in ignored else "tied to other parameters" for name in packable}
            warn_nothing_done("opaq.Config", "quantized", len(modules), left)
        _pack(model, dict.fromkeys(found, packing))

    def _pack_own(self, model: Any, headers: Mapping[str, Header]) -> None:
        config, (target, _) = self.quantization_config, placer(model, get_model_conversion_mapping(model))
        names = buffer_names(config.quantizer)
        saved = {name.removesuffix(f".{b}") for name in headers for b in names if name.endswith(f".{b}")}
        found = {weight: parameter for weight in saved if (parameter := target(weight)[0]) is not None}
        _pack(model, dict.fromkeys(found.values(), _Packing(config.quantizer, config.activations)))
        for weight, parameter in found.items():
            for buffer, like in zip(names, model.get_parameter(parameter).buffers(), strict=True):
                expected = Header("U8" if like.dtype == torch.uint8 else "F32", tuple(like.shape))
                if (header := headers.get(f"{weight}.{buffer}")) != expected:
                    raise ValueError(
                        f"opaq: {weight}.{buffer} is {header} in the checkpoint, expected {expected}"
                    )

    def _pack_parts(self, model: Any, layout: Layout, files: Files) -> None:
        packed = layout.packed(files.headers)
        target, place = placer(model, get_model_conversion_mapping(model))
        placed: dict[str, dict[str, tuple[Place, Scheme]]] = {}
        for weight, scheme in packed.items():
            if (found := place(weight)) is not None:
                placed.setdefault(found.parameter, {})[weight] = found, scheme
        self._check_complete(model, {*placed, *(target(name)[0] for name in files.headers)})
        self.parts = {parameter: parts_of(weights, files.headers) for parameter, weights in placed.items()}
        packings = {}
        for parameter, parts in self.parts.items():
            scheme, has_scale = parts[0].scheme, "input" in parts[0].headers
            text = scheme.weight if len(parts) == 1 else scheme.stacked
            packings[parameter] = _Packing(text, scheme.input_given if has_scale else scheme.input, has_scale)
        _pack(model, packings)
        for parameter, parts in self.parts.items():
            check_parts(parameter, model.get_parameter(parameter), parts, files)

    def _check_complete(self, model: Any, found: set[str]) -> None:
        """Raises for parameters that transformers would initialize at random; only a new head may be
        missing."""
        base = getattr(model, model.base_model_prefix, model)
        prefix = f"{model.base_model_prefix}." if base is not model else ""
        for name in _packable(base):
            if prefix + name not in found and prefix + name not in model.all_tied_weights_keys:
                raise ValueError(f"opaq: the checkpoint has nothing for {prefix + name}, plain or quantized")

    # ---- while loading ----

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        module, leaf = param_name.rpartition(".")[::2]
        return isinstance(getattr(model.get_submodule(module), leaf, None), QuantizedTensor)

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    def plain_dtype(self, model: Any, name: str) -> Any:
        """The dtype of a plain parameter: the model's exceptions, or its own."""
        for pattern, dtype in model._get_dtype_plan(model.dtype).items():
            if re.search(pattern.replace("*", ".*"), name):
                return dtype
        return model.get_parameter_or_buffer(name).dtype

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' converters, and ours instead of those that stack weights. Versions before 5.21 do not
        pass the model."""
        self.transforms = list(weight_conversions)
        if not self.pre_quantized:
            return weight_conversions
        if self.layout is None:
            sources = Assemble.patterns(buffer_names(self.quantization_config.quantizer))
            return [*weight_conversions, WeightConverter(sources, "", [Assemble(self)])]
        schemes = [scheme for _, scheme in self.layout.schemes]
        updated: list[Any] = []
        for transform in weight_conversions:
            if stacks(transform):
                op = Import(self, transform._original_source_patterns, schemes, transform)
                targets = list(transform._original_target_patterns)
                updated.append(_converter_like(transform, list(op.roles), targets, op))
                if {f"{p.removesuffix('$')}$" for p in transform.source_patterns} <= set(op.roles):
                    continue
            updated.append(transform)
        for leaf in self.layout.weights:
            op = Import(self, [rf"\.{leaf}"], schemes, None)
            updated.append(WeightConverter(list(op.roles), f".{leaf}", [op]))
        return updated

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, parameter in model.named_parameters():
            if tuple(parameter.shape) != self.shapes[name]:
                found = f"{tuple(parameter.shape)} in the checkpoint, expected {self.shapes[name]}"
                raise ValueError(f"opaq: {name} is {found}")
        model.requires_grad_(False)  # packed weights have no gradients; others are trainable on request
        # save_pretrained reverses these; not those of parameters whose buffers are saved unchanged
        packed = {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
        model._weight_conversions = [t for t in self._used() if not _makes(t, packed - self.parts.keys())]
        config = self.quantization_config
        if config.checkpoint is not None:
            if not config.is_precision_given and hasattr(model.config, _PRECISION_KEY):
                config.precision = _checked_precision(getattr(model.config, _PRECISION_KEY))
            if config.precision != "exact" or hasattr(model.config, _PRECISION_KEY):
                setattr(model.config, _PRECISION_KEY, config.precision)
        if config.precision is not None:
            tile_loaded(model, config.precision)
        set_order(model, config.order)
        return_freed()
        return model

    def _used(self) -> list[Any]:
        """transformers' own transforms that were used, directly or inside an Import."""
        return [t for t in self.transforms if t.was_used() or stacks(t)]

    # ---- after loading ----

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        state = model.state_dict()
        saved: dict[str, Any] = {}
        scales = {scale_buffer(name) for name in self.parts}
        for name, tensor in state.items():
            if not isinstance(tensor, QuantizedTensor):
                saved |= {} if name in scales else {name: tensor}
                continue
            for part in self.parts.get(name, ()):
                saved |= export(tensor, part, state.get(scale_buffer(name)))
            if name not in self.parts:
                tensor = tensor.tiled(bool(query(self.quantization_config.quantizer, "is_tiled")))
                saved |= {
                    f"{name}.{b}": t for b, t in zip(tensor.buffer_names(), tensor.buffers(), strict=True)
                }
        return saved, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        dequantize_(model)
        model._weight_conversions = self._used()
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # layers before a packed weight, and adapters beside it

    @property
    def is_compileable(self) -> bool:
        return True

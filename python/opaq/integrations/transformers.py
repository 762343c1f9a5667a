"""Hugging Face transformers: a registered quantizer. `from_pretrained(..., quantization_config=opaq.Config("nvfp4"))`
quantizes while it loads; checkpoints that are quantized already (opaq/checkpoint.py) load and stay packed, and
`save_pretrained` writes them back. docs/transformers.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import prod
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from opaq._operators import buffer_names
from opaq import _stacked, _stored
from opaq.checkpoint import Header, Layout, Scheme, input_scale_name, matches, read_layout
from opaq.integrations.transformers_experts import why_not
from opaq.packed import QuantizedLinear, zeros
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
from opaq.quantizer import Quantizer

__all__ = ["Config", "OpaqHfQuantizer", "why_not"]

METHOD = "opaq"


# ---- the configuration ----


@register_quantization_config(METHOD)
@register_quantization_config("modelopt")
class Config(QuantizationConfigMixin):
    """What `quantization_config` takes.

    `Config("nvfp4")` quantizes a checkpoint in high precision while it loads: all linear layers and experts but those
    that `ignore` names, their inputs by the quantizer `activations` or not at all. `Config()` is for a checkpoint
    that is quantized already: its own configuration says how."""

    def __init__(
        self,
        quantizer: str | Quantizer = "",
        *,
        activations: str | Quantizer = "",
        ignore: Sequence[str] = ("lm_head",),
        checkpoint: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = METHOD
        self.quantizer, self.activations = (
            str(Quantizer(str(text))) if str(text) else "" for text in (quantizer, activations)
        )
        self.ignore = list(ignore)
        self.checkpoint = None if checkpoint is None else deepcopy(dict(checkpoint))

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        is_own = config_dict.get("quant_method") == METHOD
        made = cls(**config_dict) if is_own else cls(checkpoint=config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """What config.json gets: the checkpoint's own configuration, or this one."""
        if self.checkpoint is not None:
            return deepcopy(self.checkpoint)
        own = {"quantizer": self.quantizer, "activations": self.activations, "ignore": list(self.ignore)}
        return {"quant_method": METHOD, **own}


_merge = AutoHfQuantizer.merge_quantization_configs


def _merge_configs(stored: Any, given: Any) -> Any:
    """transformers refuses a configuration of another class than the checkpoint's method has; an opaq.Config asks
    for just that."""
    if not isinstance(given, Config):
        return _merge(stored, given)
    if given.quantizer:
        raise ValueError(
            f"opaq: the checkpoint is quantized already, so opaq.Config({given.quantizer!r}) cannot quantize it; pass "
            "opaq.Config() to load it as it is"
        )
    return Config.from_dict(stored if isinstance(stored, Mapping) else stored.to_dict())


AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge_configs)


# ---- a checkpoint's tensors and the parameters they go to ----


class _Part(NamedTuple):
    """A quantized weight of the checkpoint, which is a stretch of a parameter's rows."""

    name: str  # the plain weight's, as it is saved
    scheme: Scheme
    headers: Mapping[str, Header]  # by role: data, scale, global, input
    first_row: int = 0
    expert: int = 0

    @property
    def rows(self) -> int:
        shape = self.headers["data"].shape
        return prod(shape[:2]) if len(shape) > 2 else shape[0]

    def names(self) -> dict[str, str]:
        found = {role: self.name + suffix for role, (suffix, _) in self.scheme.tensors().items()}
        return found | {"input": input_scale_name(self.name, self.scheme)}


def _read_headers(files: Sequence[str]) -> dict[str, Header]:
    found: dict[str, Header] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"opaq: {file} is not a safetensors file, which a quantized checkpoint has to be")
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no mapping
                    part = opened.get_slice(name)
                    found[name] = Header(part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"opaq: {file} cannot be read: {error}") from error
    return found


def _stacks(converter: WeightConverter) -> bool:
    """Whether a converter of transformers only puts rows after one another: experts, and their projections."""
    kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    return kinds in (
        [(MergeModulelist, 0)],
        [(MergeModulelist, 0), (Concatenate, 1)],
        [(Concatenate, 0)],
    )


class _Place(NamedTuple):
    """Where transformers puts a weight."""

    target: str
    expert: int
    source: int
    name: str  # of the plain weight, by which it is saved


def _place(plain: str, model: Any, transforms: Sequence[Any], meta: Mapping[str, Any]) -> _Place | None:
    """None for what this model has no use for."""
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    target, pattern = rename_source_key(plain, renamings, converters, model.base_model_prefix, meta)
    if target not in meta:
        return None
    if pattern is None:
        return _Place(target, 0, 0, target)
    converter = next(c for c in converters if pattern in c.source_patterns)
    if not _stacks(converter):
        raise NotImplementedError(
            f"opaq: {plain} is quantized, and transformers would have to rearrange it: {converter.operations}"
        )
    found = re.search(pattern.replace("*", r"(\d+)"), plain)
    expert = int(found.group(1)) if found and "*" in pattern else 0
    name = target.replace(converter.target_patterns[0], pattern.replace("*", str(expert)))
    return _Place(target, expert, converter.source_patterns.index(pattern), name)


def _parts_of(places: Mapping[str, tuple[_Place, Scheme]], headers: Mapping[str, Header]) -> list[_Part]:
    """A parameter's parts in the order of their rows."""
    ordered = sorted(places.items(), key=lambda item: (item[1][0].expert, item[1][0].source))
    experts = {place.expert for place, _ in places.values()}
    sources = {place.source for place, _ in places.values()}
    first = next(iter(places.values()))
    if experts != set(range(len(experts))) or len(places) != len(experts) * len(sources):
        raise ValueError(
            f"opaq: {first[0].target} is stored as {len(places)} quantized weights of the experts "
            f"{sorted(experts)}, expected {len(sources)} of each expert; the first is {ordered[0][0]}"
        )
    parts: list[_Part] = []
    row = 0
    for plain, (place, scheme) in ordered:
        if scheme != first[1]:
            raise ValueError(f"opaq: {plain} is {scheme.weight}, other parts of {place.target} {first[1].weight}")
        names = {role: plain + suffix for role, (suffix, _) in scheme.tensors().items()}
        names["input"] = input_scale_name(plain, scheme)
        found = {role: headers[name] for role, name in names.items() if name in headers}
        parts.append(_Part(place.name, scheme, found, row, place.expert))
        row += parts[-1].rows
    if len({"input" in part.headers for part in parts}) > 1:
        raise ValueError(f"opaq: some weights of {first[0].target} have a scale of their input, others have none")
    return parts


class _Packing(NamedTuple):
    """How a parameter is packed: its quantizer, its input's, and whether the checkpoint has a scale of that."""

    quantizer: str
    input_quantizer: str = ""
    has_scale: bool = False


def _pack_linear(module: nn.Linear, packing: _Packing) -> QuantizedLinear:
    made = QuantizedLinear(
        module.in_features,
        module.out_features,
        module.bias is not None,
        quantizer=packing.quantizer,
        input_quantizer=packing.input_quantizer,
        dtype=module.weight.dtype,
        device=module.weight.device,
    )
    made.input_scale = torch.empty(1, device=module.weight.device) if packing.has_scale else None
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
    module.opaq_is_turned = module.is_transposed  # as checkpoints in high precision have the weights
    _stacked.put(module, made, "")
    for key, packing in packings.items():
        role = "hidden" if key == "down_proj" else "input"
        setattr(module, f"{role}_quantizer", packing.input_quantizer)
        if packing.has_scale:
            scale = torch.empty(made[key].shape[0], device=made[key].device)
            module.register_buffer(f"{role}_scale", scale)


# ---- what transformers calls while it loads ----


class _Load(ConversionOps):
    """Base of the operations below. One serves many parameters, so a copy of a converter keeps it."""

    def __init__(self, hf_quantizer: OpaqHfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> _Load:
        return self


class _Import(_Load):
    """A checkpoint's tensors become a packed parameter; what is stored plain goes through `converter`'s own
    operations."""

    def __init__(self, hf_quantizer: OpaqHfQuantizer, converter: WeightConverter | None = None) -> None:
        super().__init__(hf_quantizer)
        self.converter = converter
        self.roles: dict[str, tuple[int, str]] = {}  # of a source pattern: which source, which tensor

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        parts = self.hf_quantizer.parts.get(full_layer_name)
        if parts is None:
            return self._plain(input_dict, full_layer_name, model, more)
        sources = len({source for source, _ in self.roles.values()}) if self.converter else 1
        found: list[dict[str, torch.Tensor]] = [{} for _ in parts]
        for pattern, tensors in input_dict.items():
            source, role = self.roles[pattern]
            for expert, tensor in enumerate(tensors):
                found[expert * sources + source][role] = tensor
        meta = model.get_parameter(full_layer_name)
        made = zeros(tuple(meta.shape), meta._quantizer_text, meta.dtype, found[0]["data"].device)
        for part, tensors in zip(parts, found, strict=True):
            _import(made, part, tensors)
        loaded = {full_layer_name: nn.Parameter(made, requires_grad=False)}
        if "input" in parts[0].headers:
            scales = torch.stack([tensors["input"].float().reshape(()) for tensors in found])
            loaded[_scale_buffer(full_layer_name)] = _one_for_each_expert(scales, parts)
        return loaded

    def _plain(self, input_dict: Any, name: str, model: Any, more: Any) -> Any:
        dtype = self.hf_quantizer.plain_dtype(model, name)
        found = {p: [t.to(dtype) if t.is_floating_point() else t for t in ts] for p, ts in input_dict.items()}
        if self.converter is None:
            return {name: next(iter(found.values()))}
        patterns = self.converter.source_patterns, self.converter.target_patterns
        for op in self.converter.operations:
            found = op.convert(found, *patterns, full_layer_name=name, model=model, **more)
        return found


class _Assemble(_Load):
    """A parameter that opaq saved: its buffers, as they are."""

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        meta = model.get_parameter(full_layer_name)
        buffers = [input_dict[_pattern(name)][0].clone() for name in meta.buffer_names()]
        made = QuantizedTensor(buffers, meta._quantizer_text, meta.shape, meta.dtype)
        return {full_layer_name: nn.Parameter(made, requires_grad=False)}


class _Quantize(_Load):
    """A parameter in high precision becomes a packed one."""

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        meta = model.get_parameter(full_layer_name)
        if getattr(model.get_submodule(full_layer_name.rpartition(".")[0]), "opaq_is_turned", False):
            value = value.transpose(1, 2)
        if value.shape != meta.shape:
            raise ValueError(f"opaq: {full_layer_name} is {tuple(value.shape)}, expected {tuple(meta.shape)}")
        made = quantize_tensor(value.contiguous(), meta._quantizer_text)
        return {full_layer_name: nn.Parameter(made, requires_grad=False)}


def _pattern(buffer: str) -> str:
    return rf"\.{buffer}"


def _scale_buffer(parameter: str) -> str:
    """Where a parameter's module keeps the scale of its input."""
    module, _, name = parameter.rpartition(".")
    return f"{module}.{'hidden_scale' if name == 'down_proj' else 'input_scale'}"


def _one_for_each_expert(scales: torch.Tensor, parts: Sequence[_Part]) -> torch.Tensor:
    """Projections that share an input share its scale."""
    by_expert = scales.reshape(parts[-1].expert + 1, -1)
    if not torch.equal(by_expert, by_expert[:, :1].expand_as(by_expert)):
        raise ValueError(
            f"opaq: {parts[0].name} and the weights stacked with it have different scales of the same input: "
            f"{by_expert.tolist()}"
        )
    return by_expert[:, 0].contiguous()


def _matrix(tensor: torch.Tensor, stacked: bool) -> torch.Tensor:
    """As two dimensions: rows of stacked experts after one another, blocks of a row beside one another."""
    if tensor.dim() <= 2:
        return tensor
    return tensor.flatten(0, 1).flatten(1) if stacked else tensor.flatten(1)


def _import(made: QuantizedTensor, part: _Part, tensors: Mapping[str, torch.Tensor]) -> None:
    stacked = tensors["data"].dim() > 2
    data, scale = (_matrix(tensors[role], stacked) for role in ("data", "scale"))
    _stored.import_rows(made, part.first_row, data, scale, tensors.get("global"))


def _export(tensor: QuantizedTensor, part: _Part, input_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A part's tensors in the shapes and dtypes they had in the checkpoint, by their names there."""
    # what the checkpoint has once, stacked weights have for every row
    one = prod(part.headers["global" if "global" in part.headers else "scale"].shape) == 1
    found = _stored.export_rows(tensor, part.first_row, part.rows, one_for_all=one)
    exported = dict(zip(("data", "scale", "global"), found, strict=True))
    exported["input"] = None if input_scale is None else input_scale[part.expert].clone()
    saved = {}
    for role, header in part.headers.items():
        made, dtype = exported[role], _DTYPES[header.dtype]
        assert made is not None
        made = made.view(dtype) if made.dtype == torch.uint8 else made.to(dtype)
        saved[part.names()[role]] = made.reshape(header.shape)
    return saved


_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


# ---- the quantizer ----


@register_quantizer(METHOD)
class OpaqHfQuantizer(HfQuantizer):
    """What transformers asks while it loads and saves a model."""

    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.parts: dict[str, list[_Part]] = {}  # of each packed parameter
        self.layout: Layout | None = None
        if quantization_config.checkpoint is not None:
            self.layout = read_layout(quantization_config.checkpoint)
        elif not quantization_config.quantizer:
            raise ValueError(
                "opaq: the checkpoint has no quantization_config, so opaq.Config() does not say how to quantize it; "
                'pass opaq.Config("nvfp4") or another quantizer'
            )

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("opaq: packed weights cannot be offloaded to disk")

    # ---- before the weights come ----

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if not self.pre_quantized:
            self._prepare_to_quantize(model)
        else:
            headers = _read_headers(checkpoint_files or ())
            if self.layout is None:
                self._prepare_own(model, headers)
            else:
                self._prepare_parts(model, self.layout, headers)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    def _pack(self, model: Any, packings: Mapping[str, _Packing]) -> None:
        """Gives parameters packed weights, in their modules' own way."""
        experts: dict[str, dict[str, _Packing]] = {}
        for parameter, packing in packings.items():
            name, _, leaf = parameter.rpartition(".")
            module = model.get_submodule(name)
            if leaf in _stacked.weight_names(module):
                experts.setdefault(name, {})[leaf] = packing
            elif isinstance(module, nn.Linear) and leaf == "weight":
                model.set_submodule(name, _pack_linear(module, packing))
            else:
                raise NotImplementedError(
                    f"opaq: {parameter} is quantized, but it belongs to a {type(module).__name__}, which is no linear "
                    "layer and no stack of experts"
                )
        for name, both in experts.items():
            _pack_experts(name, model.get_submodule(name), both)

    def _prepare_to_quantize(self, model: Any) -> None:
        config = self.quantization_config
        kept = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        packings = {}
        for name, module in model.named_modules():
            if any(matches(pattern, name) for pattern in (*config.ignore, *kept)):
                continue
            leaves = ("weight",) if isinstance(module, nn.Linear) else _stacked.weight_names(module)
            packings |= {f"{name}.{leaf}": _Packing(config.quantizer, config.activations) for leaf in leaves}
        self._pack(model, packings)

    def _prepare_own(self, model: Any, headers: Mapping[str, Header]) -> None:
        config = self.quantization_config
        names = buffer_names(config.quantizer)
        found = {name.removesuffix(f".{names[0]}") for name in headers if name.endswith(f".{names[0]}")}
        self._pack(model, {name: _Packing(config.quantizer, config.activations) for name in found})
        for name in found:
            for buffer, meta in zip(names, model.get_parameter(name).buffers(), strict=True):
                header = headers.get(f"{name}.{buffer}")
                expected = Header({torch.uint8: "U8"}.get(meta.dtype, "F32"), tuple(meta.shape))
                if header != expected:
                    raise ValueError(f"opaq: {name}.{buffer} is {header} in the checkpoint, expected {expected}")

    def _prepare_parts(self, model: Any, layout: Layout, headers: Mapping[str, Header]) -> None:
        transforms, meta = get_model_conversion_mapping(model), model.state_dict()
        places: dict[str, dict[str, tuple[_Place, Scheme]]] = {}
        for plain, scheme in layout.packed(headers).items():
            if (place := _place(plain, model, transforms, meta)) is not None:
                places.setdefault(place.target, {})[plain] = place, scheme
        self.parts = {target: _parts_of(found, headers) for target, found in places.items()}
        packings = {}
        for target, parts in self.parts.items():
            scheme, has_scale = parts[0].scheme, "input" in parts[0].headers
            text = scheme.weight if len(parts) == 1 else scheme.stacked
            packings[target] = _Packing(text, scheme.input_given if has_scale else scheme.input, has_scale)
        self._pack(model, packings)
        for target, parts in self.parts.items():
            _check_parts(target, model.get_parameter(target), parts)

    # ---- while they come ----

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        module = model.get_submodule(param_name.rpartition(".")[0])
        return isinstance(getattr(module, param_name.rpartition(".")[2], None), QuantizedTensor)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def plain_dtype(self, model: Any, name: str) -> torch.dtype:
        """The dtype of a plain parameter, by the model's list of exceptions or the parameter itself."""
        for pattern, dtype in model._get_dtype_plan(model.dtype).items():
            if re.search(pattern.replace("*", ".*"), name):
                return dtype
        return model.get_parameter_or_buffer(name).dtype

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        if not self.pre_quantized:
            return weight_conversions
        if self.layout is None:
            sources = [_pattern(name) for name in buffer_names(self.quantization_config.quantizer)]
            return [*weight_conversions, WeightConverter(sources, "", [_Assemble(self)])]
        tensors: dict[str, str] = {}  # what can stand where a plain weight would: the role of each ending
        for _, scheme in self.layout.schemes:
            tensors |= {suffix: role for role, (suffix, _) in scheme.tensors().items()}
        inputs = {scheme.input_scale for _, scheme in self.layout.schemes if scheme.input_scale}
        updated: list[Any] = []
        for transform in weight_conversions:
            if isinstance(transform, WeightConverter) and _stacks(transform):
                sources = transform._original_source_patterns
                if all(source.endswith(".weight") for source in sources):
                    updated.append(self._import_instead(transform, sources, tensors, inputs))
                    if "" in tensors:
                        continue
            updated.append(transform)
        for leaf in self.layout.weights:
            op = _Import(self)
            op.roles = {f"{leaf}{suffix}": (0, role) for suffix, role in tensors.items()}
            op.roles |= {name: (0, "input") for name in inputs}
            updated.append(WeightConverter(list(op.roles), leaf, [op]))
        return updated

    def _import_instead(
        self, converter: Any, sources: Sequence[str], tensors: Mapping[str, str], inputs: set[str]
    ) -> Any:
        """A converter that collects the quantized tensors where one of transformers collects plain weights."""
        op = _Import(self, converter)
        for i, source in enumerate(sources):
            op.roles |= {source + suffix: (i, role) for suffix, role in tensors.items()}
            op.roles |= {source.removesuffix("weight") + name: (i, "input") for name in inputs}
        return converter.copy(list(op.roles), list(converter._original_target_patterns), operations=[op])

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, parameter in model.named_parameters():
            if tuple(parameter.shape) != self._shapes[name]:
                raise ValueError(
                    f"opaq: {name} is {tuple(parameter.shape)} in the checkpoint, expected {self._shapes[name]}"
                )
        packed = [name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
        kept = []
        for transform in getattr(model, "_weight_conversions", None) or ():
            if isinstance(transform, WeightConverter):
                op = transform.operations[0]
                transform = op.converter if isinstance(op, _Import) else transform
                if transform is None or isinstance(op, _Assemble):
                    continue
                back = transform.reverse_transform()
                if any(back.rename_source_key(name)[1] is not None for name in packed):
                    continue
            kept.append(transform)
        model._weight_conversions = kept  # what save_pretrained undoes; the packed ones are undone below
        return model

    # ---- saving, and the rest ----

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        state, saved = model.state_dict(), {}
        scales = {_scale_buffer(name) for name in self.parts}
        for name, tensor in state.items():
            if name in scales:
                continue
            if not isinstance(tensor, QuantizedTensor):
                saved[name] = tensor
            elif name not in self.parts:
                saved |= {f"{name}.{b}": t for b, t in zip(tensor.buffer_names(), tensor.buffers(), strict=True)}
            else:
                for part in self.parts[name]:
                    saved |= _export(tensor, part, state.get(_scale_buffer(name)))
        return saved, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # what stands before a packed weight, and adapters beside it

    @property
    def is_compileable(self) -> bool:
        return True


def _fits(header: Header, expected: tuple[int, ...], may_be_one: bool) -> bool:
    """Sizes of 1 may stand anywhere; rows of stacked weights, and blocks of a row, may have dimensions of their own."""
    sizes, wanted = ([size for size in shape if size != 1] for shape in (header.shape, expected))
    if len(header.shape) > 2:
        return prod(sizes) == prod(wanted)
    return sizes == wanted or (may_be_one and not sizes)


def _check_parts(target: str, parameter: Any, parts: Sequence[_Part]) -> None:
    """The shapes of a parameter's tensors, before any of them is read."""
    rows, expected = sum(part.rows for part in parts), prod(parameter.shape[:-1])
    if rows != expected:
        raise ValueError(
            f"opaq: the {len(parts)} quantized weights of {target} have {rows} rows, expected {expected}: the first "
            f"is {parts[0].name}, {parts[0].headers['data']}"
        )
    one = {"global"} | ({"scale"} if parts[0].scheme.weight.split("+")[0] == "fp8" else set())  # for all rows
    for part in parts:
        shapes = dict(zip(("data", "scale", "global"), _stored.stored_shapes(parameter, part.rows), strict=True))
        shapes["input"] = ()
        for role, header in part.headers.items():
            if not _fits(header, shapes[role] or (), role in one):
                raise ValueError(
                    f"opaq: {part.names()[role]} has the shape {list(header.shape)}, expected {list(shapes[role] or ())} "
                    f"for {part.rows} rows of {parameter!r}"
                )

"""A checkpoint's quantized weights in transformers: the parameters they belong to, their checks, and the
operations that load and save them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from opaq import _stacked, _stored
from opaq.checkpoint import Header, Scheme
from opaq.packed import zeros
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor


class Files(ExitStack):
    """The open files of a checkpoint. Tensors are read on request."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__()
        self.headers: dict[str, Header] = {}
        self._places: dict[str, Any] = {}
        for file in files:
            if not str(file).endswith(".safetensors"):
                raise ValueError(f"opaq: {file} is not a safetensors file, as a quantized checkpoint has to be")
            try:
                opened = self.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    part = opened.get_slice(name)
                    self.headers[name] = Header(part.get_dtype(), tuple(part.get_shape()))
                    self._places[name] = opened
            except (SafetensorError, OSError) as error:
                raise ValueError(f"opaq: {file} cannot be read: {error}") from error

    def number(self, name: str) -> float:
        """The one number of a tensor, a scale."""
        header = self.headers[name]
        if prod(header.shape) != 1:
            raise ValueError(f"opaq: {name} is {header}, expected one number")
        found = float(self._places[name].get_tensor(name).float())
        _stored.check_factor(name, found)
        return found


# ---- which weights make a parameter ----


class Place(NamedTuple):
    """Where transformers puts a weight of the checkpoint."""

    parameter: str
    expert: int
    source: int  # index among concatenated projections
    name: str  # see Part


class Part(NamedTuple):
    """A quantized weight of the checkpoint: consecutive rows of a parameter."""

    weight: str  # its name in the checkpoint
    name: str  # its name as it is saved, before transformers' renamings are undone
    scheme: Scheme
    headers: Mapping[str, Header]  # by role
    first_row: int
    rows: int
    expert: int


def stacks(transform: Any) -> bool:
    """Whether a transform only concatenates rows: experts and projections."""
    kinds = [(type(op), getattr(op, "dim", None)) for op in getattr(transform, "operations", ())]
    merged = [(MergeModulelist, 0)]
    return kinds in (merged, [*merged, (Concatenate, 1)], [(Concatenate, 0)])


def placer(model: Any, transforms: Sequence[Any]) -> tuple[Any, Callable[[str], Place | None]]:
    """Two functions: which parameter transformers puts a tensor of the checkpoint into, and by which pattern of
    its converters; and where exactly a quantized weight goes. None for tensors that the model does not use."""
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix

    def target(name: str) -> tuple[str | None, str | None]:
        parameter, pattern = rename_source_key(name, renamings, converters, prefix, state)
        return (parameter, pattern) if parameter in state else (None, None)

    def place(weight: str) -> Place | None:
        parameter, pattern = target(weight)
        if parameter is None:
            return None
        if pattern is None:
            return Place(parameter, 0, 0, parameter)
        converter = by_pattern[pattern]
        if not stacks(converter):
            raise NotImplementedError(
                f"opaq: {weight} is quantized, and to make {parameter} of it would need {converter.operations}"
            )
        found = re.search(pattern.replace("*", r"(\d+)"), weight)
        expert = int(found.group(1)) if found and found.groups() else 0
        source = pattern.removesuffix("$").replace("*", str(expert))
        name = parameter.replace(converter.target_patterns[0], source)
        return Place(parameter, expert, converter.source_patterns.index(pattern), name)

    return target, place


def parts_of(placed: Mapping[str, tuple[Place, Scheme]], headers: Mapping[str, Header]) -> list[Part]:
    """A parameter's parts in the order of their rows, from weights by their names in the checkpoint."""
    ordered = sorted(placed.items(), key=lambda item: (item[1][0].expert, item[1][0].source))
    parameter, scheme = ordered[0][1][0].parameter, ordered[0][1][1]
    experts, sources = ({place[i] for place, _ in placed.values()} for i in (1, 2))
    if experts != set(range(len(experts))) or len(placed) != len(experts) * len(sources):
        count = f"{len(placed)} quantized weights of the experts {sorted(experts)}"
        raise ValueError(f"opaq: for {parameter} there are {count}, expected {len(sources)} of each expert")
    parts: list[Part] = []
    row = 0
    for weight, (place, found) in ordered:
        if found != scheme:
            other = f"{ordered[0][0]} as {scheme.weight}; they make one parameter"
            raise ValueError(f"opaq: {weight} is stored as {found.weight}, {other}")
        there = {role: headers[name] for role, name in scheme.names(weight).items() if name in headers}
        shape = there["data"].shape
        rows = prod(shape[:2]) if len(shape) > 2 else prod(shape[:1])
        parts.append(Part(weight, place.name, scheme, there, row, rows, place.expert))
        row += rows
    return parts


def check_parts(parameter: str, packed: QuantizedTensor, parts: Sequence[Part], files: Files) -> None:
    """Checks the headers, before any weight is read."""
    rows = prod(packed.shape[:-1])
    if sum(part.rows for part in parts) != rows:
        found = f"{len(parts)} quantized weights with {sum(part.rows for part in parts)} rows"
        raise ValueError(
            f"opaq: for {parameter} there are {found}, expected {rows}; the first is {parts[0].weight}"
        )
    scales: dict[int, float] = {}
    for part in parts:
        given = [part.headers.get(role) for role in ("data", "scale", "global")]
        headers = [None if h is None else (_stored.STORED_DTYPES[h.dtype], h.shape) for h in given]
        try:
            _stored.check_rows(packed, part.first_row, headers)
        except ValueError as error:
            raise ValueError(f"opaq: {part.weight} cannot be loaded: {error}") from error
        names = part.scheme.names(part.weight)
        if "global" in part.headers:
            files.number(names["global"])
        if ("input" in part.headers) != ("input" in parts[0].headers):
            raise ValueError(f"opaq: of the weights of {parameter} only some have a scale of their input")
        if "input" in part.headers:
            scale = files.number(names["input"])
            if scales.setdefault(part.expert, scale) != scale:
                both = f"{scales[part.expert]:g} and {scale:g}"
                raise ValueError(
                    f"opaq: {names['input']}: weights with one input have two scales of it, {both}"
                )


def scale_buffer(parameter: str) -> str:
    """Where a parameter's module keeps the scale of its input: a linear layer, or experts."""
    module, _, name = parameter.rpartition(".")
    if name == "weight":
        return f"{module}.input_scale"
    return f"{module}.input_scales.{'hidden' if name == 'down_proj' else 'input'}_scale"


# ---- operations that transformers calls while it loads ----


class Load(ConversionOps):
    """Base of the operations. One serves many parameters, so copies of a converter share it."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Import(Load):
    """Makes a packed parameter from a checkpoint's tensors. Tensors that are stored plain go through
    `converter`, transformers' own, which this replaces."""

    def __init__(
        self, hf_quantizer: Any, weights: Sequence[str], schemes: Sequence[Scheme], converter: Any
    ) -> None:
        super().__init__(hf_quantizer)
        self.converter = converter
        self.sources = len(weights)
        self.roles = {  # the source and tensor of each pattern
            f"{pattern}$": (source, role)
            for scheme in schemes
            for source, weight in enumerate(weights)
            for role, pattern in scheme.names(weight.removesuffix("$")).items()
        }

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        parts = self.hf_quantizer.parts.get(full_layer_name)
        if parts is None:
            return self._plain(input_dict, full_layer_name, model, more)
        found: list[dict[str, torch.Tensor]] = [{} for _ in parts]
        for pattern, tensors in input_dict.items():
            source, role = self.roles[pattern]
            for expert, tensor in enumerate(tensors):
                part = expert * self.sources + source
                # versions before 5.21 cast codes of FP8 that have a plain weight's name to the model's dtype,
                # which is exact in both directions
                found[part][role] = tensor.to(_stored.STORED_DTYPES[parts[part].headers[role].dtype])
        like = model.get_parameter(full_layer_name)
        made = zeros(tuple(like.shape), like._quantizer_text, like.dtype)
        for part, given in zip(parts, found, strict=True):
            _stored.import_roles(made, part.first_row, given)
        device = found[0]["data"].device
        loaded = {full_layer_name: nn.Parameter(made.to(device), requires_grad=False)}
        if "input" in parts[0].headers:
            first = [given["input"] for given in found[:: self.sources]]  # projections share their input
            loaded[scale_buffer(full_layer_name)] = torch.cat([t.float().reshape(1) for t in first])
        return loaded

    def _plain(self, input_dict: Any, name: str, model: Any, more: Any) -> Any:
        dtype = self.hf_quantizer.plain_dtype(model, name)
        found = {p: [t.to(dtype) if t.is_floating_point() else t for t in ts] for p, ts in input_dict.items()}
        if self.converter is None:
            return {name: next(iter(found.values()))}
        own = {pattern.removesuffix("$"): pattern for pattern in self.converter.source_patterns}
        found = {own[pattern.removesuffix("$")]: tensors for pattern, tensors in found.items()}
        for pattern in ("source_patterns", "target_patterns"):
            more[pattern] = getattr(self.converter, pattern)
        for op in self.converter.operations:
            found = op.convert(found, full_layer_name=name, model=model, **more)
        return found


class Assemble(Load):
    """Loads a parameter that opaq saved: its buffers, unchanged."""

    @staticmethod
    def patterns(names: Sequence[str]) -> list[str]:
        return [rf"\.{name}$" for name in names]

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        like = model.get_parameter(full_layer_name)
        buffers = [input_dict[pattern][0].clone() for pattern in self.patterns(like.buffer_names())]
        made = QuantizedTensor(buffers, like._quantizer_text, like.shape, like.dtype)
        return {full_layer_name: nn.Parameter(made, requires_grad=False)}


class Quantize(Load):
    """Packs a parameter in high precision."""

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str, model: Any, **more: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        like, module = model.get_parameter(full_layer_name), full_layer_name.rpartition(".")[0]
        if _stacked.was_transposed(model.get_submodule(module)):
            value = value.mT
        if value.shape != like.shape:
            raise ValueError(f"opaq: {full_layer_name} is {tuple(value.shape)}, expected {tuple(like.shape)}")
        made = quantize_tensor(value.contiguous(), like._quantizer_text)
        if made.dim() == 3 and made.shape[0] > 1:
            made[:1]  # raises if experts share a scale
        return {full_layer_name: nn.Parameter(made, requires_grad=False)}


# ---- saving ----


def export(packed: QuantizedTensor, part: Part, input_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A part's tensors as they were in the checkpoint, by their names there."""
    # the checkpoint stores one value where stacked weights have one per row
    one = prod(part.headers["global" if "global" in part.headers else "scale"].shape) == 1
    found = _stored.export_rows(packed.tiled(False).cpu(), part.first_row, part.rows, one_for_all=one)
    exported = dict(zip(("data", "scale", "global"), found, strict=True))
    exported["input"] = None if input_scale is None else input_scale[part.expert].clone()
    names, saved = part.scheme.names(part.name), {}
    for role, header in part.headers.items():
        made, dtype = exported[role], _stored.STORED_DTYPES[header.dtype]
        assert made is not None
        made = made.view(dtype) if made.dtype == torch.uint8 else made.to(dtype)
        saved[names[role]] = made.reshape(header.shape)
    return saved

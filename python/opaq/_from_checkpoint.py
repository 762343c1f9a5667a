"""QuantizedTensor.from_checkpoint: finds the format of a weight's stored tensors and imports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod

import torch

from opaq import _stored
from opaq._tables import ELEMENT_BITS
from opaq.checkpoint import Header, Scheme, layout_names, layout_schemes
from opaq.packed import zeros
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer

_HERE = "opaq.QuantizedTensor.from_checkpoint"
_NAMES = {dtype: name for name, dtype in _stored.STORED_DTYPES.items()}


def _format(scheme: Scheme) -> str:
    return Quantizer(scheme.weight).format


def _headers(tensors: Mapping[str, torch.Tensor]) -> dict[str, Header]:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{_HERE}: tensors is a {type(tensors).__name__}, expected a dict of tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{_HERE}: {name!r} is a {type(tensor).__name__}, expected names and torch.Tensors"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{_HERE}: {name} is on the meta device, expected a tensor with data")
    return {name: Header(_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors.items()}


def _needed(scheme: Scheme, weight: str) -> tuple[list[str], str]:
    """The names of a weight's required tensors, and of its input's scale, which is optional."""
    names = scheme.names(weight)
    given = names.pop("input", "")
    return list(names.values()), given


def _described(scheme: Scheme, weight: str) -> str:
    names, given = _needed(scheme, weight)
    return f"{_format(scheme)}: {', '.join(names)}" + (f" (and {given})" if given else "")


def _named(schemes: Sequence[Scheme], found: Iterable[str], layout: str) -> tuple[str, list[Scheme]]:
    """The weight's plain name, and the schemes whose tensors have the names that were found, followed by
    schemes that need more tensors: Scheme.check names the missing ones if no other scheme fits."""
    found = set(found)
    endings = {ending for scheme in schemes for ending in (scheme.data, scheme.scale)}
    weights = sorted(
        {name.removesuffix(ending) for name in found for ending in endings if name.endswith(ending)}
    )

    def wrong(weight: str, scheme: Scheme) -> tuple[list[str], list[str]]:
        names, given = _needed(scheme, weight)
        return [name for name in names if name not in found], sorted(found - {*names, given})

    for weight in weights:
        if fitting := [scheme for scheme in schemes if wrong(weight, scheme) == ([], [])]:
            larger = [scheme for scheme in schemes if wrong(weight, scheme)[0] and not wrong(weight, scheme)[1]]
            return weight, [*fitting, *larger]
    default = "gate_up_proj" if layout == "gpt-oss" else "weight"
    choices = [(weight, scheme) for weight in weights or [default] for scheme in schemes]
    weight, nearest = min(choices, key=lambda choice: [len(names) for names in wrong(*choice)])
    missing, unknown = wrong(weight, nearest)
    said = ", ".join([f"no {name}" for name in missing] + [f"unknown {name}" for name in unknown])
    expected = "; ".join(_described(scheme, weight) for scheme in schemes)
    raise ValueError(f"{_HERE}: {said} in a weight of layout {layout}, expected {expected}")


def _shape(weight: str, scheme: Scheme, found: Mapping[str, Header]) -> tuple[int, ...]:
    """The shape of the weight. Codes may have an extra dimension of blocks if each row has a row of scales."""
    names = scheme.names(weight)
    data, scale = (found[names[role]].shape for role in ("data", "scale"))
    has_row_blocks = scheme.rows_per_scale == 1 and scheme.scales(1, 1).columns_dim is not None
    is_split = has_row_blocks and len(data) == len(scale) + 1
    leading = len(data) - (2 if is_split else 1)
    if leading not in (1, 2):
        raise ValueError(f"opaq: {names['data']} is {found[names['data']]}, expected rows and columns")
    element = Quantizer(scheme.weight).element
    return (*data[:leading], prod(data[leading:]) * (8 // ELEMENT_BITS[element]))


def _is_as_written(weight: str, scheme: Scheme, found: Mapping[str, Header]) -> bool:
    """Whether the scale has the shape that the layout's own software writes. The library also imports other
    shapes, so a single number would fit several formats."""
    names = scheme.names(weight)
    if not all(names[role] in found for role in ("data", "scale")):
        return False
    with suppress(ValueError):
        shape = _shape(weight, scheme, found)
        return len(shape) == 2 and scheme.scales(*shape).sizes == found[names["scale"]].shape
    return False


def from_checkpoint(
    tensors: Mapping[str, torch.Tensor], layout: str, form: str, dtype: torch.dtype
) -> QuantizedTensor:
    if layout not in layout_names():
        raise ValueError(f"{_HERE}: layout is {layout!r}, expected one of {', '.join(layout_names())}")
    schemes = layout_schemes(layout)
    known = [_format(scheme) for scheme in schemes]
    if form and form not in known:
        raise ValueError(f"{_HERE}: format is {form!r}, expected one that {layout} has: {', '.join(known)}")
    headers = _headers(tensors)
    chosen = [scheme for scheme in schemes if form in ("", _format(scheme))]
    weight, fitting = _named(chosen, headers, layout)
    wrong: list[str] = []
    for scheme in sorted(fitting, key=lambda scheme: not _is_as_written(weight, scheme, headers)):
        names = scheme.names(weight)
        given = {role: tensors[name] for role, name in names.items() if name in tensors}
        stored = [given.get(role) for role in ("data", "scale", "global")]
        try:
            scheme.check(weight, headers)
            shape = _shape(weight, scheme, headers)
            like = zeros(shape, scheme.weight, dtype, "meta")
            _stored.check_rows(like, 0, [None if t is None else (t.dtype, t.shape) for t in stored])
        except ValueError as error:
            wrong.append(f"{_format(scheme)}: {error}")
            continue
        for role in ("global", "input"):
            if role in given and given[role].numel() == 1:
                _stored.check_factor(names[role], given[role].item())
        made = zeros(shape, scheme.weight, dtype)
        _stored.import_roles(made, 0, given)
        moved: QuantizedTensor = made.to(given["data"].device)
        return moved
    raise ValueError(f"{_HERE}: the tensors of {weight} fit no format of {layout}: {'; '.join(wrong)}")

"""How quantized checkpoints are laid out, read from their `quantization_config`: which quantizer each weight
has, which tensors hold it, how its layer's input is quantized. Nothing here knows a framework or opens a file.
The names and dtypes of the tensors are the library's table (opaq/layout.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from opaq._names import Names
from opaq._tables import layouts

_PLAIN = ("F32", "BF16", "F16", "F64")
_FLOATS = ("F32", "BF16")


class Header(NamedTuple):
    """What a file says of a tensor without its data: the dtype by its name in safetensors, and the sizes."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Scheme:
    """How one kind of weight is stored and run."""

    weight: str  # the quantizer of a weight of its own
    stacked: str  # of several in one tensor, each with the scales it has
    data: str  # what is added to the plain weight's name
    scale: str
    global_: str = ""
    input: str = ""  # how the input is quantized; "" if it is not
    input_given: str = ""  # the same, where the checkpoint has a scale for it
    input_scale: str = ""  # the name of that, beside the weight's
    data_dtypes: tuple[str, ...] = ("F8_E4M3",)
    scale_dtypes: tuple[str, ...] = _FLOATS
    scale_shape: str = ""  # a letter for each dimension: opaq/layout.h

    def names(self, weight: str) -> dict[str, str]:
        """The names of a weight's tensors by role, from the name it would have if it were plain."""
        found = {"data": weight + self.data, "scale": weight + self.scale}
        if self.global_:
            found["global"] = weight + self.global_
        if self.input_scale:
            module, dot, _ = weight.rpartition(".")
            found["input"] = module + dot + self.input_scale
        return found

    def check(self, weight: str, headers: Mapping[str, Header]) -> None:
        """All tensors are there, with dtypes they can have. The input's scale may be missing."""
        dtypes = {"data": self.data_dtypes, "scale": self.scale_dtypes, "global": ("F32",), "input": _FLOATS}
        names = self.names(weight)
        for role, name in names.items():
            if name not in headers and role != "input":
                needed = ", ".join(n for r, n in names.items() if r != "input")
                raise ValueError(
                    f"opaq: the checkpoint has no {name}; a weight stored as {self.weight} needs {needed}"
                )
            if name in headers and headers[name].dtype not in dtypes[role]:
                raise ValueError(
                    f"opaq: {name} is {headers[name]}, expected {' or '.join(dtypes[role])} for a weight that "
                    f"is stored as {self.weight}"
                )


@dataclass(frozen=True)
class Layout:
    """A checkpoint's `quantization_config`, understood."""

    schemes: tuple[tuple[Names, Scheme], ...]  # the first that means a module is its
    ignore: Names
    weights: tuple[str, ...] = ("weight",)  # what a plain weight is called in its module

    def scheme(self, module: str) -> Scheme | None:
        """How this module's weight is stored; None if it is plain."""
        if module in self.ignore:
            return None
        return next((scheme for names, scheme in self.schemes if module in names), None)

    def packed(self, headers: Mapping[str, Header]) -> dict[str, Scheme]:
        """The weights that are stored quantized, by the names they would have if they were plain. What is
        stored plain stays plain. A weight that lacks a tensor, has one of a wrong dtype, or is said to be
        plain, is an error."""
        found: dict[str, Scheme] = {}
        endings = {e for _, s in self.schemes for e in (s.data, s.scale, s.global_)} - {""}
        for name, header in headers.items():
            weights = [name.removesuffix(e) for e in endings if name.endswith(e)]
            weights += [name] if header.dtype not in _PLAIN else []
            for weight in weights:
                module, _, leaf = weight.rpartition(".")
                if leaf not in self.weights:
                    continue
                if (scheme := self.scheme(module)) is None:
                    raise ValueError(
                        f"opaq: the checkpoint has {name} ({header}), but its quantization_config says that "
                        f"{module} is not quantized"
                    )
                found[weight] = scheme
        for weight, scheme in found.items():
            scheme.check(weight, headers)
        return found


# ---- fields of a quantization_config ----

_JSON_KINDS: dict[str, tuple[type, ...]] = {
    "a boolean": (bool,),
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "a list": (list, tuple, set, frozenset),
    "an object": (Mapping,),
}


def json_kind(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    return next((kind for kind, types in _JSON_KINDS.items() if isinstance(value, types)), type(value).__name__)


def _field(config: Mapping[str, Any], key: str, expected: str, default: Any = None) -> Any:
    """config[key] of the kind `expected`; the default where it is absent or null."""
    value = config.get(key)
    if value is None or json_kind(value) == expected:
        return default if value is None else value
    raise ValueError(
        f"opaq: the quantization_config's {key} is {value!r}, {json_kind(value)}, expected {expected}"
    )


def _strings(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names."""
    found = _field(config, key, "a list", ())
    for name in found:
        if not isinstance(name, str):
            kind = f"{name!r}, {json_kind(name)}"
            raise ValueError(f"opaq: the quantization_config's {key} has {kind}, expected a list of strings")
    return list(found)


def _objects(config: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """An object of objects."""
    found = _field(config, key, "an object", {})
    return {name: _field(found, name, "an object", {}) for name in found}


# ---- the layouts ----


def _layout(schemes: Iterable[tuple[Iterable[str], Scheme]], ignore: Iterable[str], *weights: str) -> Layout:
    found = tuple((Names(names), scheme) for names, scheme in schemes)
    return Layout(found, Names(ignore), weights or ("weight",))


def _with(text: str, rule: str) -> str:
    return text if rule == "te" else f"{text}+rule={rule}"


def _scheme(layout: str, form: str, **more: Any) -> Scheme:
    """A row of the library's table. Weights that are stacked and have one scale each have one for every row."""
    row = next(row for row in layouts() if (row.layout, row.format) == (layout, form))
    texts = {"nvfp4": ("nvfp4+global", "nvfp4+rowscaled+global"), "fp8": ("fp8", "fp8row")}.get(
        form, (form, form)
    )
    weight, stacked = (_with(text, row.rule) for text in texts)
    return Scheme(
        weight,
        stacked,
        row.data,
        row.scale,
        row.global_,
        data_dtypes=row.data_dtypes,
        scale_dtypes=row.scale_dtypes,
        scale_shape=row.scale_shape,
        **more,
    )


def _deepseek_tensor(**more: Any) -> Scheme:
    """One scale for a weight, which only transformers writes."""
    return Scheme("fp8+rule=modelopt", "fp8row+rule=modelopt", "", "_scale_inv", **more)


def layout_names() -> list[str]:
    return list(dict.fromkeys(row.layout for row in layouts()))


def layout_schemes(layout: str) -> list[Scheme]:
    """How weights can be stored in a layout."""
    found = [_scheme(layout, row.format, input_scale=row.input) for row in layouts() if row.layout == layout]
    return [*found, _deepseek_tensor()] if layout == "deepseek" else found


class _Found(NamedTuple):
    """What an entry of compressed-tensors says, as far as it decides the format."""

    bits: int
    strategy: str
    group: int | None
    block: tuple[int, ...] | None

    def __str__(self) -> str:
        size = f", group {self.group}" if self.group else f", block {self.block}" if self.block else ""
        return f"floats of {self.bits} bits, strategy {self.strategy}{size}"


def _ct_entry(entry: Mapping[str, Any], what: str) -> _Found:
    is_symmetric, kind = _field(entry, "symmetric", "a boolean", True), _field(entry, "type", "a string")
    if kind != "float" or not is_symmetric:
        kind = f"{'symmetric' if is_symmetric else 'asymmetric'} {kind}"
        raise ValueError(f"opaq: the checkpoint's {what} are {kind} numbers, expected symmetric float ones")
    block = _field(entry, "block_structure", "a list")
    return _Found(
        _field(entry, "num_bits", "an integer", 0),
        str(_field(entry, "strategy", "a string")),
        _field(entry, "group_size", "an integer"),
        None if block is None else tuple(block),
    )


def _ct_input(entry: Mapping[str, Any] | None) -> dict[str, str]:
    if entry is None:
        return {}
    found, rule = _ct_entry(entry, "input activations"), "compressed-tensors"
    computed = {
        (4, "tensor_group", 16): "nvfp4+global",
        (4, "group", 32): "mxfp4",
        (8, "group", 32): "mxfp8",
        (8, "group", 128): "fp8blk1",
        (8, "token", None): "fp8row",
        (8, "tensor", None): "fp8",
    }.get((found.bits, found.strategy, found.group))
    if computed is None:
        raise ValueError(f"opaq: the checkpoint's input activations are {found}, which no opaq format is")
    text = _with(computed, rule)
    if computed == "nvfp4+global":
        return {"input": text, "input_given": text, "input_scale": "input_global_scale"}
    is_dynamic = entry.get("dynamic") or False
    if not isinstance(is_dynamic, bool) and is_dynamic != "local":
        kind = f"{is_dynamic!r}, {json_kind(is_dynamic)}"
        raise ValueError(f'opaq: the quantization_config\'s dynamic is {kind}, expected a boolean or "local"')
    if computed == "fp8" and not is_dynamic:
        return {"input": text, "input_given": _with("fp8+delayed", rule), "input_scale": "input_scale"}
    if not is_dynamic:
        raise ValueError(
            f"opaq: the checkpoint's input activations are static {computed}, expected dynamic ones"
        )
    return {"input": text}


def _ct_scheme(group: Mapping[str, Any]) -> Scheme:
    found = _ct_entry(_field(group, "weights", "an object"), "weights")
    more = _ct_input(_field(group, "input_activations", "an object"))
    if group.get("output_activations"):
        raise ValueError("opaq: the checkpoint quantizes output activations, which opaq does not")
    blocks = {(4, "tensor_group", 16): "nvfp4", (4, "group", 32): "mxfp4", (8, "group", 32): "mxfp8"}
    form = blocks.get((found.bits, found.strategy, found.group or 0))
    if found.bits == 8 and (found.strategy != "block" or found.block == (128, 128)):
        form = form or {"channel": "fp8row", "tensor": "fp8", "block": "fp8blk2"}.get(found.strategy)
    if form:
        return _scheme("compressed-tensors", form, **more)
    raise ValueError(f"opaq: the checkpoint's weights are {found}, which no opaq format is")


def _ct_targets(group: Mapping[str, Any]) -> list[str]:
    """All weights that are stored quantized are those of linear layers."""
    return ["*" if target == "Linear" else target for target in _strings(group, "targets")]


def _read_compressed_tensors(config: Mapping[str, Any]) -> Layout:
    is_sparse = _field(config, "sparsity_config", "an object", {}).get("format", "dense") != "dense"
    if is_sparse or _field(config, "transform_config", "an object", {}).get("config_groups"):
        what = "is sparse" if is_sparse else "transforms its inputs (transform_config)"
        raise ValueError(f"opaq: the checkpoint {what}, which opaq does not do")
    groups = [group for group in _objects(config, "config_groups").values() if group.get("weights")]
    # a module's name decides before its class
    groups.sort(key=lambda group: "Linear" in _strings(group, "targets"))
    return _layout([(_ct_targets(group), _ct_scheme(group)) for group in groups], _strings(config, "ignore"))


# How inputs are quantized: as they come, and with the checkpoint's scale. ModelOpt writes some algorithms in
# lower case; all are compared in upper case.
_MODELOPT_FP8_INPUT = {"input": "fp8+rule=modelopt", "input_given": "fp8+delayed+rule=modelopt"}
_MODELOPT_INPUTS = {
    "NVFP4": {"input": "nvfp4+global+rule=modelopt", "input_given": "nvfp4+global+rule=modelopt"},
    "FP8": _MODELOPT_FP8_INPUT,
    "FP8_PER_CHANNEL_PER_TOKEN": {"input": "fp8row+rule=modelopt"},
    "MXFP8": {"input": "mxfp8+rule=modelopt"},
    "W4A8_MXFP4_FP8": _MODELOPT_FP8_INPUT,
}
_MODELOPT_WEIGHTS = {"W4A16_NVFP4": "NVFP4", "W4A8_MXFP4_FP8": "MXFP4"}  # stored as those are


def _modelopt_scheme(algorithm: str | None) -> Scheme:
    rows = {row.method.upper(): row for row in layouts() if row.layout == "modelopt"}
    name = algorithm.upper() if algorithm else ""
    row = rows.get(_MODELOPT_WEIGHTS.get(name, name))
    if row is None:
        expected = ", ".join([*rows, *_MODELOPT_WEIGHTS])
        raise ValueError(
            f"opaq: the checkpoint's quant_algo is {algorithm!r}, expected one of {expected} or MIXED_PRECISION"
        )
    inputs = _MODELOPT_INPUTS.get(name, {})
    named = {"input_scale": row.input} if "input_given" in inputs else {}
    return _scheme("modelopt", row.format, **inputs, **named)


def _read_modelopt(config: Mapping[str, Any]) -> Layout:
    """As it stands in config.json, or as in hf_quant_config.json, where it is called `quantization`."""
    config = {**config, **_field(config, "quantization", "an object", {})}
    ignore = _strings(config, "ignore") or _strings(config, "exclude_modules")
    algorithm, layers = _field(config, "quant_algo", "a string"), _objects(config, "quantized_layers")
    if str(algorithm).upper() != "MIXED_PRECISION" or not layers:
        return _layout([(["*"], _modelopt_scheme(algorithm))], ignore)
    named: dict[str | None, list[str]] = {}
    for name, layer in layers.items():
        named.setdefault(_field(layer, "quant_algo", "a string"), []).append(name)
    return _layout([(names, _modelopt_scheme(found)) for found, names in named.items()], ignore)


def _read_deepseek(config: Mapping[str, Any]) -> Layout:
    """DeepSeek's blocks, and what transformers writes under the same name: one scale, or MXFP8."""
    block = _field({"weight_block_size": (128, 128), **config}, "weight_block_size", "a list")
    block = tuple(block) if block is not None else None
    dynamic = _field(config, "activation_scheme", "a string", "dynamic") == "dynamic"
    pow2 = _field(config, "scale_fmt", "a string") == "ue8m0"
    if block == (128, 128):
        text = "fp8blk1+pow2" if pow2 else "fp8blk1+rule=modelopt"
        scheme = _scheme("deepseek", "fp8blk2", input=text)
    elif block == (1, 32):
        scheme = _scheme("deepseek", "mxfp8", input="mxfp8")
    elif block is None:
        given = "" if dynamic else "fp8+delayed+rule=modelopt"
        name = "" if dynamic else "activation_scale"
        scheme = _deepseek_tensor(input="fp8+rule=modelopt", input_given=given, input_scale=name)
    else:
        raise ValueError(f"opaq: the checkpoint's weight_block_size is {block}, expected [128, 128] or [1, 32]")
    if not dynamic and block is not None:
        raise ValueError("opaq: the checkpoint's activation_scheme is static, expected dynamic for blocks")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"opaq: the checkpoint's expert_dtype is {config['expert_dtype']!r}, expected 'fp8'")
    ignore = _strings(config, "modules_to_not_convert") or _strings(config, "ignored_layers")
    return _layout([(["*"], scheme)], ignore)


def _read_mxfp4(config: Mapping[str, Any]) -> Layout:
    """gpt-oss: the experts only, each projection in one tensor of blocks and one of scales."""
    scheme = _scheme("gpt-oss", "mxfp4")
    ignore = _strings(config, "modules_to_not_convert")
    return _layout([(["*"], scheme)], ignore, "gate_up_proj", "down_proj")


_READERS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "fp8": _read_deepseek,
    "mxfp8": _read_deepseek,
    "mxfp4": _read_mxfp4,
}


def read_layout(config: Mapping[str, Any]) -> Layout:
    """The layout that a checkpoint's `quantization_config` describes."""
    if not isinstance(config, Mapping):
        raise ValueError(
            f"opaq: the quantization_config is {config!r}, {json_kind(config)}, expected an object"
        )
    method = config.get("quant_method")
    method = getattr(method, "value", method)
    method = method.lower() if isinstance(method, str) else method
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(
            f"opaq: the checkpoint's quant_method is {method!r}, expected one of {', '.join(_READERS)}"
        )
    return _READERS[method](config)

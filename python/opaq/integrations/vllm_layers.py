"""The layers of a model in vLLM: which tensors a checkpoint has for each, how they become packed weights once
they are loaded, and the operator that runs a forward.

Weights cross the operator's boundary as tensors, which are parameters of the layer: a compiled graph takes them
as its inputs, so it may be cached and used by another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import vllm.envs
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import set_weight_attrs

from opaq import _stored
from opaq._explain import kernel_of
from opaq._operators import ops
from opaq._plan import experts_plan, plan_for
from opaq.checkpoint import Scheme
from opaq.model import can_be_tiled
from opaq.packed import zeros
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
from opaq.quantizer import derive

_ACTIVATIONS = {  # vLLM's names and opaq's
    "swigluoai": "swiglu_oai",
    "swigluoai_uninterleave": "swiglu_oai_packed",
    "swiglustep": "silu_step",
}
_STEP_LIMIT = 7.0  # of swiglustep in vLLM, whose models do not pass it on


class Prepared(NamedTuple):
    """A prepared weight."""

    format: str
    input: str
    kernel: str
    order: str
    bytes: int


# ---- the tensors of a checkpoint ----


def _as_bytes(loader: Callable[..., Any]) -> Callable[..., Any]:
    """A loader that copies codes and scales of one byte as bytes, whatever dtype a file gives them."""

    @wraps(loader)
    def load(param: Any, loaded_weight: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if loaded_weight.dtype != param.dtype and loaded_weight.itemsize == param.itemsize == 1:
            loaded_weight = loaded_weight.view(param.dtype)
        return loader(param, loaded_weight, *arguments, **keywords)

    return load


def _missing(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor filled with NaN, in any dtype that scales have, so that a missing scale is noticed. Like all
    tensors that methods create, it is on the device that vLLM has made the default."""
    made = torch.empty(shape, dtype=dtype)
    made.view(torch.uint8).fill_(255)
    return made


class Shapes(NamedTuple):
    """How one weight of `rows` and `columns` is stored."""

    rows: int
    data: tuple[int, ...]
    scale: tuple[int, ...]  # () if there is one for the whole weight
    rows_dim: int  # of the scale
    columns_dim: int | None
    dtypes: tuple[torch.dtype, torch.dtype]


def _shapes(scheme: Scheme, rows: int, columns: int) -> Shapes:
    like = zeros((rows, columns), scheme.weight, torch.bfloat16, "meta")
    data, _, _ = _stored.describe_rows(like, rows)
    assert data is not None
    scale, rows_dim, columns_dim = scheme.scales(rows, columns)
    data_dtype, scale_dtype = (
        _stored.STORED_DTYPES[dtypes[0]] for dtypes in (scheme.data_dtypes, scheme.scale_dtypes)
    )
    sizes = () if rows_dim is None else scale
    return Shapes(rows, tuple(data), sizes, rows_dim or 0, columns_dim, (data_dtype, scale_dtype))


def _import(
    shape: tuple[int, ...],
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    parts: Iterator[tuple[str, int, Mapping[str, Any]]],
) -> QuantizedTensor:
    """One packed weight from consecutive rows with scales of their own: (name, rows, tensors by role). Rows are
    imported in CPU memory; then the weight moves to the device."""
    stretches = list(parts)
    made = zeros(shape, scheme.weight if len(stretches) == 1 else scheme.stacked, dtype, "cpu")
    row = 0
    for name, rows, given in stretches:
        if (given["scale"].view(torch.uint8) == 255).all():
            raise ValueError(f"opaq: the checkpoint has no tensors for {name}, stored as {scheme.weight}")
        for role in ("scale", "global"):
            if role in given and given[role].numel() == 1:
                _stored.check_factor(f"{role} of {name}", float(given[role]))
        _stored.import_roles(made, row, given)
        row += rows
    moved: QuantizedTensor = made.to(device)
    return moved


def _input(method: Any, name: str, scales: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
    """How a layer's input is quantized, and its scale from the checkpoint if that has one. `scales` has one
    entry [..., weights] for each weight that is multiplied with the input. A scale computed from the data is
    computed for each token, so no request's result depends on other requests in the batch."""
    if method.config.options.activations == "none":
        return "", None
    if scales is None or not method.scheme.input_given or bool(scales.isnan().all()):
        return derive(method.scheme.input, "row_amaxes") if method.scheme.input else "", None
    first = scales[..., 0]
    if not torch.equal(scales, first.unsqueeze(-1).expand_as(scales)):
        said = ", ".join(f"{value:g}" for value in scales.flatten()[:4].tolist())
        raise ValueError(f"opaq: weights of {name} have different scales of their one input: {said}")
    for value in first.flatten().tolist():
        _stored.check_factor(f"the scale of {name}'s input", value)
    return method.scheme.input_given, first.reshape(-1).clone()


# ---- packed weights of a layer ----


def _keep(layer: nn.Module, name: str, weight: QuantizedTensor) -> list[str]:
    """Puts a packed weight's buffers into a layer, as parameters, and returns their names."""
    names = [name if i == 0 else f"{name}_{i}" for i in range(len(weight.buffers()))]
    for key, buffer in zip(names, weight.buffers(), strict=True):
        layer.register_parameter(key, nn.Parameter(buffer, requires_grad=False))
    return names


def _tiled(weight: QuantizedTensor, options: Any) -> QuantizedTensor:
    """The weight in tiles, which are for processors, unless the user chose rows."""
    is_kept = options.keeps_rows or weight.device.type == "cuda" or not can_be_tiled(weight)
    return weight if is_kept else weight.tiled()


def _order(weight: QuantizedTensor) -> str:
    """The order of sums: on a GPU the fastest, unless VLLM_BATCH_INVARIANT requires one order.
    Kernels of processors have one order, which does not."""
    return "any" if weight.device.type == "cuda" and not vllm.envs.VLLM_BATCH_INVARIANT else "fixed"


def _prepared(weight: QuantizedTensor, given: str, precision: str) -> Prepared:
    text, order = weight._quantizer_text, _order(weight)
    kernel = kernel_of(text, given, weight.dtype, precision, weight.device.type)
    return Prepared(weight.quantizer.format, given, kernel, order, weight.nbytes)


def _keep_scale(layer: nn.Module, name: str, scale: torch.Tensor | None, device: torch.device) -> None:
    """Puts an input's scale into a layer, beside the weight."""
    layer.register_buffer(name, None if scale is None else scale.to(device), persistent=False)


def _buffers(layer: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    return [getattr(layer, name) for name in names]


class _Linear(LinearMethodBase):
    """One operator for a packed weight."""

    config: Any
    names: Sequence[str] = ()

    def _pack(self, layer: nn.Module, weight: QuantizedTensor, given: str, scale: torch.Tensor | None) -> None:
        weight, precision = _tiled(weight, self.config.options), self.config.options.lowest_precision
        self.names, self.shape = _keep(layer, "weight", weight), list(weight.shape)
        _keep_scale(layer, "opaq_input_scale", scale, weight.device)
        words = {"x": given, "w_given": weight._quantizer_text, "precision": precision}
        self.plan = plan_for("opaq in vLLM", **words, order=_order(weight))
        self.config.done(_prepared(weight, given, precision))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = _buffers(layer, self.names)
        y: torch.Tensor = ops.linear(
            x.contiguous(), weight, bias, self.shape, self.plan, layer.opaq_input_scale
        )
        return y


@register_weight_loader_v2_supported_method
class OpaqLinearMethod(_Linear):
    """A linear layer, or several that vLLM joins, of a quantized checkpoint."""

    def __init__(self, config: Any, scheme: Scheme, prefix: str) -> None:
        self.config, self.scheme, self.prefix = config, scheme, prefix
        self.roles = scheme.names("weight")

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        columns, scheme = input_size_per_partition, self.scheme
        self.dtype, self.columns = params_dtype, columns
        self.parts = parts = [_shapes(scheme, rows, columns) for rows in output_partition_sizes]
        layer.logical_widths, layer.weight_block_size = output_partition_sizes, None
        layer.input_size_per_partition = columns
        self._check_blocks(input_size, output_partition_sizes, getattr(layer, "tp_size", 1))
        loader = _as_bytes(extra["weight_loader"])
        data, scale = parts[0].dtypes
        total = sum(output_partition_sizes), *parts[0].data[1:]
        weight = ModelWeightParameter(
            data=torch.empty(total, dtype=data), input_dim=1, output_dim=0, weight_loader=loader
        )
        made: dict[str, Any] = {"data": weight}
        if not parts[0].scale:
            made["scale"] = PerTensorScaleParameter(data=_missing([len(parts)], scale), weight_loader=loader)
        else:
            kind: Any = GroupQuantScaleParameter
            dims = {"output_dim": parts[0].rows_dim, "input_dim": parts[0].columns_dim}
            if parts[0].columns_dim is None:
                kind = ChannelQuantScaleParameter
                del dims["input_dim"]
            elif scheme.rows_per_scale > 1:
                kind = BlockQuantScaleParameter
                layer.weight_block_size = [scheme.rows_per_scale]
            shape = list(parts[0].scale)
            shape[parts[0].rows_dim] = sum(part.scale[part.rows_dim] for part in parts)
            made["scale"] = kind(data=_missing(shape, scale), weight_loader=loader, **dims)
        for role in ("global", "input"):
            if role in self.roles:
                values = _missing([len(parts)], torch.float32)
                made[role] = PerTensorScaleParameter(data=values, weight_loader=loader)
        for role, parameter in made.items():
            layer.register_parameter(self.roles[role], parameter)

    def _check_blocks(self, input_size: int, rows: Sequence[int], ranks: int) -> None:
        """Checks that ranks and joined weights end at block boundaries."""
        block = self.scheme.rows_per_scale
        cut = rows if ranks > 1 else rows[:-1]
        where, dim = f"opaq: {self.prefix}, stored as {self.scheme.weight}", self.parts[0].columns_dim
        if any(size % block for size in cut):
            raise ValueError(f"{where}: parts of {list(rows)} rows are not whole blocks of {block} rows")
        whole, part = _shapes(self.scheme, rows[0], input_size), self.parts[0]
        if dim is not None and whole.scale[dim] * self.columns != part.scale[dim] * input_size:
            raise ValueError(f"{where}: {self.columns} of {input_size} columns are not whole blocks")

    def _stretches(self, layer: Any) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        tensors = {role: getattr(layer, name).data.cpu() for role, name in self.roles.items()}
        data, scale = tensors["data"], tensors["scale"]
        row = block = 0
        for i, part in enumerate(self.parts):
            given = {"data": data[row : row + part.rows]}
            if part.scale:
                blocks = part.scale[part.rows_dim]
                given["scale"] = scale.narrow(part.rows_dim, block, blocks)
                block += blocks
            else:
                given["scale"] = scale[i : i + 1]
            if "global" in tensors:
                given["global"] = tensors["global"][i : i + 1]
            yield f"part {i} of {self.prefix}" if len(self.parts) > 1 else self.prefix, part.rows, given
            row += part.rows

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.names:
            return
        shape = sum(part.rows for part in self.parts), self.columns
        device = getattr(layer, self.roles["data"]).device
        weight = _import(shape, self.scheme, self.dtype, device, self._stretches(layer))
        scales = getattr(layer, self.roles["input"]).data if "input" in self.roles else None
        given, scale = _input(self, self.prefix, scales)
        if scale is not None and _is_absorbed(self.prefix):
            given, scale = "", None
        for name in self.roles.values():
            delattr(layer, name)
        self._pack(layer, weight, given, scale)


def _is_absorbed(prefix: str) -> bool:
    """Whether vLLM gets the layer's weight by multiplying with an identity matrix, as in latent attention; a
    calibrated input scale would distort it."""
    return prefix.endswith("kv_b_proj")


class OpaqOnlineLinearMethod(_Linear, OnlineLinearBase):
    """A linear layer in high precision that is quantized when it has been loaded."""

    activation_quant_key = None

    def __init__(self, config: Any) -> None:
        OnlineLinearBase.__init__(self)
        self.config = config

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.names:
            return
        weight = quantize_tensor(layer.weight.data.contiguous(), self.config.quantizer)
        delattr(layer, "weight")
        self._pack(layer, weight, self.config.activations, None)


# register_weight_loader_v2_supported_method stores the name of the class
register_weight_loader_v2_supported_method(OpaqOnlineLinearMethod)


# ---- experts ----


class _Experts(FusedMoEMethodBase):
    """One operator for the packed weights of all experts here."""

    config: Any
    names: Sequence[Sequence[str]] = ()

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def _pack(
        self, layer: Any, weights: Sequence[QuantizedTensor], given: Sequence[str], scales: Sequence[Any]
    ) -> None:
        options = self.config.options
        weights, precision = [_tiled(weight, options) for weight in weights], options.lowest_precision
        self.names = [
            _keep(layer, name, w) for name, w in zip(("w13_weight", "w2_weight"), weights, strict=True)
        ]
        self.shapes = [list(weight.shape) for weight in weights]
        for name, scale in zip(("opaq_input_scale", "opaq_hidden_scale"), scales, strict=True):
            _keep_scale(layer, name, scale, weights[0].device)
        texts = [weight._quantizer_text for weight in weights]
        # experts of other ranks are -1 in the map
        slices = len(weights[0]), 0, bool(layer.apply_router_weight_on_input)
        self.plan = experts_plan(
            "opaq in vLLM",
            (given[0], given[1], ""),
            (texts[0], texts[1]),
            *_activation(layer),
            precision,
            slices,
            _order(weights[0]),
        )
        made = [_prepared(w, x, precision) for w, x in zip(weights, given, strict=True)]
        self.config.done(*made)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]
        up, down = (_buffers(layer, names) for names in self.names)
        biases = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        scales = layer.opaq_input_scale, layer.opaq_hidden_scale
        routing = topk_weights.to(torch.float32), topk_ids
        y: torch.Tensor = ops.moe(x.contiguous(), *routing, up, down, *biases, *self.shapes, self.plan, *scales)
        return y


def _activation(layer: Any) -> tuple[str, tuple[float | None, float | None, float | None]]:
    name = layer.activation.value
    limit, alpha, beta = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    if name == "silu" and limit is not None:
        return "silu_clamp", (limit, alpha, beta)
    if name in ("silu", "gelu", "gelu_tanh", "relu2") or name.endswith("_no_mul"):
        return name, (None, None, None)
    if name == "swiglustep":
        return _ACTIVATIONS[name], (_STEP_LIMIT if limit is None else limit, None, None)
    return _ACTIVATIONS.get(name, name), (limit, alpha, beta)


class OpaqMoEMethod(_Experts):
    """The experts of a quantized checkpoint."""

    def __init__(self, moe: Any, config: Any, scheme: Scheme, prefix: str) -> None:
        super().__init__(moe)
        self.config, self.scheme, self.prefix = config, scheme, prefix
        self.is_stored_stacked = "weight" not in config.layout.weights
        stacked = {"data": "weight", "scale": "weight_scale"}  # gpt-oss, by the names that vLLM gives it
        self.roles = stacked if self.is_stored_stacked else scheme.names("weight")
        if (rank := len(scheme.scales(1, 1).sizes)) > 2:
            raise ValueError(
                f"opaq: experts stored as {scheme.weight} have scales of {rank} dimensions, expected at most 2"
            )

    @property
    def weight_dtype(self) -> str:
        """vLLM's loader for gpt-oss."""
        return self.config.get_name()  # type: ignore[no-any-return]

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        halves = 2 if self.moe.is_act_and_mul else 1
        inner, self.dtype, self.experts = intermediate_size_per_partition, params_dtype, num_experts
        first = [_shapes(self.scheme, inner, hidden_size)] * halves
        if self.is_stored_stacked:  # gate and up alternate, so they are one weight
            first = [_shapes(self.scheme, inner * halves, hidden_size)]
        self.parts = {"w13": first, "w2": [_shapes(self.scheme, hidden_size, inner)]}
        self.columns = {"w13": hidden_size, "w2": inner}
        attributes = {**extra, "weight_loader": _as_bytes(extra["weight_loader"])}
        for name, parts in self.parts.items():
            for role, (tensor, kind) in self._tensors(parts).items():
                parameter = nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(f"{name}_{self.roles[role]}", parameter)
                set_weight_attrs(parameter, {**attributes, "quant_method": kind} if kind else attributes)
            if self.moe.has_bias:
                rows = sum(part.rows for part in parts)
                bias = nn.Parameter(torch.zeros(num_experts, rows, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(f"{name}_bias", bias)
                set_weight_attrs(bias, attributes)

    def _tensors(self, parts: Sequence[Shapes]) -> dict[str, tuple[torch.Tensor, str]]:
        """Tensors by role, with vLLM's name of how each is loaded."""
        experts, one, kinds = self.experts, parts[0], FusedMoeWeightScaleSupported
        whole = [experts, len(parts)] if len(parts) > 1 else [experts]
        data = torch.empty(experts, sum(part.rows for part in parts), *one.data[1:], dtype=one.dtypes[0])
        made = {"data": (data, "")}
        if not one.scale:
            made["scale"] = _missing(whole, one.dtypes[1]), kinds.TENSOR.value
        else:
            kind = kinds.CHANNEL if one.columns_dim is None else kinds.GROUP
            kind = kinds.BLOCK if self.scheme.rows_per_scale > 1 else kind
            shape = experts, sum(part.scale[0] for part in parts), *one.scale[1:]
            made["scale"] = _missing(shape, one.dtypes[1]), kind.value
        for role in ("global", "input"):
            if role in self.roles:
                made[role] = _missing(whole, torch.float32), kinds.TENSOR.value
        return made

    def _stretches(self, layer: Any, name: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        parts = self.parts[name]
        tensors = {role: getattr(layer, f"{name}_{key}").data.cpu() for role, key in self.roles.items()}
        for expert in range(self.experts):
            row = block = 0
            for i, part in enumerate(parts):
                blocks = part.scale[0] if part.scale else 0
                given = {"data": tensors["data"][expert, row : row + part.rows]}
                scale = tensors["scale"][expert]
                given["scale"] = scale[block : block + blocks] if blocks else scale.reshape(-1)[i : i + 1]
                if "global" in tensors:
                    given["global"] = tensors["global"][expert].reshape(-1)[i : i + 1]
                yield f"{self.prefix}, {name} of expert {expert} here", part.rows, given
                row, block = row + part.rows, block + blocks

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.names:
            return
        weights, inputs, scales = [], [], []
        for name, parts in self.parts.items():
            shape = self.experts, sum(part.rows for part in parts), self.columns[name]
            device = getattr(layer, f"{name}_{self.roles['data']}").device
            weights.append(_import(shape, self.scheme, self.dtype, device, self._stretches(layer, name)))
            given = getattr(layer, f"{name}_{self.roles['input']}").data if "input" in self.roles else None
            given = given.reshape(self.experts, -1) if given is not None else None
            by, scale = _input(self, f"{self.prefix}, {name}", given)
            inputs.append(by)
            scales.append(scale)
            for key in self.roles.values():
                delattr(layer, f"{name}_{key}")
        self._pack(layer, weights, inputs, scales)


class OpaqOnlineMoEMethod(_Experts, OnlineMoEMethodBase):
    """Experts in high precision that are quantized when they have been loaded."""

    supports_eplb = False

    def __init__(self, moe: Any, config: Any) -> None:
        OnlineMoEMethodBase.__init__(self, moe)
        self.config = config

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.names:
            return
        weights = []
        for name in ("w13_weight", "w2_weight"):
            made = quantize_tensor(getattr(layer, name).data.contiguous(), self.config.quantizer)
            try:
                made[:1]
            except ValueError as error:
                text, shape = self.config.quantizer, " x ".join(map(str, made.shape))
                said = f"opaq: experts of {shape} would share scales in {text}, choose another format: {error}"
                raise ValueError(said) from None
            weights.append(made)
            delattr(layer, name)
        self._pack(layer, weights, [self.config.activations] * 2, [None, None])

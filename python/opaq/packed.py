"""QuantizedLinear: a linear layer whose weight is quantized once and stays packed. For inference, and for
training layers before it: gradients flow to its input only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from opaq import functional
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
from opaq.quantizer import Quantizer, as_quantizer, query, with_usage
from opaq.tensor_proto import TensorProto


def zeros(shape: tuple[int, ...], quantizer: str, dtype: torch.dtype, device: Any = None) -> QuantizedTensor:
    """A QuantizedTensor of zero bytes, which are zeros in every format."""
    made = TensorProto(shape, dtype, Quantizer(quantizer), device=device).create_tensor()
    assert isinstance(made, QuantizedTensor)
    for buffer in made.buffers():
        buffer.zero_()
    return made


def weight_quantizer(quantizer: Quantizer | str, caller: str = "opaq") -> str:
    """The canonical text of a weight's quantizer, with the rowwise copy that a forward reads."""
    return with_usage(str(as_quantizer(caller, quantizer)), True, None)


def input_quantizer_text(quantizer: Quantizer | str, caller: str = "opaq") -> str:
    """The canonical text of an input's quantizer; "" if it is not quantized."""
    return "" if quantizer == "" else with_usage(str(as_quantizer(caller, quantizer)), True, False)


def why_not_packed(text: str) -> str:
    """Why a quantizer cannot pack weights; "" if it can."""
    if query(text, "is_delayed"):
        return "needs calibrated scales, and nothing is calibrated here"
    if query(text, "is_stochastic"):
        return "rounds stochastically, which is for gradients; expected one that rounds to nearest"
    return ""


class PackedModule(nn.Module):
    """Base of the modules whose weights may be QuantizedTensors. Input scales from
    checkpoints are buffers: float32 whatever the model is cast to, None if there are none."""

    weight_names: ClassVar[tuple[str, ...]] = ()
    scale_names: ClassVar[tuple[str, ...]] = ()
    precision = "exact"  # lowest accuracy accepted for unquantized inputs; tile_ sets it
    order = "fixed"  # "any": sums may be added up in any order; quantize_ sets it

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Keeps scales in float32; a QuantizedTensor keeps its bytes itself."""
        scales = {name: self._buffers[name] for name in self.scale_names}
        self._buffers.update(dict.fromkeys(scales))
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            moved = None if scale is None else fn(scale)
            if scale is not None and moved is not None and moved.dtype != scale.dtype:
                moved = scale.to(moved.device)
            self._buffers[name] = moved
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *arguments: Any) -> None:
        """Loads a scale even if the module has none yet, and quantizes a plain weight with the quantizer of the
        module's own."""
        for name in self.scale_names:
            given = state_dict.get(prefix + name)
            if given is not None and self._buffers[name] is None:
                self._buffers[name] = torch.empty_like(given, device=next(self.parameters()).device)
        for name in self.weight_names if metadata.get("assign_to_params_buffers") else ():
            given, mine = state_dict.get(prefix + name), self._parameters[name]
            if isinstance(mine, QuantizedTensor) and given is not None and given.shape == mine.shape:
                if not isinstance(given, QuantizedTensor):
                    made = quantize_tensor(given.detach().contiguous(), mine._quantizer_text)
                    state_dict[prefix + name] = nn.Parameter(made, requires_grad=mine.requires_grad)
        super()._load_from_state_dict(state_dict, prefix, metadata, *arguments)


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of torch.autocast, if that is enabled."""
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
    return x


class QuantizedLinear(PackedModule):
    """y = x w^T + bias with a packed weight.

    `weight` is a parameter that is a QuantizedTensor of shape (out_features, in_features), zeros at first.
    `input_quantizer` quantizes x; "" does not. `input_scale`, a float32 buffer of one number or None, is a
    calibrated scale from a checkpoint: the scale of an `fp8+delayed` input, the amax (with `+global` the global
    scale) of an `nvfp4` one. Without it, it is computed from each input. `dtype` is that of the bias and of the
    dequantized weight."""

    weight: Any
    bias: Any
    input_scale: Any
    weight_names = ("weight",)
    scale_names = ("input_scale",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quantizer: Quantizer | str,
        input_quantizer: Quantizer | str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        device = torch.get_default_device() if device is None else device
        made = zeros((out_features, in_features), weight_quantizer(quantizer), dtype, device)
        added = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._fill(made, added, input_quantizer_text(input_quantizer))

    def _fill(self, weight: QuantizedTensor, bias: torch.Tensor | None, input_quantizer: str) -> None:
        self.out_features, self.in_features = weight.shape
        self.input_quantizer = input_quantizer
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        given = query(input_quantizer, "is_delayed")  # a delayed scale is always given
        self.register_buffer("input_scale", torch.ones(1, device=weight.device) if given else None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, quantizer: Quantizer | str, input_quantizer: Quantizer | str = ""
    ) -> QuantizedLinear:
        """A layer with the quantized weight of `linear` and the memory of its bias."""
        if not isinstance(linear, nn.Linear):
            name = type(linear).__name__
            hint = "; from_weight takes a QuantizedTensor" if isinstance(linear, torch.Tensor) else ""
            raise TypeError(f"QuantizedLinear.from_linear: expected a torch.nn.Linear, got a {name}{hint}")
        weight = quantize_tensor(linear.weight.detach().contiguous(), weight_quantizer(quantizer))
        made = cls.from_weight(weight, linear.bias, input_quantizer)
        made.train(linear.training)
        return made

    @classmethod
    def from_weight(
        cls,
        weight: QuantizedTensor,
        bias: torch.Tensor | None = None,
        input_quantizer: Quantizer | str = "",
    ) -> QuantizedLinear:
        """A layer with an already quantized weight."""
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(
                f"QuantizedLinear.from_weight: weight is a {type(weight).__name__}, expected a QuantizedTensor"
                "; from_linear quantizes a layer"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._fill(weight, bias, input_quantizer_text(input_quantizer))
        return made

    def to_linear(self, weight: nn.Parameter | None = None) -> nn.Linear:
        """A plain layer with the dequantized weight, or the given one, and the memory of this layer's bias."""
        weight = nn.Parameter(self.weight.dequantize()) if weight is None else weight
        with torch.device("meta"):
            made = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=weight.dtype)
        made.weight = weight
        made.bias = None if self.bias is None else nn.Parameter(self.bias.detach())
        return made.train(self.training)

    @property
    def quantizer(self) -> str:
        """The quantizer of the weight, as text."""
        return str(self.weight._quantizer_text)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; the result is [..., out_features]."""
        parameters = self._parameters  # without nn.Module.__getattr__, which costs as much as a small product
        return functional.quantized_linear(
            autocast_input(x),
            parameters["weight"],
            parameters.get("bias"),
            input_quantizer=self.input_quantizer,
            input_scale=self._buffers["input_scale"],
            precision=self.precision,
            order=self.order,
            _caller="opaq.QuantizedLinear",
        )

    def extra_repr(self) -> str:
        said = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        more = f", input_quantizer={self.input_quantizer!r}" if self.input_quantizer else ""
        more += f", precision={self.precision!r}" if self.precision != "exact" else ""
        more += f", order={self.order!r}" if self.order != "fixed" else ""
        return f"{said}, quantizer={self.quantizer!r}{more}"

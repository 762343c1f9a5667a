"""TensorProto: a tensor without its data. It creates the tensor eagerly, as a fake, or in a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opaq._operators import buffer_names, create_buffers
from opaq._tables import make_proto
from opaq.quantized_tensor import QuantizedTensor, assemble
from opaq.quantizer import Quantizer, as_quantizer

ARGUMENTS = ("shape", "dtype", "quantizer", "requires_grad", "device")


@dataclass(frozen=True, init=False, repr=False)
class TensorProto:
    """Shape, dtype, quantizer (None for a plain tensor; a Quantizer or its text), requires_grad and device of a
    tensor. Immutable, and compared and hashed by these values. `replace` and `update_usage` return new ones."""

    shape: Sequence[Any]
    dtype: torch.dtype
    quantizer: Quantizer | None
    requires_grad: bool
    device: torch.device

    def __init__(
        self,
        shape: Sequence[Any],
        dtype: torch.dtype,
        quantizer: Quantizer | str | None = None,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if quantizer is not None:
            quantizer = as_quantizer("TensorProto", quantizer)
        sizes = torch.Size(shape) if all(type(size) is int for size in shape) else tuple(shape)
        if quantizer is not None and isinstance(sizes, torch.Size) and not torch.compiler.is_compiling():
            make_proto(sizes, str(dtype).removeprefix("torch."), quantizer)  # raises if the library refuses it
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "quantizer", quantizer)
        object.__setattr__(self, "requires_grad", requires_grad)
        object.__setattr__(self, "device", torch.device("cpu" if device is None else device))

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor has a quantizer."""
        return self.quantizer is not None

    def inner_names(self) -> list[str]:
        """The buffers' names in flatten order; none for a plain tensor."""
        return [] if self.quantizer is None else list(buffer_names(str(self.quantizer)))

    def create_metadata(self) -> dict[str, Any]:
        """The properties of a quantized tensor besides its buffers."""
        return {"dtype": self.dtype, "quantizer": None if self.quantizer is None else str(self.quantizer)}

    def create_inner_tensors(self) -> dict[str, torch.Tensor]:
        """The buffers, uninitialised, by name."""
        if self.quantizer is None:
            return {}
        buffers = create_buffers(str(self.quantizer), tuple(self.shape), self.device)
        return dict(zip(self.inner_names(), buffers, strict=True))

    def create_tensor(self) -> torch.Tensor:
        """The tensor, uninitialised."""
        if self.quantizer is None:
            return torch.empty(
                self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
            )
        buffers = list(self.create_inner_tensors().values())
        made = assemble(buffers, str(self.quantizer), self.shape, self.dtype)
        return made.requires_grad_() if self.requires_grad else made

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> TensorProto:
        """The prototype of a tensor with other copies; None keeps a copy as it is. Returns a new
        prototype; Transformer Engine's changes in place."""
        if self.quantizer is None:
            raise ValueError("TensorProto: a plain tensor has no usages")
        return self.replace(quantizer=self.quantizer.with_usage(rowwise, columnwise))

    def replace(self, **changes: Any) -> TensorProto:
        """A copy with other values of some arguments of the constructor: `proto.replace(dtype=torch.float16)`.
        The same as dataclasses.replace and copy.replace."""
        kept = {name: getattr(self, name) for name in ARGUMENTS}  # vars() is not traced by PyTorch 2.11
        return TensorProto(**{**kept, **changes})

    __replace__ = replace

    def __repr__(self) -> str:
        parts = [f"{tuple(self.shape)}", f"{self.dtype}"]
        parts += [repr(self.quantizer)] if self.quantizer is not None else []
        parts += ["requires_grad=True"] if self.requires_grad else []
        return f"TensorProto({', '.join(parts)}, device='{self.device}')"


TensorSpec = TensorProto  # the name it has in newer Transformer Engine


def to_tensor_proto(tensor: torch.Tensor) -> TensorProto:
    """The prototype of a tensor, plain or quantized."""
    quantizer = tensor.quantizer if isinstance(tensor, QuantizedTensor) else None
    return TensorProto(tensor.shape, tensor.dtype, quantizer, tensor.requires_grad, tensor.device)

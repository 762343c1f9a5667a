"""Tensor and sequence parallelism around the local operator: PyTorch's functional collectives, which a compiler
traces, moving quantized bytes. Groups are named, so that they are constants in a graph."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from opaq._operators import DTYPES, buffer_names, ops
from opaq._tables import formats
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer

_c10d = torch.ops._c10d_functional


class Parallel(NamedTuple):
    """Which way a layer is split over a group: "column" (out features), "row" (in features) or "" (not), and
    whether activations outside of it are split along their first dimension."""

    mode: str = ""
    sequence: bool = False
    group: str = ""
    size: int = 1

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        return self.mode == "row" and self.sequence


def group_of(group: Any) -> tuple[str, int]:
    """A process group's or a one-dimensional mesh's name and size."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"opaq: the mesh {group} has {group.ndim} dimensions, expected one")
        group = group.get_group()
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"opaq: tp_group is a {type(group).__name__}, expected a ProcessGroup or a DeviceMesh")
    return group.group_name, group.size()


def all_reduce(tensor: torch.Tensor, how: str, group: str) -> torch.Tensor:
    made: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(tensor.contiguous(), how, group))
    return made


def all_gather(tensor: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Along the first dimension."""
    gathered = _c10d.all_gather_into_tensor(tensor.contiguous(), parallel.size, parallel.group)
    made: torch.Tensor = _c10d.wait_tensor(gathered)
    return made


def reduce_scatter(tensor: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Along the first dimension."""
    scattered = _c10d.reduce_scatter_tensor(tensor.contiguous(), "sum", parallel.size, parallel.group)
    made: torch.Tensor = _c10d.wait_tensor(scattered)
    return made


def reduce_rows(tensor: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """A sum over the group, of which each rank keeps its part of a split sequence."""
    if parallel.sequence:
        return reduce_scatter(tensor, parallel)
    return all_reduce(tensor, "sum", parallel.group)


def whole_shape(shape: Any, parallel: Parallel) -> tuple[Any, ...]:
    return (shape[0] * parallel.size, *shape[1:])


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient, "sum", ctx.group), None


def sum_gradient(tensor: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The tensor itself, which every rank has and uses on its part of a split sequence: gradients are parts."""
    made: torch.Tensor = _SumGradient.apply(tensor, parallel.group) if parallel.sequence else tensor
    return made


# ---- quantized shards: the bytes are those that the whole tensor would have ----


def _shared_amaxes(text: str) -> tuple[bool, bool]:
    """Whether one amax covers all of the rowwise copy, and of the columnwise: ranks have to agree on it."""
    quantizer = Quantizer(text)
    covers = quantizer.format in ("fp8", "nvfp4") and not {"delayed", "rowscaled"} & set(quantizer.options)
    return covers and quantizer.usage != "columnwise", covers and quantizer.usage != "rowwise"


def covers_rows(text: str) -> bool:
    """Whether a column's scale covers all rows, so that no rank can quantize its part of them alone."""
    quantizer = Quantizer(text)
    return quantizer.usage != "rowwise" and (quantizer.format == "fp8row" or "rowscaled" in quantizer.options)


def _block_rows(text: str) -> int:
    """How many rows share a scale in some copy: shards must be cut between them."""
    quantizer = Quantizer(text)
    row = next(row for row in formats() if row.name == quantizer.format)
    columnwise = quantizer.usage != "rowwise"
    square = "2d" in quantizer.options
    return max(row.block_rows, row.block_columns if columnwise or square else 1, 1)


for _function in (_shared_amaxes, covers_rows, _block_rows):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010  # as in quantizer.py


def check_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, text: str, parallel: Parallel
) -> None:
    """What would be found out only after a collective; `text` is how rows are quantized before they are
    gathered, "" if they are not."""
    if x.dtype not in DTYPES.values() or not x.is_floating_point():
        raise TypeError(f"opaq.linear: x is {x.dtype}, expected float32, bfloat16 or float16")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"opaq.linear: {name} is {other.dtype}, expected float32 or {x.dtype}, which x is")
    if parallel.mode == "row" and bias is not None:
        raise ValueError("opaq.linear: a row-parallel layer's bias is added after the sum over ranks")
    if not parallel.sequence:
        return
    if x.dim() < 2:
        raise ValueError(f"opaq.linear: x has the shape {tuple(x.shape)}, which has no sequence to divide")
    if parallel.gathers_input and isinstance(x, QuantizedTensor):
        raise NotImplementedError("opaq.linear: x is quantized already, so its rows cannot be gathered")
    if parallel.gathers_input and "+sr" in text:
        raise NotImplementedError(f"opaq.linear: {text} does not go with a sequence-parallel layer's input")
    if parallel.gathers_gradient and x.shape[0] % parallel.size:
        raise ValueError(
            f"opaq.linear: {x.shape[0]} as the first size of x cannot be divided among {parallel.size} ranks"
        )
    rows = prod(x.shape[:-1]) // (parallel.size if parallel.gathers_gradient else 1)
    if text and rows % _block_rows(text):
        raise ValueError(
            f"opaq.linear: {rows} rows on each of {parallel.size} ranks cannot be gathered as {text}: expected "
            f"a multiple of {_block_rows(text)}"
        )


def agreed_amax(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """[1]: the largest value of the whole tensor."""
    return all_reduce(ops.amax(x, "fp8")[:1], "max", parallel.group)


def quantize_shard(
    x: torch.Tensor,
    text: str,
    parallel: Parallel,
    scale: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The buffers of this rank's rows, quantized as the whole tensor's would be."""
    rowwise, columnwise = _shared_amaxes(text)
    amax = all_reduce(ops.amax(x, text), "max", parallel.group) if rowwise or columnwise else x
    made: list[torch.Tensor] = ops.quantize(
        x, text, scale, amax[:1] if rowwise else None, amax[1:] if columnwise else None, random
    )
    return made


def copy_of(buffers: list[torch.Tensor], text: str, wanted: str) -> list[torch.Tensor]:
    """Those of the buffers that `wanted`, with fewer usages than `text`, has."""
    names = buffer_names(wanted)
    return [b for name, b in zip(buffer_names(text), buffers, strict=True) if name in names]


def gather_rows(
    buffers: list[torch.Tensor], text: str, shape: Any, dtype: torch.dtype, parallel: Parallel
) -> list[torch.Tensor]:
    """The whole tensor's buffers, from those that each rank has of its rows."""
    gathered = [all_gather(buffer, parallel) for buffer in buffers]
    made: list[torch.Tensor] = ops.gather_rows(gathered, text, shape, whole_shape(shape, parallel), dtype)
    return made

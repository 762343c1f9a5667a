"""Tensor and sequence parallelism around the local operator. Quantized bytes are moved by PyTorch's functional
collectives, which torch.compile traces. Groups are referred to by name, so they are constants in a graph."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from opaq._library import USAGES
from opaq._operators import buffer_names, ops
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import query

_c10d = torch.ops._c10d_functional


class Parallel(NamedTuple):
    """How a layer is split over a group: "column" (out features), "row" (in features) or "" (not split), and
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
    """Sums over the group; with a split sequence each rank keeps its part of the sum."""
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
    """Returns the tensor unchanged; its gradient is summed over the ranks. For a parameter that every rank
    applies to its part of a split sequence."""
    made: torch.Tensor = _SumGradient.apply(tensor, parallel.group) if parallel.sequence else tensor
    return made


# ---- quantized shards: their bytes equal those of the whole tensor, quantized ----


def check_parallel(
    caller: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, text: str, parallel: Parallel
) -> None:
    """Raises the operator's errors before any collective starts. `text` is the quantizer of rows that are
    gathered quantized, "" if there are none."""
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{caller}: {name} is {other.dtype}, expected float32 or {x.dtype}, which x is")
    if parallel.mode == "row" and bias is not None:
        raise ValueError(f"{caller}: a row-parallel layer's bias is added after the sum over ranks")
    if not parallel.sequence:
        return
    if x.dim() < 2:
        raise ValueError(f"{caller}: x has the shape {tuple(x.shape)}, which has no sequence to divide")
    if parallel.gathers_input and isinstance(x, QuantizedTensor):
        raise NotImplementedError(f"{caller}: x is quantized already, so its rows cannot be gathered")
    if parallel.gathers_input and query(text, "is_stochastic"):
        raise NotImplementedError(f"{caller}: {text} is not supported for a sequence-parallel layer's input")
    if parallel.gathers_gradient and x.shape[0] % parallel.size:
        raise ValueError(
            f"{caller}: {x.shape[0]} as the first size of x cannot be divided among {parallel.size} ranks"
        )
    rows = prod(x.shape[:-1]) // (parallel.size if parallel.gathers_gradient else 1)
    if text and rows % (block := query(text, "rows_per_scale")):
        raise ValueError(
            f"{caller}: {rows} rows on each of {parallel.size} ranks cannot be gathered as {text}: expected "
            f"a multiple of {block}"
        )


def agreed_amax(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The amax of the whole tensor over all ranks, of shape [1]."""
    return all_reduce(ops.amax(x, "fp8")[:1], "max", parallel.group)


def quantize_shard(
    x: torch.Tensor,
    text: str,
    parallel: Parallel,
    scale: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The buffers of this rank's rows, quantized as the whole tensor's would be."""
    shared = query(text, "tensor_amaxes")  # copies whose one amax per tensor is reduced over the ranks
    amax = all_reduce(ops.amax(x, text), "max", parallel.group) if shared else x
    rowwise, columnwise = (bool(shared & USAGES[usage]) for usage in ("rowwise", "columnwise"))
    made: list[torch.Tensor] = ops.quantize(
        x, text, scale, amax[:1] if rowwise else None, amax[1:] if columnwise else None, random
    )
    return made


def copy_of(buffers: list[torch.Tensor], text: str, wanted: str) -> list[torch.Tensor]:
    """The buffers of `wanted`, which has fewer usages than `text`."""
    names = buffer_names(wanted)
    return [b for name, b in zip(buffer_names(text), buffers, strict=True) if name in names]


def gather_rows(
    buffers: list[torch.Tensor], text: str, shape: Any, dtype: torch.dtype, parallel: Parallel
) -> list[torch.Tensor]:
    """Gathers the buffers of the whole tensor from each rank's rows."""
    gathered = [all_gather(buffer, parallel) for buffer in buffers]
    made: list[torch.Tensor] = ops.gather_rows(gathered, text, shape, whole_shape(shape, parallel), dtype)
    return made

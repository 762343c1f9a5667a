"""QuantizedTensor: a tensor whose data are the buffers of a quantizer. It behaves like a tensor of its shape
and dtype; its bytes are laid out by the library's format table."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from opaq._import_hook import allow_in_graph
from opaq._library import version
from opaq._operators import buffer_names, buffer_rows, call_operator, expect_tensors, ops
from opaq._refusals import refuse_transforms
from opaq.quantizer import Quantizer, as_quantizer, with_tiles

aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}
LABELS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that can be quantized


class _ElementSize(int):
    """Bytes per element, rounded up; multiplied by the number of elements it gives exactly the bytes of the
    buffers, for code that sums up a model's memory."""

    nbytes: int
    elements: int

    def __new__(cls, nbytes: int, elements: int) -> _ElementSize:
        made = super().__new__(cls, -(-nbytes // elements))
        made.nbytes, made.elements = nbytes, elements
        return made

    def __mul__(self, count: Any) -> Any:
        if not isinstance(count, int):
            return NotImplemented
        return -(-count * self.nbytes // self.elements)

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:  # copies and pickles as a plain integer
        return int, (int(self),)


class QuantizedTensor(torch.Tensor):
    """Created by `opaq.quantize_tensor` or `TensorProto.create_tensor`. Its buffers are attributes with
    Transformer Engine's names (`_rowwise_data`, ...)."""

    _quantizer_text: str
    _is_cut = False  # a slice of another tensor, whose memory it does not share
    _is_flat = False  # flattened view, which FSDP2 creates and never reads

    @staticmethod
    def __new__(
        cls, buffers: Sequence[torch.Tensor], quantizer: str, shape: Sequence[Any], dtype: torch.dtype
    ) -> QuantizedTensor:
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=buffers[0].device
        )
        made._quantizer_text = quantizer
        for row, buffer in zip(buffer_rows(quantizer), buffers, strict=True):
            setattr(made, row.name, buffer)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @classmethod
    def from_checkpoint(
        cls,
        tensors: Mapping[str, torch.Tensor],
        layout: str,
        *,
        format: str = "",  # noqa: A002  # as a Quantizer's
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """A weight from its tensors as a safetensors file has them, under the names they have there, with or
        without their module's. `layout` is "compressed-tensors", "modelopt", "deepseek" or "gpt-oss". The
        format follows from names, dtypes and shapes unless `format` is given. A scale of the input is accepted
        and not used. `dtype` is what the weight dequantizes to, PyTorch's default if not given."""
        from opaq._from_checkpoint import from_checkpoint  # noqa: PLC0415  # avoids a circular import

        return from_checkpoint(tensors, layout, format, dtype or torch.get_default_dtype())

    # ---- buffers and metadata ----

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer that its bytes belong to."""
        return Quantizer(self._quantizer_text)

    def buffer_names(self) -> list[str]:
        """The attribute names of the buffers, in flatten order."""
        return list(buffer_names(self._quantizer_text))

    def buffers(self) -> list[torch.Tensor]:
        """The buffers, in flatten order; they are not copies."""
        if self._is_flat:
            raise NotImplementedError(
                "opaq: this is a flattened QuantizedTensor, and the quantized dimension cannot be "
                "merged with others; use it in its own shape, or dequantize it first"
            )
        return [getattr(self, name) for name in buffer_names(self._quantizer_text)]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(getattr(self, name).nbytes for name in self.buffer_names())

    def element_size(self) -> int:
        """Bytes of the buffers per element: `numel() * element_size()` is `nbytes`."""
        elements = self.numel()
        return _ElementSize(self.nbytes, elements) if elements else self.dtype.itemsize

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return self.buffer_names(), (self._quantizer_text, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> QuantizedTensor:
        text, dtype = context
        return QuantizedTensor([inner[row.name] for row in buffer_rows(text)], text, size, dtype)

    def _stable_hash_for_caching(self) -> str:
        """Metadata for compiled graphs; the buffers' shapes follow from it."""
        return f"opaq {version} {self!r} {self.stride()} {self.requires_grad}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, {self.quantizer!r}, device='{self.device}')"

    # ---- conversions ----

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor, from the rowwise copy if there is one. Gradients pass through unchanged."""
        made: torch.Tensor = _Dequantize.apply(self, dtype or self.dtype)
        return made

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> QuantizedTensor:
        """A tensor with these copies; a missing one is created if that needs no second rounding."""
        target = str(self.quantizer.with_usage(rowwise, columnwise))
        if target == self._quantizer_text:
            return self
        made: QuantizedTensor = _Convert.apply(self, target)
        return made

    def tiled(self, tiled: bool = True) -> QuantizedTensor:
        """The same tensor with its codes and scales in tiles, as CPU kernels read them, or in rows
        (docs/formats.md, "Tiles")."""
        target = with_tiles(self._quantizer_text, tiled)
        if target == self._quantizer_text:
            return self
        made: QuantizedTensor = _Convert.apply(self, target)
        return made

    def share_memory_(self) -> QuantizedTensor:
        """Moves the buffers to shared memory, for other processes."""
        for buffer in self.buffers():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers are in shared memory."""
        return all(buffer.is_shared() for buffer in self.buffers())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_is_cut"}

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        made: QuantizedTensor = super().__deepcopy__(memo)
        made._is_cut = False
        return made

    def __setitem__(self, *_: Any) -> None:
        raise NotImplementedError("opaq: a QuantizedTensor's values cannot be changed; dequantize it first")

    # ---- FSDP2 gathers the bytes; the library joins the shards ----

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        if self.shape[0] * mesh.size() != outer_size[0]:  # every rank raises, so none waits for another
            raise NotImplementedError(
                f"opaq: {outer_size[0]} rows are not divided evenly by {mesh.size()} ranks, so the bytes of "
                f"{self.quantizer!r} cannot be gathered"
            )
        return tuple(self.buffers()), (self._quantizer_text, tuple(self.shape), tuple(outer_size), self.dtype)

    def fsdp_post_all_gather(
        self, gathered: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        text, shard, whole, dtype = metadata
        buffers = ops.gather_rows(list(gathered), text, shard, whole, dtype)
        if out is None:
            return assemble(buffers, text, whole, param_dtype), tuple(buffers)
        # the values are the same, so tensors saved for the backward stay valid
        with torch.autograd._unsafe_preserve_version_counter(tuple(out.buffers())):
            for mine, new in zip(out.buffers(), buffers, strict=True):
                mine.copy_(new)
        return None

    # ---- dispatch of PyTorch's operators ----

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if (handler := _HANDLERS.get(function)) is not None:
            return handler(function, *arguments, **keywords)
        if function.namespace == "c10d":  # these write without declaring it in their schemas
            raise NotImplementedError(f"opaq: {function} takes no QuantizedTensor; dequantize it first")
        if any(isinstance(t, QuantizedTensor) for t in _written(function, arguments, keywords)):
            raise NotImplementedError(
                f"opaq: {function} changes a tensor in place, and a QuantizedTensor's values cannot be changed;"
                " dequantize it first"
            )
        plain = tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (arguments, keywords))
        return function(*plain[0], **plain[1])

    __torch_function__ = torch._C._disabled_torch_function_impl


def _written(function: Any, arguments: Any, keywords: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    rows = function._schema.arguments
    given = {**dict(zip((row.name for row in rows), arguments, strict=False)), **keywords}
    changed = [given.get(row.name) for row in rows if row.alias_info is not None and row.alias_info.is_write]
    return list(tree_leaves(changed))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        arguments = tensor.buffers(), tensor._quantizer_text, tensor.shape, dtype
        made: torch.Tensor = call_operator("opaq.QuantizedTensor.dequantize", ops.dequantize, *arguments)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, target: str) -> torch.Tensor:
        arguments = tensor.buffers(), tensor._quantizer_text, target, tensor.shape, tensor.dtype
        made = call_operator("opaq.QuantizedTensor.update_usage", ops.convert, *arguments)
        return QuantizedTensor(made, target, tensor.shape, tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, text: str, given: tuple[Any, ...]) -> torch.Tensor:
        made = call_operator("opaq.quantize_tensor", ops.quantize, x, text, *given)
        return QuantizedTensor(made, text, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


@allow_in_graph
def _assemble(buffers: list[torch.Tensor], text: str, shape: Any, dtype: torch.dtype) -> QuantizedTensor:
    return QuantizedTensor(buffers, text, shape, dtype)


def assemble(buffers: Sequence[torch.Tensor], text: str, shape: Any, dtype: torch.dtype) -> QuantizedTensor:
    """A QuantizedTensor around buffers, in a compiled graph too."""
    made: QuantizedTensor = _assemble(list(buffers), text, tuple(shape), dtype)
    return made


def quantize_tensor(
    x: torch.Tensor,
    quantizer: Quantizer | str,
    *,
    scale: torch.Tensor | None = None,
    amax_rowwise: torch.Tensor | None = None,
    amax_columnwise: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantizes x; gradients pass through unchanged. `quantizer` is an opaq.Quantizer or its text. `random`,
    for `sr`, is an int64 tensor (seed, offset)."""
    refuse_transforms("opaq.quantize_tensor")
    expect_tensors("opaq.quantize_tensor", x=x, scale=scale, random=random)
    text = as_quantizer("opaq.quantize_tensor", quantizer)._text
    if isinstance(x, QuantizedTensor) and not torch.compiler.is_compiling():
        warnings.warn(
            f"opaq.quantize_tensor: x of shape {tuple(x.shape)} is quantized already ({x._quantizer_text}): "
            f"its dequantized values are quantized again ({text}), which adds a second rounding error",
            stacklevel=2,
        )
    made: QuantizedTensor = _Quantize.apply(x, text, (scale, amax_rowwise, amax_columnwise, random))
    return made


# ---- PyTorch's operators with an implementation here ----


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return keep


def _like(
    tensor: QuantizedTensor, buffers: Sequence[torch.Tensor], shape: Any = None, dtype: Any = None
) -> Any:
    shape = tensor.shape if shape is None else shape
    return QuantizedTensor(buffers, tensor._quantizer_text, shape, dtype or tensor.dtype)


def _marked(made: Any, tensor: QuantizedTensor) -> Any:
    made._is_cut, made._is_flat = tensor._is_cut, tensor._is_flat
    return made


@_handles(aten.detach.default, aten.alias.default, aten.clone.default)
def _each_buffer(function: Any, tensor: QuantizedTensor, **keywords: Any) -> Any:
    keywords.pop("memory_format", None)
    buffers = [function(getattr(tensor, name), **keywords) for name in tensor.buffer_names()]
    made = _marked(_like(tensor, buffers), tensor)
    made._is_cut = tensor._is_cut and function is not aten.clone.default
    return made


def for_device(tensor: QuantizedTensor, device: Any) -> QuantizedTensor:
    """The tensor in the layout that kernels of a device read. Tiles are for processors: on the way to a GPU
    they become rows."""
    to_gpu = device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    return tensor.tiled(False) if to_gpu else tensor


@_handles(aten._to_copy.default)
def _to(function: Any, tensor: QuantizedTensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    """Casting to another float dtype changes only the label: the bytes are the same."""
    if dtype not in (None, *LABELS):
        return function(tensor.dequantize(), dtype=dtype, device=device, **rest)
    tensor = for_device(tensor, device)
    moved = [aten._to_copy.default(buffer, device=device) for buffer in tensor.buffers()]
    return _like(tensor, moved, dtype=dtype)


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(function: Any, tensor: QuantizedTensor, size: Sequence[Any]) -> Any:
    shape = torch.empty(tensor.shape, device="meta").view(size).shape
    if shape[-1:] != tensor.shape[-1:]:
        if len(shape) == 1:
            made = _like(tensor, [getattr(tensor, name) for name in tensor.buffer_names()], shape)
            made._is_flat = True
            return made
        raise NotImplementedError(
            f"opaq: {tuple(tensor.shape)} cannot be viewed as {tuple(shape)}: the last dimension is quantized"
        )
    rows = buffer_rows(tensor._quantizer_text)
    shaped = [buffer.view(row.shape(shape)) for row, buffer in zip(rows, tensor.buffers(), strict=True)]
    return _marked(_like(tensor, shaped, shape), tensor)


@_handles(aten.as_strided.default)
def _as_strided(
    function: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None
) -> Any:
    """Only the identity is supported, which FSDP2 uses."""
    if (tuple(size), tuple(stride), storage_offset or 0) != (tuple(tensor.shape), tensor.stride(), 0):
        raise NotImplementedError(f"opaq: {tensor!r} has no strides to change; dequantize it first")
    return _each_buffer(aten.alias.default, tensor)


def _clamp(bound: Any, size: Any) -> Any:
    """A slice bound clamped like Python's; it may be symbolic."""
    return torch.sym_min(size, torch.sym_max(0, bound + size if bound < 0 else bound))


@_handles(aten.slice.Tensor)
def _slice(
    function: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if dim % tensor.dim() != 0 or step != 1 or tensor.dim() < 2:
        raise NotImplementedError("opaq: a QuantizedTensor is sliced along its first dimension, without a step")
    size = tensor.shape[0]
    first, last = (_clamp(bound, size) for bound in (start or 0, size if end is None else end))
    is_all = isinstance(size, int) and (first, last) == (0, size)  # comparing symbols would add a guard
    if is_all or (start in (None, 0) and end in (None, sys.maxsize)):
        return _each_buffer(aten.alias.default, tensor)
    length = torch.sym_max(0, last - first)
    whole, part = list(tensor.shape), [length, *tensor.shape[1:]]
    rows = first * prod(tensor.shape[1:-1])
    arguments = tensor.buffers(), tensor._quantizer_text, whole, part, tensor.dtype, rows
    cut = call_operator("opaq.QuantizedTensor", ops.slice_rows, *arguments)
    made = _like(tensor, cut, part)
    made._is_cut = True
    return made


@_handles(aten.split.Tensor)
def _split(function: Any, tensor: QuantizedTensor, size: int, dim: int = 0) -> Any:
    if size <= 0:
        raise ValueError(f"opaq: a QuantizedTensor is split into pieces of at least one row, not of {size}")
    return [_slice(None, tensor, dim, i, i + size) for i in range(0, max(1, tensor.shape[dim]), size)]


@_handles(aten.copy_.default)
def _copy(function: Any, tensor: Any, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(tensor, QuantizedTensor):
        return tensor.copy_(source.dequantize(), non_blocking)
    if tensor._is_cut:
        raise NotImplementedError(
            f"opaq: {tensor!r} is a slice of another tensor and does not share its memory, so values copied "
            "into it would not reach that tensor; clone it for a tensor of its own. FSDP2 needs rows that the "
            "ranks divide evenly; a sharded checkpoint is loaded into the same shards or into a plain tensor"
        )
    if not isinstance(source, QuantizedTensor):
        source = quantize_tensor(source.to(tensor.device, tensor.dtype), tensor._quantizer_text)
    if source.shape == tensor.shape:
        source = source.tiled(tensor.quantizer.is_tiled)
    if (source._quantizer_text, source.shape) != (tensor._quantizer_text, tensor.shape):
        raise NotImplementedError(f"opaq: {source!r} cannot be copied into {tensor!r}")
    for mine, theirs in zip(tensor.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs, non_blocking)
    return tensor


@_handles(aten.new_zeros.default, aten.empty_like.default, aten.zeros_like.default)
def _new(function: Any, tensor: QuantizedTensor, size: Any = None, **keywords: Any) -> Any:
    """A tensor with the same quantizer; zero bytes decode to zeros in every format."""
    rows = buffer_rows(tensor._quantizer_text)
    shape = tensor.shape if size is None else size
    dtype, device = keywords.get("dtype"), keywords.get("device")
    if not len(shape) or dtype not in (None, *LABELS):  # a plain tensor
        return torch.zeros(shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    made = [b.new_zeros(row.shape(shape), device=device) for row, b in zip(rows, tensor.buffers(), strict=True)]
    return _like(tensor, made, shape, dtype)


@_handles(aten.equal.default)
def _equal(function: Any, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether quantizers and bytes are equal; compared with a plain tensor, whether values are."""
    if not (isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor)):
        return bool(
            torch.equal(*(t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (first, second)))
        )
    same = first._quantizer_text == second._quantizer_text and first.shape == second.shape
    pairs = zip(first.buffers(), second.buffers(), strict=True) if same else ()
    return same and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# ---- collectives on the bytes, for DTensor and torch.distributed.checkpoint ----


def _all_gather(function: Any, tensor: QuantizedTensor, size: int, group: Any) -> Any:
    """Gathers rows, for DTensor.full_tensor() and full state_dicts."""
    whole = [tensor.shape[0] * size, *tensor.shape[1:]]
    gathered = [_c10d.wait_tensor(function(b.contiguous(), size, group)) for b in tensor.buffers()]
    buffers = ops.gather_rows(gathered, tensor._quantizer_text, tensor.shape, whole, tensor.dtype)
    return _like(tensor, buffers, whole)


def _waited(function: Any, tensor: QuantizedTensor) -> Any:
    return _each_buffer(aten.alias.default, tensor)


def _scatter(function: Any, outputs: list[Any], inputs: list[list[Any]], *rest: Any) -> Any:
    """Scatters shards, for distribute_tensor() and loading a full state_dict."""
    for name in outputs[0].buffer_names():
        mine, theirs = tree_map_only(QuantizedTensor, lambda t, name=name: getattr(t, name), (outputs, inputs))
        *_, work = function(mine, theirs, *rest)
        work.wait()
    return outputs, work


def _broadcast(function: Any, tensors: list[Any], *rest: Any) -> Any:
    """Broadcasts values, since other ranks may receive them in a plain tensor. Equal tensors are not
    rewritten."""
    plain = [t.dequantize() for t in tensors]
    before = [t.clone() for t in plain]
    *_, work = function(plain, *rest)
    work.wait()
    for tensor, old, new in zip(tensors, before, plain, strict=True):
        if not torch.equal(old, new):
            tensor.copy_(new)
    return tensors, work


if torch.distributed.is_available():
    _c10d = torch.ops._c10d_functional
    _handles(_c10d.all_gather_into_tensor.default)(_all_gather)
    _handles(_c10d.wait_tensor.default)(_waited)
    if hasattr(_c10d, "_wrap_tensor_autograd"):  # of PyTorch 2.13
        _handles(_c10d._wrap_tensor_autograd.default)(_waited)
    _handles(torch.ops.c10d.scatter_.default)(_scatter)
    _handles(torch.ops.c10d.broadcast_.default)(_broadcast)

torch.serialization.add_safe_globals([QuantizedTensor, Quantizer])

"""Shared by the PyTorch tests: quantizers, tensors, and the arguments that a quantizer's options require."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import opaq
from conftest import need
from opaq import Quantizer
from spec_texts import valid_texts

torch = need("torch")
need("opaq.quantized_tensor")  # registers the operators

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
USAGES = ("", "+columnwise", "+both")
FORMATS = tuple(row.name for row in opaq.formats())

# One quantizer for each option that changes a buffer or an argument, with every usage.
BASES = (
    *FORMATS,
    *("fp8+delayed", "fp8.e5m2+pow2", "fp8blk1+pow2+eps=1e-12", "mxfp8+swizzle", "mxfp8.e5m2+2d", "mxfp4+sr"),
    *("mxfp4+rule=ocp", "nvfp4+2d", "nvfp4+rht+sr", "nvfp4+rowscaled", "nvfp4+4over6", "nvfp4+swizzle"),
    *("nvfp4+rowscaled+global+rule=compressed-tensors", "nvfp4+global+rule=modelopt"),
)
QUANTIZERS = tuple(str(Quantizer(base + usage)) for base in BASES for usage in USAGES)
FEW_QUANTIZERS = tuple({Quantizer(text).format: text for text in QUANTIZERS}.values())  # one of each format

SHAPES = [(1, 1), (37,), (5, 37), (16, 128), (2, 3, 32), (3, 2, 5, 17), (40, 130), (130, 33)]
EMPTY = [(0, 32), (5, 0), (0,), (2, 0, 16)]


def make_tensor(shape: tuple[int, ...], device: str, dtype: Any = torch.float32, gap: int = 0) -> Any:
    """Numbers of many magnitudes, with a few special values; `gap` elements between rows."""
    rng = np.random.default_rng(crc32(repr((shape, gap)).encode()))
    rows, columns = math.prod(shape[:-1]), shape[-1]
    values = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-9, 9, (rows, 1)))
    flat = values.reshape(-1)
    if flat.size > 400:
        flat[rng.integers(0, flat.size, 8)] = [0.0, -0.0, 1e-40, -3e-39, 448.0, 6.0, 60000.0, -0.5]
    memory = torch.full((rows, columns + gap), math.nan, dtype=dtype)
    memory[:, :columns] = torch.from_numpy(values)
    strides = [(columns + gap) * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    return torch.as_strided(memory.to(device), shape, (*strides, 1))


def given_for(text: str, device: str = "cpu") -> dict[str, Any]:
    """The arguments that the quantizer's options require."""
    options, given = Quantizer(text).options, {}
    if "delayed" in options:
        given["scale"] = torch.tensor([12.5], device=device)
    if "sr" in options:
        given["random"] = torch.tensor([1234567890123, 77], device=device)
    return given


def quantized(text: str, shape: tuple[int, ...], device: str, dtype: Any = torch.float32) -> Any:
    return opaq.quantize_tensor(make_tensor(shape, device, dtype), text, **given_for(text, device))


def numpy_of(tensor: Any) -> NDArray[Any]:
    """A NumPy array with the same memory and strides if the tensor is on the CPU; bfloat16 is ml_dtypes'."""
    tensor = tensor.detach().cpu()
    is_bf16 = tensor.dtype == torch.bfloat16
    array: NDArray[Any] = tensor.view(torch.int16).numpy() if is_bf16 else tensor.numpy()
    return array.view(ml_dtypes.bfloat16) if is_bf16 else array


def same_bytes(first: Any, second: Any) -> bool:
    """Compares bytes, so equal NaNs are equal."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return numpy_of(first).tobytes() == numpy_of(second).tobytes()


def same_buffers(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(same_bytes(a, b) for a, b in zip(first, second, strict=True))


def some_texts(count: int) -> tuple[str, ...]:
    """Texts spread evenly over the list of valid ones."""
    texts = valid_texts()
    return texts[:: len(texts) // count]

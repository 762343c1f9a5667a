"""explain: which kernel multiplies what, in a model or a runner, and why."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import nn

from opaq import _library, _stacked
from opaq._operators import DTYPES
from opaq.model import PRECISIONS
from opaq.packed import PackedModule
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer, query
from opaq.runner import Runner


class Explained(NamedTuple):
    """One product: the parameter's name, how weight and input are quantized, the kernel, and why that one."""

    name: str
    weight: str
    input: str
    precision: str
    kernel: str
    why: str


def kernel_of(weight: str, given: str, dtype: torch.dtype, precision: str) -> str:
    """The library's kernel for quantizers of a weight and its input ("": plain, of that dtype)."""
    specs = [ctypes.byref(Quantizer(text).spec) if text else None for text in (weight, given)]
    element = next(number for number, known in DTYPES.items() if known == dtype)
    found = _library.library.opaq_linear_kernel(*specs, element, PRECISIONS.index(precision))
    return str(found.decode())


def _why(weight: str, given: str, precision: str, kernel: str) -> str:
    if kernel in _library.library.opaq_kernel_forced().decode().replace(" ", "").split(","):
        return "it is forced"
    if not query(weight, "is_tiled"):
        return "the weight is not tiled: it is decoded to float32 in every call; opaq.tile_ makes tiles"
    if "_codes_" in kernel:
        return "both are 4-bit codes: multiplied as integers"
    if kernel.startswith("gemm_"):
        return "there is no kernel for tiles on this processor: the weight is decoded to float32 in every call"
    if "_bf16_" in kernel:
        return "tiles; an input in bfloat16 is multiplied as it is, which is exact"
    if given:
        return "the input's codes are decoded to float32"
    if f"_{precision}_" not in kernel:
        return f"there is no {precision} kernel for 8-bit weights, so it is exact"
    return "tiles, in the precision that was asked for"


def explain(what: nn.Module | Runner) -> list[Explained]:
    """Prints and returns which kernel each packed weight of a module, or a runner, runs on here."""
    rows = []
    if isinstance(what, Runner):
        info = what.info()
        rows.append(Explained(f"runner {what.id}", info.format, "", "", info.kernel, "chosen when it was made"))
    else:
        for name, module in what.named_modules():
            if not isinstance(module, PackedModule) and not _stacked.is_packed(module):
                continue
            for index, (key, weight) in enumerate(module.named_parameters(recurse=False)):
                if isinstance(weight, QuantizedTensor):
                    role = "hidden_quantizer" if index and key.startswith("down") else "input_quantizer"
                    rows.append(_row(f"{name}.{key}".lstrip("."), module, weight, getattr(module, role, "")))
    for row in rows:
        print(f"{row.name:40} {row.weight:24} x {row.input or 'plain':12} {row.kernel:32} {row.why}")
    return rows


def _row(name: str, module: Any, weight: QuantizedTensor, given: str) -> Explained:
    precision = getattr(module, "precision", "exact")
    text = weight._quantizer_text
    kernel = kernel_of(text, given, weight.dtype, precision)
    return Explained(name, text, given, precision, kernel, _why(text, given, precision, kernel))

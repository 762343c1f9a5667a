"""explain: which kernel runs for each weight of a model or runner, and why."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import torch
from torch import nn

from opaq import _library, _stacked
from opaq._operators import NUMBERS
from opaq._summary import kind_of, table_lines
from opaq.linear import Linear
from opaq.model import PRECISIONS
from opaq.packed import PackedModule
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer, query
from opaq.runner import Runner


class Explained(NamedTuple):
    """One product: the weight's name, the quantizers of weight and input, the kernel, and the reason for it."""

    name: str
    weight: str
    input: str
    precision: str
    kernel: str
    why: str


def kernel_of(weight: str, given: str, dtype: torch.dtype, precision: str, device: str = "cpu") -> str:
    """The library's kernel for quantizers of a weight and its input ("": plain, of that dtype), on a type of
    device; "" if there is no back end for it."""
    specs = [ctypes.byref(Quantizer(text).spec) if text else None for text in (weight, given)]
    where = _library.Device(int(device == "cuda"), 0)
    words = NUMBERS[dtype], PRECISIONS.index(precision)
    found = _library.library.opaq_device_linear_kernel(where, *specs, *words)
    return str(found.decode()) if found else ""


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
        return "tiles; bfloat16 inputs are multiplied exactly, without conversion"
    if given:
        return "the input's codes are decoded to float32"
    if f"_{precision}_" not in kernel:
        return f"there is no {precision} kernel for 8-bit weights, so it is exact"
    return "tiles, in the requested precision"


def _why_on_cuda(weight: str, kernel: str) -> str:
    if not kernel:
        return "opaq has no CUDA back end here: opaq.library_info() lists its back ends"
    if query(weight, "is_tiled"):
        return "the weight has tiles, which are for processors, and is decoded in every call: see tiled(False)"
    if kernel.endswith("_fma"):
        return "multiply-adds in float32: inputs in bfloat16 are multiplied on tensor cores"
    return "tensor cores, in bfloat16: codes and block scales are decoded exactly on the way"


class Explanation(Sequence[Explained]):
    """The rows of `explain`: a sequence of Explained. Printed, it is a table with a line for each group of rows
    whose names differ in numbers only; notebooks show it as HTML."""

    HEADER = ("weight", "count", "quantizer", "input", "precision", "kernel", "why")

    def __init__(self, rows: Iterable[Explained]) -> None:
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def groups(self) -> list[tuple[str, ...]]:
        """The lines of the table, without its header."""
        found: dict[Explained, list[str]] = {}
        for row in self.rows:
            found.setdefault(row._replace(name=kind_of(row.name)), []).append(row.name)
        return [
            (
                kind.name if len(names) > 1 else names[0],
                str(len(names)),
                kind.weight,
                kind.input or "plain",
                *kind[3:],
            )
            for kind, names in found.items()
        ]

    def __str__(self) -> str:
        return "\n".join(table_lines([self.HEADER, *self.groups()], right=(1,)))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = [("th", self.HEADER), *(("td", group) for group in self.groups())]
        cells = ["".join(f"<{tag}>{escape(text)}</{tag}>" for text in line) for tag, line in lines]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def explain(what: nn.Module | Runner) -> Explanation:
    """Which kernel multiplies each weight of a module's linear layers and experts here, or a runner's, and why.
    The result is a table: print it, iterate over its rows, or let a notebook show it."""
    if isinstance(what, Runner):
        info = what.info()
        made = Explained(f"runner {what.id}", info.format, "", "", info.kernel, "chosen when it was made")
        return Explanation([made])
    if not isinstance(what, nn.Module):
        raise TypeError(
            f"opaq.explain: expected a torch.nn.Module or an opaq.runner.Runner, got a {type(what).__name__}"
        )
    rows = []
    for name, module in what.named_modules():
        if isinstance(module, PackedModule) or _stacked.is_packed(module):
            for index, (key, weight) in enumerate(module.named_parameters(recurse=False)):
                if isinstance(weight, QuantizedTensor):
                    role = "hidden_quantizer" if index and key.startswith("down") else "input_quantizer"
                    rows.append(_row(f"{name}.{key}".lstrip("."), module, weight, getattr(module, role, "")))
        elif isinstance(module, nn.Linear):
            rows.append(_plain_row(f"{name}.weight".lstrip("."), module))
    return Explanation(rows)


def _plain_row(name: str, module: nn.Linear) -> Explained:
    """A linear layer whose weight is not packed."""
    if isinstance(module, Linear):
        how = "an opaq.Linear: the active opaq.autocast decides in every call"
        if module.recipe is not None:
            how = f"an opaq.Linear: {type(module.recipe).__name__}, unless an opaq.autocast is active"
        return Explained(name, "plain", "", "", "", how)
    why = (
        f"a {type(module).__name__}: opaq.quantize_ packs it, opaq.convert_training makes it train by a recipe"
    )
    return Explained(name, "plain", "", "", "PyTorch's", why)


def _row(name: str, module: Any, weight: QuantizedTensor, given: str) -> Explained:
    precision = getattr(module, "precision", "exact")
    text = weight._quantizer_text
    device = weight.device.type
    kernel = kernel_of(text, given, weight.dtype, precision, device)
    why = _why_on_cuda(text, kernel) if device == "cuda" else _why(text, given, precision, kernel)
    return Explained(name, text, given, precision, kernel, why)

"""The result of `quantize_`: its weights, and a table of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from re import sub


@dataclass(frozen=True)
class QuantizedModule:
    """One weight that was quantized: its bytes, and its signal-to-noise ratio in decibels (None on meta)."""

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    sqnr: float | None


@dataclass(frozen=True)
class Summary:
    """The result of `quantize_`. Printed, it is a table with a line for each group of similar layers."""

    quantizer: str
    activations: str
    modules: tuple[QuantizedModule, ...]
    left: dict[str, str]  # modules that stay as they are, and why

    @property
    def bytes_before(self) -> int:
        """The bytes of all quantized weights before."""
        return sum(module.bytes_before for module in self.modules)

    @property
    def bytes_after(self) -> int:
        """The bytes of all quantized weights after."""
        return sum(module.bytes_after for module in self.modules)

    @property
    def worst(self) -> QuantizedModule | None:
        """The module with the lowest signal-to-noise ratio."""
        return _worst(self.modules)

    def __str__(self) -> str:
        kinds: dict[tuple[str, tuple[int, ...]], list[QuantizedModule]] = {}
        for module in self.modules:
            kinds.setdefault((kind_of(module.name), module.shape), []).append(module)
        rows = [("weight", "number", "shape", "before", "after", "lowest SQNR")]
        for (kind, shape), members in kinds.items():
            name = kind if len(members) > 1 else members[0].name
            rows.append((name, str(len(members)), "x".join(map(str, shape)), *_figures(members)))
        rows.append(("all", str(len(self.modules)), "", *_figures(self.modules)))
        lines = table_lines(rows, right=range(1, 6))
        said = f"weights {self.quantizer}, activations {self.activations or 'as they are'}"
        if (worst := self.worst) is not None:
            said += f"; lowest SQNR {worst.sqnr:.2f} dB: {worst.name}"
        return "\n".join([*lines, said, *left_lines(self.left)])


def kind_of(name: str) -> str:
    """The name with every component that is a number replaced by *, as `opaq inspect` groups weights."""
    return sub(r"(?<![^.])\d+(?![^.])", "*", name)


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Rows in aligned columns; those of `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if column in right else str.ljust for column in range(len(widths))]
    return [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def left_lines(left: Mapping[str, str]) -> list[str]:
    """Modules that stay as they are, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    return [f"left as it is: {some(names)} ({reason})" for reason, names in reasons.items()]


def some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}, {len(names)} modules"


def _worst(modules: Sequence[QuantizedModule]) -> QuantizedModule | None:
    measured = [module for module in modules if module.sqnr is not None]
    return min(measured, key=_order, default=None)


def _order(module: QuantizedModule) -> float:
    """Sort key; NaN sorts as the lowest."""
    return -inf if module.sqnr is None or isnan(module.sqnr) else module.sqnr


def _figures(modules: Sequence[QuantizedModule]) -> tuple[str, str, str]:
    worst = _worst(modules)
    before, after = (sum(getattr(m, name) for m in modules) for name in ("bytes_before", "bytes_after"))
    return _size(before), _size(after), "" if worst is None else f"{worst.sqnr:.2f} dB"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"

"""What `quantize_` did, module by module, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
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
    """What `quantize_` did. Printed, it is a table with a line for each kind of layer."""

    quantizer: str
    activations: str
    modules: tuple[QuantizedModule, ...]
    left: dict[str, str]  # modules that stay as they are, and why

    @property
    def bytes_before(self) -> int:
        return sum(module.bytes_before for module in self.modules)

    @property
    def bytes_after(self) -> int:
        return sum(module.bytes_after for module in self.modules)

    @property
    def worst(self) -> QuantizedModule | None:
        """The module with the lowest signal-to-noise ratio."""
        return _worst(self.modules)

    def __str__(self) -> str:
        kinds: dict[tuple[str, tuple[int, ...]], list[QuantizedModule]] = {}
        for module in self.modules:
            kinds.setdefault((sub(r"(?<![^.])\d+(?![^.])", "*", module.name), module.shape), []).append(module)
        rows = [("weight", "number", "shape", "before", "after", "lowest SQNR")]
        for (kind, shape), members in kinds.items():
            name = kind if len(members) > 1 else members[0].name
            rows.append((name, str(len(members)), "x".join(map(str, shape)), *_figures(members)))
        rows.append(("all", str(len(self.modules)), "", *_figures(self.modules)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]).rstrip() for r in rows]
        said = f"weights {self.quantizer}, activations {self.activations or 'as they are'}"
        if (worst := self.worst) is not None:
            said += f"; lowest SQNR {worst.sqnr:.2f} dB: {worst.name}"
        lines += [said, *(f"left as it is: {name} ({reason})" for name, reason in self.left.items())]
        return "\n".join(lines)


def _worst(modules: Sequence[QuantizedModule]) -> QuantizedModule | None:
    measured = [module for module in modules if module.sqnr is not None]
    return min(measured, key=_order, default=None)


def _order(module: QuantizedModule) -> float:
    """NaN is the worst."""
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

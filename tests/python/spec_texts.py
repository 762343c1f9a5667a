"""Spec texts generated from the format table: every combination of what a format accepts, and which of them
docs/spec.md allows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import opaq
from opaq._tables import RULES
from reference_quantizer import Spec, parse

USAGES = ("", "+columnwise", "+both")
WITH_VALUES = {"rht": ("+rht", "+rht=0x1234"), "4over6": ("+4over6", "+4over6=mse")}


def numbers(row: opaq.FormatRow) -> tuple[str, ...]:
    if row.name == "nvfp4":
        return ("", "+e4m3max=448", "+e4m3max=256")
    return ("", "+eps=2.5", "+eps=1e-12") if row.name.startswith("fp8") else ("",)


def combinations(row: opaq.FormatRow) -> Iterator[str]:
    """Each element, usage, rule, and set of the options that the row has."""
    elements = ["" if e == row.element_default else "." + e for e in row.elements]
    options = [("", *WITH_VALUES.get(option, ("+" + option,))) for option in row.options]
    rules = ["" if rule == "te" else f"+rule={rule}" for rule in RULES]
    for parts in product(elements, USAGES, *options, numbers(row), rules):
        yield row.name + "".join(parts)


def is_valid(text: str) -> bool:
    """The table of combinations that docs/spec.md forbids."""
    s = parse(text)
    has_eps = float(s.eps) != 0
    contradictions = [
        s.two_d and (s.rht is not None or s.rowscaled),
        s.four_over_six and (s.rht is not None or s.sr),
        s.e4m3_max == 256 and not s.four_over_six,
        s.delayed and (s.pow2 or has_eps),
        s.rule in ("ocp", "rceil") and not s.is_mx,
        s.tiled and (s.swizzle or s.rht is not None or s.usage != 1),
    ]
    if s.rule in ("compressed-tensors", "modelopt"):
        kept = {"delayed": s.delayed, "rowscaled": s.rowscaled, "swizzle": s.swizzle, "global_": s.global_}
        kept |= {"tiled": s.tiled}
        plain = Spec(s.format, s.element, s.usage, rule=s.rule, **kept)
        contradictions += [s.element == "e5m2", s != plain]
    else:
        contradictions.append(s.global_)
    return not any(contradictions)


@cache
def valid_texts() -> tuple[str, ...]:
    """Canonical texts of all valid values."""
    texts = [text for row in opaq.formats() for text in combinations(row) if is_valid(text)]
    return tuple(dict.fromkeys(parse(text).text() for text in texts))

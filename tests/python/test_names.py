"""Patterns for names of modules: the library's matcher against Python's, and patterns for which backtracking
matchers take exponential time."""

from __future__ import annotations

import copy
import fnmatch
import random
import re
import time

import pytest

from opaq._library import OpaqError
from opaq._names import Names
from opaq.checkpoint import read_layout

ATOMS = [
    "a",
    "b",
    r"\.",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\w",
    "(a|b)",
    "(?:ab|)",
    "(?=a)",
    "(?!b)",
    "^",
    "$",
    r"\b",
]
TAILS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "*?", "{,1}"]


def expression(bits: random.Random, depth: int = 0) -> str:
    """A random expression of the syntax that opaq supports."""
    parts = []
    for _ in range(bits.randint(1, 5)):
        atom = bits.choice(ATOMS)
        if depth < 2 and bits.random() < 0.15:
            atom = f"{bits.choice(['(', '(?:', '(?=', '(?!'])}{expression(bits, depth + 1)})"
        parts.append(atom + (bits.choice(TAILS) if atom not in ("^", "$", r"\b") else ""))
    return bits.choice(["", "", "|"]).join(parts)


def test_expressions_match_as_in_python() -> None:
    bits = random.Random(3)
    checked = 0
    for _ in range(3000):
        text = expression(bits)
        names = [f"{''.join(bits.choices('ab.1_', k=bits.randint(0, 8)))}" for _ in range(4)]
        for name in names:
            parts = name.split(".")
            prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            expected = any(re.match(text, prefix) for prefix in prefixes)
            assert (name in Names([f"re:{text}"])) == expected, (text, name)
            checked += expected
    assert checked > 3000


def test_globs_match_as_in_python() -> None:
    bits = random.Random(4)
    for _ in range(3000):
        pattern = "".join(bits.choices(["a", "b", ".", "*", "?", "[ab]", "[!a]"], k=bits.randint(0, 6))) + "*"
        name = "".join(bits.choices("ab.", k=bits.randint(0, 8)))
        parts = name.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        expected = any(fnmatch.fnmatchcase(p, g) for p in prefixes for g in (pattern, f"*.{pattern}"))
        assert (name in Names([pattern])) == expected, (pattern, name)


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:^(([a-z])+.)+[A-Z]([a-z])+$", "*a*a*a*a*a*a*a*a*a*a*a*b"])
def test_a_hostile_configuration_does_not_hang(pattern: str) -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    begin = time.monotonic()
    assert "a" * 60 + "!" not in read_layout(config).ignore
    assert time.monotonic() - begin < 1


def test_unsupported_syntax_is_an_error() -> None:
    for pattern in (r"re:(a)\1", "re:(?<=a)b", "re:" + "(" * 20000, "re:((a{99}){99}){99}", "re:a++"):
        with pytest.raises(OpaqError, match="the pattern "):
            Names([pattern])


def test_names_are_copied() -> None:
    names = copy.deepcopy(Names(["re:a.*b", "*.gate", "lm_head"]))
    assert "acb" in names and "x.gate" in names and "lm_head.x" in names and "c" not in names

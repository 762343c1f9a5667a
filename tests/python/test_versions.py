"""Versions that several files contain: opaq's own is in include/opaq/version.h, others must agree with the
package."""

from __future__ import annotations

import re

from conftest import ROOT
from opaq import _library
from opaq.integrations.transformers_version import OLDEST as OLDEST_TRANSFORMERS


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def header_version() -> list[str]:
    return re.findall(r"#define OPAQ_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text_of("include/opaq/version.h"))


def extra(name: str) -> str:
    found = re.search(rf"^{name} = \[(.*)\]$", text_of("pyproject.toml"), re.MULTILINE)
    assert found is not None, f"pyproject.toml has no extra {name}"
    return found[1]


def test_opaq() -> None:
    version = ".".join(header_version())
    assert re.search(r"^version: (.*)$", text_of("CITATION.cff"), re.MULTILINE)[1] == version
    assert header_version()[:2] == [str(_library.MAJOR), str(_library.MINOR)]
    assert _library.version == version


def test_extras_require_accepted_versions() -> None:
    torch = re.search(r"^OLDEST = \((\d+), (\d+)\)", text_of("python/opaq/_operators.py"), re.MULTILINE)
    for name in ("torch", "transformers"):
        assert f'"torch>={torch[1]}.{torch[2]}"' in extra(name)
    assert '"transformers>={}.{}"'.format(*OLDEST_TRANSFORMERS) in extra("transformers")

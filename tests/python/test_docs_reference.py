"""The reference pages that tools/docs_reference.py makes have every exported C symbol, every public C type and
every public Python name, and nothing of the plumbing around them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from conftest import ROOT, need

HEADING = re.compile(r"^## (.*)$", re.M)


@pytest.fixture(scope="module")
def pages() -> Iterator[dict[str, str]]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from docs_reference import reference_pages

        yield reference_pages()
    finally:
        sys.path.remove(str(ROOT / "tools"))


def headings(pages: dict[str, str], beginning: str) -> set[str]:
    """The names in the headings of the pages whose path begins so."""
    chosen = [text for name, text in pages.items() if name.startswith(beginning)]
    lines = [line for text in chosen for line in HEADING.findall(text)]
    return {name for line in lines for name in re.findall(r"`([\w.]+)`", line)}


def test_every_c_name_has_an_entry(pages: dict[str, str]) -> None:
    found = headings(pages, "reference/c_")
    exported = set((ROOT / "tools/exported_symbols.txt").read_text().split())
    assert len(exported) > 100
    assert not sorted(exported - found)
    for header in (ROOT / "include/opaq").glob("*.h"):
        types = set(re.findall(r"^(?:struct|enum) (opaq_\w+) \{", header.read_text(), re.M))
        assert types <= headings(pages, f"reference/c_{header.stem}.md"), header.name
        lines = HEADING.findall(pages.get(f"reference/c_{header.stem}.md", ""))
        named = re.findall(r"`(\w+)`", " ".join(lines))
        assert {name for name in named if named.count(name) > 1} <= types, header.name  # a type and a function


def test_c_pages_show_declarations_only(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        if name.startswith("reference/c_"):
            code = "".join(re.findall(r"^```c\n(.*?)^```$", text, re.M | re.S))
            assert "OPAQ_API " not in code.replace("#define OPAQ_API ", ""), name
            assert "__cplusplus" not in code and "_H\n" not in code, name


def test_every_python_name_has_an_entry(pages: dict[str, str]) -> None:
    need("torch")
    opaq = need("opaq")
    submodules = {"functional", "recipe", "runner"}
    assert headings(pages, "reference/python.md") == {f"opaq.{name}" for name in {*opaq.__all__} - submodules}
    for name in ("functional", "recipe"):
        listed = {f"opaq.{name}.{entry}" for entry in getattr(opaq, name).__all__}
        assert headings(pages, f"reference/python_{name}.md") == listed
    assert {"opaq.checkpoint.Layout", "opaq.checkpoint.read_layout"} <= headings(
        pages, "reference/python_checkpoint"
    )
    integrations = pages["reference/python_integrations.md"]
    for name in ("transformers.Config", "vllm.register", "torchtitan.linear", "megatron.OpaqSpecProvider"):
        assert f"### `opaq.integrations.{name}`\n" in integrations
    assert not re.findall(r"=_\w+", pages["reference/python.md"])  # defaults are values, not private names


def test_navigation_lists_every_page(pages: dict[str, str]) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in pages if name not in navigation] == []

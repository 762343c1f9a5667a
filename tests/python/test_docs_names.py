"""Names and messages that the documentation quotes exist: the package's names in the pages about moving, and
messages in troubleshooting.md."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT, need

need("transformers")  # opaq.Config needs it

import opaq  # noqa: E402

MOVING = ("moving_transformer_engine.md", "moving_torchao.md")
NAME = re.compile(r"`opaq((?:\.\w+)+)")
QUOTED = re.compile(r'`opaq\.Quantizer\("([^"]+)"\)`')
MESSAGE = re.compile(r"^### (`.+`)$", re.M)
SOURCES = [
    path
    for folder in ("src", "python", "tools")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".cu", ".h", ".py", ".sh")
]


@pytest.mark.parametrize("page", MOVING)
def test_names_exist(page: str) -> None:
    names = set(NAME.findall((ROOT / "docs" / page).read_text()))
    assert len(names) > 5
    for name in sorted(names):
        found = opaq
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_quantizers_parse() -> None:
    texts = [text for page in MOVING for text in QUOTED.findall((ROOT / "docs" / page).read_text())]
    assert texts
    for text in texts:
        assert opaq.Quantizer(text).format


def joined(text: str) -> str:
    """A source with the parts of its string literals put together, and quotes as they are printed."""
    return re.sub(r'"\s*\n\s*f?"', "", text).replace('\\"', '"')


def test_messages_are_those_of_the_sources() -> None:
    sources = "\n".join(joined(path.read_text()) for path in SOURCES)
    messages = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text())
    assert len(messages) > 15
    missing = []
    for message in messages:
        for part in re.split(r"`, `|\.\.\.", message.strip("`")):
            part = re.sub(r"^\"|\"$", "", part.strip(' ():;,"'))
            if part and part not in sources:
                missing.append((message, part))
    assert not missing

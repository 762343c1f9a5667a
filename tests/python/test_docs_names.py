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


def test_names_of_other_libraries_are_public_names_or_have_hints() -> None:
    """Also those that opaq has under another name or not at all."""
    engine, torchao = ((ROOT / "docs" / page).read_text() for page in MOVING)
    names = set(re.findall(r"`te\.(\w+)", engine))
    column = "\n".join(re.findall(r"^\|([^|]*)\|", torchao, re.M))
    names |= set(re.findall(r"`(?:torchao\.)?(\w\w+)", column)) - {"RCEIL", "moe_training"}  # a value, a module
    assert len(names) > 50 and {"QuantizerRole", "TorchAoConfig"} <= names
    missing = {name for name in names if name not in opaq.__all__ and not opaq._FOREIGN_NAMES.get(name)}
    assert not missing
    for name in names - {*opaq.__all__, "checkpoint"}:  # a module of opaq, perhaps imported
        with pytest.raises(AttributeError, match=re.escape(opaq._FOREIGN_NAMES[name])):
            getattr(opaq, name)


def test_quantizers_parse() -> None:
    texts = [text for page in MOVING for text in QUOTED.findall((ROOT / "docs" / page).read_text())]
    assert texts
    for text in texts:
        assert opaq.Quantizer(text).format


def joined(text: str) -> str:
    """A source with the parts of its string literals put together, and quotes as they are printed."""
    return re.sub(r'"\s*\n\s*f?"', "", text).replace('\\"', '"')


def test_messages_are_those_of_the_sources() -> None:
    """The parts between `...` of a message are in one file."""
    sources = [joined(path.read_text()) for path in SOURCES]
    messages = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text())
    assert len(messages) > 15
    missing = []
    for message in [one for heading in messages for one in heading.strip("`").split("`, `")]:
        parts = [re.sub(r"^\"|\"$", "", part.strip(' ():;,"')) for part in message.split("...")]
        if not any(all(part in source for part in parts) for source in sources):
            missing.append(message)
    assert not missing


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert not [page for page in pages if f"]({page})" not in readme]


@pytest.mark.parametrize(
    "warning",
    [
        "of ignore match none of",
        "nothing was",
        "none of the",
        "quantized already and stay as they are",
        "is quantized already",
        "weights have NaNs or infinities",
        "no module of opaq ran inside it",
        "the models that ran inside it",
        "nothing was tiled",
        "holds",
        "expected f32, bf16 or f16",
    ],
)
def test_warnings_have_headings(warning: str) -> None:
    headings = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text())
    assert any(warning in heading for heading in headings)

"""The page of the demonstration: classes for its parts, and `write_page`, which fills demo_page.html.

`write_page` writes index.html and demo.json, which has all figures. It raises an error for a picture that is
missing in the folder or has no alternative text, a table without rows or with rows of different lengths, and an
empty part. Texts are escaped only here; `...` in a text becomes code. Needs the standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

TEMPLATE = Path(__file__).with_name("demo_page.html")


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first cell of a row is its heading. Columns of numbers are aligned to the right."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)  # aligned to the left

    def html(self, folder: Path) -> str:
        widths = {len(row) for row in (self.header, *self.rows)}
        if not self.rows or len(widths) != 1:
            raise ValueError(
                f"table {self.caption!r}: {len(self.rows)} rows with {sorted(widths)} cells, expected equal "
                "counts"
            )
        head = self._cells(self.header, "th", "col")
        body = "\n".join(f"<tr>{self._cells(row, 'td', 'row')}</tr>" for row in self.rows)
        return (
            f'<div class="wide"><table>\n<caption>{inline(self.caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
        )

    def _cells(self, cells: Sequence[str], tag: str, first: str) -> str:
        found = []
        for column, cell in enumerate(cells):
            name = tag if column else "th"
            scope = f' scope="{"col" if tag == "th" else first}"' if name == "th" else ""
            kind = ' class="text"' if column in self.text_columns else ""
            found.append(f"<{name}{scope}{kind}>{inline(cell)}</{name}>")
        return "".join(found)


@dataclass(frozen=True)
class Picture:
    """A file in the page's folder. `alternative` is the alternative text (the `alt` attribute)."""

    file: str
    alternative: str
    caption: str

    def html(self, folder: Path) -> str:
        if not self.alternative.strip():
            raise ValueError(f"picture {self.file}: there is no alternative text")
        if not (folder / self.file).is_file() or not (folder / self.file).stat().st_size:
            raise FileNotFoundError(f"picture {self.file}: there is no such file in {folder}, or it is empty")
        return (
            f'<figure><img src="{escape(self.file)}" alt="{escape(self.alternative)}">\n'
            f"<figcaption>{inline(self.caption)}</figcaption></figure>"
        )


@dataclass(frozen=True)
class Listing:
    """Preformatted text: output, code, generated text. A folded listing opens with a click."""

    caption: str
    text: str
    is_folded: bool = False
    is_prose: bool = False  # long lines wrap

    def html(self, folder: Path) -> str:
        kind = ' class="prose"' if self.is_prose else ""
        text = f"<pre{kind}>{escape(self.text)}</pre>"
        if self.is_folded:
            return f"<details><summary>{inline(self.caption)}</summary>\n{text}</details>"
        return f"<figure><figcaption>{inline(self.caption)}</figcaption>\n{text}</figure>"


@dataclass
class Part:
    """A section of the page. `wrong` has a sentence for each failed check, `skipped` the reason if the part did
    not run."""

    name: str
    title: str
    headline: str = ""  # the result in one line
    blocks: list[str | Table | Picture | Listing] = field(default_factory=list)  # a str is a paragraph
    figures: dict[str, Any] = field(default_factory=dict)  # for demo.json
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        return "skipped" if self.skipped else "failed" if self.wrong else "passed"

    @property
    def outcome(self) -> str:
        return self.skipped or " ".join(self.wrong) or self.headline

    def html(self, folder: Path) -> str:
        lines = [f'<section id="{escape(self.name)}">', f"<h2>{inline(self.title)}</h2>"]
        lines += [f'<p class="failed">Failed: {inline(sentence)}</p>' for sentence in self.wrong]
        if self.skipped:
            lines.append(f'<p class="skipped">Skipped: {inline(self.skipped)}</p>')
        elif not self.blocks and not self.wrong:
            raise ValueError(f"part {self.name!r} is empty: expected a text, a table or a picture")
        for block in self.blocks:
            lines.append(f"<p>{inline(block)}</p>" if isinstance(block, str) else block.html(folder))
        return "\n".join([*lines, "</section>"])

    def record(self) -> dict[str, Any]:
        known = ("title", "headline", "result", "skipped", "wrong", "seconds", "figures")
        return {name: getattr(self, name) for name in known}


def inline(text: str) -> str:
    """Escaped text, with `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def write_page(folder: Path, machine: dict[str, Any], parts: Iterable[Part], seconds: float) -> Path:
    """Writes index.html and demo.json into the folder; returns the path of index.html."""
    parts = list(parts)
    links = [
        f'<li><a href="#{escape(part.name)}">{inline(part.title)}</a>: '
        f'<strong class="{part.result}">{part.result}</strong>. {inline(part.outcome)}</li>'
        for part in parts
    ]
    values = [(name, str(value)) for name, value in machine.items()]
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        links="\n".join(links),
        machine=Table("This machine", ("what", "value"), values, (0, 1)).html(folder),
        parts="\n\n".join(part.html(folder) for part in parts),
        seconds=f"{seconds:.0f}",
    )
    record = {"machine": machine, "seconds": seconds, "parts": {part.name: part.record() for part in parts}}
    (folder / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path

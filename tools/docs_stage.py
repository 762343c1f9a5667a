#!/usr/bin/env python3
"""docs_stage.py FOLDER: writes the sources of the site there: docs/ unchanged, the README as the first page,
the project's other texts, the pages of tools/docs_reference.py, and colours for code. Links out of docs/ are
rewritten to those pages; a link to a missing page is an error."""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

from pygments.formatters import HtmlFormatter

from docs_reference import reference_pages
from repository import ROOT

TEXTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "LICENSE": "project/license.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def page_of(name: str) -> tuple[str, str]:
    """The site's page for a file of the repository, and the anchor."""
    if name in TEXTS:
        return TEXTS[name], ""
    if name.startswith("docs/"):
        return name.removeprefix("docs/"), ""
    if name.startswith("examples"):
        file = name.removeprefix("examples").strip("/")
        return "reference/examples.md", "#" + file.replace(".", "") if file else ""
    raise SystemExit(f"docs_stage.py: no page of the site shows {name}")


def relinked(text: str, source: str, page: str) -> str:
    """`text` of the repository's file `source` as the site's `page`, with adjusted links."""

    def replace(match: re.Match[str]) -> str:
        opening, target, place, closing = match.groups()
        if re.match(r"[a-z]+:", target):
            return match.group(0)
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found, inside = page_of(name)
        if name.startswith("docs/") and not (ROOT / name).exists() and not name.startswith("docs/reference/"):
            raise SystemExit(f"docs_stage.py: {source} links to {target}, which does not exist")
        return f"{opening}{posixpath.relpath(found, posixpath.dirname(page) or '.')}{place or inside}{closing}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    pages = {f"docs/{path.relative_to(folder)}": str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    for source, page in (pages | TEXTS).items():
        text = (ROOT / source).read_text()
        if source == "LICENSE":
            opening = "For users who need the terms: opaq is under the Apache License 2.0."
            text = f"# License\n\n{opening}\n\n```text\n{text}```\n"
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relinked(text, source, page))
    for page, text in reference_pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)
    colours = HtmlFormatter(style="tango").get_style_defs(".codehilite")
    (folder / "code.css").write_text(colours + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

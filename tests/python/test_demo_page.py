"""The page of the demonstration: accessible, equal to its data, and refused if a part is incomplete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "demo"))
from demo_page import Listing, Part, Picture, Table, write_page  # noqa: E402

NASTY = 'a < b & "c" <script>alert(1)</script>'
VOID = {"meta", "img", "br", "link"}


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects pictures, tables and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.tables: list[list[list[tuple[str, str]]]] = []  # rows of (tag, text)
        self.captions: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if "id" in found:
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.pictures.append(found)
        elif tag == "a":
            self.links.append(str(found["href"]))
        elif tag == "table":
            self.tables.append([])
        elif tag == "caption":
            self.captions.append("")
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            assert tag == "td" or found.get("scope") in ("col", "row")
            self.tables[-1][-1].append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "caption" in self.open:
            self.captions[-1] += data
        elif self.open and ("td" in self.open or "th" in self.open):
            tag, before = self.tables[-1][-1].pop()
            self.tables[-1][-1].append((tag, before + data))


def parts(**changes: Any) -> list[Part]:
    table = Table(f"table {NASTY}", ("name", "a"), [("one", "1"), (NASTY, "`2`")])
    picture = Picture("dot.svg", f"what {NASTY} shows", "a dot")
    first = Part(
        "first",
        "The first part",
        "it works & is fine",
        [f"A paragraph with {NASTY}.", table, picture, Listing("output", NASTY), Listing("more", NASTY, True)],
        {"value": 1.5},
        seconds=2.0,
    )
    for name, value in changes.items():
        setattr(first, name, value)
    return [first, Part("second", "The second part", skipped="there is no PyTorch")]


def written(folder: Path, some: list[Part]) -> Reader:
    (folder / "dot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    path = write_page(folder, {"processor": NASTY, "threads": 2}, some, 12.4)
    assert path == folder / "index.html"
    return Reader(path.read_text(encoding="utf-8"))


def test_everything_is_there(tmp_path: Path) -> None:
    page = written(tmp_path, parts())
    assert "$" not in page.text and "12 seconds" in page.text
    assert page.text.count(NASTY) == 6  # the machine, the paragraph, the caption, a cell, both listings
    assert page.captions == ["This machine", f"table {NASTY}"]
    for rows in page.tables:
        assert len({len(row) for row in rows}) == 1
        assert all(tag == "th" for tag, _ in rows[0]) and all(row[0][0] == "th" for row in rows[1:])
    machine, own = ([[text for _, text in row] for row in rows] for rows in page.tables)
    assert "The first part: passed. it works & is fine" in page.text
    assert "The second part: skipped. there is no PyTorch" in page.text
    assert ["processor", NASTY] in machine and own == [["name", "a"], ["one", "1"], [NASTY, "2"]]
    assert page.pictures == [{"src": "dot.svg", "alt": f"what {NASTY} shows"}]
    assert {"first", "second"} <= set(page.ids)
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (tmp_path / link).is_file()
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["machine"] == {"processor": NASTY, "threads": 2} and record["seconds"] == 12.4
    assert record["parts"]["first"]["figures"] == {"value": 1.5}
    assert [part["result"] for part in record["parts"].values()] == ["passed", "skipped"]


def test_what_failed_is_said(tmp_path: Path) -> None:
    page = written(tmp_path, parts(wrong=[f"4 is not < 3: {NASTY}"], blocks=[]))
    assert f"Failed: 4 is not < 3: {NASTY}" in page.text
    assert "The first part: failed. 4 is not < 3" in page.text
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["parts"]["first"]["wrong"] == [f"4 is not < 3: {NASTY}"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Picture("none.svg", "a picture", "there is none"), "no such file"),
        (Picture("empty.svg", "a picture", "it is empty"), "empty"),
        (Picture("dot.svg", " ", "none can hear it"), "alternative text"),
        (Table("no rows", ("a", "b"), []), "0 rows"),
        (Table("ragged", ("a", "b"), [("1", "2"), ("3",)]), r"\[1, 2\] cells"),
        (Table("header", ("a",), [("1", "2")]), r"\[1, 2\] cells"),
    ],
    ids=lambda value: getattr(value, "caption", None),
)
def test_a_broken_page_is_refused(tmp_path: Path, block: Any, message: str) -> None:
    (tmp_path / "empty.svg").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        written(tmp_path, parts(blocks=["text", block]))
    assert not (tmp_path / "index.html").exists()


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'first' is empty"):
        written(tmp_path, parts(blocks=[]))


FORMATS = [
    {"quantizer": name, "bits": bits, "bytes": 1, "sqnr_db": db, "cosine": 1, "largest_error": 0.1}
    | {"quantize_rate": 1, "dequantize_rate": 1}
    for name, bits, db in (("fp8", 8, 31), ("mxfp8", 8.25, 31), ("mxfp4", 4.25, 18), ("nvfp4", 4.5, 20))
]


def run_formats(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> subprocess.Popen[str]:
    """`run_demo.py --parts formats` on stored figures, with programs that stand in for those of the build."""
    programs = {"opaq": "echo opaq 0", "demo/demo_rules": options.pop("rules", "echo 'a < b'")}
    for name, script in programs.items():
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    figures = tmp_path / "formats.json"
    figures.write_text(json.dumps({"rows": 4, "columns": 4, "threads": 1, "formats": rows}))
    words = ["--build", tmp_path, "--formats", figures, "--parts", "formats", "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-S", ROOT / "demo" / "run_demo.py", *words],  # -S: no packages but Python's own
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        **options,
    )


def test_without_any_package(tmp_path: Path) -> None:
    process = run_formats(tmp_path, FORMATS)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    page = Reader((tmp_path / "demo" / "index.html").read_text())
    assert "a < b" in page.text and page.pictures == [] and "0.562" in page.text
    assert "NVFP4 takes 0.562 bytes per element" in output


def test_a_failed_check_is_exit_1(tmp_path: Path) -> None:
    process = run_formats(tmp_path, [row | {"bits": 9} for row in FORMATS], rules="exit 3")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: formats: nvfp4 takes 9 bits" in errors and "demo_rules ended with status 3" in errors
    assert "Failed: nvfp4 takes 9 bits" in Reader((tmp_path / "demo" / "index.html").read_text()).text


def test_ctrl_c_says_one_sentence(tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = run_formats(tmp_path, FORMATS, rules=f"touch {started}; exec sleep 60", start_new_session=True)
    end = time.monotonic() + 30
    while not started.exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (
        130,
        "Interrupted; run `make demo` again to start from the beginning.\n",
    )
    assert not (tmp_path / "demo" / "index.html").exists()


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of text every few seconds."""
    import terminal

    monkeypatch.setitem(sys.modules, "tqdm", None)
    seconds = iter([0.0, 1.0, 3.0, 3.0, 5.0, 7.0, 7.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(seconds))
    with terminal.Bar("one", 9) as bar:
        bar.advance()
        bar.advance(2, loss="0.5")
        bar.rename("two")
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err == "    one: 3 of 9 steps, loss 0.5\n    two: 5 of 9 steps\n"

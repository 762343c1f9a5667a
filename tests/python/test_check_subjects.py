"""tools/check_subjects.py: the subjects that it refuses, and the commits that it checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, skip_test


@pytest.fixture(scope="module")
def checker() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import check_subjects

        return check_subjects
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize(
    "subject",
    [
        "op: validate memory before allocating",
        "tests, bench: reword messages",
        "cli: quantize, decode and compare gpt-oss's experts",
        "bench: speed up the loop",
    ],
)
def test_accepted(checker: Any, subject: str) -> None:
    assert checker.fault(subject) == ""


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("op: " + "x" * 69, "73 characters, expected at most 72"),
        ("Add a kernel", "expected `area: verb object`"),
        ("op: add a kernel.", "without a full stop"),
        ("op: add", "expected `area: verb object`"),
        ("op: Add a kernel", "expected `area: verb object`"),
        ("ops: the memory is validated", "not 'the'"),
        ("op: added a kernel", "not 'added'"),
        ("op: adding a kernel", "not 'adding'"),
    ],
)
def test_refused(checker: Any, subject: str, problem: str) -> None:
    assert problem in checker.fault(subject)


def test_commits(checker: Any, tmp_path: Path) -> None:
    """Those after the given one, without merges and their second parents."""
    if shutil.which("git") is None:
        skip_test("there is no git")

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        command = ["git", *identity, *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(subject: str) -> str:
        git("commit", "--allow-empty", "-q", "-m", subject)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    commit("old")
    since = commit("the last one that is not checked")
    commit("a: first")
    git("checkout", "-q", "-b", "side")
    commit("on a branch")
    git("checkout", "-q", "main")
    commit("b: second")
    git("merge", "-q", "--no-ff", "-m", "Merge branch 'side'", "side")
    assert [subject for _, subject in checker.commits(tmp_path, since)] == ["b: second", "a: first"]
    assert checker.commits(tmp_path, "0" * 40) == []
    (tmp_path / "archive").mkdir()
    shutil.rmtree(tmp_path / ".git")
    assert checker.commits(tmp_path / "archive", since) == []

"""`opaq doctor` and `python -m opaq doctor`: available parts, missing parts and their effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_run import command, run, run_well
from conftest import need

opaq = need("opaq")
command()


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The output of `python -m opaq doctor`."""
    return subprocess.run(
        [sys.executable, "-m", "opaq", *words],
        env={**os.environ, "OPAQ_COMMAND": command(), **environment},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_the_command() -> None:
    found = json.loads(run_well("doctor", "--json"))
    assert found["version"] == opaq.__version__ and Path(found["command"]).samefile(command())
    assert [row["format"] for row in found["kernels"]] == [row.name for row in opaq.formats()]
    assert {row["quantize"] for row in found["kernels"]} <= set(opaq.kernels())
    printed = run_well("doctor")
    for row in found["kernels"]:
        assert row["product"] in printed
    for finding in found["findings"]:
        assert f"{finding['subject']}: {finding['text']}" in printed
    if not found["cuda"]:
        assert [f["subject"] for f in found["findings"]].count("CUDA") == 1
        assert "tensors are on cuda" not in printed


def test_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPAQ_CPU", "ref")
    monkeypatch.setenv("OPAQ_KERNEL", "quantize_nvfp4_ref")
    found = json.loads(run_well("doctor", "--json"))
    texts = {finding["subject"]: finding["text"] for finding in found["findings"]}
    assert texts["OPAQ_CPU"].endswith("limits the instruction sets to ref")
    assert texts["OPAQ_KERNEL"].endswith("it forces quantize_nvfp4_ref")
    assert "reference kernels run" in texts["processor"]
    assert all(row["quantize"].endswith("_ref") for row in found["kernels"])
    monkeypatch.setenv("OPAQ_CPU", "avx9000")
    assert "no kernel runs until it is unset or corrected" in run_well("doctor")


def test_in_python() -> None:
    done = doctor("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == found["machine"]["version"] == opaq.__version__
    assert found["packages"].keys() >= {"torch", "transformers", "peft", "vllm"}
    missing = {name for name, installed in found["packages"].items() if installed is None}
    assert missing == {f["subject"] for f in found["findings"] if f["text"].startswith("not installed")}
    printed = doctor("doctor").stdout
    assert found["library"] in printed and run_well("doctor") in printed


def test_without_a_command() -> None:
    done = doctor("doctor", "--json", OPAQ_COMMAND="/nowhere/opaq")
    found = json.loads(done.stdout)
    assert found["machine"] is None
    assert [f["text"] for f in found["findings"] if f["subject"] == "command"][0].startswith(
        "/nowhere/opaq cannot run"
    )


def test_other_words_go_to_the_command() -> None:
    assert doctor("version").stdout == run_well("version")
    assert doctor("doctor", "--jsn").returncode == 2
    assert run("doctor", "x").returncode == 2

"""Many tensors, keys and patterns: time that grows with their number, and limits that are said before anything
is written. The figures in comments are seconds of the command as it was before these were mended."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

import make_hostile
from cli_run import command, run

command()
SECONDS = 4.0  # of the processor


def took(*words: str | Path, code: int = 0) -> str:
    begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run(*words)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
    assert done.returncode == code, done.stderr[:500]
    assert seconds < SECONDS, (words, seconds)
    return done.stdout + done.stderr


def test_diff_of_many_keys(tmp_path: Path) -> None:
    """20,000 metadata entries: 19 s; 0.1 s now."""
    for side in "ab":
        folder = tmp_path / side
        folder.mkdir()
        metadata = {f"{side}{i}": str(i) for i in range(20_000)}
        (folder / "model.safetensors").write_bytes(
            make_hostile.tensors({"x.weight": ("BF16", [2, 16], 64)}, metadata)
        )
        (folder / "config.json").write_text(json.dumps(metadata))
    found = json.loads(
        took("diff", "--json", tmp_path / "a", tmp_path / "b", code=1).partition("\ncomparing")[0]
    )
    for where in ("metadata", "config"):
        assert [len(found[where][key]) for key in ("only_in_a", "only_in_b", "different")] == [
            20_000,
            20_000,
            0,
        ]


@pytest.mark.parametrize(
    "glob", ["*.layers.{}.mlp.*", "model.layers.{}.*", "*.{}.mlp.w", "model.layers.{}.mlp.x"]
)
def test_many_modules_and_globs(glob: str, tmp_path: Path) -> None:
    """6,000 of each. 3,000 of each took 1.8 s before, 0.05 s now."""
    entries: dict[str, make_hostile.Entry] = {}
    for i in range(6000):
        entries[f"model.layers.{i}.mlp.w.weight"] = ("F8_E4M3", [1, 16], 16)
        entries[f"model.layers.{i}.mlp.w.weight_scale"] = ("F32", [1], 4)
    (tmp_path / "model.safetensors").write_bytes(make_hostile.tensors(entries))
    quantization = {
        "quant_method": "compressed-tensors",
        "ignore": [glob.format(6000 - i) for i in range(6000)],
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    said = "modules to ignore: 5999 weights" in took("inspect", tmp_path)
    assert said != glob.endswith("x")


def test_convert_of_many_weights(tmp_path: Path) -> None:
    """20,000 weights with a scale in the metadata: 10 s; 0.6 s now."""
    entries: dict[str, make_hostile.Entry] = {}
    for i in range(20_000):
        entries[f"m.{i}.weight_packed"] = ("U8", [1, 8], 8)
        entries[f"m.{i}.weight_scale"] = ("F8_E4M3", [1, 1], 1)
        entries[f"m.{i}.weight_global_scale"] = ("F32", [1], 4)
    metadata = {f"opaq.was:m.{i}.weight_global_scale": "0" * 8 for i in range(20_000)}
    (tmp_path / "a.safetensors").write_bytes(make_hostile.tensors(entries, metadata))
    took("convert", "--layout", "modelopt", tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_a_header_that_no_reader_takes(tmp_path: Path) -> None:
    """A stack of experts becomes weights with long names, whose header would have more than 100 MB."""
    name = "m" * 900 + ".experts.down_proj"
    path = tmp_path / "a.safetensors"
    path.write_bytes(make_hostile.tensors({name: ("BF16", [36_000, 1, 16], 36_000 * 32)}))
    done = run("quantize", path, tmp_path / "b.safetensors")
    assert done.returncode == 3 and "a header of 1" in done.stderr and "at most 100000000" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    "pattern",
    ["re:" + "(" * 20_000, "re:" + "[" * 20_000, "re:" + "(" * 9 + "a{99}" + "){99}" * 9, "re:(a)\\1"],
)
def test_patterns_with_limits(pattern: str, tmp_path: Path) -> None:
    """Exit 2 with a sentence; the C library's compiler crashed or took gigabytes."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(make_hostile.tensors({"x.weight": ("BF16", [2, 16], 64)}))
    for option in ("--ignore", "--include"):
        done = run("quantize", option, pattern, path, tmp_path / "b.safetensors", memory=100_000_000)
        assert done.returncode == 2 and 'the pattern "re:' in done.stderr, done.stderr[:200]
        assert len(done.stderr) < 600 and not (tmp_path / "b.safetensors").exists()

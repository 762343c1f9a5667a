"""Many tensors, keys and patterns: time and memory grow linearly with their number, and exceeded limits are
reported before anything is written. Times in comments are those of a quadratic algorithm and of the linear
one."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

import make_hostile
from cli_run import command, run

command()
SECONDS = 4.0  # limit of CPU time
X = ("BF16", [2, 16], 64)


def processor_seconds() -> float:
    """CPU time of finished children, user and system together: only the sum is exact, its parts are sampled."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(*words: str | Path, code: int) -> tuple[float, str]:
    """CPU seconds and the output."""
    begin = processor_seconds()
    done = run(*words)
    assert done.returncode == code, done.stderr[:500]
    return processor_seconds() - begin, done.stdout + done.stderr


def run_in_time(*words: str | Path, code: int = 0) -> str:
    seconds, printed = timed(*words, code=code)
    assert seconds < SECONDS, (words, seconds)
    return printed


def check_growth(make: Callable[[int], tuple[str | Path, ...]], count: int, code: int) -> None:
    """Four times the input takes 4 times as long if growth is linear, and 16 times if it is quadratic. `make`
    writes the input and returns the command's arguments. Uses the best of three runs, plus 20 ms for noise."""
    seconds = []
    for n in (count, 4 * count):
        words = make(n)
        seconds.append(timed(*words, code=code)[0])
        for _ in range(2 if seconds[-1] < SECONDS else 0):
            seconds[-1] = min(seconds[-1], timed(*words, code=code)[0])
    assert seconds[1] < 8 * seconds[0] + 0.02, seconds


def write_pair(
    folder: Path, metadata: Callable[[str], dict[str, str]], files: int = 1
) -> tuple[str | Path, ...]:
    """Writes two checkpoints whose metadata is divided among files and is also config.json. Returns the
    arguments for diff."""
    for side in "ab":
        (folder / side).mkdir(exist_ok=True)
        pairs, weight_map = list(metadata(side).items()), {}
        for f in range(files):
            name = f"model-{f + 1:05}-of-{files:05}.safetensors"
            weight_map[f"x{f}.weight"] = name
            content = make_hostile.tensors({f"x{f}.weight": X}, dict(pairs[f::files]))
            (folder / side / name).write_bytes(content)
        (folder / side / "config.json").write_text(json.dumps(metadata(side)))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / side / "model.safetensors.index.json").write_text(json.dumps(index))
    return "diff", "--json", folder / "a", folder / "b"


def test_growth_of_diff_with_keys(tmp_path: Path) -> None:
    """No key in both, one file. A million entries take 2 s and 0.56 GB, 80,000 take 46 MB."""
    check_growth(
        lambda n: write_pair(tmp_path, lambda side: {f"{side}{i}": str(i) for i in range(n)}), 20_000, 1
    )
    assert run("diff", "--json", tmp_path / "a", tmp_path / "b", memory=100_000_000).returncode == 1


def test_growth_of_diff_with_files(tmp_path: Path) -> None:
    """100 keys in each file. 500 and 1,000 files of 1,000 keys: quadratic 35 and 172 s, linear 0.7 and 1.3."""

    def make(files: int) -> tuple[str | Path, ...]:
        folder = tmp_path / str(files)
        folder.mkdir()
        return write_pair(folder, lambda side: {f"{side}{i}": str(i) for i in range(100 * files)}, files)

    check_growth(make, 200, 1)


@pytest.mark.parametrize("key", ["quantization_config", "other"])
def test_growth_of_diff_with_members_in_another_order(key: str, tmp_path: Path) -> None:
    """Objects in config.json. 20,000 and 40,000 members: quadratic 3.7 and 17 s, linear 0.02 s."""

    def make(n: int) -> tuple[str | Path, ...]:
        words = write_pair(tmp_path, lambda side: {})
        for side, order in (("a", range(n)), ("b", reversed(range(n)))):
            config = {key: {"quant_method": "fp8", "extra": [{f"k{i}": i for i in order}]}}
            (tmp_path / side / "config.json").write_text(json.dumps(config))
        return words

    check_growth(make, 5000, 0)


def test_diff_of_objects(tmp_path: Path) -> None:
    """The order of members does not matter; anything else does."""

    def differs(a: object, b: object) -> bool:
        words = write_pair(tmp_path, lambda side: {})
        for side, value in (("a", a), ("b", b)):
            (tmp_path / side / "config.json").write_text(json.dumps({"key": value}))
        found = json.loads(run(*words).stdout)
        assert found["config"]["different"] == ([] if found["equal"] else ["key"])
        return not found["equal"]

    value = {"a": [1, {"b": None, "c": "x"}], "d": {}}
    assert not differs(value, {"d": {}, "a": [1, {"c": "x", "b": None}]})
    for other in (
        {"a": [1, {"b": None, "c": "y"}], "d": {}},
        {"a": [{"b": None, "c": "x"}, 1], "d": {}},
        {"a": [1, {"b": None, "c": "x"}], "e": {}},
        {"a": [1, {"b": None, "c": "x"}], "d": []},
        {"a": [1, {"b": None}], "d": {}},
        {"a": [1], "d": {}},
        [],
        "x",
    ):
        assert differs(value, other) and differs(other, value)


def test_diff_of_metadata_in_several_files(tmp_path: Path) -> None:
    """A key is compared with the other checkpoint's value in its first file."""
    for side, values in (("a", ("1", "1", "1")), ("b", ("1", "2", "3"))):
        (tmp_path / side).mkdir()
        weight_map = {}
        for f, value in enumerate(values):
            name = f"model-{f + 1:05}-of-00003.safetensors"
            weight_map[f"x{f}.weight"] = name
            metadata = {"key": value, f"only{f}": "", f"{side}{f}": ""}
            (tmp_path / side / name).write_bytes(make_hostile.tensors({f"x{f}.weight": X}, metadata))
        (tmp_path / side / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = json.loads(run("diff", "--json", tmp_path / "a", tmp_path / "b").stdout)["metadata"]
    assert found == {"only_in_a": ["a0", "a1", "a2"], "only_in_b": ["b0", "b1", "b2"], "different": ["key"]}


def test_diff_of_many_keys(tmp_path: Path) -> None:
    """20,000 metadata entries: quadratic 19 s, linear 0.1 s."""
    for side in "ab":
        folder = tmp_path / side
        folder.mkdir()
        metadata = {f"{side}{i}": str(i) for i in range(20_000)}
        (folder / "model.safetensors").write_bytes(make_hostile.tensors({"x.weight": X}, metadata))
        (folder / "config.json").write_text(json.dumps(metadata))
    found = json.loads(
        run_in_time("diff", "--json", tmp_path / "a", tmp_path / "b", code=1).partition("\ncomparing")[0]
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
def test_growth_with_modules_and_globs(glob: str, tmp_path: Path) -> None:
    """As many globs as modules. 6,000 of each: quadratic 0.25 to 1.0 s, linear 0.03 s."""

    def make(n: int) -> tuple[str | Path, ...]:
        entries: dict[str, make_hostile.Entry] = {}
        for i in range(n):
            entries[f"model.layers.{i}.mlp.w.weight"] = ("F8_E4M3", [1, 16], 16)
            entries[f"model.layers.{i}.mlp.w.weight_scale"] = ("F32", [1], 4)
        (tmp_path / "model.safetensors").write_bytes(make_hostile.tensors(entries))
        ignore = [glob.format(n - i) for i in range(n)]
        quantization = {"quant_method": "compressed-tensors", "ignore": ignore}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        return "inspect", tmp_path

    check_growth(make, 3000, 0)
    is_matched = "modules to ignore: 11999 weights" in run("inspect", tmp_path).stdout
    assert is_matched != glob.endswith("x")


def test_convert_of_many_weights(tmp_path: Path) -> None:
    """20,000 weights with a scale in the metadata: quadratic 10 s, linear 0.6 s."""
    entries: dict[str, make_hostile.Entry] = {}
    for i in range(20_000):
        entries[f"m.{i}.weight_packed"] = ("U8", [1, 8], 8)
        entries[f"m.{i}.weight_scale"] = ("F8_E4M3", [1, 1], 1)
        entries[f"m.{i}.weight_global_scale"] = ("F32", [1], 4)
    metadata = {f"opaq.was:m.{i}.weight_global_scale": "0" * 8 for i in range(20_000)}
    (tmp_path / "a.safetensors").write_bytes(make_hostile.tensors(entries, metadata))
    run_in_time("convert", "--layout", "modelopt", tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_a_header_above_the_limit(tmp_path: Path) -> None:
    """A stack of experts is split into weights with long names, whose header would exceed 100 MB."""
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
    """Exit 2 with a message; the C library's regcomp() crashed or took gigabytes."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(make_hostile.tensors({"x.weight": ("BF16", [2, 16], 64)}))
    for option in ("--ignore", "--include"):
        done = run("quantize", option, pattern, path, tmp_path / "b.safetensors", memory=100_000_000)
        assert done.returncode == 2 and 'the pattern "re:' in done.stderr, done.stderr[:200]
        assert len(done.stderr) < 600 and not (tmp_path / "b.safetensors").exists()

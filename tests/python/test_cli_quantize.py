"""`opaq quantize`: which weights are quantized, their names, and the other files. test_cli_peers.py checks the
bytes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
checkpoints = need("cli_checkpoints")
safetensors = need("safetensors.torch")

from cli_checkpoints import check_text, plain_tensors, run, write_model  # noqa: E402  # after what may be missing

Tensors = dict[str, Any]


def load(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(path)
    return found


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def quantized(folder: Path) -> set[str]:
    """The modules that are stored packed."""
    return {name.removesuffix(".weight_packed") for name in load(folder) if name.endswith(".weight_packed")}


def normal(*shape: int, seed: int = 3) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_text(tmp_path: Path) -> None:
    """The summary, and the plan of --dry-run."""
    write_model(tmp_path / "source", plain_tensors(1), files=2)
    output = run("quantize", "source", "to", "--dry-run", folder=tmp_path)
    assert not (tmp_path / "to").exists()
    check_text("quantize_plan.txt", output)
    check_text("quantize.txt", run("quantize", "source", "to", folder=tmp_path))


def test_quantized_weights_are_noted(tmp_path: Path) -> None:
    write_model(tmp_path / "source", plain_tensors(1))
    run("quantize", "source", "once", "--format", "mxfp8", folder=tmp_path)
    said = run("quantize", "once", "twice", folder=tmp_path)
    assert (
        "note: 7 of 7 matrices are quantized already in once, the first is model.layers.0.mlp.down_proj" in said
    )
    assert "(mxfp8): they are decoded and quantized again" in said
    assert "quantized already" not in run("quantize", "source", "to", folder=tmp_path)


def test_patterns_that_match_nothing_are_noted(tmp_path: Path) -> None:
    write_model(tmp_path / "source", plain_tensors(1))
    patterns = [
        "--ignore",
        "*.q_prj",
        "--ignore",
        "*.q_proj",
        "--include",
        "*.mlp.*",
        "--include",
        "re:.*expert",
    ]
    said = run("quantize", "source", "to", "--dry-run", *patterns, folder=tmp_path)
    notes = [line for line in said.splitlines() if line.startswith("note: --")]
    weights = len(plain_tensors(1))
    assert notes == [
        f"note: --ignore *.q_prj matches none of the modules of {weights} weights",
        f"note: --include re:.*expert matches none of the modules of {weights} weights",
    ]


def test_dry_run_groups(tmp_path: Path) -> None:
    write_model(tmp_path / "source", plain_tensors(3))
    grouped, listed = (
        run("quantize", "source", "to", "--dry-run", *options, folder=tmp_path)
        for options in ([], ["--tensors"])
    )
    assert "model.layers.*.mlp.up_proj.weight_packed 3 make U8 [384, 128]" in " ".join(grouped.split())
    assert "model.layers.2.mlp.up_proj.weight_packed 1 make U8 [384, 128]" in " ".join(listed.split())
    assert "*" not in listed and len(grouped) < len(listed) / 2


CONFIGS = [
    *[("compressed-tensors", name) for name in ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2")],
    *[("modelopt", name) for name in ("nvfp4", "mxfp8", "fp8", "fp8row", "fp8blk2")],
    *[("deepseek", name) for name in ("mxfp8", "fp8blk2")],
]


@pytest.mark.parametrize(("layout", "name"), CONFIGS)
def test_configuration(tmp_path: Path, layout: str, name: str) -> None:
    """It equals the file in tests/cli; other members and numbers are unchanged."""
    source = write_model(tmp_path / "source", plain_tensors(1))
    text = '{"model_type": "llama", "eps": 1e-05, "rope": [1.0, 10000000000000000000000], "name": "Zürich"}'
    (source / "config.json").write_text(text)
    run("quantize", source, tmp_path / "to", "--format", name, "--layout", layout)
    made = (tmp_path / "to" / "config.json").read_text()
    assert '"eps": 1e-05' in made and "10000000000000000000000" in made and "Zürich" in made
    own = tmp_path / "to" / "hf_quant_config.json"
    assert own.exists() == (layout == "modelopt")
    check_text(f"config_{layout}_{name}.txt", made + (own.read_text() if own.exists() else ""))


def test_the_rest_of_the_folder(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(1), files=3)
    (source / "tokenizer.json").write_bytes(b"\x00tokens")
    (source / "original" / "deep").mkdir(parents=True)
    (source / "original" / "deep" / "params.json").write_text("{}")
    (source / ".cache").mkdir()
    (source / ".cache" / "of another tool").write_text("x")
    to = tmp_path / "to"
    run("quantize", source, to)
    assert (to / "tokenizer.json").read_bytes() == b"\x00tokens"
    assert (to / "original" / "deep" / "params.json").read_text() == "{}"
    assert sorted(path.name for path in to.iterdir()) == sorted(
        path.name for path in source.iterdir() if path.name != ".cache"
    )
    index = json.loads((to / "model.safetensors.index.json").read_text())
    tensors = load(to)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(to / file, "pt") as opened:
            assert name in opened.keys()
            assert opened.metadata() == {"format": "pt"}


def test_defaults(tmp_path: Path) -> None:
    """Heads, embeddings, norms, routers, encoders and ragged matrices are not quantized, and are listed."""
    stay = {
        "lm_head.weight": normal(64, 64),
        "model.layers.0.mlp.gate.weight": normal(8, 64),
        "model.layers.0.mlp.shared_expert_gate.weight": normal(16, 64),
        "model.layers.0.router.weight": normal(8, 64),
        "model.layers.0.self_attn.q_norm.weight": normal(64, 64),
        "visual.blocks.0.mlp.fc1.weight": normal(64, 64),
        "model.layers.0.odd.weight": normal(16, 40),
    }
    others = {
        "model.embed_tokens.weight": normal(64, 64),
        "model.layers.0.conv.weight": normal(16, 16, 3),
        "model.layers.0.mlp.up_proj.bias": normal(64),
        "model.layers.0.input_layernorm.weight": normal(64),
        "model.layers.0.steps.weight": torch.arange(64).reshape(4, 16),
        "empty.weight": torch.zeros(0, 64, dtype=torch.bfloat16),
    }
    taken = {"model.layers.0.mlp.up_proj.weight": normal(64, 64), "score.weight": normal(16, 64)}
    source = write_model(tmp_path / "source", stay | others | taken)
    run("quantize", source, tmp_path / "to")
    assert quantized(tmp_path / "to") == {name.removesuffix(".weight") for name in taken}
    made = load(tmp_path / "to")
    for name, tensor in (stay | others).items():
        assert torch.equal(made[name], tensor), name
    assert set(config(tmp_path / "to")["ignore"]) >= {name.removesuffix(".weight") for name in stay}
    run(
        "quantize",
        source,
        tmp_path / "all",
        "--no-default-ignore",
        "--ignore",
        "*gate",
        "--ignore",
        "re:model.*norm",
    )
    assert quantized(tmp_path / "all") == {
        "lm_head",
        "model.layers.0.router",
        "visual.blocks.0.mlp.fc1",
        "model.layers.0.mlp.up_proj",
        "score",
    }
    assert "lm_head" not in config(tmp_path / "all")["ignore"]


def test_a_head_without_a_tensor(tmp_path: Path) -> None:
    """A head that shares the embedding's weight is still a linear module."""
    run("quantize", write_model(tmp_path / "source", plain_tensors(1)), tmp_path / "to")
    assert config(tmp_path / "to")["ignore"] == ["lm_head"]


def test_patterns(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(3))
    run("quantize", source, tmp_path / "to", "--include", "*.mlp.*", "--ignore", "model.layers.1.*")
    names = ("gate_proj", "up_proj", "down_proj")
    assert quantized(tmp_path / "to") == {f"model.layers.{i}.mlp.{name}" for i in (0, 2) for name in names}
    output = run("quantize", source, tmp_path / "none", "--include", "nothing", code=3)
    assert "no weight to quantize" in output and not (tmp_path / "none").exists()
    output = run("quantize", source, tmp_path / "none", "--ignore", "re:(", code=2)
    assert 'the pattern "re:(": has a group without its end' in output


def test_fused_projections_share_their_scale(tmp_path: Path) -> None:
    """Also across files; the largest amax determines it. Other projections do not share scales."""
    tensors = {}
    for i, name in enumerate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]):
        tensors[f"model.layers.0.{name}.weight"] = normal(32, 64, seed=i) * 2.0**i
    for i, name in enumerate(["gate_proj", "up_proj", "w1", "w3", "w2", "q_a_proj", "kv_a_proj_with_mqa"]):
        tensors[f"model.layers.1.mlp.{name}.weight"] = normal(32, 64, seed=i) * 4.0**i
    source = write_model(tmp_path / "source", tensors, files=5)
    run("quantize", source, tmp_path / "to")
    made = load(tmp_path / "to")

    def check(*names: str) -> None:
        amax = max(tensors[f"{name}.weight"].float().abs().max() for name in names)
        for name in names:
            assert made[f"{name}.weight_global_scale"].tolist() == [(1 / amax * 2688).item()], name

    check(*[f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
    check("model.layers.0.self_attn.o_proj")
    check("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    check("model.layers.1.mlp.w1", "model.layers.1.mlp.w3")
    check("model.layers.1.mlp.w2")
    check("model.layers.1.mlp.q_a_proj", "model.layers.1.mlp.kv_a_proj_with_mqa")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8blk2"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_stacked_experts(tmp_path: Path, name: str, is_turned: bool) -> None:
    """The result equals that of the same matrices as separate weights."""
    gate_up, down = normal(3, 2 * 160, 256), normal(3, 256, 160)
    prefix = "model.layers.0.mlp.experts"
    single = {}
    for expert in range(3):
        gate, up = gate_up[expert].chunk(2)
        single |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
        single[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    stacks = {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
    if is_turned:
        stacks = {key: stack.transpose(1, 2).contiguous() for key, stack in stacks.items()}
    one = write_model(tmp_path / "single", {key: part.contiguous() for key, part in single.items()})
    many = write_model(tmp_path / "stacked", stacks)
    for folder in (one, many):
        run("quantize", folder, tmp_path / f"to {folder.name}", "--format", name)
    made = [(tmp_path / f"to {n}" / "model.safetensors").read_bytes() for n in ("single", "stacked")]
    assert made[0] == made[1]


def test_stacks_that_are_kept(tmp_path: Path) -> None:
    stack = normal(3, 64, 128)
    source = write_model(tmp_path / "source", {"a.experts.down_proj": stack})
    (source / "config.json").write_text("{}")
    run("quantize", source, tmp_path / "to", "--experts", "keep")
    made = load(tmp_path / "to")
    assert {key: list(tensor.shape) for key, tensor in made.items()} == {
        "a.experts.down_proj_packed": [3, 64, 64],
        "a.experts.down_proj_scale": [3, 64, 8],
        "a.experts.down_proj_global_scale": [3],
    }
    for expert in range(3):
        own = write_model(tmp_path / f"own{expert}", {"a.weight": stack[expert].contiguous()})
        run("quantize", own, tmp_path / f"to{expert}")
        alone = load(tmp_path / f"to{expert}")
        assert torch.equal(made["a.experts.down_proj_packed"][expert], alone["a.weight_packed"])
        assert made["a.experts.down_proj_global_scale"][expert] == alone["a.weight_global_scale"][0]


def test_rules(tmp_path: Path) -> None:
    """With other rules the decoded values are close to the original in every layout."""
    source = write_model(tmp_path / "source", plain_tensors(1))
    files = []
    for rule in ("te", "compressed-tensors", "modelopt"):
        for layout in ("compressed-tensors", "modelopt"):
            to = tmp_path / f"{rule} {layout}"
            run("quantize", source, to, "--rule", rule, "--layout", layout)
            run("verify", to, source, "--min-sqnr", "19")
            files.append((to / "model.safetensors").read_bytes())
    assert len(set(files)) == len(files)
    assert "rceil" in run("quantize", source, tmp_path / "no", "--rule", "rceil", code=2)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8row"])
def test_a_source_in_blocks_of_fp8(tmp_path: Path, name: str) -> None:
    """The result equals that of the decoded float32 values."""
    source = write_model(tmp_path / "source", plain_tensors(1))
    run("quantize", source, tmp_path / "fp8", "--format", "fp8blk2", "--layout", "deepseek")
    run("convert", tmp_path / "fp8", tmp_path / "floats", "--layout", "plain", "--dtype", "f32")
    for folder in ("fp8", "floats"):
        run("quantize", tmp_path / folder, tmp_path / f"to {folder}", "--format", name)
    one, other = (load(tmp_path / f"to {folder}") for folder in ("fp8", "floats"))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[key].view(torch.uint8)), key
    run("verify", tmp_path / "to fp8", source)


def test_one_file(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(1)) / "model.safetensors"
    to = tmp_path / "made.safetensors"
    run("quantize", source, to)
    run("quantize", source.parent, tmp_path / "folder")
    assert to.read_bytes() == (tmp_path / "folder" / "model.safetensors").read_bytes()
    assert "exists; --overwrite replaces it" in run("quantize", source, to, code=3)
    assert "is the source itself" in run("quantize", source, source, "--overwrite", code=3)
    run("quantize", source, to, "--overwrite", "--format", "mxfp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "made.safetensors", "source"]


def test_destinations(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(1), files=2)
    to = tmp_path / "to"
    assert "is the folder of the source" in run("quantize", source, source, "--overwrite", code=3)
    run("quantize", source, to)
    made = {path.name: path.read_bytes() for path in to.iterdir()}
    output = run("quantize", source, to, code=3)
    assert "has files already (config.json); --overwrite" in output
    assert made == {path.name: path.read_bytes() for path in to.iterdir()}
    (to / "model-00009-of-00009.safetensors").write_bytes(b"of another model")
    run("quantize", source, to, "--overwrite")
    assert made == {path.name: path.read_bytes() for path in to.iterdir()}
    run("quantize", source, source / "inside")
    assert made == {path.name: path.read_bytes() for path in (source / "inside").iterdir()}


def test_links(tmp_path: Path) -> None:
    real = write_model(tmp_path / "real", plain_tensors(1))
    links = tmp_path / "links"
    links.mkdir()
    for path in real.iterdir():
        (links / path.name).symlink_to(path)
    output = run("quantize", links, tmp_path / "to", code=3)
    assert "model.safetensors is a link" in output and not (tmp_path / "to").exists()
    run("quantize", links, tmp_path / "to", "--follow-links")
    run("quantize", real, tmp_path / "same")
    assert (tmp_path / "to" / "model.safetensors").read_bytes() == (
        tmp_path / "same" / "model.safetensors"
    ).read_bytes()


def test_threads_do_not_matter(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(2))
    for threads in ("1", "2", "7"):
        run("quantize", source, tmp_path / threads, "--threads", threads)
    made = {(tmp_path / threads / "model.safetensors").read_bytes() for threads in ("1", "2", "7")}
    assert len(made) == 1


@pytest.mark.parametrize("name", ["nvfp4", "fp8blk2", "fp8"])
def test_memory(tmp_path: Path, name: str) -> None:
    """Less than twice the largest tensor and 64 MB, also with many threads."""
    weights = {f"m{i}.weight": torch.ones(512, 8192, dtype=torch.bfloat16) for i in range(30)}
    source = write_model(tmp_path / "source", weights)
    command = [checkpoints.program(), "quantize", "--quiet", "--threads", "64", "--format", name]
    process = subprocess.Popen([*command, str(source), str(tmp_path / "to")])
    seen = []
    while process.poll() is None:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if lines[0].split()[1] == "opaq":  # before exec it is a copy of this process
                seen += [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        time.sleep(0.001)
    assert process.returncode == 0
    assert max(seen) < 2 * (8 << 20) + (64 << 20)

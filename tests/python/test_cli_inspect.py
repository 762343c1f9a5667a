"""`opaq inspect` on checkpoints that other packages wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
cli = need("cli_checkpoints")
cli.program()

Q, K, GATE = (f"model.layers.0.{m}.weight" for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))


def with_one_scale(stored: dict[str, Any]) -> dict[str, Any]:
    """Sets all global scales to the same value, so that there is no note about them."""
    return {
        key: torch.full_like(value, 1000.0) if key.endswith("_global_scale") else value
        for key, value in stored.items()
    }


@pytest.mark.parametrize("name", sorted(cli.CT_METHODS))
def test_formats_are_found(tmp_path: Path, name: str) -> None:
    plain = cli.plain_tensors()
    stored = with_one_scale(cli.quantized_tensors(plain, name))
    found = cli.run_json("inspect", cli.write_model(tmp_path / "model", stored, cli.ct_config(name)))
    assert (found["layout"], found["formats"], found["notes"]) == ("compressed-tensors", [name], [])
    linear = [key for key in plain if cli.is_linear(key)]
    own = [tensor for key, tensor in stored.items() if key.rpartition(".")[0] + ".weight" in linear]
    quantized = found["totals"]["quantized"]
    assert quantized["weights"] == len(linear)
    assert quantized["parameters"] == sum(plain[key].numel() for key in linear)
    assert quantized["bytes"] == sum(tensor.nbytes for tensor in own)
    assert quantized["bits_per_weight"] == pytest.approx(8 * quantized["bytes"] / quantized["parameters"])
    totals = found["totals"]
    assert totals["tensors"] == len(stored)
    assert totals["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert totals["parameters"] == sum(tensor.numel() for tensor in plain.values())
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    assert set(kinds) == {name, "BF16"}
    assert kinds["BF16"]["weights"] == len(plain) - len(linear)
    groups = {group["pattern"]: group for group in found["groups"]}
    up = groups["model.layers.*.mlp.up_proj.weight"]
    assert (up["weights"], up["kind"], up["shape"]) == (2, name, [384, 256])


def test_roles(tmp_path: Path) -> None:
    stored = cli.quantized_tensors(cli.plain_tensors(), "nvfp4")
    stored["model.layers.0.self_attn.q_proj.input_global_scale"] = torch.ones(1)
    found = cli.run_json("inspect", "--tensors", cli.write_model(tmp_path, stored, cli.ct_config("nvfp4")))
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(tensors) == set(stored)
    roles = {key: tensors[key]["role"] for key in tensors if tensors[key]["weight"] == Q}
    assert roles == {
        Q + "_packed": "codes",
        Q + "_scale": "scales",
        Q + "_global_scale": "global scale",
        "model.layers.0.self_attn.q_proj.input_global_scale": "input scale",
    }
    assert tensors[Q + "_scale"]["layout"] == "compressed-tensors"
    assert tensors["model.norm.weight"]["role"] == "plain"
    for key, tensor in tensors.items():
        assert tensor["shape"] == list(stored[key].shape)
        assert tensor["bytes"] == stored[key].nbytes


def notes(folder: Path, stored: dict[str, Any], config: dict[str, Any] | None) -> list[str]:
    found: list[str] = cli.run_json("inspect", cli.write_model(folder, stored, config))["notes"]
    return found


def test_notes(tmp_path: Path) -> None:
    plain = cli.plain_tensors()
    nvfp4 = cli.quantized_tensors(plain, "nvfp4")
    fine = with_one_scale(nvfp4)
    config = cli.ct_config("nvfp4")
    assert notes(tmp_path / "fine", fine, config) == []
    assert notes(tmp_path / "plain", plain, None) == []
    assert "no quantized weight was found" in notes(tmp_path / "nothing", plain, config)[0]
    assert "config.json has no quantization_config" in notes(tmp_path / "silent", fine, None)[0]
    other = notes(tmp_path / "other", fine, {"quant_method": "gptq"})
    assert other == ["the configuration says gptq, but the weights are in the layout compressed-tensors"]

    q, gate = notes(tmp_path / "apart", nvfp4, config)
    assert "within q_proj, k_proj, v_proj" in q and "2 times" in q and Q in q
    assert "within gate_proj, up_proj" in gate and GATE in gate

    fp8 = cli.quantized_tensors(plain, "fp8row")
    del fp8[Q + "_scale"]
    lost = notes(tmp_path / "lost", fp8, cli.ct_config("fp8row"))
    assert lost == [f"fp8 codes without scales that fit: 1 tensor, the first {Q}"]
    del fine[K + "_packed"]
    alone = notes(tmp_path / "alone", fine, config)
    assert alone == [f"scales without codes that fit: 2 tensors, the first {K}_global_scale"]


@pytest.mark.parametrize(
    ("entry", "hits"),
    [
        ("model.layers.0.self_attn.q_proj", 1),
        ("model.layers.0.self_attn", 0),
        (r"re:.*self_attn\.q_proj$", 2),
        (r"re:model\.layers\.\d+\.(?:mlp|other)\..*", 6),
        ("re:self_attn", 0),  # matched at the start only
        (r"re:(.*){2}", 14),
        ("*.o_proj", 2),
    ],
)
def test_ignored_modules(tmp_path: Path, entry: str, hits: int) -> None:
    stored = with_one_scale(cli.quantized_tensors(cli.plain_tensors(), "nvfp4"))
    found = notes(tmp_path, stored, cli.ct_config("nvfp4", ["lm_head", entry]))
    assert len(found) == (hits != 0)
    if hits:
        assert f"list of modules to ignore: {hits} weight" in found[0]
        assert f'(by "{entry}")' in found[0]


@pytest.mark.parametrize("entry", [r"re:(.*)\1", "re:(", "re:" + "(" * 20_000])
def test_ignored_modules_that_are_not_patterns(tmp_path: Path, entry: str) -> None:
    stored = with_one_scale(cli.quantized_tensors(cli.plain_tensors(), "nvfp4"))
    found = notes(tmp_path, stored, cli.ct_config("nvfp4", ["lm_head", entry]))
    assert len(found) == 1
    assert found[0].startswith(
        f'skipped in the configuration\'s list of modules to ignore: the pattern "{entry[:80]}"'
    )


def test_modelopt_and_gpt_oss(tmp_path: Path) -> None:
    stored = cli.quantized_tensors({Q: cli.plain_tensors()[Q]}, "nvfp4")
    modelopt = {
        Q: stored[Q + "_packed"],
        Q + "_scale": stored[Q + "_scale"],
        Q + "_scale_2": 1 / stored[Q + "_global_scale"].reshape(()),
    }
    folder = cli.write_model(tmp_path / "modelopt", modelopt)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    found = cli.run_json("inspect", folder)
    assert (found["layout"], found["formats"], found["notes"]) == ("modelopt", ["nvfp4"], [])
    assert found["config"] == {"method": "NVFP4", "format": None, "layout": "modelopt"}
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = {
        stack + "_blocks": torch.zeros(4, 64, 3, 16, dtype=torch.uint8),
        stack + "_scales": torch.full((4, 64, 3), 127, dtype=torch.uint8),
    }
    found = cli.run_json("inspect", cli.write_model(tmp_path / "oss", blocks, {"quant_method": "mxfp4"}))
    assert (found["layout"], found["formats"], found["notes"]) == ("gpt-oss", ["mxfp4"], [])
    assert found["groups"][0]["shape"] == [4, 64, 96]


def test_text(tmp_path: Path) -> None:
    stored = cli.quantized_tensors(cli.plain_tensors(), "nvfp4")
    cli.write_model(tmp_path / "model", stored, cli.ct_config("nvfp4", ["lm_head", "*.o_proj"]), files=2)
    cli.check_text("inspect.txt", cli.run("inspect", "model", folder=tmp_path))
    cli.check_text("inspect_tensors.txt", cli.run("inspect", "--tensors", "model", folder=tmp_path))
    cli.check_text("inspect_json.txt", cli.run("inspect", "--json", "model", folder=tmp_path))


def test_errors(tmp_path: Path) -> None:
    assert "cannot open" in cli.run("inspect", tmp_path / "nowhere", code=3)
    assert "has no safetensors file" in cli.run("inspect", tmp_path, code=3)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "its header would have" in cli.run("inspect", tmp_path, code=3)


def test_control_characters(tmp_path: Path) -> None:
    """Replaced in text, because terminals interpret them; escaped in JSON."""
    method = "gptq\x1b[31m\x9bred\nline"
    folder = cli.write_model(tmp_path, {"x": torch.ones(2)}, {"quant_method": method, "\x1b[2J": 1})
    assert "gptq?[31m?red?line" in cli.run("inspect", folder)
    assert cli.run_json("inspect", folder)["config"]["method"] == method
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "\x1b[2J": 2}))
    other = cli.write_model(tmp_path / "other", {"x": torch.ones(2)})
    output = cli.run("diff", folder, other, code=1)
    assert 'config.json: "?[2J": only in A' in output and "\x1b" not in output


def test_empty(tmp_path: Path) -> None:
    found = cli.run_json("inspect", cli.write_model(tmp_path, {"a": torch.zeros(0, 5), "b": torch.zeros(())}))
    assert found["totals"]["parameters"] == 1
    alone = cli.run_json("inspect", cli.write_model(tmp_path / "none", {}))
    assert alone["totals"]["bits_per_weight"] is None

"""`opaq diff`: differences between two checkpoints, by bytes and by values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
cli = need("cli_checkpoints")
cli.program()

Q = "model.layers.0.self_attn.q_proj.weight"
SORTS = ("only_in_a", "only_in_b", "other_type", "different")


def names(found: Any) -> dict[str, list[str]]:
    return {sort: [item["name"] for item in found[sort]] for sort in SORTS if found[sort]}


def test_equal(tmp_path: Path) -> None:
    """The file of a tensor does not matter."""
    plain = cli.plain_tensors()
    a, b = cli.write_model(tmp_path / "a", plain), cli.write_model(tmp_path / "b", plain, files=3)
    for options in ([], ["--values"]):
        found = cli.run_json("diff", *options, a, b)
        assert found["equal"] and names(found) == {}
        assert found["compared"] == len(plain)
        assert found["quantization_config_equal"]


def changed(folder: Path) -> tuple[Path, Path]:
    plain = cli.plain_tensors()
    other = dict(plain)
    other[Q] = plain[Q].clone()
    other[Q][3, 5] += 0.5
    other[Q][9, 0] = 7
    other["model.norm.weight"] = plain["model.norm.weight"].float()
    other["new.weight"] = torch.ones(2, 3)
    del other["model.embed_tokens.weight"]
    a = cli.write_model(folder / "a", plain)
    b = cli.write_model(folder / "b", other, {"quant_method": "fp8"})
    config = json.loads((b / "config.json").read_text())
    config["hidden_size"] = 512
    (b / "config.json").write_text(json.dumps(config))
    return a, b


def test_bytes(tmp_path: Path) -> None:
    a, b = changed(tmp_path)
    found = cli.run_json("diff", a, b, code=1)
    assert names(found) == {
        "only_in_a": ["model.embed_tokens.weight"],
        "only_in_b": ["new.weight"],
        "other_type": ["model.norm.weight"],
        "different": [Q],
    }
    x, y = cli.plain_tensors()[Q], cli.plain_tensors()[Q].clone()
    y[3, 5] += 0.5
    y[9, 0] = 7
    bytes_of = [tensor.view(torch.uint8) for tensor in (x, y)]
    assert found["different"][0]["bytes"] == int((bytes_of[0] != bytes_of[1]).sum())
    assert found["different"][0]["of"] == x.nbytes
    assert found["config"] == {
        "only_in_a": [],
        "only_in_b": ["quantization_config"],
        "different": ["hidden_size"],
    }
    assert not found["quantization_config_equal"]
    cli.check_text("diff.txt", cli.run("diff", "a", "b", code=1, folder=tmp_path))


def test_groups(tmp_path: Path) -> None:
    """Tensors whose names differ in numbers only are one line, unless --tensors is given."""
    plain = cli.plain_tensors(layers=3)
    other = {name: x + 1 if "q_proj" in name else x for name, x in plain.items() if "up_proj" not in name}
    a, b = cli.write_model(tmp_path / "a", plain), cli.write_model(tmp_path / "b", other)
    grouped, listed = (cli.run("diff", *options, a, b, code=1) for options in ([], ["--tensors"]))
    changed = [sum(x["bytes"] for x in cli.run_json("diff", a, b, code=1)["different"]), 3 * 256 * 256 * 2]
    assert " ".join(grouped.split()).count("model.layers.*.mlp.up_proj.weight 3 BF16 [384, 256]") == 1
    figures = f"{changed[0]:,} {changed[1]:,}"
    assert f"model.layers.*.self_attn.q_proj.weight 3 BF16 [256, 256] {figures}" in " ".join(grouped.split())
    assert "*" not in listed and "model.layers.2.mlp.up_proj.weight" in listed
    values = " ".join(cli.run("diff", "--values", a, b, code=1).split())
    assert "model.layers.*.self_attn.q_proj.weight 3 BF16 [256, 256] BF16 [256, 256]" in values


def test_values(tmp_path: Path) -> None:
    a, b = changed(tmp_path)
    found = cli.run_json("diff", "--values", a, b, code=1)
    assert names(found) == {
        "only_in_a": ["model.embed_tokens.weight"],
        "only_in_b": ["new.weight"],
        "different": [Q],
    }
    x = cli.plain_tensors()[Q]
    assert found["different"][0]["elements"] == 2
    assert found["different"][0]["largest"] == 7 - float(x[9, 0])
    cli.check_text("diff_values.txt", cli.run("diff", "--values", "a", "b", code=1, folder=tmp_path))


def test_layouts_of_the_same_codes(tmp_path: Path) -> None:
    stored = cli.quantized_tensors(cli.plain_tensors(), "nvfp4")
    other: dict[str, Any] = {}
    for key, tensor in stored.items():
        if key.endswith("_global_scale"):
            stored[key] = torch.full_like(tensor, 4096.0)  # its inverse is exact
            other[key.replace("_global_scale", "_scale_2")] = torch.tensor(1 / 4096.0)
        else:
            other[key.removesuffix("_packed")] = tensor
    a = cli.write_model(tmp_path / "a", stored, cli.ct_config("nvfp4"))
    b = cli.write_model(tmp_path / "b", other, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert not cli.run_json("diff", a, b, code=1)["equal"]
    found = cli.run_json("diff", "--values", a, b)
    assert found["equal"] and not found["quantization_config_equal"]
    assert found["rounded"] == 0
    third = torch.tensor(3000.0)  # its inverse is rounded
    stored[Q + "_global_scale"], other[Q + "_scale_2"] = third.reshape(1), 1 / third
    cli.write_model(a, stored, cli.ct_config("nvfp4"))
    cli.write_model(b, other, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = cli.run_json("diff", "--values", a, b)
    assert found["equal"] and found["rounded"] == 1
    other[Q] = other[Q] ^ 0x10
    cli.write_model(b, other, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = cli.run_json("diff", "--values", a, b, code=1)
    assert names(found) == {"different": [Q]}
    assert 0 < found["different"][0]["elements"] <= 2 * stored[Q + "_packed"].numel()


def test_not_finite(tmp_path: Path) -> None:
    """NaNs and infinities in both are equal."""
    x = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    y = x.bfloat16()
    a, b = cli.write_model(tmp_path / "a", {"x": x}), cli.write_model(tmp_path / "b", {"x": y})
    assert cli.run_json("diff", "--values", a, b)["equal"]
    y[2] = -y[2]
    cli.write_model(b, {"x": y})
    assert cli.run_json("diff", "--values", a, b, code=1)["different"][0]["elements"] == 1


def test_metadata(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2)}
    for name, metadata in (("a", {"format": "pt", "by": "me"}), ("b", {"format": "np", "to": "you"})):
        cli.safetensors.save_file(tensors, tmp_path / f"{name}.safetensors", metadata=metadata)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    found = cli.run_json("diff", *paths, code=1)
    assert found["metadata"] == {"only_in_a": ["by"], "only_in_b": ["to"], "different": ["format"]}
    assert cli.run_json("diff", "--values", *paths)["equal"]


@pytest.mark.parametrize("options", [[], ["--values"]])
def test_integers(tmp_path: Path, options: list[str]) -> None:
    a = cli.write_model(tmp_path / "a", {"x": torch.arange(5), "y": torch.tensor([True, False])})
    b = cli.write_model(tmp_path / "b", {"x": torch.arange(5) + 1, "y": torch.tensor([True, False])})
    assert names(cli.run_json("diff", *options, a, b, code=1)) == {"different": ["x"]}


def test_errors(tmp_path: Path) -> None:
    folder = cli.write_model(tmp_path / "a", {"x": torch.ones(3)})
    assert "cannot open" in cli.run("diff", folder, tmp_path / "nowhere", code=3)

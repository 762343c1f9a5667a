"""`opaq verify`: figures against PyTorch's in float64, failures, and the HTML page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
cli = need("cli_checkpoints")
cli.program()

Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
VOID = {"meta", "input"}


def figures(x: Any, y: Any) -> dict[str, float]:
    x, y = x.double().flatten(), y.double().flatten()
    error = x - y
    return {
        "sqnr_db": float(10 * torch.log10((x * x).sum() / (error * error).sum())),
        "cosine": float(x @ y / (x.norm() * y.norm())),
        "relative_error": float(error.norm() / x.norm()),
        "rms": float((x * x).mean().sqrt()),
        "largest_error": float(error.abs().max()),
    }


def by_name(found: Any) -> dict[str, Any]:
    return {weight["name"]: weight for weight in found["weights"]}


def pair(folder: Path, plain: dict[str, Any], stored: dict[str, Any], name: str = "nvfp4") -> tuple[Path, Path]:
    quantized = cli.write_model(folder / "quantized", stored, cli.ct_config(name))
    return quantized, cli.write_model(folder / "original", plain, files=2)


@pytest.mark.parametrize("name", sorted(cli.CT_METHODS))
def test_figures(tmp_path: Path, name: str) -> None:
    plain = cli.plain_tensors()
    stored = cli.quantized_tensors(plain, name)
    found = cli.run_json("verify", *pair(tmp_path, plain, stored, name))
    assert found["pass"]
    weights = by_name(found)
    assert set(weights) == set(plain)
    for key, x in plain.items():
        weight = weights[key]
        if not cli.is_linear(key):
            assert (weight["kind"], weight["equal"], weight["sqnr_db"]) == ("BF16", True, None)
            continue
        y = cli.dequantized(stored, key, name)
        for figure, expected in figures(x, y).items():
            assert weight[figure] == pytest.approx(expected, rel=1e-9), (key, figure)
        matrix, row, column = weight["largest_at"]
        assert matrix == 0
        assert float(x[row, column].double() - y[row, column].double()) in (
            weight["largest_error"],
            -weight["largest_error"],
        )
        assert weight["exact"] + sum(weight["histogram"]) == x.numel()
    sizes = {
        kind["kind"]: (kind["elements"], kind["bytes"], kind["bits_per_weight"]) for kind in found["kinds"]
    }
    assert sum(elements for elements, _, _ in sizes.values()) == sum(x.numel() for x in plain.values())
    assert (
        found["quantized_bytes"]
        == sum(size for _, size, _ in sizes.values())
        == sum(x.nbytes for x in stored.values())
    )
    assert found["original_bytes"] == sum(x.nbytes for x in plain.values())
    assert sizes["BF16"][2] == 16 and sizes[name][2] == 8 * sizes[name][1] / sizes[name][0] < 9
    assert all(w["bits_per_weight"] == 8 * w["bytes"] / w["elements"] for w in found["weights"])
    assert [weight["sqnr_db"] for weight in found["weights"] if weight["sqnr_db"]] == sorted(
        weight["sqnr_db"] for weight in found["weights"] if weight["sqnr_db"]
    )


def test_histogram(tmp_path: Path) -> None:
    x = torch.randn(512, 768, generator=torch.Generator().manual_seed(5))
    stored = cli.quantized_tensors({Q: x}, "mxfp4")
    found = cli.run_json("verify", *pair(tmp_path, {Q: x}, stored, "mxfp4"))
    error = (x - cli.dequantized(stored, Q, "mxfp4")).double().abs()
    octaves = torch.log2(error[error > 0] / x.double().square().mean().sqrt())
    first, per_octave = found["histogram_first_octave"], found["histogram_bins_per_octave"]
    bins = ((octaves - first) * per_octave).floor().clamp(0, 63).long()
    expected = torch.bincount(bins, minlength=64)
    got = torch.tensor(found["weights"][0]["histogram"])
    assert found["weights"][0]["exact"] == int((error == 0).sum())
    # values near an edge may be counted in the next bin: edges are accurate to an eighth of an octave
    assert int((got - expected).abs().sum()) < 0.15 * x.numel()
    assert abs(int(got.cumsum(0)[40]) - int(expected.cumsum(0)[40])) < 0.1 * x.numel()


def test_threads_do_not_matter(tmp_path: Path) -> None:
    x = torch.randn(3000, 1024, generator=torch.Generator().manual_seed(6)).bfloat16()
    paths = pair(tmp_path, {Q: x}, cli.quantized_tensors({Q: x}, "fp8blk2"), "fp8blk2")
    outputs = {cli.run("verify", "--json", "--quiet", "--threads", str(n), *paths) for n in (1, 2, 3, 7)}
    assert len(outputs) == 1


def test_thresholds(tmp_path: Path) -> None:
    plain = cli.plain_tensors()
    paths = pair(tmp_path, plain, cli.quantized_tensors(plain, "nvfp4"))
    for given, code in (
        (["--min-sqnr", "20"], 0),
        (["--min-sqnr", "21"], 1),
        (["--min-cosine", "0.99"], 0),
        (["--min-cosine", "0.999"], 1),
        (["--min-sqnr", "20", "--min-cosine", "0.999"], 1),
    ):
        found = cli.run_json("verify", *given, *paths, code=code)
        assert found["pass"] == (code == 0)
        assert found["failed"] == (14 if code else 0)
    cli.run("verify", "--min-cosine", "2", *paths, code=2)


def test_failures(tmp_path: Path) -> None:
    plain = cli.plain_tensors()
    stored = cli.quantized_tensors(plain, "nvfp4")
    k, v, o = (Q.replace("q_proj", other) for other in ("k_proj", "v_proj", "o_proj"))
    stored[Q + "_packed"] = stored[Q + "_packed"].flip(0).contiguous()
    stored[k + "_scale"].view(torch.uint8)[3, 2] = 0x7F
    for part in ("_packed", "_scale", "_global_scale"):
        del stored[v + part]
    stored[o + "_packed"] = stored[o + "_packed"][:128].contiguous()
    stored[o + "_scale"] = stored[o + "_scale"][:128].contiguous()
    stored[NORM] = stored[NORM].clone()
    stored[NORM][7] += 1
    stored["model.more.weight"] = torch.zeros(3)
    stored["model.layers.0.self_attn.attn.k_scale"] = torch.ones(1)  # of a calibration: not a failure
    quantized, original = pair(tmp_path, plain, stored)
    found = cli.run_json("verify", quantized, original, code=1)
    failed = {w["name"]: w["verdict"] for w in found["weights"] if w["verdict"] != "pass"}
    assert failed == {
        Q: "below the threshold",
        k: "not finite",
        v: "missing",
        o: "other shape or dtype",
        NORM: "unequal",
        "model.more.weight": "extra",
    }
    assert by_name(found)[k]["quantized_not_finite"] == 16
    assert found["failed"] == 6
    cli.check_text("verify_failures.txt", cli.run("verify", "quantized", "original", code=1, folder=tmp_path))


def test_exchanged_arguments(tmp_path: Path) -> None:
    from cli_run import run

    plain = cli.plain_tensors()
    pair(tmp_path, plain, cli.quantized_tensors(plain, "nvfp4"))
    said = run("verify", "--quiet", "original", "quantized", folder=tmp_path)
    assert said.returncode == 1
    assert "original has no quantized weights and quantized has: are the two exchanged?" in said.stderr
    assert "exchanged" not in run("verify", "--quiet", "quantized", "original", folder=tmp_path).stderr


def test_text(tmp_path: Path) -> None:
    plain = cli.plain_tensors()
    pair(tmp_path, plain, cli.quantized_tensors(plain, "nvfp4"))
    cli.check_text("verify.txt", cli.run("verify", "quantized", "original", folder=tmp_path))
    everything = cli.run("verify", "--all", "quantized", "original", folder=tmp_path)
    cli.check_text("verify_all.txt", everything)


def test_plain_tensors(tmp_path: Path) -> None:
    """Compared by value if the dtypes differ; integers are compared by bytes."""
    x = torch.randn(33, 20).bfloat16()
    original = {"same": x, "wide": x, "rounded": x.float() + 1e-9, "count": torch.arange(7), "empty": x[:0]}
    other = {**original, "wide": x.float(), "rounded": x, "count": torch.arange(7).int()}
    a, b = cli.write_model(tmp_path / "a", other), cli.write_model(tmp_path / "b", original)
    failed = {w["name"]: w["verdict"] for w in cli.run_json("verify", a, b, code=1)["weights"]}
    assert failed == {
        "same": "pass",
        "wide": "pass",
        "rounded": "unequal",
        "count": "other shape or dtype",
        "empty": "pass",
    }
    assert cli.run_json("verify", b, b)["pass"]


def test_zeros(tmp_path: Path) -> None:
    plain = {Q: torch.zeros(64, 64)}
    stored = cli.quantized_tensors(plain, "mxfp8")
    weight = cli.run_json("verify", *pair(tmp_path, plain, stored, "mxfp8"))["weights"][0]
    assert (weight["verdict"], weight["sqnr_db"], weight["cosine"]) == ("pass", None, 1.0)


def test_stacked_experts(tmp_path: Path) -> None:
    """The original has one tensor for all experts, the quantized checkpoint one weight for each."""
    random = torch.Generator().manual_seed(9)
    prefix = "model.layers.0.mlp.experts."
    gate_up = torch.randn(3, 64, 256, generator=random).bfloat16()
    down = torch.randn(3, 256, 32, generator=random).bfloat16()
    single = {}
    for expert in range(3):
        single[f"{prefix}{expert}.gate_proj.weight"] = gate_up[expert, :32].contiguous()
        single[f"{prefix}{expert}.up_proj.weight"] = gate_up[expert, 32:].contiguous()
        single[f"{prefix}{expert}.down_proj.weight"] = down[expert].contiguous()
    stored = cli.quantized_tensors(single, "mxfp8")
    plain = {prefix + "gate_up_proj": gate_up, prefix + "down_proj": down}
    quantized, original = pair(tmp_path, plain, stored, "mxfp8")
    found = cli.run_json("verify", quantized, original)
    weights = by_name(found)
    assert set(weights) == set(single)
    for key, x in single.items():
        expected = figures(x, cli.dequantized(stored, key, "mxfp8"))
        assert weights[key]["sqnr_db"] == pytest.approx(expected["sqnr_db"], rel=1e-9)
    del stored[f"{prefix}1.up_proj.weight"], stored[f"{prefix}1.up_proj.weight_scale"]
    cli.write_model(quantized, stored, cli.ct_config("mxfp8"))
    found = cli.run_json("verify", quantized, original, code=1)
    assert found["weights"][0]["name"] == f"{prefix}1.up_proj.weight"
    assert found["weights"][0]["verdict"] == "missing"


@pytest.mark.parametrize("name", sorted(cli.CT_METHODS))
def test_quantized_stacks(tmp_path: Path, name: str) -> None:
    """A stack of experts whose codes and scales are stacks too."""
    stack = "model.layers.0.mlp.experts.down_proj"
    x = torch.randn(3, 256, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    single = [cli.quantized_tensors({Q: x[expert]}, name) for expert in range(3)]
    stored = {
        key.replace(Q, stack): torch.stack([each[key].reshape(each[key].shape or (1,)) for each in single])
        for key in single[0]
    }
    if name == "nvfp4":
        stored[stack + "_global_scale"] = stored[stack + "_global_scale"].reshape(3)
    found = cli.run_json("verify", *pair(tmp_path, {stack: x}, stored, name))
    y = torch.stack([cli.dequantized(each, Q, name) for each in single])
    weight = found["weights"][0]
    assert weight["kind"] == name
    assert weight["sqnr_db"] == pytest.approx(figures(x, y)["sqnr_db"], rel=1e-9)
    matrix, row, column = weight["largest_at"]
    assert abs(float(x[matrix, row, column].double() - y[matrix, row, column])) == weight["largest_error"]


def test_gpt_oss(tmp_path: Path) -> None:
    """Its plain experts are stored transposed."""
    name = "model.layers.0.mlp.experts.down_proj"
    codes = torch.randint(0, 256, (2, 64, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    scales = torch.full((2, 64, 2), 120, dtype=torch.uint8)
    values = cli.unpack_e2m1(codes.flatten(2)) * 2.0**-7
    stored = {name + "_blocks": codes, name + "_scales": scales}
    plain = {name: values.transpose(1, 2).contiguous().bfloat16()}
    a = cli.write_model(tmp_path / "a", stored, {"quant_method": "mxfp4"})
    weight = cli.run_json("verify", a, cli.write_model(tmp_path / "b", plain))["weights"][0]
    assert (weight["verdict"], weight["equal"]) == ("pass", True)


class Page(HTMLParser):
    """Checks that tags balance, and collects the page's contents and the report of its JSON block."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.texts: list[str] = []
        self.block = ""
        self.is_block = False
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []
        self.report = json.loads(self.block)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        for key, value in attrs:
            assert key not in ("src", "href") and not key.startswith("on"), (tag, key, value)
        if tag not in VOID:
            self.open.append(tag)
        self.is_block = ("type", "application/json") in attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())
        self.is_block = False

    def handle_data(self, data: str) -> None:
        if self.is_block:
            self.block += data
        else:
            self.texts.append(data)


def test_page(tmp_path: Path) -> None:
    """Its JSON equals that of --json, and its table needs no script. Nothing is loaded from other hosts."""
    plain = cli.plain_tensors(layers=3)
    quantized, original = pair(tmp_path, plain, cli.quantized_tensors(plain, "nvfp4"))
    path = tmp_path / "page.html"
    cli.run("verify", "--html", path, quantized, original)
    page = Page(path)
    assert page.report == cli.run_json("verify", quantized, original)
    assert {weight["name"] for weight in page.report["weights"]} == set(plain)
    assert all(name in page.texts for name in plain)
    assert (page.seen["script"], page.seen["style"], page.seen["table"]) == (2, 1, 1)
    assert page.seen["tr"] == len(plain) + 1
    text = path.read_text(encoding="utf-8")
    assert "@" not in text.replace("@media", "") and "https:" not in text
    assert text.count("http:") == 1 and "'http://www.w3.org/2000/svg'" in text  # the namespace
    assert "cannot open the folder" in cli.run(
        "verify", "--html", tmp_path / "none" / "x.html", quantized, original, code=3
    )


def test_page_shows_sizes_and_fits_a_screen(tmp_path: Path) -> None:
    """Both tables of weights have the columns, the one without a script has the figures, and the page is at
    most 1280 px wide."""
    plain = cli.plain_tensors(layers=1)
    quantized, original = pair(tmp_path, plain, cli.quantized_tensors(plain, "nvfp4"))
    path = tmp_path / "page.html"
    cli.run("verify", "--html", path, quantized, original)
    page, text = Page(path), path.read_text(encoding="utf-8")
    heads = ["weight", "kind", "verdict", "SQNR dB", "cosine", "size", "bits per weight"]
    first = page.texts.index("weight")
    assert page.texts[first : first + len(heads)] == heads
    for weight in page.report["weights"]:
        assert page.texts.count(f"{weight['bits_per_weight']:.3f}") >= 1
    columns = re.search(r"const COLUMNS = \[\n(.*?)\n\];", text, re.S)
    assert columns and {"size", "bits per weight"} <= set(re.findall(r"^  \['([^']+)'", columns[1], re.M))
    assert re.search(r"cells\('th', .*'size', 'bits per weight'", text)
    width = re.search(r"^main \{ max-width: (\d+)px;.*padding: \d+px (\d+)px", text, re.M)
    assert width and int(width[1]) <= 1280 and "* { box-sizing: border-box; }" in text
    assert ".scroll { overflow-x: auto;" in text  # wide tables scroll inside the page


HOSTILE_NAMES = (
    "</script><img src=x onerror=alert(1)>.0.x_proj.weight",
    "<!--<script>.1.x_proj.weight",
    "</noscript></table><b>bold</b>&amp;\"'.2.x_proj.weight",
    "a\u2028b\u2029c\u202e\\u003c/script>.3.x_proj.weight",
    "@JSON@ @TABLE@ %s.4.x_proj.weight",
)


def test_no_name_breaks_out_of_the_page(tmp_path: Path) -> None:
    plain = {name: torch.randn(64, 64) for name in HOSTILE_NAMES}
    quantized, original = pair(tmp_path / "</script><i>", plain, cli.quantized_tensors(plain, "nvfp4"))
    path = tmp_path / "page.html"
    cli.run("verify", "--html", path, quantized, original)
    page = Page(path)
    harmless = {Q: torch.randn(64, 64)}
    cli.run("verify", "--html", path, *pair(tmp_path / "b", harmless, cli.quantized_tensors(harmless, "nvfp4")))
    other = Page(path)
    rows = ("tr", "td", "code")
    assert {t: n for t, n in page.seen.items() if t not in rows} == {
        t: n for t, n in other.seen.items() if t not in rows
    }
    assert page.report == cli.run_json("verify", quantized, original)
    assert page.block.isascii() and not set(page.block) & set("<>&")
    assert {weight["name"] for weight in page.report["weights"]} == set(HOSTILE_NAMES)
    assert [name for name in HOSTILE_NAMES if name.isprintable() and page.texts.count(name) != 1] == []


def test_page_without_quantized_weights(tmp_path: Path) -> None:
    folder = cli.write_model(tmp_path / "a", {"x": torch.ones(3)})
    cli.run("verify", "--html", tmp_path / "page.html", folder, folder)
    assert Page(tmp_path / "page.html").report == cli.run_json("verify", folder, folder)


def test_margins_of_the_defaults(tmp_path: Path) -> None:
    """Normal numbers exceed the default thresholds clearly."""
    for name in cli.CT_METHODS:
        x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(8)).bfloat16()
        found = cli.run_json(
            "verify", *pair(tmp_path / name, {Q: x}, cli.quantized_tensors({Q: x}, name), name)
        )
        kind = found["kinds"][0]
        assert math.isclose(kind["required_sqnr_db"], 14 if name.endswith("fp4") else 25)
        assert kind["least_sqnr_db"] > kind["required_sqnr_db"] + 4
        assert kind["least_cosine"] > kind["required_cosine"]


def test_errors(tmp_path: Path) -> None:
    folder = cli.write_model(tmp_path / "a", {"x": torch.ones(3)})
    assert "cannot open" in cli.run("verify", folder, tmp_path / "nowhere", code=3)
    assert "cannot open" in cli.run("verify", tmp_path / "nowhere", folder, code=3)
    cli.run("verify", folder, code=2)

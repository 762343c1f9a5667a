"""opaq in transformers: every model in every layout loads exactly the weights of the checkpoint, runs, and is
saved byte for byte; checkpoints in high precision are quantized while they load; all models compile to whole
graphs that generate the same tokens.

Every model is compiled with AOTAutograd, which traces the operators that Inductor would get and computes them
like eager mode, so logits are compared bit by bit. Inductor itself takes up to 20 seconds per layer, so it is
tested with Llama, DeepSeek-V3 and gpt-oss only: Qwen3-MoE and Mixtral consist of the same parts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import ROOT, need, need_cxx, slow_but

torch = need("torch")
transformers = need("transformers")
models = need("checkpoint_models")
experts_forward = need("opaq.integrations.transformers_experts").experts_forward
transformers_version = need("opaq.integrations.transformers_version")
VERSION = transformers_version.minor_version(transformers.__version__)
Config = opaq.Config
FP4 = ["ct-nvfp4", "ct-nvfp4a16", "ct-mxfp4"]
DENSE = [layout for layout in models.LAYOUTS if not layout.startswith("gpt-oss")]
PAIRS = [(model, layout) for model in models.MODELS for layout in DENSE] + [("gpt_oss", "gpt-oss-mxfp4")]
OWN = {"gpt_oss": "gpt-oss-mxfp4", "deepseek_v3": "deepseek-fp8", "qwen3_moe": "modelopt-nvfp4"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load(folder: Path, config: Any = None, **more: Any) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=Config() if config is None else config, **more)


def prompt(rows: int = 2, length: int = 9) -> Any:
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(5))


def parameter_rows(model: Any, name: str) -> Any:
    """The part of the model that corresponds to a plain weight of a checkpoint: (parameter, values of its
    rows)."""
    name = name.replace("block_sparse_moe", "mlp")
    for old, new in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
        name = name.replace(old, new)
    if ".experts." not in name or not name.endswith(".weight"):
        parameter = model.get_parameter(name)
        return parameter, parameter.dequantize(torch.float32)
    module, rest = name.split(".experts.")
    expert, projection, _ = rest.split(".")
    key = "down_proj" if projection == "down_proj" else "gate_up_proj"
    parameter = model.get_parameter(f"{module}.experts.{key}")
    matrix = parameter.dequantize(torch.float32)[int(expert)]
    if key == "gate_up_proj":
        matrix = matrix.chunk(2)[projection == "up_proj"]
    return parameter, matrix


def same_bytes(a: Any, b: Any) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def assert_same_files(folder: Path, other: Path) -> None:
    first, second = ({k: v for f in d.glob("*.safetensors") for k, v in models.safetensors.load_file(f).items()}
                     for d in (folder, other))  # fmt: skip
    assert set(first) == set(second)
    assert [name for name in first if not same_bytes(first[name], second[name])] == []
    kept = [json.loads((d / "config.json").read_text()).get("quantization_config") for d in (folder, other)]
    assert kept[0] == kept[1]


@torch.no_grad()
def logits(model: Any, ids: Any) -> Any:
    return model(ids).logits.float()


def cosine(a: Any, b: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


# ---- quantized checkpoints ----


@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_checkpoint_loads_runs_and_is_saved(name: str, layout: str, tmp_path: Path) -> None:
    plain = models.make_model(name)
    values = models.write_checkpoint(tmp_path / "in", plain, models.LAYOUTS[layout])
    model = load(tmp_path / "in")
    for weight, expected in values.items():
        parameter, found = parameter_rows(model, weight)
        assert isinstance(parameter, opaq.QuantizedTensor), weight
        assert torch.equal(found, expected), weight
    packed = {n for n, p in model.named_parameters() if isinstance(p, opaq.QuantizedTensor)}
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert packed.isdisjoint(linear) and (linear == {"lm_head.weight"} or layout == "gpt-oss-mxfp4")
    expected = 0.8 if layout in FP4 or "nvfp4" in layout else 0.95
    assert cosine(logits(model, prompt()), logits(plain, prompt())) > expected
    model.save_pretrained(tmp_path / "out")
    assert_same_files(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", models.MODELS)
def test_a_packed_model_is_the_plain_model_of_its_values(name: str, tmp_path: Path) -> None:
    """Weight-only, in float32: equal to transformers' own layers and experts with the dequantized weights."""
    layout = "gpt-oss-mxfp4" if name == "gpt_oss" else "ct-nvfp4a16"
    plain = models.make_model(name, torch.float32)
    models.write_checkpoint(tmp_path, plain, models.LAYOUTS[layout])
    model = load(tmp_path)
    found = logits(model, prompt())
    dequantized = model.dequantize()
    assert not any(isinstance(p, opaq.QuantizedTensor) for p in dequantized.parameters())
    torch.testing.assert_close(found, logits(dequantized, prompt()), rtol=1e-4, atol=1e-3)
    dequantized.save_pretrained(tmp_path / "plain")
    assert set(models.plain_tensors(plain)) == set(
        models.safetensors.load_file(tmp_path / "plain" / "model.safetensors")
    )


def rounded(x: Any, text: str, scale: Any) -> Any:
    name = "scale" if "+delayed" in text else "amax_rowwise"
    given = {} if scale is None else {name: scale.reshape(1)}
    return opaq.quantize_tensor(x.contiguous(), text, **given).dequantize()


class _Rounded(torch.nn.Module):
    """A plain layer with a quantized and dequantized input."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.weight, self.text = packed.weight.dequantize(), packed.input_quantizer
        self.scale = packed.input_scale

    def forward(self, x: Any) -> Any:
        return rounded(x, self.text, self.scale) @ self.weight.mT


class _RoundedExperts(torch.nn.Module):
    """A loop over plain experts with quantized and dequantized inputs."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.weights = packed.gate_up_proj.dequantize(), packed.down_proj.dequantize()
        self.texts = packed.input_quantizer, packed.hidden_quantizer
        scales = packed.input_scales.input_scale, packed.input_scales.hidden_scale
        self.scales = [[None] * len(self.weights[0]) if scale is None else scale for scale in scales]

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        total = torch.zeros_like(x)
        for expert in range(len(self.weights[0])):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            if len(rows):
                h = rounded(x[rows], self.texts[0], self.scales[0][expert]) @ self.weights[0][expert].mT
                gate, up = h.chunk(2, -1)
                h = torch.nn.functional.silu(gate) * up
                y = rounded(h, self.texts[1], self.scales[1][expert]) @ self.weights[1][expert].mT
                total.index_add_(0, rows, y * weights[rows, slots, None])
        return total


@pytest.mark.parametrize("layout", [layout for layout in DENSE if layout != "ct-nvfp4a16"])
def test_inputs_are_rounded_as_the_checkpoint_says(layout: str, tmp_path: Path) -> None:
    models.write_checkpoint(tmp_path, models.make_model("llama", torch.float32), models.LAYOUTS[layout])
    model = load(tmp_path)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, opaq.QuantizedLinear)}
    given = 2688 / 3 if layout == "ct-nvfp4" else 3 / 2688 if "nvfp4" in layout else 4 / 448
    has_scale = layout in ("ct-nvfp4", "ct-fp8-static", "modelopt-nvfp4", "modelopt-fp8")
    for module in packed.values():
        expected = torch.tensor([given]) if has_scale else None
        assert module.input_quantizer and (module.input_scale is None) == (expected is None)
        assert expected is None or torch.equal(module.input_scale, expected)
    # each layer by itself: in a whole model one different code affects everything after it
    seen: dict[str, tuple[Any, Any]] = {}
    for name, module in packed.items():
        module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
    logits(model, prompt())
    assert seen.keys() == packed.keys()
    for name, (x, y) in seen.items():
        torch.testing.assert_close(y, _Rounded(packed[name])(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["ct-nvfp4", "ct-mxfp4", "ct-fp8-dynamic", "modelopt-fp8", "deepseek-fp8"])
def test_experts_inputs_are_rounded_as_the_checkpoint_says(layout: str, tmp_path: Path) -> None:
    models.write_checkpoint(tmp_path, models.make_model("qwen3_moe", torch.float32), models.LAYOUTS[layout])
    experts = load(tmp_path).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 256, generator=generator)
    ids = torch.rand(24, 4, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(24, 2, generator=generator)
    with torch.no_grad():
        expected = _RoundedExperts(experts)(x, ids, weights)
        torch.testing.assert_close(experts(x, ids, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["ct-nvfp4", "modelopt-nvfp4", "ct-fp8-static"])
def test_experts_keep_the_scales_they_have(layout: str, tmp_path: Path) -> None:
    """In a stack each weight keeps its scales, and each expert the scale of its input."""
    plain = models.make_model("qwen3_moe")
    stored, _ = models.quantize_tensors(models.plain_tensors(plain), models.LAYOUTS[layout])
    key = {"ct-nvfp4": "input_global_scale"}.get(layout, "input_scale")
    for expert in range(4):
        for projection in ("gate", "up", "down"):
            scale = stored[f"model.layers.1.mlp.experts.{expert}.{projection}_proj.{key}"]
            scale.mul_(1 + expert / 8)
    models.write_config(tmp_path, plain, models.LAYOUTS[layout].config)
    models.write_tensors(tmp_path, stored)
    experts = load(tmp_path).model.layers[1].mlp.experts
    end = {"ct-nvfp4": "weight_global_scale", "modelopt-nvfp4": "weight_scale_2"}.get(layout, "weight_scale")
    buffer = "_rowwise_scale_inv" if layout == "ct-fp8-static" else "_global_rowwise"
    rows = getattr(experts.gate_up_proj, buffer).reshape(4, 2, -1)
    names = [f"model.layers.1.mlp.experts.{e}.{p}_proj.{end}" for e in range(4) for p in ("gate", "up")]
    own = torch.cat([stored[name].reshape(1) for name in names]).reshape(4, 2, 1)
    assert len(own.unique()) == 8
    assert torch.equal(rows, own.expand_as(rows))
    for expert in range(4):
        scale = stored[f"model.layers.1.mlp.experts.{expert}.up_proj.{key}"].reshape(())
        assert experts.input_scales.input_scale[expert] == scale
        assert experts.input_scales.hidden_scale[expert] == scale


def test_shards_prefixes_and_what_stays_plain(tmp_path: Path) -> None:
    """A checkpoint in several files, of the base model only, with one layer in high precision."""
    plain = models.make_model("qwen3_moe")
    whole = models.plain_tensors(plain)
    stored, _ = models.quantize_tensors(whole, models.LAYOUTS["ct-fp8-dynamic"])
    kept = {name: t for name, t in stored.items() if not name.startswith("model.layers.1.mlp.")}
    kept |= {name: t for name, t in whole.items() if name.startswith("model.layers.1.mlp.")}
    base = {name.removeprefix("model."): t for name, t in kept.items() if name != "lm_head.weight"}
    models.write_config(tmp_path, plain, models.LAYOUTS["ct-fp8-dynamic"].config)
    models.write_tensors(tmp_path, base, 100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    model = load(tmp_path)
    first, second = (layer.mlp.experts.gate_up_proj for layer in model.model.layers)
    assert isinstance(first, opaq.QuantizedTensor) and not isinstance(second, opaq.QuantizedTensor)
    assert torch.equal(second, plain.model.layers[1].mlp.experts.gate_up_proj)
    model.lm_head.weight.data.copy_(plain.lm_head.weight)
    assert cosine(logits(model, prompt()), logits(plain, prompt())) > 0.95
    model.save_pretrained(tmp_path / "out")
    saved = models.safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(kept)
    assert all(same_bytes(saved[name], kept[name]) for name in saved if name != "lm_head.weight")


def test_scales_of_other_dtypes(tmp_path: Path) -> None:
    """llm-compressor writes bf16, DeepSeek-V4 exponents; both are saved unchanged."""
    plain = models.make_model("qwen3_moe")
    for layout, end, dtype in (
        ("ct-fp8-dynamic", "weight_scale", torch.bfloat16),
        ("deepseek-fp8", "weight_scale_inv", torch.float8_e8m0fnu),
    ):
        folder = tmp_path / layout
        stored, _ = models.quantize_tensors(models.plain_tensors(plain), models.LAYOUTS[layout])
        stored = {name: t.to(dtype) if name.endswith(end) else t for name, t in stored.items()}
        models.write_config(folder, plain, models.LAYOUTS[layout].config)
        models.write_tensors(folder, stored)
        model = load(folder)
        name = "model.layers.0.self_attn.q_proj.weight"
        value = models.LAYOUTS[layout].dequantize(
            {"weight": stored[name], end: stored[name[:-6] + end].float()}
        )
        assert torch.equal(model.get_parameter(name).dequantize(torch.float32), value)
        model.save_pretrained(folder / "out")
        assert_same_files(folder, folder / "out")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_plain_experts_run_too(name: str) -> None:
    model = models.make_model(name, torch.float32)
    expected = logits(model, prompt())
    model.set_experts_implementation("opaq")
    torch.testing.assert_close(logits(model, prompt()), expected, rtol=1e-4, atol=1e-3)


class _Sizes(SimpleNamespace):
    """A configuration that has every attribute that an experts module reads."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "implementation": "eager",
            "limit": 0.5,
            "alpha": 1.702,
            "act": "relu2" if self.plain else "silu",
        }
        answers |= {"expert": 4, "intermediate": 32, "hidden": 64}
        return next((value for part, value in answers.items() if part in name), None)


def experts_class(family: str, kind: str) -> Any:
    """A model's experts. Older versions of transformers do not have every model; the newest must."""
    if VERSION < transformers_version.NEWEST and not importlib.util.find_spec(f"transformers.models.{family}"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return getattr(need(f"transformers.models.{family}.modeling_{family}"), kind)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("deepseek_v4", "DeepseekV4Experts"),
        ("glm5_next", "Glm5NextTextExperts"),
        ("gpt_oss", "GptOssExperts"),
        ("hy_v4", "HYV4Experts"),
        ("minimax_m3_vl", "MiniMaxM3VLExperts"),
        ("nemotron_h", "NemotronHExperts"),
        ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    ],
)
def test_gates(family: str, kind: str) -> None:
    """The operator against each model's own code, with limits that many values exceed."""
    torch.manual_seed(0)
    experts = experts_class(family, kind)(_Sizes(plain=family == "nemotron_h"))
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.3)
    x, ids, weights = torch.randn(10, 64), torch.rand(10, 4).argsort(-1)[:, :2], torch.rand(10, 2)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch.testing.assert_close(experts_forward(experts, x, ids, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "kind"), [("beam", "BeamExperts"), ("muse_spark", "MuseSparkExperts")])
def test_gates_that_are_refused(family: str, kind: str) -> None:
    experts = experts_class(family, kind)(_Sizes(plain=False))
    with pytest.raises(NotImplementedError, match=kind):
        experts_forward(experts, torch.randn(2, 64), torch.zeros(2, 1).long(), torch.ones(2, 1))


def test_gradients_if_required(tmp_path: Path) -> None:
    """Nothing is saved for a backward that is not needed; parameters that require gradients get them."""
    models.write_checkpoint(tmp_path, models.make_model("qwen3_moe"), models.LAYOUTS["ct-nvfp4a16"])
    model = load(tmp_path)
    assert not model(prompt()).logits.requires_grad
    weight = model.model.embed_tokens.weight.requires_grad_()
    model(prompt()).logits.float().sum().backward()
    assert weight.grad.abs().sum() > 0


def test_mixed_schemes_and_files_of_modelopt(tmp_path: Path) -> None:
    """Layers with different formats, and the configuration of hf_quant_config.json."""
    plain = models.make_model("llama")
    whole = models.plain_tensors(plain)
    four, eight = (
        models.quantize_tensors(whole, models.LAYOUTS[n])[0] for n in ("modelopt-nvfp4", "modelopt-fp8")
    )
    stored = {n: t for n, t in eight.items() if "mlp" not in n} | {n: t for n, t in four.items() if "mlp" in n}
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "NVFP4" if "mlp" in name else "FP8"}
        for name in whole
        if name.endswith("_proj.weight")
    }
    found = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"], "quantized_layers": layers}
    models.write_config(tmp_path, plain)
    models.write_tensors(tmp_path, stored)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "modelopt", "quantization": found}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    layer = model.model.layers[0]
    assert layer.mlp.up_proj.quantizer == "nvfp4+global+tiled+rule=modelopt"
    assert layer.self_attn.q_proj.quantizer == "fp8+tiled+rule=modelopt"
    assert cosine(logits(model, prompt()), logits(plain, prompt())) > 0.8


def test_configurations_of_other_libraries_are_unchanged(tmp_path: Path) -> None:
    merge = transformers.quantizers.auto.AutoHfQuantizer.merge_quantization_configs
    stored = models.LAYOUTS["deepseek-fp8"].config
    assert type(merge(stored, None)).__name__ == "FineGrainedFP8Config"
    assert merge(stored, Config()).to_dict() == stored
    with pytest.raises(ValueError, match="quantized already"):
        merge(stored, Config("nvfp4"))


# ---- quantizing while loading ----


@pytest.mark.parametrize("name", models.MODELS)
def test_quantizes_while_it_loads(name: str, tmp_path: Path) -> None:
    plain = models.make_model(name)
    plain.save_pretrained(tmp_path / "in")
    model = load(tmp_path / "in", Config("nvfp4", activations="mxfp8"))
    for key, parameter in plain.named_parameters():
        found = model.get_parameter(key)
        is_expert = key.endswith(("gate_up_proj", "down_proj"))
        if not (is_expert or (key.endswith("_proj.weight") or "kv_a_proj" in key)):
            assert torch.equal(found, parameter), key
            continue
        value = parameter.detach()
        value = value.mT.contiguous() if is_expert and name == "gpt_oss" else value
        assert isinstance(found, opaq.QuantizedTensor) and found._quantizer_text == "nvfp4+tiled"
        assert torch.equal(found.tiled(False), opaq.quantize_tensor(value, "nvfp4")), key
    model.save_pretrained(tmp_path / "own")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert torch.equal(logits(model, prompt()), logits(again, prompt()))
    again.save_pretrained(tmp_path / "once_more")
    assert_same_files(tmp_path / "own", tmp_path / "once_more")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_precision_selects_tiles(name: str, tmp_path: Path) -> None:
    models.make_model(name).save_pretrained(tmp_path / "in")
    load(tmp_path / "in", Config("mxfp8")).save_pretrained(tmp_path / "own")
    rows, exact, near = (load(tmp_path / "own", Config(precision=p)) for p in (None, "exact", "near"))
    for model, quantizer, precision in ((rows, "mxfp8", "exact"), (near, "mxfp8+tiled", "near")):
        packed = [p for p in model.parameters() if isinstance(p, opaq.QuantizedTensor)]
        assert packed and {p._quantizer_text for p in packed} == {quantizer}
        modules = [m for m in model.modules() if hasattr(m, "precision") and m._parameters]
        assert modules and {m.precision for m in modules} == {precision}
    want = logits(rows, prompt())
    for model in (exact, near):
        torch.testing.assert_close(logits(model, prompt()), want, rtol=0, atol=float(want.abs().max()) / 50)
    for model, precision in ((rows, None), (near, "near"), (exact, "exact")):  # saved; buffers are unchanged
        model.save_pretrained(tmp_path / "again")
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert config["quantization_config"].pop("precision") == precision
        again = load(tmp_path / "again", None)
        assert again.config.quantization_config.precision == precision
        (tmp_path / "again" / "config.json").write_text(json.dumps(config))
        own = json.loads((tmp_path / "own" / "config.json").read_text())
        own["quantization_config"].pop("precision", None)
        (tmp_path / "own" / "config.json").write_text(json.dumps(own))
        assert_same_files(tmp_path / "own", tmp_path / "again")
    with pytest.raises(ValueError, match="'quick', expected None or one of exact, near"):
        Config(precision="quick")


def test_ignored_and_tied_weights_stay_plain(tmp_path: Path) -> None:
    models.make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load(tmp_path, Config("fp8row", ignore=["re:.*layers.0.", "o_proj", "model.layers.1.mlp.*_proj"]))
    packed = [n for n, m in model.named_modules() if isinstance(m, opaq.QuantizedLinear)]
    assert packed == [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="calibrated"):
        Config("nvfp4", activations="fp8+delayed")
    with pytest.raises(ValueError, match=r'opaq.Config\("nvfp4"\)'):
        load(tmp_path, Config())


def test_warnings_while_it_loads(tmp_path: Path) -> None:
    models.make_model("llama").save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"opaq.Config: 1 of 2 patterns of ignore match none of the \d+ modules: 'q_prj'"
    ):
        load(tmp_path, Config("nvfp4", ignore=["q_prj", "lm_head"]))
    with pytest.warns(
        UserWarning, match=r"opaq.Config: none of the (\d+) linear layers and experts was.*: \1 ignored"
    ):
        load(tmp_path, Config("nvfp4", ignore=["*"]))
    with pytest.raises(ValueError, match=r"opaq.Config: quantizer='nvfp4\+sr' rounds stochastically"):
        Config("nvfp4+sr")


# ---- compiled ----


@torch.no_grad()
def greedy(model: Any, forward: Any, steps: int = 5, recompiles: bool = True) -> tuple[Any, Any]:
    """Tokens and logits of prefill and decoding, with a static cache."""
    ids = step = prompt()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    tokens, found, at = [], [], 0
    for i in range(steps):
        count = step.shape[1]
        positions = torch.arange(at, at + count).expand(len(ids), -1)
        with torch.compiler.set_stance("default" if recompiles and i < 2 else "fail_on_recompile"):
            out = forward(input_ids=step, position_ids=positions, past_key_values=cache, use_cache=True)
        at += count
        step = out.logits[:, -1:].argmax(-1)
        tokens.append(step)
        found.append(out.logits[:, -1])
    return torch.cat(tokens, 1), torch.stack(found, 1)


@pytest.mark.parametrize("name", slow_but(models.MODELS, "llama", "gpt_oss"))
def test_compiles_whole_and_generates_the_same(name: str, tmp_path: Path) -> None:
    models.write_checkpoint(tmp_path, models.make_model(name), models.LAYOUTS[OWN.get(name, "ct-nvfp4")])
    # Before 5.18 transformers' SDPA prefills a static cache with is_causal in eager code and with a mask over
    # the whole cache in compiled code, so its plain models differ too: by 1e-5 in float32 and 0.1 in bf16.
    model = load(tmp_path, **({"attn_implementation": "eager"} if VERSION < (5, 18) else {}))
    tokens, expected = greedy(model, model)
    torch._dynamo.utils.counters.clear()
    found, values = greedy(model, compiled(model))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(tokens, found) and torch.equal(expected, values)
    made = model.generate(prompt(), max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert torch.equal(made[:, prompt().shape[1] :], tokens)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_inductor_generates_the_same(name: str, tmp_path: Path) -> None:
    """With emulated precision casts: fused operations round like eager mode, so that 4-bit codes are the
    same."""
    need_cxx()
    sparse = {"first_k_dense_replace": 0} if name == "deepseek_v3" else {}
    plain = models.make_model(name, num_hidden_layers=1, **sparse)
    models.write_checkpoint(tmp_path, plain, models.LAYOUTS[OWN.get(name, "ct-nvfp4")])
    model = load(tmp_path)
    tokens, _ = greedy(model, model, 4)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        found, _ = greedy(model, compiled(model, backend="inductor"), 4)
    assert torch.equal(tokens, found)


# ---- without transformers ----


def test_opaq_without_transformers() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import opaq
try:
    opaq.Config
except AttributeError as error:
    print("refused:", error)
try:
    from opaq import Config
except ImportError as error:
    print("refused:", error)
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT / "python", check=True)
    assert done.stdout.count("refused: opaq.Config needs transformers, which is not installed") == 2


def test_precision_is_kept_beside_a_configuration_of_others(tmp_path: Path) -> None:
    """In the model's configuration, so that other readers find the standard quantization_config."""
    models.write_checkpoint(tmp_path / "in", models.make_model("llama"), models.LAYOUTS["ct-nvfp4"])
    load(tmp_path / "in", Config(precision="near")).save_pretrained(tmp_path / "out")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    assert load(tmp_path / "out", Config()).config.quantization_config.precision == "near"
    assert load(tmp_path / "out", Config(precision=None)).config.quantization_config.precision is None
    assert load(tmp_path / "in", Config()).config.quantization_config.precision == "exact"


_LOADS = """
import sys
{imports}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print([type(module).__name__ for module in model.modules()].count("QuantizedLinear"))
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import opaq; assert 'transformers' not in sys.modules",
        pytest.param("import transformers.quantizers.auto, opaq", marks=pytest.mark.slow),
    ],
)
def test_import_opaq_registers_it(imports: str, tmp_path: Path) -> None:
    """A folder that opaq saved loads packed without opaq.Config, in both orders of the imports."""
    models.make_model("llama").save_pretrained(tmp_path / "in")
    load(tmp_path / "in", Config("mxfp8")).save_pretrained(tmp_path / "own")
    run = [sys.executable, "-c", _LOADS.format(imports=imports), str(tmp_path / "own")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT / "python", check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0 and "MISSING" not in done.stderr, (done.stdout, done.stderr)


def test_versions_that_are_not_supported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked when the integration is imported, before the first use of an API that such a version may lack."""
    integration = need("opaq.integrations.transformers")
    for version in ("5.16.0", "5.22.2"):
        transformers_version.check_version(version)
    for version, kind, message in (
        ("5.15.1", ImportError, "opaq: transformers 5.15.1 is installed, expected 5.16 to 5.22"),
        ("5.23.0", UserWarning, "opaq: transformers 5.23.0 is newer than those tested, 5.16 to 5.22"),
    ):
        # transformers replaces its own module when some of its parts are imported
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with warnings.catch_warnings(), pytest.raises(kind) as raised:
            warnings.simplefilter("error")
            importlib.reload(integration)
        assert str(raised.value) == message

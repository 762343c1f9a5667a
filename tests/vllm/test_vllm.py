"""The vLLM plug-in in the real vLLM: greedy tokens of packed checkpoints equal those of transformers with opaq,
or of vLLM's own layers with the decoded weights."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.plugins import load_general_plugins

import opaq
from vllm_calls import PROMPTS, TOKENS, ask, serving, tokens, transformers_tokens
from vllm_models import calibrate, run_command, write_adapter, write_model

COMMAND = os.environ["OPAQ_COMMAND"]
CT, MODELOPT, DEEPSEEK = "compressed-tensors", "modelopt", "deepseek"


class Models:
    """Checkpoints, written on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plain(self, family: str) -> Path:
        folder = self.folder / family
        return folder if folder.exists() else write_model(family, folder)

    def packed(self, family: str, layout: str, form: str) -> Path:
        options = "--layout", layout, "--format", form
        target = self.folder / f"{family}-{layout}-{form}"
        return run_command(COMMAND, "quantize", self.plain(family), target, *options)

    def decoded(self, family: str, layout: str, form: str) -> Path:
        """A plain checkpoint with the decoded weights."""
        source = self.packed(family, layout, form)
        return run_command(COMMAND, "convert", source, source.with_suffix(".plain"), "--layout", "plain")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def plugin() -> Any:
    load_general_plugins()
    return get_quantization_config("opaq")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log messages of the plug-in."""
    lines: list[str] = []
    logger = sys.modules[plugin().__module__].logger
    monkeypatch.setattr(logger, "info", lambda text, *values: lines.append(text % values))
    return lines


# ---- the same tokens ----


@pytest.mark.parametrize(
    ("family", "layout", "form"),
    [
        ("llama", CT, "nvfp4"),
        ("llama", CT, "mxfp4"),
        ("llama", CT, "mxfp8"),
        ("llama", CT, "fp8row"),
        ("llama", CT, "fp8blk2"),
        ("llama", MODELOPT, "nvfp4"),
        ("llama", MODELOPT, "mxfp8"),
        ("llama", DEEPSEEK, "fp8blk2"),
        ("qwen3_moe", CT, "nvfp4"),
        ("qwen3_moe", CT, "mxfp4"),
        ("qwen3_moe", CT, "mxfp8"),
        ("qwen3_moe", MODELOPT, "nvfp4"),
        ("qwen3_moe", DEEPSEEK, "fp8blk2"),
        ("gpt_oss", "gpt-oss", "mxfp4"),
    ],
)
def test_same_tokens_as_transformers(
    models: Models, log: list[str], family: str, layout: str, form: str
) -> None:
    model = models.packed(family, layout, form)
    assert tokens(model) == transformers_tokens(model)
    assert all(f"weights in {form}" in line and "kernel packed_" in line for line in log) and len(log) == 1


@pytest.mark.parametrize("layout", [CT, MODELOPT])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_one_scale_for_a_weight(
    models: Models, family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fp8 inputs are not quantized here: vLLM computes one amax per token, transformers one per tensor."""
    monkeypatch.setenv("OPAQ_VLLM_ACTIVATIONS", "none")
    model = models.packed(family, layout, "fp8")
    assert tokens(model) == transformers_tokens(model, plain_inputs=True)


@pytest.mark.parametrize(("layout", "form"), [(CT, "nvfp4"), (CT, "mxfp8"), (DEEPSEEK, "fp8blk2")])
def test_same_tokens_as_decoded_weights(
    models: Models, layout: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention, a shared expert and groups of experts, against vLLM's own layers: vLLM's latent
    attention differs from that of transformers even with plain weights."""
    monkeypatch.setenv("OPAQ_VLLM_ACTIVATIONS", "none")
    packed = tokens(models.packed("deepseek_v3", layout, form))
    assert packed == tokens(models.decoded("deepseek_v3", layout, form))
    assert len(set(packed[0])) > 4


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_calibrated_inputs(models: Models, family: str, tmp_path: Path) -> None:
    """W4A4: inputs are quantized with the checkpoint's scales; fused projections keep different global
    scales."""
    model = calibrate(models.packed(family, CT, "nvfp4"), tmp_path / "calibrated")
    found = tokens(model)
    assert found == transformers_tokens(model)
    assert found != tokens(models.packed(family, CT, "nvfp4"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantizes_while_it_loads(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPAQ_VLLM_FORMAT", "mxfp8")
    found = tokens(models.plain(family), quantization="opaq")
    assert found == transformers_tokens(models.plain(family), opaq.Config("mxfp8", ignore=["lm_head", "gate"]))


def test_format_in_overrides(models: Models, log: list[str]) -> None:
    config = {"quantization_config": {"quant_method": "opaq", "format": "mxfp4"}}
    tokens(models.plain("llama"), hf_overrides=config)
    assert len(log) == 1 and "8 weights in mxfp4" in log[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_compiled(models: Models, family: str) -> None:
    """vLLM traces the whole model; products are single nodes of one graph."""
    model = models.packed(family, CT, "nvfp4")
    torch._dynamo.reset()
    counters.clear()
    found = tokens(model, enforce_eager=False)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] >= 1
    if family == "deepseek_v3":
        torch._dynamo.reset()
        assert found == tokens(models.decoded(family, CT, "nvfp4"), enforce_eager=False)
    else:
        assert found == transformers_tokens(model)


@pytest.mark.parametrize("layout", [CT, MODELOPT])
def test_scales_of_an_fp8_cache(models: Models, layout: str, tmp_path: Path) -> None:
    """Declared by the checkpoint and loaded by vLLM, as without the plug-in."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(models.packed("llama", layout, "nvfp4"), tmp_path / "cached"))
    scales = {
        f"model.layers.{i}.self_attn.{k}_proj.{k}_scale": torch.tensor(2.0 + i) for i in (0, 1) for k in "kv"
    }
    save_file(load_file(model / "model.safetensors") | scales, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (model / "config.json").write_text(json.dumps(config))
    with serving(model) as llm:
        (found,) = llm.apply_model(_cache_scales)
        assert ask(llm)
    assert [scale for _, *scale in found] == [[2.0, 2.0], [3.0, 3.0]]
    assert all(dtype.startswith("fp8") for dtype, *_ in found)


def _cache_scales(model: torch.nn.Module) -> list[tuple[str, float, float]]:
    layers = [module for module in model.modules() if hasattr(module, "_k_scale_float")]
    return [(layer.kv_cache_dtype, layer._k_scale_float, layer._v_scale_float) for layer in layers]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
def test_adapters_beside_packed_weights(models: Models, enforce_eager: bool, tmp_path: Path) -> None:
    """vLLM's LoRA with adapters in PEFT's format, against its own layers with the decoded weights."""
    adapter = write_adapter(models.plain("llama"), tmp_path / "adapter")

    def found(model: Path) -> list[list[list[int]]]:
        torch._dynamo.reset()
        with serving(model, enable_lora=True, max_lora_rank=8, enforce_eager=enforce_eager) as llm:
            return [[ids for ids, _ in ask(llm, adapter=given)] for given in (adapter, None)]

    packed = found(models.packed("llama", CT, "nvfp4"))
    assert packed == found(models.decoded("llama", CT, "nvfp4"))
    assert packed[0] != packed[1]


# ---- alone and together ----


@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
def test_alone_and_batched(models: Models, form: str) -> None:
    """Log probabilities are equal bit by bit; scales of fp8 inputs depend on one token only."""
    with serving(models.packed("llama", CT, form), dtype="bfloat16") as llm:
        together = ask(llm, [PROMPTS[0], PROMPTS[1][:4], PROMPTS[0][:3]])
        alone = [ask(llm, [ids])[0] for ids in (PROMPTS[0], PROMPTS[1][:4], PROMPTS[0][:3])]
    assert together == alone


@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}], ids=["shards", "experts"])
def test_two_ranks(models: Models, options: dict[str, Any]) -> None:
    """Tensor parallelism, or expert parallelism with an expert map, in two processes."""
    model = models.packed("qwen3_moe", CT, "nvfp4")
    given = json.dumps({"tensor_parallel_size": 2, **options})
    command = [sys.executable, str(Path(__file__).with_name("vllm_calls.py")), str(model), given]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert "TOKENS" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("weights in nvfp4") == 2  # a line for each rank
    found = json.loads(next(line for line in done.stdout.splitlines() if "TOKENS" in line).split("TOKENS")[1])
    assert found == transformers_tokens(model)


# ---- the same bits ----


@pytest.mark.parametrize(("family", "form"), [("llama", "nvfp4"), ("llama", "mxfp8"), ("llama", "fp8row")])
def test_rows_have_the_bits_of_transformers(
    models: Models, family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPAQ_VLLM_PRECISION=rows: each linear layer's product with the same input, among them fused projections
    with the products of their parts."""
    monkeypatch.setenv("OPAQ_VLLM_PRECISION", "rows")
    model = models.packed(family, CT, form)
    config = opaq.Config(precision=None)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(model, dtype=torch.bfloat16, quantization_config=config)
    with serving(model, dtype="bfloat16") as llm:
        (products,) = llm.apply_model(_products)
    assert len(products) == 8
    for name, got in products.items():
        head, _, leaf = name.rpartition(".")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        layers = [theirs.get_submodule(f"{head}.{part}") for part in parts.get(leaf, [leaf])]
        assert all(not layer.quantizer.endswith("tiled") for layer in layers)
        with torch.no_grad():
            x = _inputs(layers[0].in_features)
            assert torch.equal(got, torch.cat([layer(x) for layer in layers], -1)), name


def _inputs(columns: int) -> torch.Tensor:
    return torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()


def _products(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of each packed linear layer."""
    return {
        name: module.quant_method.apply(module, _inputs(module.input_size))
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__ == "OpaqLinearMethod"
    }


# ---- a server ----


def test_a_server_completes_a_prompt(models: Models, tmp_path: Path) -> None:
    """The command of docs/vllm.md, with token ids in place of text because these models have no tokenizer."""
    model = models.packed("llama", CT, "nvfp4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        port,
    ]
    command += ["--host", "127.0.0.1", "--max-model-len", "64", "--dtype", "float32", "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--served-model-name", "packed"]
    body = {"model": "packed", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"detokenize": False, "return_token_ids": True}
    log = tmp_path / "server.log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as server,
    ):
        try:
            answer = _post(f"http://127.0.0.1:{port}/v1/completions", body, server)
        finally:
            server.terminate()
    assert answer is not None, log.read_text()[-3000:]
    assert answer["choices"][0]["token_ids"] == transformers_tokens(model)[0]
    assert "weights in nvfp4" in log.read_text()


def _post(address: str, body: dict[str, Any], server: subprocess.Popen[bytes]) -> Any:
    """The server's answer, once it listens; None if it ended or takes too long."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(300):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(error.read().decode()[-2000:])
        except OSError:
            if server.poll() is not None:
                return None
            time.sleep(1)
    return None


# ---- memory, options, errors ----


def test_memory_is_the_packed_bytes(models: Models) -> None:
    model = models.packed("qwen3_moe", CT, "nvfp4")
    with serving(model) as llm:
        (size,) = llm.apply_model(_layer_bytes)
    stored = (model / "model.safetensors").stat().st_size
    plain = 2 * 2 * 256 * 256  # embeddings and the output layer, in the file
    assert size < 1.15 * (stored - plain), (size, stored)


def _layer_bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name)


def test_precision(models: Models, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPAQ_VLLM_PRECISION", "fast")
    tokens(models.packed("llama", CT, "nvfp4"), dtype="bfloat16")
    assert "precision fast" in log[0] and "packed_nvfp4_fast" in log[0]
    monkeypatch.setenv("OPAQ_VLLM_PRECISION", "sloppy")
    with pytest.raises(ValueError, match="OPAQ_VLLM_PRECISION is 'sloppy', expected one of exact"):
        plugin()()


def test_checkpoints_that_vllm_handles(log: list[str]) -> None:
    config, packed = plugin(), {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert config.override_quantization_method(packed, None) is None
    assert len(log) == 1 and log[0].startswith("opaq leaves this checkpoint to vLLM: ") and "gptq" in log[0]
    with pytest.raises(ValueError, match="^opaq: .*gptq"):
        config.override_quantization_method(packed, "opaq")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert config.override_quantization_method(fp8, "fp8") is None  # vLLM's method if it is named explicitly
    assert config.override_quantization_method(fp8, None) == "opaq"
    assert len(log) == 1


def test_other_devices(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """tests/python/test_vllm_stand_in.py has all cases."""
    from vllm.platforms import current_platform

    config = plugin()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "device_name", "cuda")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert config.override_quantization_method(fp8, None) is None
    assert log[0].endswith(
        "vLLM runs on cuda; --quantization opaq or OPAQ_VLLM_CUDA=1 serves it with opaq there"
    )
    assert config.override_quantization_method(fp8, "opaq") == "opaq"
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    with pytest.raises(
        ValueError, match="vLLM runs on cuda, and opaq has kernels for processors and CUDA only"
    ):
        config.override_quantization_method(fp8, "opaq")


def test_errors(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint is not quantized; OPAQ_VLLM_FORMAT=nvfp4"):
        tokens(models.plain("llama"), quantization="opaq")
    with pytest.raises(ValueError, match="saved by opaq.Config, whose tensors vLLM does not load"):
        plugin().from_config({"quant_method": "opaq", "quantizer": "nvfp4"})
    broken = calibrate(models.packed("llama", CT, "nvfp4"), tmp_path / "broken")
    from safetensors.torch import load_file, save_file

    kept = {
        n: t for n, t in load_file(broken / "model.safetensors").items() if "0.mlp.down_proj.weight_s" not in n
    }
    save_file(kept, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no tensors for model.layers.0.mlp.down_proj, stored as nvfp4"):
        tokens(broken)

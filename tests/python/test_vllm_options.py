"""The vLLM plug-in's options, and what it refuses and why, in the stand-in of test_vllm_stand_in.py: inputs,
blocks that ranks and joined weights would split, configurations of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conftest import ROOT, need
from opaq import functional
from opaq._names import Names
from opaq._plan import plan_get
from opaq.checkpoint import Layout, layout_schemes
from test_gpu import near, numbers
from test_vllm_stand_in import (
    BF16,
    EXPERTS,
    HIDDEN,
    INNER,
    LIMIT,
    SCHEMES,
    Mixture,
    Weight,
    build,
    config_of,
    load,
    routed,
    stand_in,
)
from torch_cases import same_bytes

torch = need("torch")


@pytest.fixture
def engine() -> Iterator[Any]:
    with stand_in.installed("cpu") as module:
        yield module


def projection(
    engine: Any, scheme: Any, columns: int = HIDDEN, rows: int = HIDDEN, prefix: str = "o_proj"
) -> Any:
    config = config_of(engine, scheme)
    weight = Weight(scheme, rows, columns, 1)
    layer = build(
        "cpu",
        lambda: stand_in.RowParallelLinear(columns, rows, False, BF16, quant_config=config, prefix=prefix),
        lambda made: load(made, scheme, weight),
    )
    return layer, weight


# ---- inputs ----


def test_inputs_that_are_not_quantized(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPAQ_VLLM_ACTIVATIONS", "none")
    for name in ("compressed-tensors fp8row, inputs fp8row", "compressed-tensors nvfp4, inputs with scales"):
        layer, weight = projection(engine, SCHEMES[name])
        assert not plan_get(layer.quant_method.plan, "x")
        x = numbers((9, HIDDEN), 2, "cpu", BF16)
        with torch.no_grad():
            assert near(layer(x), functional.quantized_linear(x, weight.packed), LIMIT)
    monkeypatch.setenv("OPAQ_VLLM_ACTIVATIONS", "some")
    with pytest.raises(ValueError, match="OPAQ_VLLM_ACTIVATIONS is 'some', expected one of checkpoint, none"):
        engine.OpaqConfig(None, "nvfp4")


def test_a_computed_scale_is_a_tokens_own(engine: Any) -> None:
    """Even if the checkpoint declares one scale for all tokens, and in NVFP4."""
    for name, declared in (
        ("compressed-tensors fp8, inputs fp8row", "fp8"),
        ("compressed-tensors nvfp4", "nvfp4"),
    ):
        layer, _ = projection(engine, replace(SCHEMES[name], input=declared))
        x = numbers((6, HIDDEN), 2, "cpu", BF16) * torch.arange(1, 7)[:, None].to(BF16)
        with torch.no_grad():
            together = layer(x)
            assert all(same_bytes(layer(x[i : i + 1]), together[i : i + 1]) for i in range(6)), name


def test_weights_with_different_scales_of_one_input(engine: Any) -> None:
    scheme = SCHEMES["compressed-tensors nvfp4, inputs with scales"]
    weights = [Weight(scheme, rows, HIDDEN, rows) for rows in (128, 256)]
    weights[1].tensors["input"] = weights[1].tensors["input"] * 2

    def make() -> Any:
        config = config_of(engine, scheme)
        return stand_in.MergedColumnParallelLinear(
            HIDDEN, [128, 256], bias=False, params_dtype=BF16, quant_config=config, prefix="up"
        )

    with pytest.raises(ValueError, match="weights of up have different scales of their one input: 336, 672"):
        build("cpu", make, lambda made: [load(made, scheme, weight, i) for i, weight in enumerate(weights)])


def test_a_weight_that_latent_attention_splits_reads_plain_inputs(engine: Any) -> None:
    """vLLM multiplies it with an identity matrix, which a calibrated scale would distort."""
    scheme = SCHEMES["compressed-tensors nvfp4, inputs with scales"]
    layer, _ = projection(engine, scheme, prefix="layers.0.self_attn.kv_b_proj")
    assert not plan_get(layer.quant_method.plan, "x") and layer.opaq_input_scale is None
    layer, _ = projection(engine, scheme, prefix="layers.0.self_attn.o_proj")
    assert plan_get(layer.quant_method.plan, "x") and layer.opaq_input_scale is not None


def test_router_weights_on_the_input(engine: Any) -> None:
    mixture = Mixture(SCHEMES["compressed-tensors nvfp4"])
    layer = mixture.layer(engine, "cpu", apply_router_weight_on_input=True)
    stacks = mixture.decoded("w1", "w3").to(BF16), mixture.decoded("w2").to(BF16)
    x, weights, ids = routed(13, "cpu")
    with torch.no_grad():
        got = layer.forward_modular(x, weights, ids)
        assert near(got, functional.moe(x, weights, ids, *stacks, weights_on_input=True), 0.02)
        assert not near(got, functional.moe(x, weights, ids, *stacks), 0.02)


# ---- blocks that would be split ----


def test_joined_weights_and_shards_end_at_blocks(engine: Any) -> None:
    scheme = SCHEMES["deepseek fp8blk2, inputs fp8blk1"]
    options = {"bias": False, "params_dtype": BF16, "quant_config": config_of(engine, scheme), "prefix": "up"}
    said = r"opaq: up, stored as fp8blk2.*: parts of \[192, 128\] rows are not whole blocks of 128 rows"
    with pytest.raises(ValueError, match=said):
        stand_in.MergedColumnParallelLinear(256, [192, 128], **options)
    stand_in.MergedColumnParallelLinear(256, [128, 192], **options)  # only the last one ends inside a block
    with stand_in.tensor_parallel(0, 2):
        with pytest.raises(ValueError, match=r"parts of \[128, 64\] rows are not whole blocks of 128 rows"):
            stand_in.MergedColumnParallelLinear(256, [256, 128], **options)
        with pytest.raises(
            ValueError, match="up, stored as fp8blk2.*: 192 of 384 columns are not whole blocks"
        ):
            stand_in.RowParallelLinear(384, 256, **options)


def test_experts_that_share_a_block_are_not_quantized_while_loading(engine: Any) -> None:
    config = engine.OpaqConfig(None, "fp8blk2")
    moe = stand_in.FusedMoEConfig(EXPERTS, HIDDEN, 32, EXPERTS)  # 64 rows of gate and up for each expert
    layer = stand_in.RoutedExperts("experts", BF16, moe, config, stand_in.ExpertMap(EXPERTS))
    with pytest.raises(ValueError, match="opaq: experts of 4 x 64 x 256 would share scales in fp8blk2, choose"):
        for e in range(EXPERTS):
            for shard, shape in (("w1", (32, HIDDEN)), ("w3", (32, HIDDEN)), ("w2", (HIDDEN, 32))):
                name = "w2_weight" if shard == "w2" else "w13_weight"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, numbers(shape, e, "cpu", BF16), name, shard, e)


def test_experts_with_scales_of_four_dimensions(engine: Any) -> None:
    scheme = next(s for s in layout_schemes("modelopt") if "r1c1" in s.scale_shape)
    moe = stand_in.FusedMoEConfig(EXPERTS, HIDDEN, INNER, EXPERTS)
    with pytest.raises(
        ValueError, match="experts stored as fp8blk2.* have scales of 4 dimensions, expected at most 2"
    ):
        stand_in.RoutedExperts("experts", BF16, moe, config_of(engine, scheme), stand_in.ExpertMap(EXPERTS))


# ---- configurations ----


def test_joined_weights_that_are_stored_differently(engine: Any) -> None:
    schemes = SCHEMES["compressed-tensors nvfp4"], SCHEMES["compressed-tensors mxfp8, inputs mxfp8"]
    rows = (Names(["re:.*gate_proj"]), schemes[0]), (Names(["re:.*up_proj"]), schemes[1])
    config = engine.OpaqConfig(Layout(rows, Names([])))
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    said = "vLLM joins weights that are stored differently in mlp.gate_up_proj: mlp.gate_proj nvfp4.* mxfp8"
    with pytest.raises(ValueError, match=said):
        stand_in.MergedColumnParallelLinear(
            256, [128, 128], bias=False, params_dtype=BF16, quant_config=config, prefix="mlp.gate_up_proj"
        )


def test_ignored_modules_stay_plain(engine: Any) -> None:
    for config in (
        engine.OpaqConfig(None, "nvfp4"),
        engine.OpaqConfig(Layout(((Names(["re:.*"]), SCHEMES["modelopt mxfp8"]),), Names(["*.gate"]))),
    ):
        layer, _ = projection(engine, SCHEMES["modelopt mxfp8"])
        for name, is_packed in (("gate", False), ("down_proj", True)):
            method = config.get_quant_method(layer, f"model.layers.0.mlp.{name}")
            assert type(method).__name__.startswith("Opaq") == is_packed, name


def test_names_that_vllm_changes(engine: Any) -> None:
    class Mapper:
        def apply_list(self, names: list[str]) -> list[str]:
            return [name.replace("outer", "inner") for name in names]

    scheme = SCHEMES["modelopt mxfp8"]
    layout = Layout(((Names(["outer.a"]), scheme),), Names(["outer.b"]))
    config = engine.OpaqConfig(layout)
    config.apply_vllm_mapper(Mapper())
    assert config.layout.scheme("inner.a") == scheme
    assert config.layout.scheme("outer.a") is None
    assert "inner.b" in config.layout.ignore and "outer.b" not in config.layout.ignore
    online = engine.OpaqConfig(None, "nvfp4")
    online.apply_vllm_mapper(Mapper())  # has no names


def test_configurations_of_checkpoints(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine.OpaqConfig.from_config
    with pytest.raises(
        ValueError, match="^opaq: the checkpoint was saved by opaq.Config, whose tensors vLLM does not"
    ):
        made({"quant_method": "opaq", "quantizer": "nvfp4"})
    with pytest.raises(ValueError, match="^opaq: the checkpoint is not quantized; OPAQ_VLLM_FORMAT=nvfp4"):
        engine.OpaqConfig()
    monkeypatch.setenv("OPAQ_VLLM_FORMAT", "mxfp8")
    assert engine.OpaqConfig().quantizer == "mxfp8"
    online = made({"quant_method": "opaq", "format": "nvfp4", "activations": "nvfp4", "ignore": ["x"]})
    assert (online.quantizer, online.activations) == ("nvfp4", "nvfp4") and "x" in online.ignore
    nested = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    for config in (nested, {"quant_method": "modelopt", **nested["quantization"]}):
        assert made(config).layout.scheme("a").weight == "nvfp4+global+rule=modelopt"
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert (
        made({**fp8, "total_num_heads": 8, "total_num_kv_heads": 2})
        .layout.scheme("a")
        .weight.startswith("fp8blk2")
    )
    text = (ROOT / "tests" / "cli" / "config_compressed-tensors_mxfp8.txt").read_text()
    cached = {**json.loads(text)["quantization_config"], "kv_cache_scheme": {"num_bits": 8}}
    config = made({**cached, "total_num_heads": 8, "total_num_kv_heads": 2})
    assert config.layout.scheme("a").weight.startswith("mxfp8")
    assert (config.kv_cache_scheme, config.total_num_heads, config.total_num_kv_heads) == (
        {"num_bits": 8},
        8,
        2,
    )
    with pytest.raises(ValueError, match="^opaq: .*gptq"):
        made({"quant_method": "gptq", "bits": 4})

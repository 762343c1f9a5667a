"""The vLLM plug-in's layers on every device, in a stand-in for vLLM (tests/vllm/stand_in.py) that follows its
calls: create_weights under vLLM's default device, the loaders of fused projections and experts, shards of
ranks, process_weights_after_loading, apply; on a GPU in captured CUDA graphs. Results are compared with
opaq.functional. tests/vllm runs the same classes in the real vLLM, on processors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import ROOT, need
from opaq._names import Names
from opaq.checkpoint import Layout, Scheme, layout_schemes
from test_gpu import near, numbers
from test_gpu_graphs import Recorded, graphs_recorded
from torch_cases import same_bytes

torch = need("torch")
sys.path.append(str(ROOT / "tests" / "vllm"))

import stand_in  # noqa: E402
from opaq import _stored, functional  # noqa: E402
from opaq._plan import plan_get  # noqa: E402

BF16 = torch.bfloat16
HIDDEN, HEAD, HEADS, KV_HEADS, INNER, EXPERTS, CHOICES = 256, 64, 4, 2, 128, 4, 2
LIMIT = 5e-3  # results are rounded to bfloat16; a GPU adds sums in another order


def schemes() -> dict[str, Scheme]:
    """How weights are stored, and how their layers' inputs are quantized."""
    by_name = {
        f"{layout} {scheme.weight.partition('+')[0]}": scheme
        for layout in ("compressed-tensors", "modelopt", "deepseek")
        for scheme in layout_schemes(layout)
    }
    found = {name: by_name[name] for name in ("compressed-tensors nvfp4", "modelopt nvfp4", "modelopt mxfp8")}
    inputs = {
        "compressed-tensors mxfp8": "mxfp8",
        "compressed-tensors fp8row": "fp8row",
        "modelopt fp8": "fp8row",
    }
    inputs |= {
        "compressed-tensors mxfp4": "",
        "deepseek fp8blk2": "fp8blk1",
        "compressed-tensors fp8": "fp8row",
    }
    found |= {f"{name}, inputs {given}": replace(by_name[name], input=given) for name, given in inputs.items()}
    given = replace(by_name["compressed-tensors nvfp4"], input_given="nvfp4+global+rule=compressed-tensors")
    return found | {"compressed-tensors nvfp4, inputs with scales": given}


SCHEMES = schemes()


@pytest.fixture
def engine(device: str) -> Iterator[Any]:
    """The plug-in's configuration module, inside the stand-in on this device."""
    with stand_in.installed(device) as module:
        yield module


def config_of(engine: Any, scheme: Scheme) -> Any:
    return engine.OpaqConfig(Layout(((Names(["re:.*"]), scheme),), Names([])))


class Weight:
    """One weight of a checkpoint: its tensors by role, and the same weight as opaq.functional takes it."""

    def __init__(self, scheme: Scheme, rows: int, columns: int, seed: int) -> None:
        values = numbers((rows, columns), seed, "cpu") * columns**-0.5
        self.packed = opaq.quantize_tensor(values.to(BF16), scheme.weight)
        is_one = not set(scheme.scale_shape) & set("Rr") or "global" in scheme.names("weight")
        data, scale, over = _stored.export_rows(self.packed, 0, rows, one_for_all=is_one)
        if scheme.scale_shape in ("R", "R1"):
            scale = scale.reshape((-1,) if scheme.scale_shape == "R" else (-1, 1))
        elif scheme.scale_shape == "r1c1":
            scale = scale.reshape(scale.shape[0], 1, scale.shape[-1], 1)
        self.tensors = {"data": data, "scale": scale}
        if "global" in scheme.names("weight"):
            self.tensors["global"] = over
        if scheme.input_given:
            self.tensors["input"] = torch.tensor([448.0 * 6 / 8])

    def product(self, x: Any, scheme: Scheme, device: str) -> Any:
        """Of opaq.functional, with the weight in rows."""
        given, scale = scheme.input, None
        if scheme.input_given:
            given, scale = scheme.input_given, self.tensors["input"].to(device)
        return functional.quantized_linear(x, self.packed.to(device), input_quantizer=given, input_scale=scale)


def load(layer: Any, scheme: Scheme, weight: Weight, *shard: Any) -> None:
    for role, tensor in weight.tensors.items():
        parameter = getattr(layer, scheme.names("weight")[role])
        parameter.weight_loader(parameter, tensor, *shard)


def build(device: str, make: Any, fill: Any) -> Any:
    """A layer as vLLM makes one: created where the device is the default, loaded from tensors in CPU memory,
    processed outside of that."""
    with torch.device(device):
        layer = make()
    assert all(p.device.type in (device, "meta") for p in layer.parameters())
    fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert all(t.device.type == device for t in (*layer.parameters(), *layer.buffers()))
    return layer


def check_replays(run: Any, x: Any, device: str) -> None:
    """On a GPU the calls are captured; replays have the bytes of eager calls and read new inputs."""
    with torch.no_grad():
        recorded = Recorded(run, device)
        for _ in range(2):
            x.copy_(-x.roll(1, 0))
            assert same_bytes(recorded.replay()[0], run())


# ---- linear layers ----


def fused(kind: str, engine: Any, scheme: Scheme, device: str) -> tuple[Any, list[Weight], int]:
    """A layer of several weights, these, and the number of columns."""
    config, columns = config_of(engine, scheme), HIDDEN
    if kind == "qkv":
        rows, shards = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], ["q", "k", "v"]
        arguments: Any = HIDDEN, HEAD, HEADS, KV_HEADS
    elif kind == "gate_up":
        rows, shards, arguments = [384, 384], [0, 1], (HIDDEN, [384, 384])
    else:
        rows, columns, arguments = [HIDDEN], 384, (384, HIDDEN)
        shards = [()]
    classes = {"qkv": "QKVParallelLinear", "gate_up": "MergedColumnParallelLinear", "down": "RowParallelLinear"}
    weights = [Weight(scheme, count, columns, 20 + i) for i, count in enumerate(rows)]

    def fill(layer: Any) -> None:
        for shard, weight in zip(shards, weights, strict=True):
            load(layer, scheme, weight, *(() if shard == () else (shard,)))

    def make() -> Any:
        return getattr(stand_in, classes[kind])(
            *arguments, bias=False, params_dtype=BF16, quant_config=config, prefix=f"layers.0.{kind}_proj"
        )

    return build(device, make, fill), weights, columns


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
@pytest.mark.parametrize("name", SCHEMES)
def test_linear_layers(name: str, kind: str, engine: Any, device: str) -> None:
    scheme = SCHEMES[name]
    layer, weights, columns = fused(kind, engine, scheme, device)
    stored = sum(tensor.nbytes for tensor in layer.parameters())
    assert stored <= 1.3 * sum(weight.packed.nbytes for weight in weights)  # nothing else is kept
    tiles = [plan_get(layer.quant_method.plan, "w_given")]
    assert ("tiled" in tiles[0]) == (device == "cpu")
    for rows in (1, 13, 96):
        x = numbers((rows, columns), rows, device, BF16)
        with torch.no_grad():
            got = layer(x)
        assert near(got, torch.cat([weight.product(x, scheme, device) for weight in weights], -1), LIMIT)
    check_replays(lambda: layer(x), x, device)


@pytest.mark.parametrize("name", ["compressed-tensors nvfp4", "deepseek fp8blk2, inputs fp8blk1"])
def test_shards_of_two_ranks(name: str, engine: Any, device: str) -> None:
    """Column shards side by side, and the sum of row shards, are the whole layer."""
    scheme = SCHEMES[name]
    x = numbers((5, 512), 1, device, BF16)
    columns, rows = [Weight(scheme, 256, 512, seed) for seed in (1, 2)], Weight(scheme, 256, 512, 3)
    parts, total = [], 0
    for rank in range(2):
        with stand_in.tensor_parallel(rank, 2):
            options = {"bias": False, "params_dtype": BF16, "quant_config": config_of(engine, scheme)}
            merged = build(
                device,
                lambda o=options: stand_in.MergedColumnParallelLinear(512, [256, 256], **o),
                lambda layer: [load(layer, scheme, weight, i) for i, weight in enumerate(columns)],
            )
            row = build(
                device,
                lambda o=options: stand_in.RowParallelLinear(512, 256, **o),
                lambda layer: load(layer, scheme, rows),
            )
        with torch.no_grad():
            parts.append(merged(x).chunk(2, -1))
            total = total + row(x[:, 256 * rank : 256 * (rank + 1)]).float()
    got = torch.cat([part for pair in zip(*parts, strict=True) for part in pair], -1)
    assert near(got, torch.cat([weight.product(x, scheme, device) for weight in columns], -1), LIMIT)
    assert near(total, rows.product(x, scheme, device), 2 * LIMIT)


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_have_the_bytes_of_a_trainer(
    name: str, kind: str, engine: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights in rows and the fixed order, a layer has the bytes of opaq.functional; on a GPU this is only
    checked for a layer of one weight."""
    monkeypatch.setenv("OPAQ_VLLM_PRECISION", "rows")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    scheme = SCHEMES[name]
    layer, weights, columns = fused(kind, engine, scheme, device)
    x = numbers((70, columns), 1, device, BF16)
    with torch.no_grad():
        got = layer(x)
    want = torch.cat([weight.product(x, scheme, device) for weight in weights], -1)
    assert same_bytes(got, want) if device == "cpu" or kind == "down" else near(got, want, LIMIT)


def test_the_order_of_sums(engine: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order on a GPU, the fixed one for batch invariance."""
    scheme = SCHEMES["compressed-tensors fp8row, inputs fp8row"]
    layer, _, _ = fused("gate_up", engine, scheme, device)
    assert (plan_get(layer.quant_method.plan, "order") == "any") == (device == "cuda")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, _, columns = fused("gate_up", engine, scheme, device)
    assert plan_get(layer.quant_method.plan, "order") != "any"
    x = numbers((130, columns), 1, device, BF16)
    with torch.no_grad():
        together = layer(x)
        for row in (0, 64, 129):
            assert same_bytes(layer(x[row : row + 1]), together[row : row + 1])


def test_quantizing_while_loading(engine: Any, device: str) -> None:
    """The bytes are those of the CPU on every device."""
    values = [numbers((rows, HIDDEN), rows, "cpu", BF16) for rows in (384, 128)]

    def fill(layer: Any) -> None:
        for i, value in enumerate(values):
            layer.weight.weight_loader(layer.weight, value, i)

    config = engine.OpaqConfig(None, "mxfp8")
    layer = build(
        device,
        lambda: stand_in.MergedColumnParallelLinear(
            HIDDEN, [384, 128], bias=False, params_dtype=BF16, quant_config=config, prefix="up"
        ),
        fill,
    )
    want = opaq.quantize_tensor(torch.cat(values), "mxfp8").tiled(device == "cpu")
    for name, buffer in zip(layer.quant_method.names, want.buffers(), strict=True):
        assert same_bytes(getattr(layer, name).cpu(), buffer)
    x = numbers((9, HIDDEN), 2, device, BF16)
    with torch.no_grad():
        assert near(layer(x), functional.quantized_linear(x, want.to(device)), LIMIT)


def test_freed_memory_is_returned_after_the_last_layer(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the checkpoint were freed layer by layer."""
    returned: list[int] = []
    config = engine.OpaqConfig(None, "mxfp8")
    monkeypatch.setattr(engine, "return_freed", lambda: returned.append(config.waiting))
    values = numbers((HIDDEN, HIDDEN), 1, "cpu", BF16)
    made = [
        stand_in.RowParallelLinear(
            HIDDEN, HIDDEN, False, BF16, quant_config=config, prefix=f"layers.{i}.o_proj"
        )
        for i in range(2)
    ]
    for layer in made:
        assert not returned
        layer.weight.weight_loader(layer.weight, values)
        layer.quant_method.process_weights_after_loading(layer)
    assert returned == [0]


# ---- experts ----


class Mixture:
    """The experts of one layer: their weights, as a checkpoint has them and as opaq.functional takes them."""

    def __init__(self, scheme: Scheme, inner: int = INNER) -> None:
        self.scheme, self.inner = scheme, inner
        self.weights = {
            (shard, e): Weight(scheme, *((HIDDEN, inner) if shard == "w2" else (inner, HIDDEN)), 10 * e + i)
            for e in range(EXPERTS)
            for i, shard in enumerate(("w1", "w3", "w2"))
        }

    def fill(self, layer: Any) -> None:
        """Loads tensors by vLLM's names: w13_weight_packed, ..."""
        for (shard, expert), weight in self.weights.items():
            for role, tensor in weight.tensors.items():
                name = ("w2_" if shard == "w2" else "w13_") + self.scheme.names("weight")[role]
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, name, shard, expert)

    def decoded(self, *shards: str) -> Any:
        one = [
            torch.cat([self.weights[shard, e].packed.dequantize(torch.float32) for shard in shards])
            for e in range(EXPERTS)
        ]
        return torch.stack(one)

    def layer(self, engine: Any, device: str, count: int | None = None, first: int = 0, **options: Any) -> Any:
        activation = options.pop("activation", stand_in.MoEActivation.SILU)
        local = EXPERTS if count is None else count
        ranks = stand_in.get_tensor_model_parallel_world_size()
        moe = stand_in.FusedMoEConfig(EXPERTS, HIDDEN, self.inner // ranks, local, activation)
        return build(
            device,
            lambda: stand_in.RoutedExperts(
                "layers.0.mlp.experts",
                BF16,
                moe,
                config_of(engine, self.scheme),
                stand_in.ExpertMap(EXPERTS, first, count),
                **options,
            ),
            self.fill,
        )


def routed(tokens: int, device: str) -> tuple[Any, Any, Any]:
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.rand((tokens, EXPERTS), generator=draw).argsort(1)[:, :CHOICES].to(torch.int32)
    weights = torch.rand((tokens, CHOICES), generator=draw) + 0.1
    return numbers((tokens, HIDDEN), tokens, device, BF16), weights.to(device), ids.to(device)


@pytest.mark.parametrize("name", [name for name in SCHEMES if "r1c1" not in SCHEMES[name].scale_shape])
def test_experts(name: str, engine: Any, device: str) -> None:
    scheme = SCHEMES[name]
    mixture = Mixture(scheme)
    layer = mixture.layer(engine, device)
    want = [mixture.decoded("w1", "w3").to(device, BF16), mixture.decoded("w2").to(device, BF16)]
    quantizers = scheme.input_given or scheme.input
    options: dict[str, Any] = {"input_quantizer": quantizers, "hidden_quantizer": quantizers}
    if scheme.input_given:
        for key in ("input_scale", "hidden_scale"):
            options[key] = torch.full((EXPERTS,), 448.0 * 6 / 8, device=device)
    for tokens in (1, 13, 70):
        x, weights, ids = routed(tokens, device)
        with torch.no_grad():
            got = layer.forward_modular(x, weights, ids)
            # an activation near the boundary of two 4-bit codes may get the other one
            limit = 0.1 if "nvfp4" in quantizers else 0.02
            assert near(got, functional.moe(x, weights, ids, *want, **options), limit), tokens
    check_replays(lambda: layer.forward_modular(x, weights, ids), x, device)


CLAMPED = {
    "silu and a limit": ("SILU", (0.4, None, None), "silu_clamp"),
    "silu, limit, alpha, beta": ("SILU", (0.4, 1.5, 0.5), "silu_clamp"),
    "swiglu of gpt-oss in halves": ("SWIGLUOAI_UNINTERLEAVE", (0.4, 1.702, 1.0), "swiglu_oai_packed"),
    "swiglustep": ("SWIGLUSTEP", (0.4, None, None), "silu_step"),
    "swiglustep with vLLM's limit": ("SWIGLUSTEP", (None, None, None), "silu_step"),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_clamped_activations(name: str, engine: Any, device: str) -> None:
    """Against float32 arithmetic of PyTorch, and opaq.functional's activation of that name."""
    member, (limit, alpha, beta), ours = CLAMPED[name]
    mixture = Mixture(SCHEMES["compressed-tensors nvfp4"])
    activation = stand_in.MoEActivation[member]
    words = {"swiglu_limit": limit, "swiglu_alpha": alpha, "swiglu_beta": beta}
    layer = mixture.layer(engine, device, activation=activation, **words)
    up, down = mixture.decoded("w1", "w3").to(device), mixture.decoded("w2").to(device)
    x, weights, ids = routed(40, device)
    if limit is None:
        x, limit = x * 20, 7.0
    with torch.no_grad():
        got = layer.forward_modular(x, weights, ids)
    want = torch.zeros(x.shape, device=device)
    is_clamped = False
    for expert in range(EXPERTS):
        gate, other = (x.float() @ up[expert].T).chunk(2, -1)
        is_clamped |= bool((gate > limit).any() and (other.abs() > limit).any())
        other = other.clamp(-limit, limit)
        if member == "SWIGLUSTEP":
            hidden = torch.nn.functional.silu(gate).clamp(max=limit) * other
        else:
            gate = gate.clamp(max=limit)
            hidden = gate * torch.sigmoid((alpha or 1.0) * gate) * (other + (beta or 0.0))
        want += (weights * (ids == expert)).sum(-1, keepdim=True) * (hidden @ down[expert].T)
    assert is_clamped and near(got, want, 0.01)
    given = {"limit": limit, **({} if member == "SWIGLUSTEP" else {"alpha": alpha, "beta": beta})}
    stacks = up.to(BF16), down.to(BF16)
    assert near(got, functional.moe(x, weights, ids, *stacks, activation=ours, **given), 0.02)


def test_experts_of_gpt_oss(engine: Any, device: str) -> None:
    """Gate and up alternate and are one weight with a bias; all experts are in one tensor."""
    config = engine.OpaqConfig.from_config({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert config.get_name() == "gpt_oss_mxfp4"
    moe = stand_in.FusedMoEConfig(EXPERTS, HIDDEN, INNER, EXPERTS, stand_in.MoEActivation.SWIGLUOAI, True)
    scheme = layout_schemes("gpt-oss")[0]
    weights = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    experts = {key: [Weight(scheme, *shape, 50 + e) for e in range(EXPERTS)] for key, shape in weights.items()}
    biases = {key: numbers((EXPERTS, shape[0]), 60, "cpu", BF16) * 0.1 for key, shape in weights.items()}

    def fill(layer: Any) -> None:
        for key, rows in experts.items():
            for name, role in ((f"{key}_weight", "data"), (f"{key}_weight_scale", "scale")):
                tensor = torch.stack([row.tensors[role].view(torch.uint8) for row in rows])
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, name, "", 0)
            bias = getattr(layer, f"{key}_bias")
            bias.weight_loader(bias, biases[key], f"{key}_bias", "", 0)

    layer = build(
        device,
        lambda: stand_in.RoutedExperts("layers.0.mlp.experts", BF16, moe, config, stand_in.ExpertMap(EXPERTS)),
        fill,
    )
    x, factors, ids = routed(37, device)
    stacks = [torch.stack([row.packed.dequantize() for row in experts[key]]).to(device) for key in weights]
    given = *stacks, *(biases[key].to(device) for key in weights)
    with torch.no_grad():
        got = layer.forward_modular(x, factors, ids)
        assert near(got, functional.moe(x, factors, ids, *given, activation="swiglu_oai"), 0.02)
    check_replays(lambda: layer.forward_modular(x, factors, ids), x, device)


def test_quantizing_experts_while_loading(engine: Any, device: str) -> None:
    config = engine.OpaqConfig(None, "nvfp4")
    moe = stand_in.FusedMoEConfig(EXPERTS, HIDDEN, INNER, EXPERTS)
    shapes = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    values = {
        (shard, e): numbers(shape, 10 * e + i, "cpu", BF16) * shape[1] ** -0.5
        for i, (shard, shape) in enumerate(shapes.items())
        for e in range(EXPERTS)
    }

    def fill(layer: Any) -> None:
        for (shard, e), value in values.items():
            name = "w2_weight" if shard == "w2" else "w13_weight"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, value, name, shard, e)

    layer = build(
        device,
        lambda: stand_in.RoutedExperts("layers.0.mlp.experts", BF16, moe, config, stand_in.ExpertMap(EXPERTS)),
        fill,
    )
    stacks = [
        torch.stack([torch.cat([values[shard, e] for shard in shards]) for e in range(EXPERTS)])
        for shards in (("w1", "w3"), ("w2",))
    ]
    packed = [opaq.quantize_tensor(stack, "nvfp4").to(device) for stack in stacks]
    x, weights, ids = routed(21, device)
    with torch.no_grad():
        got = layer.forward_modular(x, weights, ids)
        assert near(got, functional.moe(x, weights, ids, *packed), LIMIT)


def test_experts_of_two_ranks(engine: Any, device: str) -> None:
    """Each rank has half of every expert, or half of the experts with a map of the others to -1."""
    mixture = Mixture(SCHEMES["compressed-tensors nvfp4"])
    x, weights, ids = routed(33, device)
    with torch.no_grad():
        whole = mixture.layer(engine, device).forward_modular(x, weights, ids).float()
        halves = []
        for rank in range(2):
            with stand_in.tensor_parallel(rank, 2):
                halves.append(mixture.layer(engine, device))
        mapped = [mixture.layer(engine, device, EXPERTS // 2, first) for first in (0, EXPERTS // 2)]
        for layers in (halves, mapped):
            parts = [layer.forward_modular(x, weights, ids).float() for layer in layers]
            assert near(sum(parts), whole, 2 * LIMIT)
        check_replays(lambda: mapped[1].forward_modular(x, weights, ids), x, device)


# ---- several layers, compiled ----


def test_a_compiled_block(engine: Any, device: str) -> None:
    """One graph of operators for fused projections and experts; on a GPU it is a CUDA graph."""
    scheme = SCHEMES["compressed-tensors nvfp4"]
    qkv, _, _ = fused("qkv", engine, scheme, device)
    experts = Mixture(scheme).layer(engine, device)
    x, weights, ids = routed(16, device)

    def run(x: Any) -> Any:
        q, k, v = qkv(x).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        return experts.forward_modular(q + torch.cat([k, v], -1), weights, ids)

    counters = torch._dynamo.utils.counters
    counters.clear()
    before = graphs_recorded() if device == "cuda" else 0
    fast = torch.compile(run, fullgraph=True, mode="reduce-overhead") if device == "cuda" else compiled(run)
    with torch.no_grad():
        for _ in range(4):
            assert near(fast(x).clone(), run(x), 0.01)
    assert not counters["graph_break"] and counters["inductor"]["cudagraph_skips"] == 0
    assert device == "cpu" or graphs_recorded() > before


@pytest.mark.parametrize("kind", ["Attention", "MLAAttention"])
def test_scales_of_the_cache_are_loaded_by_vllm(kind: str, engine: Any) -> None:
    from vllm.model_executor.layers import attention
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    layer = getattr(attention, kind)()
    method = config_of(engine, SCHEMES["modelopt nvfp4"]).get_quant_method(layer, "layers.0.self_attn.attn")
    assert type(method) is BaseKVCacheMethod
    method.create_weights(layer)
    assert layer.k_scale == -1  # none loaded yet
    assert engine.OpaqConfig(None, "nvfp4").get_quant_method(layer, "layers.0.self_attn.attn") is None


# ---- which checkpoints are served ----

FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_on_cuda_only_if_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with stand_in.installed("cuda") as module:
        monkeypatch.setattr(module.logger, "info", lambda text, *values: lines.append(text % values))
        config = stand_in.get_quantization_config("opaq")
        assert config is module.OpaqConfig and config.get_min_capability() == 80
        assert config.override_quantization_method(FP8_BLOCKS, None) is None
        expected = "vLLM runs on cuda; --quantization opaq or OPAQ_VLLM_CUDA=1 serves it with opaq there"
        assert lines == [f"opaq leaves this checkpoint to vLLM: {expected}"]
        assert config.override_quantization_method(FP8_BLOCKS, "opaq") == "opaq"
        monkeypatch.setenv("OPAQ_VLLM_CUDA", "1")
        assert config.override_quantization_method(FP8_BLOCKS, None) == "opaq"
        assert config.override_quantization_method(FP8_BLOCKS, "fp8") is None
        assert config.override_quantization_method({"quant_method": "gptq"}, None) is None
        assert "gptq" in lines[-1]
        monkeypatch.setenv("OPAQ_VLLM_CUDA", "yes")
        with pytest.raises(ValueError, match="OPAQ_VLLM_CUDA is 'yes', expected one of 0, 1"):
            config.override_quantization_method(FP8_BLOCKS, None)


def test_on_cpu_by_default() -> None:
    with stand_in.installed("cpu") as module:
        assert module.OpaqConfig.override_quantization_method(FP8_BLOCKS, None) == "opaq"


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.installed("xpu") as module:
        reason = "vLLM runs on xpu, and opaq has kernels for processors and CUDA only"
        with pytest.raises(ValueError, match=reason):
            module.OpaqConfig.override_quantization_method(FP8_BLOCKS, "opaq")
        with pytest.raises(ValueError, match=reason):
            module.OpaqConfig(None, "nvfp4")


def test_a_missing_back_end() -> None:
    """Found out where layers are made: vLLM reads configurations in a process that may fork."""
    if "cuda" in opaq.library_info()["backends"]:
        pytest.skip("there is a CUDA back end")
    with stand_in.installed("cuda") as module:
        config = config_of(module, SCHEMES["modelopt mxfp8"])
        with pytest.raises(ValueError, match="^opaq: vLLM runs on cuda: "):
            stand_in.RowParallelLinear(HIDDEN, HIDDEN, False, BF16, config, "o_proj")


def test_a_missing_tensor(engine: Any, device: str) -> None:
    scheme = SCHEMES["compressed-tensors nvfp4"]
    weight = Weight(scheme, HIDDEN, HIDDEN, 1)
    del weight.tensors["scale"]
    with pytest.raises(ValueError, match="the checkpoint has no tensors for o_proj, stored as nvfp4"):
        build(
            device,
            lambda: stand_in.RowParallelLinear(
                HIDDEN, HIDDEN, False, BF16, config_of(engine, scheme), "o_proj"
            ),
            lambda layer: load(layer, scheme, weight),
        )

"""MLP, MoE and GroupedLinear: modules around the operators, against loops of plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from opaq.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from torch_cases import same_bytes

torch = need("torch")
nn = torch.nn
F = torch.nn.functional
BF16 = torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP = 64, 48, 6, 2


def values(*shape: int, seed: int = 0, dtype: Any = BF16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing(tokens: int = 10, seed: int = 3) -> tuple[Any, Any]:
    """Distinct experts for each token, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOP)
    return weights / weights.sum(-1, keepdim=True), ids


def filled(module: Any, seed: int = 1) -> Any:
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(module.named_parameters())):
            scale = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(scale * values(*parameter.shape, seed=seed + i, dtype=torch.float32))
    return module


def plain(weight: Any) -> Any:
    return weight.dequantize().float() if isinstance(weight, opaq.QuantizedTensor) else weight.float()


def mlp_of(x: Any, up: Any, down: Any, up_bias: Any = None, down_bias: Any = None) -> Any:
    """silu(g) * u in float32."""
    add = [None if bias is None else bias.float() for bias in (up_bias, down_bias)]
    gate, factor = F.linear(x.float(), plain(up), add[0]).chunk(2, -1)
    return F.linear(F.silu(gate) * factor, plain(down), add[1])


def moe_of(module: Any, x: Any, weights: Any, ids: Any) -> Any:
    y = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(len(x)):
        for weight, chosen in zip(weights[token], ids[token], strict=True):
            e = int(chosen) - module.first_expert
            if 0 <= e < module.num_local_experts:
                biases = [None if b is None else b[e] for b in (module.gate_up_bias, module.down_bias)]
                y[token] += weight * mlp_of(x[token], plain(module.gate_up)[e], plain(module.down)[e], *biases)
    return y


def close(y: Any, want: Any, limit: float = 0.02) -> bool:
    return bool((y.float() - want.float()).norm() <= limit * want.float().norm())


# -------------------------------------------------------------------------------- MLP


@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias: bool) -> None:
    module = filled(opaq.MLP(HIDDEN, INNER, bias=bias, dtype=BF16))
    x = values(2, 5, HIDDEN)
    y = module(x)
    want = mlp_of(x, module.gate_up, module.down, module.gate_up_bias, module.down_bias)
    assert y.shape == x.shape and y.dtype == BF16 and close(y, want)
    assert set(module.state_dict()) == {"gate_up", "down", *(["gate_up_bias", "down_bias"] if bias else [])}


def test_mlp_without_a_gate() -> None:
    module = filled(opaq.MLP(HIDDEN, INNER, activation="relu2_no_mul", dtype=BF16))
    x = values(5, HIDDEN)
    assert module.gate_up.shape == (INNER, HIDDEN)
    assert close(module(x), F.relu(x.float() @ module.gate_up.float().T).square() @ module.down.float().T)


def test_mlp_with_numbers() -> None:
    module = filled(opaq.MLP(HIDDEN, INNER, activation="silu_clamp", limit=0.5, beta=1.0, dtype=BF16))
    x = values(5, HIDDEN)
    gate, up = (x.float() @ module.gate_up.float().T).chunk(2, -1)
    want = F.silu(gate.clamp(max=0.5)) * (up.clamp(-0.5, 0.5) + 1)
    assert close(module(x), want @ module.down.float().T)


@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "fp8blk2"])
def test_packed_mlp(text: str) -> None:
    module = opaq.MLP(HIDDEN, INNER, quantizer=text, dtype=BF16)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    source = filled(opaq.MLP(HIDDEN, INNER, dtype=BF16))
    module.load_state_dict(source.state_dict())
    x = values(5, HIDDEN)
    assert close(module(x), mlp_of(x, module.gate_up, module.down))
    assert torch.equal(module.down, opaq.quantize_tensor(source.down.detach(), text))
    assert f"quantizer='{text}'" in repr(module)


def test_quantized_inputs() -> None:
    source = filled(opaq.MLP(HIDDEN, INNER, dtype=BF16))
    module = opaq.MLP(HIDDEN, INNER, quantizer="mxfp8", input_quantizer="mxfp8", dtype=BF16)
    assert module.hidden_quantizer == "mxfp8"
    module.load_state_dict(source.state_dict())
    x = values(5, HIDDEN)
    seen = opaq.quantize_tensor(x, "mxfp8").dequantize()
    h = F.linear(seen.float(), plain(module.gate_up)).to(BF16)
    gate, up = h.chunk(2, -1)
    a = opaq.quantize_tensor(F.silu(gate.float()).to(BF16) * up, "mxfp8").dequantize()
    assert close(module(x), F.linear(a.float(), plain(module.down)), 0.01)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()])
def test_mlp_trains(recipe: Any) -> None:
    module = filled(opaq.MLP(HIDDEN, INNER, bias=True, dtype=BF16))
    reference = copy.deepcopy(module).float()
    x, dy = values(32, HIDDEN), values(32, HIDDEN, seed=5)
    mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    with opaq.autocast(enabled=recipe is not None, recipe=recipe):
        module(mine).backward(dy)
    weights = reference.gate_up, reference.down, reference.gate_up_bias, reference.down_bias
    mlp_of(theirs, *weights).backward(dy.float())
    limit = {type(None): 0.02, NVFP4BlockScaling: 0.5}.get(type(recipe), 0.1)
    assert close(mine.grad, theirs.grad, limit)
    for name, parameter in module.named_parameters():
        assert close(parameter.grad, reference.get_parameter(name).grad, limit), name


# -------------------------------------------------------------------------------- MoE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8"])
def test_moe(text: str, bias: bool) -> None:
    source = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, bias=bias, dtype=BF16))
    module = opaq.MoE(HIDDEN, INNER, EXPERTS, bias=bias, quantizer=text, dtype=BF16)
    module.load_state_dict(source.state_dict())
    x, (weights, ids) = values(10, HIDDEN), routing()
    y = module(x, weights, ids)
    assert y.shape == x.shape and y.dtype == BF16 and close(y, moe_of(module, x, weights, ids))
    assert same_bytes(module(x, weights, ids.int()), y)


def test_a_shared_expert_is_added() -> None:
    module = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, shared_intermediate_size=80, dtype=BF16))
    x, (weights, ids) = values(10, HIDDEN), routing()
    routed = moe_of(module, x, weights, ids)
    shared = module.shared_expert
    assert shared.down.shape == (HIDDEN, 80)
    assert close(module(x, weights, ids), routed + mlp_of(x, shared.gate_up, shared.down))


def test_slices_of_experts_add_up() -> None:
    whole = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, shared_intermediate_size=32, dtype=BF16))
    x, (weights, ids) = values(10, HIDDEN), routing()
    total = torch.zeros(10, HIDDEN)
    for first, count in ((0, 4), (4, 2)):
        part = opaq.MoE(
            HIDDEN,
            INNER,
            EXPERTS,
            shared_intermediate_size=32,
            num_local_experts=count,
            first_expert=first,
            dtype=BF16,
        )
        state = dict(whole.state_dict())
        for name in ("gate_up", "down"):
            state[name] = state[name][first : first + count]
        if first:
            state = {name: tensor for name, tensor in state.items() if "shared" not in name}
        part.load_state_dict(state)
        total += part(x, weights, ids).float()
    assert close(total, whole(x, weights, ids), 0.01)
    assert "here 4 to 5" in repr(part)
    with pytest.raises(ValueError, match="5 experts from 2 on are not among 6"):
        opaq.MoE(HIDDEN, INNER, EXPERTS, num_local_experts=5, first_expert=2)


def test_no_tokens_and_all_tokens_for_one_expert() -> None:
    module = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, dtype=BF16))
    x, weights = values(4, HIDDEN), torch.ones(4, 2)
    absent = torch.tensor([[-1, EXPERTS]] * 4)
    assert not module(x, weights, absent).any()
    one = torch.tensor([[3, -1]] * 4)
    assert close(module(x, weights, one), moe_of(module, x, weights, one))


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()])
def test_moe_trains(recipe: Any) -> None:
    module = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, dtype=BF16))
    reference = copy.deepcopy(module).float()
    x, dy, (weights, ids) = values(10, HIDDEN), values(10, HIDDEN, seed=5), routing()
    mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    router, other = (weights.clone().requires_grad_() for _ in range(2))
    with opaq.autocast(enabled=recipe is not None, recipe=recipe):
        module(mine, router, ids).backward(dy)
    moe_of(reference, theirs, other, ids).backward(dy.float())
    limit = 0.02 if recipe is None else 0.1
    assert close(mine.grad, theirs.grad, limit) and close(router.grad, other.grad, limit)
    for name, parameter in module.named_parameters():
        assert close(parameter.grad, reference.get_parameter(name).grad, limit), name


@pytest.mark.parametrize("text", ["", "nvfp4"])
def test_moe_compiles_to_one_graph(text: str) -> None:
    source = filled(opaq.MoE(HIDDEN, INNER, EXPERTS, shared_intermediate_size=32, dtype=BF16))
    module = opaq.MoE(HIDDEN, INNER, EXPERTS, shared_intermediate_size=32, quantizer=text, dtype=BF16)
    module.load_state_dict(source.state_dict())
    run = compiled(module, dynamic=True)
    for tokens in (10, 7):
        weights, ids = routing(tokens)
        x = values(tokens, HIDDEN, seed=tokens)
        assert same_bytes(run(x, weights, ids), module(x, weights, ids))


# -------------------------------------------------------------------------------- GroupedLinear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("text", ["", "mxfp8"])
def test_grouped_linear(text: str, bias: bool) -> None:
    source = filled(opaq.GroupedLinear(3, HIDDEN, 40, bias=bias, params_dtype=BF16))
    module = opaq.GroupedLinear(3, HIDDEN, 40, bias=bias, quantizer=text, params_dtype=BF16)
    module.load_state_dict(source.state_dict())
    x, splits = values(12, HIDDEN), [5, 0, 7]
    parts = []
    for e, rows in enumerate(x.split(splits)):
        parts.append(F.linear(rows.float(), plain(module.weight)[e], module.bias[e].float() if bias else None))
    y = module(x, splits)
    assert y.shape == (12, 40) and y.dtype == BF16 and close(y, torch.cat(parts))
    assert same_bytes(module(x, torch.tensor(splits)), y)
    assert same_bytes(module(x.view(3, 4, HIDDEN), splits), y.view(3, 4, 40))


def test_grouped_linear_trains() -> None:
    module = filled(opaq.GroupedLinear(3, HIDDEN, 40, params_dtype=BF16))
    x, dy, splits = values(12, HIDDEN).requires_grad_(), values(12, 40, seed=2), [5, 0, 7]
    module(x, splits).backward(dy)
    for e, (rows, gradient) in enumerate(zip(x.detach().split(splits), dy.split(splits), strict=True)):
        assert close(module.weight.grad[e], gradient.float().T @ rows.float())
        assert close(module.bias.grad[e], gradient.float().sum(0))
    with opaq.autocast(recipe=MXFP8BlockScaling()):
        assert module(x, splits).requires_grad


def test_grouped_linear_compiles_to_one_graph() -> None:
    module = filled(opaq.GroupedLinear(3, HIDDEN, 40, params_dtype=BF16))
    run = compiled(module)
    for splits in ([5, 0, 7], [4, 4, 4]):
        x, given = values(12, HIDDEN), torch.tensor(splits)
        assert same_bytes(run(x, given), module(x, given))
    assert same_bytes(run(x, splits), module(x, splits))


def test_grouped_linear_takes_parameters_one_by_one() -> None:
    """The names with which Transformer Engine saves them."""
    source = filled(opaq.GroupedLinear(3, HIDDEN, 40, params_dtype=BF16))
    state = {f"{n}{i}": t[i] for n, t in source.state_dict().items() for i in range(3)}
    module = opaq.GroupedLinear(3, HIDDEN, 40, params_dtype=BF16)
    module.load_state_dict(state)
    assert torch.equal(module.weight, source.weight) and torch.equal(module.bias, source.bias)


def test_errors_of_grouped_linear() -> None:
    opaq.GroupedLinear(2, 8, 8, sequence_parallel=False, tp_size=1, ub_name="x")
    with pytest.raises(NotImplementedError, match="parallel_mode='column' is not supported"):
        opaq.GroupedLinear(2, 8, 8, parallel_mode="column")
    with pytest.raises(TypeError, match="unknown argument 'biases'"):
        opaq.GroupedLinear(2, 8, 8, biases=True)
    module = filled(opaq.GroupedLinear(2, 8, 8, params_dtype=BF16))
    with pytest.raises(ValueError, match="m_splits has 3 entries, expected 2"):
        module(values(4, 8), [1, 2, 1])
    with pytest.raises(ValueError, match="opaq.GroupedLinear: "):
        module(values(4, 8), [1, 2])


# -------------------------------------------------------------------------------- all modules


def every_module(**keywords: Any) -> list[Any]:
    return [
        opaq.MLP(HIDDEN, INNER, bias=True, dtype=BF16, **keywords),
        opaq.MoE(HIDDEN, INNER, EXPERTS, bias=True, shared_intermediate_size=32, dtype=BF16, **keywords),
        opaq.GroupedLinear(3, HIDDEN, 40, dtype=BF16, **keywords),
    ]


def run(module: Any) -> Any:
    x = values(10, HIDDEN, dtype=next(module.parameters()).dtype)
    more = {opaq.MoE: routing(), opaq.GroupedLinear: ([5, 0, 5],)}.get(type(module), ())
    return module(x, *more)


@pytest.mark.parametrize("text", ["", "nvfp4"])
def test_state_copies_casts(text: str) -> None:
    for module in map(filled, every_module(quantizer=text)):
        other = copy.deepcopy(module)
        assert same_bytes(run(other), run(module))
        for assign in (False, True):
            (made,) = (m for m in every_module(quantizer=text, device="meta") if type(m) is type(module))
            made = made if assign else made.to_empty(device="cpu")
            made.load_state_dict(module.state_dict(), assign=assign)
            assert same_bytes(run(made), run(module))
        before = [b.clone() for n in module.weight_names if text for b in getattr(module, n).buffers()]
        run(other.float())
        after = [b for n in module.weight_names if text for b in getattr(other, n).buffers()]
        assert all(same_bytes(a, b) for a, b in zip(before, after, strict=True))
        assert all(parameter.dtype == torch.float32 for parameter in other.parameters())


def test_scales_of_inputs() -> None:
    module = filled(opaq.MLP(HIDDEN, INNER, quantizer="nvfp4", input_quantizer="nvfp4", dtype=BF16))
    before = run(module)
    module.input_scale, module.hidden_scale = torch.full((1,), 40.0), torch.full((1,), 40.0)
    after = run(module)
    assert not torch.equal(before, after) and close(after, before, 0.5)
    other = opaq.MLP(HIDDEN, INNER, quantizer="nvfp4", input_quantizer="nvfp4", dtype=BF16)
    other.load_state_dict(module.state_dict())
    assert same_bytes(run(other), after)
    other.half()
    assert other.input_scale.dtype == torch.float32 and other.gate_up.dtype == torch.float16


def test_quantized_model_init_is_refused() -> None:
    with opaq.quantized_model_init(recipe=MXFP8BlockScaling()):
        for make in (lambda: opaq.MLP(8, 8), lambda: opaq.MoE(8, 8, 2), lambda: opaq.GroupedLinear(2, 8, 8)):
            with pytest.raises(NotImplementedError, match="quantized_model_init is not supported"):
                make()


def test_their_weights_are_packed_with_a_model() -> None:
    model = nn.ModuleList(map(filled, every_module()))
    plain_model = copy.deepcopy(model)
    summary = opaq.quantize_(model, "nvfp4", progress=False)
    assert [row.name for row in summary.modules] == ["0.gate_up", "0.down", "1.gate_up", "1.down"] + [
        "1.shared_expert.gate_up",
        "1.shared_expert.down",
        "2.weight",
    ]
    for module, before in zip(model, plain_model, strict=True):
        assert isinstance(getattr(module, module.weight_names[0]), opaq.QuantizedTensor)
        assert close(run(module), run(before), 0.35)
    assert opaq.dequantize_(model) == 4
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    summary = opaq.quantize_(model, "nvfp4", activations="nvfp4", progress=False)
    assert model[0].input_quantizer == model[0].hidden_quantizer == "nvfp4"
    assert "recipe" in summary.left["2"]

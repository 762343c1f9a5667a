"""opaq's modules inside PyTorch's tools: activation checkpointing, the flop counter, shared memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import opaq
from conftest import need

torch = need("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

H, ROWS = 64, 32
RECIPES = ["MXFP8BlockScaling", "Float8CurrentScaling", "DelayedScaling"]


def layers(delayed: bool) -> Any:
    torch.manual_seed(0)
    made = [opaq.Linear(H, 2 * H), torch.nn.GELU(), opaq.Linear(2 * H, H)]
    return torch.nn.Sequential(*made, *([] if delayed else [opaq.MLP(H, H)]))


def trained(recipe: Any, use: Any) -> tuple[list[Any], list[Any]]:
    """Losses of three steps, and the last gradients. Backward runs outside the autocast."""
    model = layers(isinstance(recipe, opaq.recipe.DelayedScaling))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(3):
        x = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with opaq.autocast(recipe=recipe):
            loss = use(model, x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()] + [x.grad]


def equal(first: Any, second: Any) -> bool:
    return all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_with_the_backward_outside(name: str) -> None:
    recipe = getattr(opaq.recipe, name)()
    want = trained(recipe, lambda model, x: model(x))
    for reentrant in (True, False):
        got = trained(recipe, lambda model, x, r=reentrant: checkpoint(model, x, use_reentrant=r))
        assert equal(got, want), reentrant


def test_an_evaluation_in_between_changes_nothing() -> None:
    def use(model: Any, x: Any) -> Any:
        y = checkpoint(model, x, use_reentrant=True)
        with opaq.autocast(enabled=False), torch.no_grad():
            model.eval()(x)
        model.train()
        return y

    recipe = opaq.recipe.MXFP8BlockScaling()
    assert equal(trained(recipe, use), trained(recipe, lambda model, x: model(x)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_llama_with_gradient_checkpointing(reentrant: bool) -> None:
    transformers = need("transformers")
    config = transformers.LlamaConfig(
        hidden_size=H,
        intermediate_size=2 * H,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
    )
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        for parent in list(model.model.layers.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    made = opaq.Linear(child.in_features, child.out_features, bias=False)
                    made.load_state_dict(child.state_dict())
                    setattr(parent, name, made)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = torch.arange(40).view(2, 20)
        with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append(([loss.detach()], [p.grad for p in model.parameters()]))
    assert equal(*found)


def flops(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_flops_are_counted() -> None:
    x = torch.randn(ROWS, H, requires_grad=True)
    product = 2 * ROWS * H * H
    linear, mlp = opaq.Linear(H, H), opaq.MLP(H, H)
    for recipe in (None, opaq.recipe.MXFP8BlockScaling(), opaq.recipe.NVFP4BlockScaling()):
        with opaq.autocast(enabled=recipe is not None, recipe=recipe):
            assert flops(lambda: linear(x).sum().backward()) == 3 * product
            assert flops(lambda: mlp(x).sum().backward()) == 9 * product
    with torch.no_grad():
        moe, grouped = opaq.MoE(H, H, 4), opaq.GroupedLinear(2, H, H)
        ids = torch.zeros(ROWS, 2, dtype=torch.int64)
        assert flops(lambda: moe(x, torch.rand(ROWS, 2), ids)) == 2 * 3 * product
        assert flops(lambda: grouped(x, [ROWS, 0])) == product
        assert flops(lambda: opaq.QuantizedLinear(H, H, quantizer="nvfp4")(x)) == product
    up, down = torch.randn(4, 4 * H, H), torch.randn(4, H, 2 * H)
    grad = x.clone().requires_grad_()
    with opaq.runner.create_linear(torch.randn(H, H)) as one:
        assert flops(lambda: one(x)) == product
        assert flops(lambda: one(grad).sum().backward()) == 2 * product
    with opaq.runner.create_mlp(up[0], down[0], quantizer="mxfp8") as one:
        assert flops(lambda: one(x)) == 6 * product
        assert flops(lambda: one(grad).sum().backward()) == 2 * 6 * product
    with opaq.runner.create_moe(up, down) as one:
        assert flops(lambda: one(x, torch.rand(ROWS, 2), ids)) == 2 * 6 * product
        assert flops(lambda: one(grad, torch.rand(ROWS, 2), ids).sum().backward()) == 4 * 6 * product
    assert flops(lambda: grouped(x, [ROWS, 0]).sum().backward()) == 3 * product
    assert flops(lambda: moe(x, torch.rand(ROWS, 2), ids).sum().backward()) == 2 * 9 * product


def test_the_flop_counter_is_not_imported() -> None:
    """`import opaq` does not import it; the formulas are registered when it is imported."""
    program = """
import sys, opaq
assert "torch.utils.flop_counter" not in sys.modules and "opaq._flops" not in sys.modules
import torch
from torch.utils.flop_counter import flop_registry
assert torch.ops.opaq.moe_gemm in flop_registry
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_packed_models_share_memory() -> None:
    model = torch.nn.Sequential(opaq.QuantizedLinear(H, H, quantizer="nvfp4"), torch.nn.Linear(H, H))
    x = torch.randn(2, H)
    want = model(x)
    model.share_memory()
    assert all(buffer.is_shared() for buffer in model[0].weight.buffers()) and model[0].weight.is_shared()
    assert torch.equal(model(x), want)

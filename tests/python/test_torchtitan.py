"""torchtitan's override mechanism with opaq.integrations.torchtitan, on its own Llama 3: which configs are
replaced, results and gradients of its feed-forward blocks, meta device, compiling. Its attention is flex
attention, which has no gradients on CPUs in PyTorch, so whole models are built here and not run. Run by `make
test-trainers`, which installs torchtitan; skipped without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conftest import need

torch = need("torch")
opaq = need("opaq")
pytest.importorskip("torchtitan")
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

TARGET = "opaq.integrations.torchtitan.linear"


def config(*words: str) -> tuple[Any, list[str]]:
    """The debug model's config with these values of --override.imports."""
    made = copy.deepcopy(model_registry("debugmodel").model)
    return made, apply_overrides(OverrideConfig(imports=parse_cli_imports(list(words))), made)


def build(made: Any) -> Any:
    with torch.device("meta"):
        model = made.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def step(model: Any) -> tuple[Any, dict[str, Any]]:
    """The first block's MLP."""
    model.zero_grad()
    mlp = model.layers["0"].feed_forward
    torch.manual_seed(1)
    y = mlp(torch.randn(2, 16, mlp.w1.in_features))
    y.square().mean().backward()
    found = {name: p.grad.clone() for name, p in mlp.named_parameters()}
    assert len(found) == 3
    return y.detach(), found


def test_the_overrides_layers_compute_as_converted_ones_do() -> None:
    plain = build(config()[0])
    before = step(plain)
    made, lines = config(TARGET)
    model = build(made)
    replaced = [name for name, m in model.named_modules() if isinstance(m, opaq.Linear)]
    assert len(replaced) == len(lines) > 6
    assert not any("output" in name or "lm_head" in name for name in replaced)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    got = step(model)
    assert 0 < float((got[0] - before[0]).norm() / before[0].norm()) < 0.2
    # expected: the same layers under autocast
    bare = build(config(TARGET)[0])
    for module in bare.modules():
        if isinstance(module, opaq.Linear):
            module.recipe = None
    with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        expected = step(bare)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])


def test_arguments_and_compiling() -> None:
    torch._dynamo.reset()
    words = TARGET + '={"recipe": "NVFP4BlockScaling", "options": {"disable_stochastic_rounding": true}}'
    model = build(config(words)[0])
    recipe = opaq.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    assert {m.recipe for m in model.modules() if isinstance(m, opaq.Linear)} == {recipe}
    expected = step(model)
    model.layers["0"].feed_forward.compile(fullgraph=True, backend="aot_eager")
    got = step(model)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="opaq: there is no recipe 'FP3', expected one of DelayedScaling"):
        config(TARGET + '={"recipe": "FP3"}')

"""convert_training and revert_training: a converted model computes the same as a model of opaq.Linear layers
under autocast; and objects, names, hooks, tied weights, the meta device, compiling and FSDP2 still work.
Experts, transformers and accelerate: test_convert_models.py."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

from conftest import need
from rank_processes import RankProcesses, need_gpus

torch = need("torch")
opaq = need("opaq")

from torch import nn  # noqa: E402

from opaq.recipe import (  # noqa: E402
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(32, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def net(blocks: int = 3, device: str = "cpu") -> Net:
    torch.manual_seed(0)
    return Net(blocks).to(device)


def tokens(device: Any = "cpu") -> Any:
    return (torch.arange(32).view(2, 16) % 16).to(device)


def step(model: Any, ids: Any = None) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    torch.manual_seed(7)  # stochastic rounding
    y = model(tokens(next(model.parameters()).device) if ids is None else ids)
    y.square().sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_tensor(name: str, a: Any, b: Any) -> bool:
    """Bit for bit; but a GPU adds up the gradient of an embedding in any order."""
    return torch.allclose(a, b, 1e-4, 1e-5) if a.is_cuda and name == "embed.weight" else torch.equal(a, b)


def same(a: tuple[Any, dict[str, Any]], b: tuple[Any, dict[str, Any]]) -> bool:
    return (
        torch.equal(a[0], b[0])
        and a[1].keys() == b[1].keys()
        and all(same_tensor(n, a[1][n], b[1][n]) for n in a[1])
    )


def with_opaq_linear(recipe: Any, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """The expected result: opaq.Linear layers with the same parameters, under autocast."""
    model = net(device=device)
    for block in model.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            made = opaq.Linear(old.in_features, old.out_features, bias=old.bias is not None, device=device)
            made.weight, made.bias = old.weight, old.bias
            setattr(block, name, made)
    with opaq.autocast(recipe=recipe):
        return step(model)


# ---- results ----


@pytest.mark.parametrize("name", RECIPES)
def test_converted_layers_compute_by_their_recipe(name: str, device: str) -> None:
    recipe, model = RECIPES[name], net(device=device)
    plain = step(model)
    summary = opaq.convert_training(model, recipe)
    assert len(summary.converted) == 6
    assert summary.left == {"lm_head": "ignored"}
    got = step(model)
    assert same(got, with_opaq_linear(recipe, device=device))
    assert not torch.equal(got[0], plain[0])
    opaq.revert_training(model)
    assert same(step(model), plain)


def test_without_a_recipe_autocast_decides(device: str) -> None:
    model = net(device=device)
    plain = step(model)
    opaq.convert_training(model)
    assert torch.allclose(step(model)[0], plain[0], rtol=1e-5, atol=1e-6)
    with opaq.autocast(recipe=RECIPES["mxfp8"]):
        assert same(step(model), with_opaq_linear(RECIPES["mxfp8"], device=device))


def test_an_autocast_takes_precedence(device: str) -> None:
    model = net(device=device)
    opaq.convert_training(model)
    plain = step(model)
    opaq.convert_training(model, RECIPES["nvfp4"])
    with opaq.autocast(recipe=RECIPES["block"]):
        assert same(step(model), with_opaq_linear(RECIPES["block"], device=device))
    with opaq.autocast(enabled=False):
        assert same(step(model), plain)
    assert same(step(model), with_opaq_linear(RECIPES["nvfp4"], device=device))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around", [None, "block"])
def test_activation_checkpointing(use_reentrant: bool, around: str | None, device: str) -> None:
    """Recomputation uses the same recipe, though backward() is called outside the autocast."""
    from torch.utils.checkpoint import checkpoint

    model = net(device=device)
    opaq.convert_training(model, RECIPES["mxfp8"])

    def run(again: bool) -> dict[str, Any]:
        model.zero_grad()
        x = model.embed(tokens(device=device))
        with opaq.autocast(recipe=RECIPES[around]) if around else torch.enable_grad():
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant) if again else block(x)
        x.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, got = run(False), run(True)
    assert expected.keys() == got.keys()
    assert all(same_tensor(name, expected[name], got[name]) for name in got)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed"])
def test_compiles_as_one_graph(name: str, device: str) -> None:
    torch._dynamo.reset()
    model = net(device=device)
    opaq.convert_training(model, RECIPES[name])
    expected = step(copy.deepcopy(model))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(7)
    y = compiled(tokens(device=device))
    y.square().sum().backward()
    assert torch.equal(y.detach(), expected[0])
    assert all(same_tensor(name, p.grad, expected[1][name]) for name, p in model.named_parameters())


def test_delayed_scaling_keeps_its_state(device: str) -> None:
    model = net(device=device)
    opaq.convert_training(model, RECIPES["delayed"])
    keys = list(model.state_dict())
    plain = list(net().state_dict())
    assert [key for key in keys if key in plain] == plain and len(keys) == len(plain) + 4 * 6
    assert "blocks.0.up.amax_history_fwd" in keys
    step(model)
    assert model.blocks[0].up.amax_history_fwd.abs().max() > 0
    again = net(device=device)
    opaq.convert_training(again, RECIPES["delayed"])
    again.load_state_dict(model.state_dict())
    assert same(step(again), step(model))


# ---- unchanged properties ----


def everything(model: nn.Module) -> list[tuple[str, Any, Any]]:
    """Each module's name, class, and contents by identity."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, of(item)) for key, item in value.items()]
        return sorted(value) if isinstance(value, set) else id(value)

    return [(name, type(m), {k: of(v) for k, v in vars(m).items()}) for name, m in model.named_modules()]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_reverting_restores_everything(recipe: str, device: str) -> None:
    model = net(device=device)
    model.blocks[1].up.register_forward_hook(lambda *_: None)
    model.blocks[1].eval()
    model.blocks[2].down.weight.requires_grad_(False)
    before = everything(model)
    opaq.convert_training(model, RECIPES[recipe])
    step(model)
    opaq.convert_training(model, RECIPES["block"])
    assert everything(model) != before
    model.zero_grad()
    assert opaq.revert_training(model) == 6
    assert everything(model) == before
    assert opaq.revert_training(model) == 0


def test_objects_names_modes_and_ties_stay() -> None:
    model = net()
    model.blocks[1].eval()
    model.blocks[2].down.weight.requires_grad_(False)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys, modes = list(model.state_dict()), [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    opaq.convert_training(model, RECIPES["mxfp8"], ignore=())
    assert dict(model.named_modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.lm_head, opaq.Linear)
    step(model)
    assert list(model.state_dict()) == keys
    plain = net()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def test_hooks_stay() -> None:
    model, seen = net(), []
    layer = model.blocks[0].up
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    layer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    layer.weight.register_hook(lambda gradient: seen.append("gradient"))
    expected = ["before", "after", "gradient", "backward", "saved", "loading", "loaded"]
    for convert in (True, False):
        opaq.convert_training(model, RECIPES["mxfp8"]) if convert else opaq.revert_training(model)
        seen.clear()
        step(model)
        model.load_state_dict(model.state_dict())
        assert sorted(seen) == sorted(expected)


def test_an_optimizer_made_before_trains_the_converted_model(device: str) -> None:
    model = net(device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    opaq.convert_training(model, RECIPES["mxfp8"])
    before = model.blocks[0].up.weight.detach().clone()
    step(model)
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)


def test_copies_and_files(device: str) -> None:
    model = net(device=device)
    opaq.convert_training(model, RECIPES["mxfp8"])
    expected = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same(step(made), expected)
        assert opaq.revert_training(made) == 6  # the copy's own modules
        assert type(made.blocks[0].up) is nn.Linear
        assert isinstance(model.blocks[0].up, opaq.Linear)
    assert same(step(model), expected)


def test_training_ends_in_a_packed_model(device: str) -> None:
    model = net(device=device)
    opaq.convert_training(model, RECIPES["mxfp8"])
    step(model)
    assert len(opaq.quantize_(model, "mxfp8", progress=False).modules) == 6


@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_the_meta_device(name: str) -> None:
    """Converted there, materialized, and initialized like nn.Linear."""
    expected = net()
    with torch.device("meta"):
        model = Net()
    opaq.convert_training(model, RECIPES[name])
    assert model.blocks[0].up.weight.is_meta
    model.to_empty(device="cpu")
    model.lm_head.weight = model.embed.weight  # to_empty unties them
    assert torch.equal(model.blocks[0].up.scale_fwd, torch.ones(3))
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    torch.manual_seed(0)
    model.blocks[0].up.reset_parameters()
    assert torch.equal(model.blocks[0].up.weight, layer.weight)
    assert torch.equal(model.blocks[0].up.bias, layer.bias)
    model.load_state_dict(expected.state_dict(), strict=name != "delayed")
    opaq.convert_training(expected, RECIPES[name])
    assert same(step(model), step(expected))


# ---- which modules ----


def test_first_and_last_blocks_and_filter() -> None:
    model = net(5)
    summary = opaq.convert_training(model, RECIPES["mxfp8"], skip_first=1, skip_last=2)
    assert list(summary.converted) == [f"blocks.{i}.{name}" for i in (1, 2) for name in ("up", "down")]
    assert sum("first or last" in reason for reason in summary.left.values()) == 6
    more = opaq.convert_training(model, RECIPES["nvfp4"], filter=lambda module, name: name.endswith("up"))
    assert len(more.converted) == 5
    assert model.blocks[1].up.recipe == RECIPES["nvfp4"]
    assert model.blocks[1].down.recipe == RECIPES["mxfp8"]
    assert more.left["blocks.0.down"] == "filtered"
    with pytest.raises(ValueError, match="the model has none; use filter"):
        opaq.convert_training(Block(), RECIPES["mxfp8"], skip_first=1)
    with pytest.raises(ValueError, match="skip_last -1, expected 0 or more"):
        opaq.convert_training(model, skip_last=-1)
    with pytest.raises(TypeError, match="recipe is a int, expected an opaq.recipe.Recipe"):
        opaq.convert_training(model, 8)


def test_blocks_are_members_of_the_outermost_lists_of_several_modules() -> None:
    """Not lists inside blocks, such as a list of experts, nor lists of one module."""

    def made() -> Any:
        blocks = [
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))}) for _ in range(3)
        ]
        return nn.ModuleDict({"adapter": nn.ModuleList([nn.Linear(8, 8)]), "blocks": nn.ModuleList(blocks)})

    summary = opaq.convert_training(made(), RECIPES["mxfp8"], skip_first=1, skip_last=1)
    assert list(summary.converted) == ["adapter.0", *(f"blocks.1.experts.{i}" for i in range(3))]
    with pytest.raises(ValueError, match="the model has none"):
        opaq.convert_training(nn.ModuleList([nn.Linear(8, 8)]), RECIPES["mxfp8"], skip_first=1)


def test_weights_that_are_no_plain_parameters_are_left() -> None:
    with opaq.quantized_model_init(recipe=RECIPES["mxfp8"]):
        stored = opaq.Linear(32, 32)
    computed = nn.Linear(8, 8)
    weight = computed._parameters.pop("weight")
    computed.register_parameter("weight_v", weight)
    computed.weight = weight.detach()  # as torch.nn.utils.weight_norm and spectral_norm do
    packed = nn.ModuleDict({"mlp": opaq.MLP(32, 64)})
    opaq.quantize_(packed, "nvfp4", progress=False)
    model = nn.ModuleDict({"stored": stored, "computed": computed, "packed": packed, "a": nn.Linear(8, 8)})
    summary = opaq.convert_training(model, RECIPES["mxfp8"])
    assert summary.converted == {"a": "Linear"}
    assert summary.left == {
        "stored": "its weight is quantized",
        "computed": "its weight is computed from other parameters",
        "packed.mlp": "packed by quantize_, which dequantize_ undoes",
    }


def test_summary_has_reasons_for_skipped_modules() -> None:
    class Own(nn.Linear):
        pass

    shared = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {
            "own": Own(8, 8),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "attention": nn.MultiheadAttention(8, 2),
            "packed": opaq.QuantizedLinear(32, 32, quantizer="nvfp4"),
            "patched": nn.Linear(8, 8),
            "lazy": nn.LazyLinear(8),
            "a": shared,
            "b": shared,
        }
    )
    model["patched"].forward = lambda x: x
    summary = opaq.convert_training(model, RECIPES["mxfp8"])
    assert summary.converted == {"a": "Linear"}
    assert type(model["b"]).__name__ == "TrainingLinear"  # one module in two places
    reasons = {
        "own": "it is a Own, a subclass of nn.Linear",
        "parametrized": "it is parametrized",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, a subclass of nn.Linear",
        "packed": "packed by quantize_, which dequantize_ undoes",
        "patched": "it has a forward of its own",
        "lazy": "it is a LazyLinear, a subclass of nn.Linear",
    }
    assert summary.left == reasons
    text = str(summary)
    assert text.startswith("1 modules train by MXFP8BlockScaling(")
    assert "left as it is: parametrized (it is parametrized)" in text


def test_an_opaq_linear_gets_the_recipe(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(opaq.Linear(32, 32, device=device))
    x = torch.randn(4, 32, device=device)
    with opaq.autocast(recipe=RECIPES["mxfp8"]):
        expected = model(x)
    plain = model(x)
    assert opaq.convert_training(model, RECIPES["mxfp8"]).converted == {"0": "Linear"}
    assert torch.equal(model(x), expected)
    assert opaq.revert_training(model) == 1
    assert type(model[0]) is opaq.Linear
    assert torch.equal(model(x), plain)


# ---- FSDP2 ----


def test_fsdp2(device: str, tmp_path: Path) -> None:
    """Two ranks, which run training_rank.py; where there are two GPUs, on these too."""
    need_gpus(device, 2)
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch was built without torch.distributed")
    ranks = RankProcesses(Path(__file__).with_name("training_rank.py"), 2, tmp_path, 240, device)
    assert ranks.ended == [0, 0], ranks.output

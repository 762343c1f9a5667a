"""convert_training with experts, with models of transformers and its Trainer, and with accelerate."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

from conftest import need
from test_convert_training import RECIPES, net, step, tokens

torch = need("torch")
opaq = need("opaq")

from torch import nn  # noqa: E402

# ---- opaq's experts ----


def test_modules_of_experts(device: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"mlp": opaq.MLP(32, 64, device=device), "grouped": opaq.GroupedLinear(2, 32, 32, device=device)}
    )
    x = torch.randn(8, 32, device=device)
    with opaq.autocast(recipe=RECIPES["mxfp8"]):
        expected = model["mlp"](x), model["grouped"](x, [3, 5])
    plain = model["mlp"](x)
    assert set(opaq.convert_training(model, RECIPES["delayed"]).left) == {"mlp", "grouped"}
    opaq.convert_training(model, RECIPES["mxfp8"])
    for made in (model, copy.deepcopy(model)):
        assert torch.equal(made["mlp"](x), expected[0])
        assert torch.equal(made["grouped"](x, [3, 5]), expected[1])
    opaq.revert_training(model)
    assert type(model["mlp"]) is opaq.MLP
    assert torch.equal(model["mlp"](x), plain)


def test_an_autocast_takes_precedence_over_experts_recipes(device: str) -> None:
    torch.manual_seed(0)
    mlp, x = opaq.MLP(32, 64, device=device), torch.randn(8, 32, device=device)
    plain, expected = mlp(x), []
    for name in ("current", "mxfp8"):
        with opaq.autocast(recipe=RECIPES[name]):
            expected.append(mlp(x))
    opaq.convert_training(nn.ModuleDict({"mlp": mlp}), RECIPES["mxfp8"])
    with opaq.autocast(recipe=RECIPES["current"]):
        assert torch.equal(mlp(x), expected[0])
    with opaq.autocast(enabled=False):
        assert torch.equal(mlp(x), plain)
    assert torch.equal(mlp(x), expected[1])
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around", [None, "current"])
def test_activation_checkpointing_of_experts(use_reentrant: bool, around: str | None, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    mlp = opaq.MLP(32, 64, device=device)
    opaq.convert_training(nn.ModuleDict({"mlp": mlp}), RECIPES["mxfp8"])
    found = []
    for again in (False, True):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        with opaq.autocast(recipe=RECIPES[around]) if around else torch.enable_grad():
            y = checkpoint(mlp, x, use_reentrant=use_reentrant) if again else mlp(x)
        y.square().sum().backward()  # recomputes outside of the autocast
        found.append([x.grad, *(p.grad.clone() for p in mlp.parameters())])
        mlp.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    file = io.BytesIO()
    torch.save(mlp, file)  # after a forward in an autocast
    assert b"_Level" not in file.getvalue()


# ---- transformers, accelerate, FSDP2 ----


def llama(tie: bool) -> Any:
    transformers = need("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
    )


@pytest.mark.parametrize("tie", [False, True])
def test_a_llama_trains_compiles_and_is_saved(tie: bool, tmp_path: Path) -> None:
    transformers = need("transformers")
    torch._dynamo.reset()
    model, ids = llama(tie), torch.arange(32).view(2, 16)
    summary = opaq.convert_training(model, RECIPES["mxfp8"], skip_first=1)
    assert len(summary.converted) == 14
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    opaq.revert_training(model)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_experts_of_transformers() -> None:
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model, ids = transformers.Qwen3MoeForCausalLM(config), torch.arange(16)[None]
    plain = model(ids).logits
    by_hand = copy.deepcopy(model)
    need("opaq.integrations.transformers")  # registers it
    by_hand.set_experts_implementation("opaq")
    with opaq.autocast(recipe=RECIPES["mxfp8"]):
        expected = by_hand(ids).logits
    opaq.convert_training(model, RECIPES["mxfp8"], lambda _, name: name.endswith("experts"))
    assert torch.equal(model(ids).logits, expected)
    summary = opaq.convert_training(model, RECIPES["mxfp8"], ignore=("lm_head", "*.gate"))
    assert sum(kind == "Qwen3MoeExperts" for kind in summary.converted.values()) == 2
    converted = model(ids).logits
    assert 1e-4 < float((converted - plain).detach().norm() / plain.detach().norm()) < 0.1
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.isfinite().all()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, converted)
    opaq.revert_training(model)
    assert torch.equal(model(ids).logits, plain)


class Lines(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.arange(index, index + 12) % 64
        return {"input_ids": row, "labels": row}


def test_trainer(tmp_path: Path) -> None:
    """transformers.Trainer, with gradient checkpointing; what it saves loads plain."""
    need("accelerate")
    transformers = need("transformers")
    model = llama(False)
    opaq.convert_training(model, RECIPES["mxfp8"], skip_last=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    ids = torch.arange(16)[None]
    converted = model.eval()(ids).logits
    assert opaq.revert_training(model) == 14
    assert not torch.equal(converted, model(ids).logits)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_accelerate() -> None:
    accelerate = need("accelerate")
    model = net()
    opaq.convert_training(model, RECIPES["mxfp8"])
    expected = step(copy.deepcopy(model))
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    torch.manual_seed(7)
    y = prepared(tokens())
    accelerator.backward(y.square().sum())
    assert torch.equal(y.detach(), expected[0])
    assert all(torch.equal(p.grad, expected[1][name]) for name, p in model.named_parameters())
    before = model.blocks[0].up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(accelerator.unwrap_model(prepared).blocks[0].up.weight, before)

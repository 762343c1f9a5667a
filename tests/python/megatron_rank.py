"""One rank of test_megatron.py: `megatron_rank.py <rank> <world> <folder>`. Megatron's MLP with opaq's linear
layers against Megatron's own: outputs, gradients, errors."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

import opaq
from opaq.integrations.megatron import OpaqSpecProvider
from opaq.recipe import DelayedScaling, MXFP8BlockScaling

ROWS, BATCH, HIDDEN = 64, 2, 64


def config_of(sequence_parallel: bool = False) -> Any:
    dtype = torch.float32
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=128,
        num_attention_heads=4,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bias_activation_fusion=False,
        add_bias_linear=True,
    )


def run(provider: Any, sequence_parallel: bool) -> dict[str, Any]:
    dtype, config = torch.float32, config_of(sequence_parallel)
    torch.manual_seed(0)
    spec = get_mlp_module_spec_for_backend(backend=provider)
    mlp = build_module(spec, config=config)
    torch.manual_seed(1)
    x, dy = torch.randn(ROWS, BATCH, HIDDEN, dtype=dtype), torch.randn(ROWS, BATCH, HIDDEN, dtype=dtype)
    if sequence_parallel:
        x, dy = (t.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for t in (x, dy))
    x.requires_grad_()
    y, bias = mlp(x)
    y.backward(dy)
    found = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **found}


def layers(provider: Any) -> list[Any]:
    """A column- and a row-parallel layer that add their biases themselves."""
    options = {
        "config": config_of(),
        "init_method": torch.nn.init.normal_,
        "skip_bias_add": False,
        "bias": True,
    }
    made = [
        provider.column_parallel_linear()(HIDDEN, 128, gather_output=False, **options),
        provider.row_parallel_linear()(128, HIDDEN, input_is_parallel=True, **options),
    ]
    for layer in made:
        torch.nn.init.normal_(layer.bias)
    return made


def check_layers(recipe: Any) -> None:
    """On one rank each layer has the bits of opaq.functional.linear."""
    for layer in layers(OpaqSpecProvider(recipe)):
        assert layer.recipe == recipe
        x = torch.randn(ROWS, layer.weight.shape[1])
        expected = opaq.functional.linear(x, layer.weight, layer.bias, recipe=recipe)
        assert torch.equal(layer(x)[0], expected), layer
        assert relative(expected, torch.nn.functional.linear(x, layer.weight, layer.bias)) > 1e-3
        layer.gradient_accumulation_fusion = True
        try:
            layer(x)
        except NotImplementedError as error:
            assert "set gradient_accumulation_fusion=False" in str(error)
        else:
            raise AssertionError("no exception was raised")


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def main(rank: str, world: str, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=120),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=int(world))
    expected = run(LocalSpecProvider(), False)
    got = run(OpaqSpecProvider(), False)
    assert got.keys() == expected.keys()
    assert len(got) >= 5, got.keys()
    for name, tensor in got.items():
        assert relative(tensor, expected[name]) < 1e-5, name
    quantized = run(OpaqSpecProvider(MXFP8BlockScaling()), False)
    for name, tensor in quantized.items():
        assert 0 < relative(tensor, expected[name]) < 0.1 or "bias" in name, name
    with opaq.autocast(recipe=MXFP8BlockScaling()):
        again = run(OpaqSpecProvider(), False)
    assert torch.equal(again["y"], quantized["y"])
    if int(world) == 1:
        check_layers(MXFP8BlockScaling())
    refused = [
        lambda: OpaqSpecProvider(DelayedScaling()),
        lambda: OpaqSpecProvider().grouped_mlp_modules(True, False),
    ]
    if int(world) > 1:
        refused.append(lambda: run(OpaqSpecProvider(), True))
    for wrong in refused:
        try:
            wrong()
        except NotImplementedError as error:
            assert "not supported in Megatron" in str(error)
        else:
            raise AssertionError("no exception was raised")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

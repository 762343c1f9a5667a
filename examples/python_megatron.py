"""Trains MLPs of Megatron-core, whose column- and row-parallel layers compute in MXFP8 by opaq's
BackendSpecProvider. One process; with torchrun, tensor parallel on all its processes. Needs megatron-core 0.16
(requirements/trainers.txt)."""

import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

import opaq
from opaq.integrations.megatron import OpaqSpecProvider

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 61
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    tensor_model_parallel_size=dist.get_world_size(),
    use_cpu_initialization=True,
    params_dtype=torch.float32,
    pipeline_dtype=torch.float32,
    bias_activation_fusion=False,
)
spec = get_mlp_module_spec_for_backend(backend=OpaqSpecProvider(opaq.recipe.MXFP8BlockScaling()))
torch.manual_seed(0)
mlps = torch.nn.ModuleList(build_module(spec, config=config) for _ in range(config.num_layers))
table = torch.nn.Embedding(96, config.hidden_size)
norm = torch.nn.LayerNorm(config.hidden_size)
print(mlps[0])

optimizer = torch.optim.AdamW([*mlps.parameters(), *table.parameters(), *norm.parameters()], lr=5e-3)
target_of = torch.randperm(96)  # the task: learn a permutation of the tokens
for step in range(STEPS):
    ids = torch.randint(0, 96, (32, 4))  # [sequence, batch]
    x = table(ids)
    for mlp in mlps:
        y, bias = mlp(norm(x))
        x = x + y + bias
    loss = torch.nn.functional.cross_entropy((norm(x) @ table.weight.T).flatten(0, 1), target_of[ids].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step:3}: loss {loss.item():.4f}")
dist.destroy_process_group()

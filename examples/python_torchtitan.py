"""Trains torchtitan's Llama 3, its debug model, whose blocks compute in MXFP8 by opaq's override: what
`--override.imports opaq.integrations.torchtitan.linear` does in torchtitan's own trainer, in a loop that also
runs on a processor. Needs torchtitan 0.3 (requirements/trainers.txt)."""

import copy
import sys

import torch
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import opaq

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 31
device = "cuda" if torch.cuda.is_available() and "cuda" in opaq.library_info()["backends"] else "cpu"

config = copy.deepcopy(model_registry("debugmodel").model)
for layer in config.layers:  # the default, flex attention, has no gradient on processors
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
words = ['opaq.integrations.torchtitan.linear={"recipe": "MXFP8BlockScaling"}']
replaced = apply_overrides(OverrideConfig(imports=parse_cli_imports(words)), config)

torch.manual_seed(0)
with torch.device("meta"):
    model = config.build()
model.to_empty(device=device)
with torch.no_grad():
    model.init_states(buffer_device=torch.device(device))
layers = [module for module in model.modules() if isinstance(module, opaq.Linear)]
recipe = type(layers[0].recipe).__name__
print(f"{len(replaced)} layers replaced, {len(layers)} are opaq.Linear by {recipe}, on {device}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    first, distance = torch.randint(0, 64, (8, 1)), torch.randint(1, 4, (8, 1))
    ids = ((first + distance * torch.arange(33)) % 64).to(device)  # the task: continue arithmetic sequences
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:3}: loss {loss.item():.4f}")

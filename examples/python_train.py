"""Trains a plain PyTorch model in MXFP8 and packs it: convert_training, a few steps, quantize_."""

import torch

import opaq
from opaq.recipe import MXFP8BlockScaling

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).bfloat16()
print(opaq.convert_training(model, MXFP8BlockScaling()))

x = torch.randn(256, 64, dtype=torch.bfloat16)
target = x.roll(1, dims=1)  # the task: shift every column by one
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(151):
    loss = (model(x) - target).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.4f}")

opaq.revert_training(model)
print(opaq.quantize_(model, "mxfp8", activations="mxfp8", progress=False))
print(f"packed: loss {(model(x) - target).float().square().mean().item():.4f}")

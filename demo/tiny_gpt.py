"""A character-level GPT small enough for two CPU cores, its training text, and AdamW with float32 masters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import opaq

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("README.md", "docs/*.md", "include/opaq/*.h")
PIECE = 1024  # characters; every eighth piece is kept for validation
WIDTH, LAYERS, HEADS = 128, 2, 4
BATCH, LENGTH = 16, 64  # sequences, characters each


class Text:
    """This repository's documentation and headers as indices of characters. Batches are on `device`; which
    characters are drawn does not depend on it."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
        text = "".join(path.read_text(encoding="utf-8") for path in files).encode("ascii", "replace")
        self.size = len(text)
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.alphabet, characters = codes.unique(return_inverse=True)  # the byte of each index
        self.vocabulary = len(self.alphabet)
        pieces = characters.split(PIECE)
        self.train = torch.cat([piece for i, piece in enumerate(pieces) if i % 8 != 7])
        self.held_out = torch.cat(pieces[7::8])

    @property
    def frequencies(self) -> float:
        """The validation loss of predicting each character with its frequency in the training text."""
        counts = self.train.bincount(minlength=self.vocabulary) + 1.0
        return float(-(counts / counts.sum()).log()[self.held_out].mean())

    def batches(
        self, steps: int, seed: int, length: int = LENGTH
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self.train) - length, (BATCH,), generator=generator)
            yield self._windows(self.train, starts, length)

    def validation(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The validation text in batches of the shape used in training."""
        starts = torch.arange(0, len(self.held_out) - LENGTH, LENGTH)
        whole = len(starts) // BATCH * BATCH
        return [self._windows(self.held_out, some, LENGTH) for some in starts[:whole].split(BATCH)]

    def _windows(
        self, characters: torch.Tensor, starts: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = starts[:, None] + torch.arange(length)
        return characters[places].to(self.device), characters[places + 1].to(self.device)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: rotates pairs of features by an angle proportional to the position."""
    half = x.shape[-1] // 2
    places, rates = torch.arange(x.shape[-2], device=x.device), torch.arange(half, device=x.device)
    angle = places[:, None] * 1000.0 ** (-rates / half)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class Block(nn.Module):
    """Attention and a feed-forward layer; its four linear layers are quantized."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device=device)
        self.qkv = opaq.Linear(WIDTH, 3 * WIDTH, params_dtype=torch.bfloat16, device=device)
        self.proj = opaq.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)
        self.norm2 = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device=device)
        self.fc1 = opaq.Linear(WIDTH, 4 * WIDTH, params_dtype=torch.bfloat16, device=device)
        self.fc2 = opaq.Linear(4 * WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        query, key = rotated(query), rotated(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int, device: str = "cpu") -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH, dtype=torch.bfloat16, device=device)
        self.blocks = nn.ModuleList([Block(device) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device=device)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the next characters."""
        x = self.characters(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MasterAdamW:
    """AdamW on float32 copies of bf16 parameters, so that updates below bf16's resolution accumulate. The
    learning rate rises linearly over the first tenth of the steps, then falls to zero along a cosine."""

    def __init__(self, model: nn.Module, rate: float, steps: int) -> None:
        self.parameters = list(model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        warm = max(1, steps // 10)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.adamw,
            [
                torch.optim.lr_scheduler.LinearLR(self.adamw, 1 / warm, total_iters=warm),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.adamw, steps - warm),
            ],
            [warm],
        )

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.adamw.step()
        self.schedule.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)

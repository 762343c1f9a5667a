"""Llama models of transformers whose tokens are ASCII bytes: creating, training and saving them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_gpt import MasterAdamW, Text

VOCABULARY = 128
LENGTH = 128  # bytes of a training sequence


class Size(NamedTuple):
    """The size of a model."""

    width: int
    inner: int
    layers: int
    heads: int

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}"

    @property
    def linear_layers(self) -> int:
        """The number of quantized layers: q, k, v, o, gate, up and down of each block."""
        return 7 * self.layers


def make(size: Size, seed: int, device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)


def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next bytes."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def as_bytes(text: Text, characters: torch.Tensor) -> torch.Tensor:
    """Converts indices of characters to bytes, which are the tokens."""
    return text.alphabet.to(characters.device)[characters].long()


def train(
    model: LlamaForCausalLM, text: Text, steps: int, rate: float, seed: int, after: Callable[[float], None]
) -> list[float]:
    """Trains in bf16 with float32 masters; calls `after` with each step's loss."""
    optimizer = MasterAdamW(model, rate, steps)
    losses = []
    model.train()
    for pair in text.batches(steps, seed, LENGTH):
        loss = loss_of(model, *(as_bytes(text, part) for part in pair))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(losses[-1])
    return losses


def save(model: LlamaForCausalLM, folder: Path) -> None:
    model.eval().save_pretrained(folder)


def size_on_disk(folder: Path) -> int:
    """Bytes of the checkpoint's tensors."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

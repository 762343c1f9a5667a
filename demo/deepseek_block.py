"""One block of a DeepSeek-like model at two sevenths of its size, with random weights and activations whose
distributions have the tails and outliers of language models, and the inputs of each projection, computed in
bf16.

No parameter is fitted to a format. Weights: Student's t with 5 degrees of freedom, as found in many models'
weights, times a scale for each row and each column (log-normal, sigma 0.25), a few columns larger (0.2 %, four
to eight times). Activations: the same t, times a scale for each channel (log-normal, sigma 0.5), and 0.3 %
outlier channels, 8 to 24 times larger, the same ones for all tokens. Weights are independent of the
activations; those of a trained model are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

HIDDEN, HEADS = 2048, 36
Q_RANK, KV_RANK = 448, 160
NOPE, ROPE, VALUE = 128, 64, 128  # of a head, as in the model
INNER, EXPERTS, CHOSEN = 576, 8, 2
FREEDOM = 5


class Numbers:
    """Random tensors. Each has its own generator, so its values do not depend on the other tensors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])

    def weight(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Scaled so that inputs of unit variance give outputs of unit variance."""
        rng = self._rng(name)
        values = rng.standard_t(FREEDOM, (rows, columns))
        values *= np.exp(0.25 * rng.standard_normal((rows, 1))) * _channels(rng, columns, 0.25, 0.002, (4, 8))
        values /= values.std() * columns**0.5
        return torch.from_numpy(values.astype(np.float32)).bfloat16()

    def activations(self, name: str, tokens: int, columns: int) -> torch.Tensor:
        rng = self._rng(name)
        values = rng.standard_t(FREEDOM, (tokens, columns)) * _channels(rng, columns, 0.5, 0.003, (8, 24))
        values /= (values**2).mean(1, keepdims=True) ** 0.5  # as after RMSNorm
        return torch.from_numpy(values.astype(np.float32)).bfloat16()


def _channels(
    rng: np.random.Generator, columns: int, sigma: float, share: float, outliers: tuple[float, float]
) -> np.ndarray[Any, Any]:
    """A scale for each channel. `share` of the channels are outliers: their scales are multiplied by a factor
    within `outliers`."""
    scale = np.exp(sigma * rng.standard_normal(columns))
    chosen = rng.permutation(columns)[: max(1, round(share * columns))]
    scale[chosen] *= np.exp(rng.uniform(*np.log(outliers), len(chosen)))
    return scale


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


class Block:
    """The weights and the input of every projection."""

    def __init__(self, seed: int, tokens: int) -> None:
        numbers = Numbers(seed)
        self.weights = {
            name: numbers.weight(name, rows, columns)
            for name, rows, columns in (
                ("q_a_proj", Q_RANK, HIDDEN),
                ("q_b_proj", HEADS * (NOPE + ROPE), Q_RANK),
                ("kv_a_proj", KV_RANK + ROPE, HIDDEN),
                ("kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK),
                ("o_proj", HIDDEN, HEADS * VALUE),
                ("shared.gate_up", 2 * INNER, HIDDEN),
                ("shared.down", HIDDEN, INNER),
            )
        }
        stacks = (("experts.gate_up", 2 * INNER, HIDDEN), ("experts.down", HIDDEN, INNER))
        for name, rows, columns in stacks:
            each = [numbers.weight(f"{name} {e}", rows, columns) for e in range(EXPERTS)]
            self.weights[name] = torch.stack(each)
        x = numbers.activations("attention", tokens, HIDDEN)
        hidden = numbers.activations("experts", tokens, HIDDEN)
        query = normed(self.linear("q_a_proj", x))
        latent = self.linear("kv_a_proj", x)
        compressed = normed(latent[:, :KV_RANK].contiguous())
        self.inputs = {
            "q_a_proj": x,
            "q_b_proj": query,
            "kv_a_proj": x,
            "kv_b_proj": compressed,
            "o_proj": self._attention(query, compressed, latent[:, KV_RANK:]),
            "shared.gate_up": hidden,
            "experts.gate_up": hidden,
        }
        self.router_weights, self.router_ids = self._route(numbers, hidden)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[name])

    def _attention(self, query: torch.Tensor, compressed: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Without the rotary embedding, which does not change the norms of queries and keys."""
        tokens = len(query)
        q = self.linear("q_b_proj", query).view(tokens, HEADS, NOPE + ROPE).transpose(0, 1)
        kv = self.linear("kv_b_proj", compressed).view(tokens, HEADS, NOPE + VALUE).transpose(0, 1)
        k = torch.cat((kv[..., :NOPE], rope.expand(HEADS, tokens, ROPE)), -1)
        mixed = functional.scaled_dot_product_attention(q, k, kv[..., NOPE:], is_causal=True)
        return mixed.transpose(0, 1).reshape(tokens, HEADS * VALUE)

    def _route(self, numbers: Numbers, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """DeepSeek-V3's router: sigmoid scores; the CHOSEN largest are normalized to a sum of 1."""
        scores = functional.linear(hidden, numbers.weight("router", EXPERTS, HIDDEN)).float().sigmoid()
        weights, ids = scores.topk(CHOSEN)
        return weights / weights.sum(-1, keepdim=True), ids


def gated(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return functional.silu(gate) * up

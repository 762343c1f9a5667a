"""Times decoding of a small compiled Llama-like model with tiled NVFP4 weights, beside the same in PyTorch.

    bench_llama.py [--json FILE] [--rounds N] [--threads N] [--layers N]

8 layers of hidden size 2048 (16 heads, 4 of keys and values, intermediate size 5632), a vocabulary of 32000, a
static cache, one token at a time with torch.compile(fullgraph=True): float32, bfloat16, and opaq.quantize_ to
nvfp4, lm_head included, in three precisions. The float32 and bfloat16 models have the values of the quantized
weights, so all are the same model. First each model gets the tokens that float32 decodes greedily, and "agree"
is the number of tokens that it predicts equally; precision exact must agree on all, else this program fails.
Then single steps are timed alternately.

For each precision, "products" is the time of all operators of a step without the rest of the model, and "calls"
the time of as many calls with tiny weights. The floor is the time of reading all weights once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import measuring
import opaq
from measuring import Limits, figure, ratio, record
from opaq._explain import kernel_of
from opaq.functional import quantized_linear

HIDDEN, INTER, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 16, 4, 32000
HEAD = HIDDEN // HEADS
CONTEXT, TOKENS = 128, 24
PRECISIONS = ("exact", "near", "fast")
TARGETS = {"torch f32": (4.0, 5.0), "torch bf16": (2.5, 2.5)}  # must and aim of precision fast


# ---- the model ----


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INTER, bias=False)
        self.up = nn.Linear(HIDDEN, INTER, bias=False)
        self.down = nn.Linear(INTER, HIDDEN, bias=False)
        self.register_buffer("keys", torch.zeros(1, KV_HEADS, CONTEXT, HEAD))
        self.register_buffer("values", torch.zeros(1, KV_HEADS, CONTEXT, HEAD))

    def forward(self, x: torch.Tensor, at: torch.Tensor, cos: Any, sin: Any, mask: Any) -> torch.Tensor:
        normed = self.attention_norm(x)
        q = rotate(self.q(normed).view(1, 1, HEADS, HEAD).transpose(1, 2), cos, sin)
        k = rotate(self.k(normed).view(1, 1, KV_HEADS, HEAD).transpose(1, 2), cos, sin)
        v = self.v(normed).view(1, 1, KV_HEADS, HEAD).transpose(1, 2)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = nn.functional.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.o(seen.transpose(1, 2).reshape(1, 1, HIDDEN))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(CONTEXT), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits after one token at one position, both of shape [1]."""
        x = self.embedding(token).view(1, 1, HIDDEN)
        mask = (torch.arange(CONTEXT) <= at).view(1, 1, 1, CONTEXT)
        cos, sin = self.cos[at].view(1, 1, 1, HEAD // 2), self.sin[at].view(1, 1, 1, HEAD // 2)
        for layer in self.layers:
            x = layer(x, at, cos, sin, mask)
        return self.lm_head(self.norm(x)).view(VOCABULARY)


def models(layers: int) -> dict[str, Llama]:
    """The same model in five variants."""
    model = Llama(layers).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 0.02)
    opaq.quantize_(model, "nvfp4", ignore=(), precision="exact", progress=False)
    made = {f"nvfp4 {precision}": copy.deepcopy(model) for precision in PRECISIONS}
    for precision in PRECISIONS:
        opaq.tile_(made[f"nvfp4 {precision}"], precision)
    opaq.dequantize_(model)
    return {"torch f32": model, "torch bf16": copy.deepcopy(model).bfloat16(), **made}


# ---- running ----


class Decoder:
    """A compiled model and its position in the cache, which starts again at its end."""

    def __init__(self, model: Llama) -> None:
        self.model, self.at = model, 0
        self.step = torch.compile(model, fullgraph=True)
        self.places = [torch.tensor([i]) for i in range(CONTEXT)]
        self.token = torch.tensor([1])

    def __call__(self) -> torch.Tensor:
        """Decodes the next token, the likeliest."""
        logits = self.step(self.token, self.places[self.at])
        self.at = (self.at + 1) % CONTEXT
        self.token = logits.argmax().view(1)
        return logits

    def decode(self, given: list[int] | None = None) -> list[int]:
        """Predicts TOKENS tokens, each after its own tokens or after the given ones."""
        made = []
        for i in range(TOKENS):
            self()
            made.append(int(self.token))
            if given is not None:
                self.token = torch.tensor([given[i]])
        return made


def weights_of(model: nn.Module) -> list[Any]:
    return [module.weight for module in model.modules() if isinstance(module, opaq.QuantizedLinear)]


def products(weights: list[Any], precision: str) -> Callable[[], None]:
    """Runs only the operators of a step."""
    inputs = {width: torch.randn(1, 1, width) for width in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            quantized_linear(inputs[weight.shape[1]], weight, precision=precision)

    return run


def bytes_of(model: nn.Module) -> int:
    """Bytes that a step reads: every weight except the embedding, of which it reads one row."""
    total = 0
    for name, parameter in model.named_parameters():
        if name != "embedding.weight":
            parts = parameter.buffers() if isinstance(parameter, opaq.QuantizedTensor) else [parameter]
            total += sum(part.nbytes for part in parts)
    return total


def measure(threads: int, rounds: int, made: dict[str, Llama]) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.compiler.reset()
    limits, decoders = Limits(threads), {}
    tokens: dict[str, list[int]] = {}
    for name, model in made.items():
        for layer in model.layers:
            layer.keys.zero_()
            layer.values.zero_()
        decoders[name] = Decoder(model)
        start = time.perf_counter()
        tokens[name] = decoders[name].decode(tokens.get("torch f32"))
        print(f"{name}, {threads} threads: ready after {time.perf_counter() - start:.1f} s", flush=True)
    agree = {
        name: sum(a == b for a, b in zip(tokens[name], tokens["torch f32"], strict=True)) for name in tokens
    }
    subjects: dict[str, Callable[[], Any]] = {**limits.samples(), **decoders}
    tiny = opaq.quantize_tensor(torch.randn(16, 64), "nvfp4").tiled()
    for precision in PRECISIONS:
        weights = weights_of(made[f"nvfp4 {precision}"])
        subjects[f"products {precision}"] = products(weights, precision)
        subjects[f"calls {precision}"] = products([tiny] * len(weights), precision)
    times = measuring.interleave(subjects, rounds, sample_s=0.1)
    records = []
    for name, model in made.items():
        figures, kernel, parts = [], "", {}
        if name.startswith("nvfp4"):
            precision = name.split()[1]
            targets = TARGETS if precision == "fast" else {}
            figures = [
                figure(ratio(times[peer], times[name]), peer, *targets.get(peer, ())) for peer in TARGETS
            ]
            kernel = kernel_of(weights_of(model)[0]._quantizer_text, "", torch.float32, precision)
            parts = {
                part: ratio(times[f"{part} {precision}"], times[name])["value"]
                for part in ("products", "calls")
            }
        floor = bytes_of(model) / limits.read
        made_record = record(name, 1, threads, times[name], kernel, floor, figures)
        records.append(made_record | {"agree": agree[name], "tokens": TOKENS, "shares": parts})
    if agree["nvfp4 exact"] != TOKENS:
        raise SystemExit(f"bench_llama: exact decodes {tokens['nvfp4 exact']}, expected {tokens['torch f32']}")
    return [*records, {"peaks": limits.best, "threads": threads}]


def main() -> None:
    parser = measuring.arguments("Times decoding with a compiled model.")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    given.rounds = given.rounds or 6
    torch.manual_seed(0)
    counts = [given.threads] if given.threads else sorted({1, measuring.processors()})
    with torch.no_grad():
        made = models(given.layers)
        records = [one for count in counts for one in measure(count, given.rounds, made)]
    peaks = [one for one in records if "peaks" in one]
    records = [one for one in records if "peaks" not in one]
    about = measuring.machine(counts[-1]) | {"rounds": given.rounds, "layers": given.layers}
    print(f"opaq {about['version']}, torch {about['torch']}, {about['cpu']}, {given.rounds} rounds")
    measuring.show(records)
    for one in records:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in one["shares"].items())
        print(
            f"{one['case']}, {one['threads']} threads: {one['agree']} of {one['tokens']} tokens agree; {shares}"
        )
    measuring.write(given.json, about | {"peaks": peaks, "results": records})


if __name__ == "__main__":
    main()

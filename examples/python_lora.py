"""Fine-tunes a small trained model with LoRA over bf16 and over packed NVFP4 weights, and compares losses and
memory.

A character-level Llama learns this repository's documentation, then adapters learn its C sources, from the
same adapters and batches: `python examples/python_lora.py [training steps] [fine-tuning steps]`. Takes three
minutes of one core with 400 and 150 steps. Needs PyTorch, transformers and peft."""

import copy
import sys
from pathlib import Path

import peft
import torch
import transformers

import opaq

ROOT = Path(__file__).resolve().parents[1]
ROWS, LENGTH = 16, 128


def read(*patterns):
    """Texts of the repository as one tensor of the bytes below 128."""
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    text = "".join(file.read_text(encoding="ascii", errors="ignore") for file in files)
    return torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8).long()


def split(text):
    """Splits for training and validation: every tenth block is for validation."""
    stretches = text[: len(text) // 1000 * 1000].view(-1, 1000)
    held = torch.arange(len(stretches)) % 10 == 9
    return stretches[~held].flatten(), stretches[held].flatten()


def batches(text, count, seed):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=random)
        yield torch.stack([text[start : start + LENGTH] for start in starts])


def train(model, text, steps, rate, seed):
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    for ids in batches(text, steps, seed):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_of(model, text):
    model.eval()
    return sum(float(model(input_ids=ids, labels=ids).loss) for ids in batches(text, 20, seed=0)) / 20


def pretrained(steps):
    """A model that has learned the documentation."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    train(model, split(read("docs/*.md", "*.md"))[0], steps, 2e-3, seed=1)
    return model.to(torch.bfloat16)


def with_adapters(model, **options):
    """The same initial adapters for every base."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def weight_bytes(model):
    """Bytes of the base: of all parameters except the adapters."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(tensor.nbytes for name, tensor in tensors if "lora_" not in name)


def compare(base, steps, **options):
    """Validation losses before and after fine-tuning, and bytes, of each base."""
    text, held = split(read("src/**/*.c"))
    found = {}
    for name in ("bf16", "nvfp4"):
        model = copy.deepcopy(base)
        if name != "bf16":
            opaq.quantize_(model, name, progress=False)
        model = with_adapters(model, **options)
        before = loss_of(model, held)
        train(model, text, steps, 2e-3, seed=3)
        found[name] = {"before": before, "after": loss_of(model, held), "bytes": weight_bytes(model)}
        if name != "bf16":
            found[name]["merged"] = loss_of(model.merge_and_unload(), held)
    return found


def main(training=400, tuning=150):
    base = pretrained(training)
    for method, options in (("LoRA", {}), ("DoRA", {"use_dora": True})):
        found = compare(base, tuning, **options)
        for name, row in found.items():
            merged = f", merged {row['merged']:.4f}" if "merged" in row else ""
            losses = f"loss {row['before']:.4f} -> {row['after']:.4f}{merged}"
            print(f"{method} {name:6} {losses}; base {row['bytes']} bytes")
        plain, packed = found["bf16"], found["nvfp4"]
        loss, size = (packed[key] / plain[key] for key in ("after", "bytes"))
        print(f"{method} loss {loss - 1:+.2%}, base {size:.3f} of bf16")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

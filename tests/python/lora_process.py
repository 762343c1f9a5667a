"""A process that loads a checkpoint, plain or packed, trains LoRA adapters for a step, and prints its peak
memory. Started by test_peft_training.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
import transformers

import opaq
from checkpoint_process import Watch, own


def in_files(model: torch.nn.Module, folder: str) -> int:
    """Bytes of weights in mapped files of the folder, which the model needs although they are not anonymous
    memory. Pages of the files without a weight are not counted: the kernel can evict them."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    ranges = [
        [int(end, 16) for end in w[0].split("-")] for w in lines if len(w) > 5 and w[5].startswith(folder)
    ]
    found = 0
    for parameter in model.parameters():
        parts = parameter.buffers() if isinstance(parameter, opaq.QuantizedTensor) else [parameter]
        found += sum(p.nbytes for p in parts if any(low <= p.data_ptr() < high for low, high in ranges))
    return found


def main(folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    weight = opaq.quantize_tensor(torch.randn(64, 64), "nvfp4")  # allocates everything that the first use does
    opaq.functional.quantized_linear(torch.randn(4, 64), weight)
    options = {"quantization_config": opaq.Config()} if kind == "packed" else {}
    before = own()
    whole, step = Watch(folder), Watch(folder)
    whole.start()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.arange(3, 35)[None]
    step.start()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for watch in (whole, step):
        watch.over.set()
        watch.join()
    held = sum(t.nbytes for n, t in [*model.named_parameters(), *model.named_buffers()] if "lora_" not in n)
    found = {
        "own": whole.own - before,
        "step": step.own - before + in_files(model, folder),
        "base": held,
        "gradients": sum(parameter.grad is not None for parameter in trained),
        "packed": sum(isinstance(p, opaq.QuantizedTensor) for p in model.parameters()),
    }
    print("memory:", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

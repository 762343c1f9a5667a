"""A process that loads and runs a checkpoint and prints its peak memory: anonymous memory alone, and together
with resident pages of the checkpoint's files. Pages of libraries are not counted, because the kernel evicts and
reloads them at any time. Started by test_checkpoint_memory.py; lora_process.py measures in the same way."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import torch._dynamo  # models import it when they run; its memory is not that of weights
import transformers

import opaq

STATUS, MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")


def own() -> int:
    """Bytes of anonymous memory."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "RssAnon:")


def mapped(folder: str) -> int:
    """Bytes of the folder's files that are mapped and resident."""
    total, inside = 0, False
    for line in MAPPINGS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            inside = words[-1].startswith(folder)
        elif inside and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


class Watch(threading.Thread):
    """Records the peak of anonymous memory, and of that together with the folder's pages."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self.folder, self.own, self.both, self.over = folder, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            now = own()
            self.own, self.both = max(self.own, now), max(self.both, now + mapped(self.folder))


@torch.no_grad()
def main(folder: str, quantizer: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    weight = opaq.quantize_tensor(torch.randn(64, 64), "nvfp4")  # allocates everything that the first use does
    opaq.functional.quantized_linear(torch.randn(4, 64), weight)
    auto = transformers.AutoModelForCausalLM
    before = own()
    watch = Watch(folder)
    watch.start()
    model = auto.from_pretrained(folder, quantization_config=opaq.Config(quantizer))
    tokens = model.generate(torch.arange(3, 11)[None], max_new_tokens=2, do_sample=False)
    watch.over.set()
    watch.join()
    found = {
        "peak": watch.both - before,
        "own": watch.own - before,
        "tokens": tokens.shape[1],
        "packed": sum(isinstance(p, opaq.QuantizedTensor) for p in model.parameters()),
    }
    print("memory:", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

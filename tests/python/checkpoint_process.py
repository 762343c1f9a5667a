"""A process that loads a checkpoint, runs it, and says what memory that took: the most that was its own, and
the most that was its own or pages of the checkpoint's files. Pages of libraries are not counted: the kernel
takes them away and gives them back as it likes. Started by test_checkpoint_memory.py; lora_process.py measures
in the same way."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import torch._dynamo  # which a model imports when it runs, and no weight needs
import transformers

import opaq

STATUS, MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")


def own() -> int:
    """Bytes of memory that no file stands behind."""
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
    """The most that was seen of the process' own memory, and of that with the folder's pages."""

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
    weight = opaq.quantize_tensor(torch.randn(64, 64), "nvfp4")  # whatever comes with the first use is there
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

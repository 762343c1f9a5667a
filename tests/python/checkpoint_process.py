"""A process that loads a checkpoint, runs it, and says what memory it took: the most that was ever resident,
and the most that was its own and not pages of the checkpoint's files. Started by test_checkpoint_memory.py."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import transformers

import opaq

STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> dict[str, int]:
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


class Watch(threading.Thread):
    """The most anonymous memory that was seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, resident()["RssAnon"])


@torch.no_grad()
def main(folder: str, quantizer: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    weight = opaq.quantize_tensor(torch.randn(64, 64), "nvfp4")  # whatever comes with the first use is there
    opaq.functional.quantized_linear(torch.randn(4, 64), weight)
    auto = transformers.AutoModelForCausalLM
    PEAK.write_text("5")  # the peak is counted from here
    before = resident()
    watch = Watch()
    watch.start()
    model = auto.from_pretrained(folder, quantization_config=opaq.Config(quantizer))
    tokens = model.generate(torch.arange(3, 11)[None], max_new_tokens=2, do_sample=False)
    watch.over.set()
    watch.join()
    after = resident()
    found = {
        "peak": after["VmHWM"] - before["VmRSS"],
        "own": watch.most - before["RssAnon"],
        "tokens": tokens.shape[1],
        "packed": sum(isinstance(p, opaq.QuantizedTensor) for p in model.parameters()),
    }
    print("memory:", json.dumps(found))


main(*sys.argv[1:])

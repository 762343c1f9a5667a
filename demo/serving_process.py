"""Loads and runs one model in its own process, so that its memory can be measured separately. Started by
part_serving.py with "plain" or "packed" and a device; reads requests from standard input and answers on
standard output, one JSON object per line."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import terminal

terminal.quiet_imports()

import torch  # noqa: E402
import transformers  # noqa: E402

import opaq  # noqa: E402
from tiny_gpt import Text  # noqa: E402
from tiny_llama import as_bytes, loss_of  # noqa: E402

STATUS, MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")


def resident(folder: str) -> int | None:
    """Bytes of this process's anonymous memory and of the mapped pages of the folder's files; None if the
    system has no /proc/self/smaps."""
    if not MAPPINGS.exists():
        return None
    lines = (line.split() for line in STATUS.read_text().splitlines())
    total = next(int(words[1]) * 1024 for words in lines if words[0] == "RssAnon:")
    is_inside = False
    for line in MAPPINGS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            is_inside = words[-1].startswith(folder)
        elif is_inside and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


class Server:
    """One model at a time. Each public method is a request."""

    def __init__(self, is_packed: bool, device: str) -> None:
        self.is_packed, self.device = is_packed, device
        self.model: Any = None
        self.folder, self.before = "", None

    def used(self) -> int | None:
        """Memory since before the model was loaded: of the GPU, or of this process."""
        now = torch.cuda.memory_allocated() if self.device == "cuda" else resident(self.folder)
        return None if now is None or self.before is None else now - self.before

    def load(self, folder: str) -> dict[str, Any]:
        self.model = None
        gc.collect()
        self.folder, self.before = folder, 0
        self.before = self.used()
        precision = "near" if self.device == "cpu" else None  # tiles are for processors
        options = {"quantization_config": opaq.Config(precision=precision)} if self.is_packed else {}
        began = time.perf_counter()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        self.model = model.to(self.device).eval()
        return {
            "seconds": time.perf_counter() - began,
            "footprint": self.model.get_memory_footprint(),
            "packed": sum(isinstance(p, opaq.QuantizedTensor) for p in self.model.parameters()),
        }

    def held_out_loss(self) -> float:
        """The mean loss on the validation text."""
        text = Text(self.device)
        batches = [[as_bytes(text, part) for part in pair] for pair in text.validation()]
        return mean(loss_of(self.model, *batch).item() for batch in batches)

    def loss_of_text(self, written: str, prompt: str) -> float:
        """The mean loss on a text, without its prompt."""
        tokens = self._tokens(prompt + written)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0].float()
        start = len(prompt)
        return float(torch.nn.functional.cross_entropy(logits[start - 1 : -1], tokens[0, start:]))

    def generate(self, prompt: str, tokens: int, seed: int | None) -> dict[str, Any]:
        """Greedy without a seed."""
        ids = self._tokens(prompt)
        how: dict[str, Any] = {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": 0.6, "top_k": 20}
        began = time.perf_counter()
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, **how
        )
        written = bytes(found[0, ids.shape[1] :].tolist())  # waits for the device
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": tokens, "text": written.decode("ascii"), "memory": self.used()}

    def _tokens(self, text: str) -> torch.Tensor:
        return torch.tensor([list(text.encode("ascii"))], device=self.device)


@torch.no_grad()
def main(kind: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not be read as an answer
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    server = Server(kind == "packed", device)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(getattr(server, request.pop("do"))(**request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

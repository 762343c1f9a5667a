"""Greedy tokens of a checkpoint, from vLLM and from transformers.

vllm_calls.py MODEL OPTIONS: prints vLLM's tokens, for tests that need a separate process; OPTIONS are those of
LLM, as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import opaq

PROMPTS = [[5, 9, 200, 33, 17, 4, 77, 120], [100, 3, 250, 61]]
TOKENS = 12


@contextmanager
def serving(model: Path | str, **options: Any) -> Iterator[Any]:
    """A vLLM engine in float32, so that differences in attention do not change tokens."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "enable_prefix_caching": False}
    llm = LLM(str(model), skip_tokenizer_init=True, seed=0, **(defaults | options))
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def ask(
    llm: Any, prompts: list[list[int]] = PROMPTS, adapter: Path | None = None
) -> list[tuple[list[int], list[float]]]:
    """The generated tokens of every prompt, and their log probabilities, with this LoRA adapter."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    request = None
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("adapter", 1, str(adapter))
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(given, parameters, use_tqdm=False, lora_request=request)
    found = [output.outputs[0] for output in outputs]
    return [
        (list(one.token_ids), [row[t].logprob for t, row in zip(one.token_ids, one.logprobs, strict=True)])
        for one in found
    ]


def tokens(model: Path | str, **options: Any) -> list[list[int]]:
    with serving(model, **options) as llm:
        return [ids for ids, _ in ask(llm)]


def transformers_tokens(model: Path, config: Any = None, plain_inputs: bool = False) -> list[list[int]]:
    """The tokens of transformers with opaq."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=config or opaq.Config()
    )
    for module in loaded.modules() if plain_inputs else ():
        for name in ("input_quantizer", "hidden_quantizer"):
            if hasattr(module, name):
                setattr(module, name, "")
    made = []
    for ids in PROMPTS:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made.append(
            loaded.generate(torch.tensor([ids]), max_new_tokens=TOKENS, **options)[0, len(ids) :].tolist()
        )
    return made


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    print("TOKENS", json.dumps(tokens(sys.argv[1], **json.loads(sys.argv[2]))))

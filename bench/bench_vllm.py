"""Times decoding and prompt processing of vLLM on processors with opaq's packed weights, beside its own
bfloat16, and measures the memory of each.

    bench_vllm.py --command OPAQ --folder FOLDER [--rounds N] [--json FILE] [--layers N] [--llama-cpp CHECKOUT]

A Llama of 1.0 billion parameters with random weights (22 layers of hidden size 2048, intermediate size 5632, 32
heads, 4 of keys and values, a vocabulary of 32000 that input and output share) is written to FOLDER, quantized
with the command, and served by vLLM, compiled, one process per subject. A round runs all of them one after
another: a request that decodes 24 tokens, then prompts of 256 tokens; the fastest step of each counts, since
other programs can only slow steps down. A figure is the median of the rounds' ratios to bfloat16 in the same
round, with quartiles. "weights" are the checkpoint's bytes, which the model keeps in memory; "resident" is the
private memory of the serving process minus that before vLLM was started, including 64 MB of keys and values and
the memory that compiling took.

With a checkout of llama.cpp, which has llama-bench and llama-quantize in build/bin, a round also runs
llama-bench on the same NVFP4 checkpoint, converted by llama.cpp, and on its Q4_0 of the bfloat16 model."""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY, DECODED, PROMPT, PROMPTS, KEYS_AND_VALUES = 32000, 24, 256, 3, 64 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SUBJECTS: dict[str, tuple[str, dict[str, str]]] = {  # a checkpoint's format, and the environment
    "bf16": ("", {}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4 fast": ("nvfp4", {"OPAQ_VLLM_PRECISION": "fast"}),
    "mxfp8": ("mxfp8", {}),
    "fp8row": ("fp8row", {}),
    "mxfp8 plain": ("mxfp8", {"OPAQ_VLLM_ACTIVATIONS": "none"}),
}
MUST = {("nvfp4", "decode"): 2.5, ("nvfp4", "prompt"): 1.0, ("nvfp4", "weights"): 0.35}


# ---- checkpoints ----


def write_model(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    sizes, head = {key: CONFIG[key] for key in CONFIG}, int(CONFIG["head_dim"])
    hidden, inner = int(sizes["hidden_size"]), int(sizes["intermediate_size"])
    queries, keys = int(sizes["num_attention_heads"]) * head, int(sizes["num_key_value_heads"]) * head
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02)

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(layers):
        at = f"model.layers.{i}"
        tensors |= {f"{at}.self_attn.{name}_proj.weight": random(*shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.mlp.{name}_proj.weight": random(inner, hidden) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = random(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))


def write_checkpoints(command: str, folder: Path, layers: int, formats: set[str]) -> dict[str, Path]:
    made = {"": folder / f"llama-{layers}-bf16"}
    if not (made[""] / "config.json").exists():
        process = multiprocessing.get_context("spawn").Process(target=write_model, args=(made[""], layers))
        process.start()
        process.join()
    for form in sorted(formats - {""}):
        made[form] = folder / f"llama-{layers}-{form}"
        if not (made[form] / "config.json").exists():
            options = ["--format", form, "--quiet"]
            subprocess.run([command, "quantize", made[""], made[form], *options], check=True)
    return made


# ---- one configuration, in a separate process ----


def own_bytes() -> int:
    """Private memory of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def serve(channel: Any, model: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from vllm import LLM, SamplingParams

    before = own_bytes()
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=KEYS_AND_VALUES,
        enable_prefix_caching=False,
        dtype="bfloat16",
    )

    engine, numbers = llm.llm_engine, itertools.count()

    def steps(prompt: int, tokens: int) -> list[float]:
        """Seconds of the engine's steps for one request: the prompt, then one token each."""
        ids = [(i * 7919 + 13) % VOCABULARY for i in range(prompt)]
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, parameters)
        found = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - start)
        return found

    for prompt, tokens in ((16, 4), (PROMPT, 1)):
        steps(prompt, tokens)
    channel.send(own_bytes() - before)
    while channel.recv():
        decode, prompt = min(steps(16, 1 + DECODED)[1:]), min(steps(PROMPT, 1)[0] for _ in range(PROMPTS))
        channel.send({"decode": decode, "prompt": prompt / PROMPT})


# ---- llama.cpp ----

# Its converter, for a model without a tokenizer.
CONVERTER = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.llama
conversion.llama.LlamaModel.set_vocab = lambda self: self._set_vocab_none()
del sys.argv[1]
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def run_quietly(*command: object) -> str:
    texts = [str(word) for word in command]
    done = subprocess.run(texts, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: {texts[0]} failed with status {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def convert_for_llama(checkout: Path, models: dict[str, Path]) -> dict[str, Path]:
    """The files of llama.cpp's subjects, made from the checkpoints beside them."""
    plain, packed = models[""].with_suffix(".gguf"), models["nvfp4"].with_suffix(".gguf")
    small = models[""].with_name(models[""].name + "-q4_0.gguf")
    for model, file in ((models[""], plain), (models["nvfp4"], packed)):
        if not file.exists():
            run_quietly(
                sys.executable, "-c", CONVERTER, checkout, model, "--outfile", file, "--outtype", "bf16"
            )
    if not small.exists():
        run_quietly(checkout / "build/bin/llama-quantize", plain, small, "q4_0")
    return {"llama.cpp nvfp4": packed, "llama.cpp q4_0": small}


def time_llama(checkout: Path, file: Path) -> dict[str, float]:
    """Seconds for a token of a prompt and for a decoded token."""
    program = checkout / "build/bin/llama-bench"
    options = ["-p", PROMPT, "-n", DECODED, "-t", os.cpu_count(), "-r", 1, "-o", "json"]
    entries = json.loads(run_quietly(program, "-m", file, *options))
    return {"prompt" if entry["n_prompt"] else "decode": 1.0 / entry["avg_ts"] for entry in entries}


# ---- figures ----


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--command", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument(
        "--llama-cpp", type=Path, help="a checkout with llama-bench and llama-quantize in build/bin"
    )
    options = parser.parse_args()
    names = ["bf16", *(name for name in options.subjects.split(",") if name != "bf16")]
    models = write_checkpoints(options.command, options.folder, options.layers, {SUBJECTS[n][0] for n in names})

    weights = {name: (models[SUBJECTS[name][0]] / "model.safetensors").stat().st_size for name in names}
    peers = convert_for_llama(options.llama_cpp, models) if options.llama_cpp and "nvfp4" in models else {}
    weights |= {name: file.stat().st_size for name, file in peers.items()}
    context = multiprocessing.get_context("spawn")
    channels: dict[str, Any] = {}
    memory: dict[str, int] = {}
    for name in names:
        form, environment = SUBJECTS[name]
        channels[name], other = context.Pipe()
        context.Process(target=serve, args=(other, str(models[form]), environment), daemon=True).start()
        memory[name] = channels[name].recv()
        print(f"{name}: {memory[name] / 1e6:.0f} MB", flush=True)
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for name in names:
            time.sleep(0.3)  # until the other processes' threads sleep
            channels[name].send(True)
            rounds[-1][name] = channels[name].recv()
        for name, file in peers.items():
            rounds[-1][name] = time_llama(options.llama_cpp, file)
    for channel in channels.values():
        channel.send(False)

    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"\n{platform.machine()}, {os.cpu_count()} processors, {load}; {len(rounds)} rounds")
    head = (
        "subject",
        "decode tok/s",
        "x bf16",
        "quartiles",
        "prompt tok/s",
        "x bf16",
        "quartiles",
        "weights MB",
        "of bf16",
        "resident MB",
        "of bf16",
    )
    rows: list[tuple[str, ...]] = [head]
    found: list[dict[str, Any]] = []
    for name in (*names, *peers):
        row = [name]
        for what in ("decode", "prompt"):
            ratios = spread([r["bf16"][what] / r[name][what] for r in rounds])
            rate = 1 / min(r[name][what] for r in rounds)
            row += [f"{rate:.1f}", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}-{ratios[2]:.2f}"]
            found.append(
                {"subject": name, "what": what, "rate": rate, "ratio": ratios[0], "quartiles": ratios[1:]}
            )
        for what, sizes in (("weights", weights), ("resident", memory)):
            if name not in sizes:
                row += ["", ""]
                continue
            share = sizes[name] / sizes["bf16"]
            found.append({"subject": name, "what": what, "bytes": sizes[name], "ratio": share})
            row += [f"{sizes[name] / 1e6:.0f}", f"{share:.2f}"]
        rows.append(tuple(row))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    missed = []
    for figure in found:
        must = MUST.get((figure["subject"], figure["what"]))
        if must is not None and (
            figure["ratio"] > must if figure["what"] == "weights" else figure["ratio"] < must
        ):
            missed.append(f"{figure['subject']} {figure['what']} is {figure['ratio']:.2f}, must be {must}")
    print("missed: " + "; ".join(missed) if missed else "every figure reaches its required value")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"figures": found, "rounds": rounds, "missed": missed}, indent=1))


if __name__ == "__main__":
    for key, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(key, value)
    main()

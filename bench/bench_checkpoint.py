"""Times quantizing a checkpoint of 2 GB with the command `opaq`, beside `cp` of the same files and beside
compressed-tensors' own compressor in Python, alternately in one run, from a warm page cache.

    make bench-checkpoint            or            bench_checkpoint.py --command build/opaq --folder FOLDER

Writes a random model (several shards, dense layers, stacked experts, unusual names). The results are also
compared: the tensors of compressed-tensors must equal those that opaq wrote, byte for byte."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from peer_compressor import compressed_state, compressed_tensors

HIDDEN, INTER, EXPERT_INTER, EXPERTS, VOCABULARY = 2048, 5632, 768, 16, 32000
LAYERS, SHARDS = 15, 5
FORMATS = ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]
MUST_PYTHON, MUST_COPY = 25.0, 0.5
MEMORY_BYTES = 64 << 20


def tensors(layers: int) -> dict[str, torch.Tensor]:
    """Normal numbers with some large ones, in bf16."""
    generator = torch.Generator().manual_seed(1)
    stock = torch.randn(1 << 24, generator=generator) * 0.02
    stock[:: 1 << 12] *= 8
    stock = stock.to(torch.bfloat16)
    taken = 0

    def weight(*shape: int) -> torch.Tensor:
        nonlocal taken
        count = torch.Size(shape).numel()
        taken = (taken + 104729) % stock.numel()
        return stock.roll(taken).repeat(-(-count // stock.numel()))[:count].reshape(shape).clone()

    made = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    made["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for part, rows in {"q_proj": HIDDEN, "k_proj": 512, "v_proj": 512, "o_proj": HIDDEN}.items():
            made[f"{name}self_attn.{part}.weight"] = weight(rows, HIDDEN)
        if layer % 3 == 2:
            made[f"{name}mlp.gate.weight"] = weight(EXPERTS, HIDDEN)
            made[f"{name}mlp.experts.gate_up_proj"] = weight(EXPERTS, 2 * EXPERT_INTER, HIDDEN)
            made[f"{name}mlp.experts.down_proj"] = weight(EXPERTS, HIDDEN, EXPERT_INTER)
        else:
            made[f"{name}mlp.gate_proj.weight"] = weight(INTER, HIDDEN)
            made[f"{name}mlp.up_proj.weight"] = weight(INTER, HIDDEN)
            made[f"{name}mlp.down_proj.weight"] = weight(HIDDEN, INTER)
        made[f"{name}input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    made['odd näme with spaces, [brackets] and "quotes".weight'] = weight(96, 160)
    made["model.rotary.inv_freq"] = torch.arange(64, dtype=torch.float32)
    return made


def write_model(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True)
    all_tensors = tensors(layers)
    names = list(all_tensors)
    places = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[len(names) * shard // SHARDS : len(names) * (shard + 1) // SHARDS]
        save_file({name: all_tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in all_tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def largest_tensor(folder: Path) -> int:
    largest = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        largest = max([largest, *(end - begin for begin, end in places)])
    return largest


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak memory in bytes. The peak is polled while the command runs: the value that the system
    reports afterwards includes the memory of this process, shared between fork and exec."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) * 1024
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, peak


# ---- compressed-tensors ----


def python_parts(name: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of a stack of experts, under the names that opaq gives them."""
    if w.dim() != 3:
        return {name.removesuffix(".weight"): w}
    prefix, leaf = name.rsplit(".", 1)
    parts = {}
    for expert in range(w.shape[0]):
        halves = w[expert].chunk(2) if leaf == "gate_up_proj" else [w[expert]]
        leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        parts.update({f"{prefix}.{expert}.{one}": half for one, half in zip(leaves, halves, strict=True)})
    return parts


def python_compress(source: Path, to: Path, quantized: set[str], form: str) -> float:
    """Seconds that compressed-tensors takes for the same weights, in float32 like opaq. Fused projections do
    not share global scales here, which does not change the time."""
    peer = compressed_tensors()
    to.mkdir()
    began = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        made: dict[str, torch.Tensor] = {}
        for name, w in load_file(path).items():
            for module, part in python_parts(name, w).items():
                if module in quantized:
                    state = compressed_state(peer, form, part.float())
                    made.update({f"{module}.{key}": value.contiguous() for key, value in state.items()})
                elif part.dim() != 3:
                    made[name] = w
        save_file(made, to / path.name, metadata={"format": "pt"})
    return time.perf_counter() - began


def quantized_modules(folder: Path, data: str) -> set[str]:
    """The modules that have codes of this name."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = set(file.keys())
        found |= {
            n.removesuffix(f".{data}")
            for n in names
            if n.endswith(data) and f"{n.removesuffix(data)}weight_scale" in names
        }
    return found


def compare(ours: Path, theirs: Path) -> int:
    """Number of tensors whose bytes are equal; a difference is an error, except in fused projections, whose
    global scales differ here."""
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    compared = 0
    for path in sorted(theirs.glob("*.safetensors")):
        with safe_open(path, "pt") as there, safe_open(ours / path.name, "pt") as here:
            for name in there.keys():
                if name.endswith("zero_point") or any(f".{part}." in name for part in joined):
                    continue
                a, b = here.get_tensor(name), there.get_tensor(name)
                if not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
                    raise RuntimeError(f"{name} differs from compressed-tensors' tensor")
                compared += 1
    return compared


# ---- the table ----


def spread(seconds: list[float]) -> float:
    return statistics.median(seconds) / min(seconds)


def measure(
    command: str, folder: Path, rounds: int, layers: int, says: Callable[[str], None]
) -> dict[str, Any]:
    source = folder / "source"
    if not source.exists():
        says("writing the model ...")
        write_model(source, layers)
    size, largest = size_of(source), largest_tensor(source)
    lines = {
        "cp": ["cp", "-r", str(source)],
        "cp and sync": ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source)],
        **{f"opaq {form}": [command, "quantize", "--quiet", "--format", form, str(source)] for form in FORMATS},
    }
    runs: dict[str, list[float]] = {name: [] for name in lines}
    peaks: dict[str, int] = {}
    subprocess.run(["cp", "-r", str(source), str(folder / "warm")], check=True)
    shutil.rmtree(folder / "warm")
    for turn in range(rounds):
        for name in runs:
            says(f"round {turn + 1} of {rounds}: {name}")
            to = folder / f"to {name}"
            shutil.rmtree(to, ignore_errors=True)
            os.sync()
            seconds, peak = timed([*lines[name], str(to)])
            runs[name].append(seconds)
            peaks[name] = max(peak, peaks.get(name, 0))
    says("compressed-tensors ...")
    shutil.rmtree(folder / "python", ignore_errors=True)
    quantized = quantized_modules(folder / "to opaq nvfp4", "weight_packed")
    python = python_compress(source, folder / "python", quantized, "nvfp4")
    compared = compare(folder / "to opaq nvfp4", folder / "python")
    copy = min(runs["cp"])
    rows = [
        {
            "case": name,
            "seconds": min(seconds),
            "bytes_per_second": size / min(seconds),
            "of_copy": copy / min(seconds),
            "times_python": python / min(seconds) if name == "opaq nvfp4" else None,
            "peak_bytes": peaks[name],
            "output_bytes": size_of(folder / f"to {name}"),
            "median_over_best": spread(seconds),
        }
        for name, seconds in runs.items()
    ]
    return {
        "source_bytes": size,
        "largest_tensor_bytes": largest,
        "memory_limit_bytes": 2 * largest + MEMORY_BYTES,
        "python_seconds": python,
        "tensors_compared": compared,
        "threads": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "must": {"times_python": MUST_PYTHON, "of_copy": MUST_COPY},
        "rows": rows,
    }


def show(found: dict[str, Any]) -> int:
    """Prints the table; returns the number of figures that miss their required value."""
    size, limit = found["source_bytes"], found["memory_limit_bytes"]
    print(f"source {size / 1e9:.2f} GB, {found['threads']} threads, best of {found['rounds']} rounds")
    heads = ("s", "GB/s", "of cp", "x Python", "peak MB", "out GB", "spread")
    print(f"{'case':26}" + "".join(f"{head:>9}" for head in heads))
    misses = 0
    for row in found["rows"]:
        python = row["times_python"]
        figures = [row["seconds"], row["bytes_per_second"] / 1e9, row["of_copy"], python]
        figures += [row["peak_bytes"] / 1e6, row["output_bytes"] / 1e9, row["median_over_best"]]
        print(f"{row['case']:26}" + "".join(f"{'' if f is None else f'{f:.2f}':>9}" for f in figures))
        is_ours = row["case"].startswith("opaq")
        misses += is_ours and row["of_copy"] < MUST_COPY
        misses += python is not None and python < MUST_PYTHON
        misses += is_ours and row["peak_bytes"] > limit
    print(f"{'compressed-tensors nvfp4':26}{found['python_seconds']:9.2f}")
    print(f"{found['tensors_compared']} tensors equal those of compressed-tensors, byte for byte")
    print(
        f"required: {MUST_COPY} of cp, {MUST_PYTHON:.0f} times Python, at most {limit / 1e6:.0f} MB of memory "
        f"(twice the largest tensor and 64 MB); {misses} missed"
    )
    return misses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--command", default="build/opaq", help="the program opaq")
    parser.add_argument("--folder", type=Path, help="folder for about 10 GB of files (default: temporary)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model; fewer are faster")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(
            given.command, Path(folder), given.rounds, given.layers, lambda text: print(text, file=sys.stderr)
        )
    misses = show(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())

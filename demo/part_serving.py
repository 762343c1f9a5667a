"""Part 4: a small Llama trained on the repository's own text, saved as a checkpoint of transformers,
quantized by `opaq quantize`, checked by `opaq verify`, loaded packed, and run beside the bf16 checkpoint:
text, tokens per second and memory. A wider model with random weights shows speed and memory where weights
count."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import transformers

import terminal
import tiny_llama
from demo_page import Listing, Part, Picture, Table
from terminal import Bar
from tiny_gpt import Text
from tiny_llama import Size

if TYPE_CHECKING:
    from run_demo import Settings

TRAINED = Size(width=256, inner=768, layers=4, heads=4)
WIDE = Size(width=2048, inner=5632, layers=4, heads=16)
STEPS, RATE = 240, 2e-3
FORMAT = "nvfp4"
LOSS_LIMIT = 0.03  # the packed model's loss may be that share from bf16's
PROMPT = "A quantizer is "
WRITTEN = 240  # bytes of the samples
ROUNDS = 3
TIMED = {"trained": 48, "wide": 16}  # tokens in a round
KINDS = ("plain", "packed")
LABELS = {"plain": "bf16", "packed": "NVFP4, packed"}


class Server:
    """A serving_process, asked one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, what: str, **values: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"serving_process.py ended with status {self.process.wait()} after {what!r}")
        return json.loads(answer)


@contextlib.contextmanager
def servers(device: str) -> Iterator[dict[str, Server]]:
    """Both processes; they import their packages at the same time."""
    program = Path(__file__).with_name("serving_process.py")
    with contextlib.ExitStack() as stack:
        yield {
            kind: Server(
                stack.enter_context(
                    terminal.child([sys.executable, program, kind, device], stdin=subprocess.PIPE)
                )
            )
            for kind in KINDS
        }


def quantized(part: Part, settings: Settings, source: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Runs `opaq quantize` and `opaq verify` on a checkpoint; returns the result's folder and both reports."""
    command, target = settings.build / "opaq", source.with_name(f"{source.name}-{FORMAT}")
    shutil.rmtree(target, ignore_errors=True)
    status, output, errors = terminal.output_of(
        [command, "quantize", "--format", FORMAT, "--json", source, target]
    )
    if status != 0:
        raise RuntimeError(f"opaq quantize ended with status {status}: {errors.strip()}")
    report = settings.out / f"verify-{name}.html"
    status, verified, errors = terminal.output_of(
        [command, "verify", "--json", "--all", "--html", report, target, source]
    )
    if status != 0:
        part.wrong.append(f"opaq verify of the {name} model ended with status {status}: {errors.strip()}")
    return target, {"quantize": json.loads(output), "verify": json.loads(verified)}


def measure(
    part: Part, name: str, size: Size, folders: dict[str, Path], running: dict[str, Server], bar: Bar
) -> dict[str, Any]:
    """Loads both checkpoints and times them in turns."""
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        bar.rename(f"loading the {name} model, {LABELS[kind]}")
        found[kind] = running[kind].ask("load", folder=str(folders[kind]))
        found[kind]["checkpoint"] = tiny_llama.size_on_disk(folders[kind])
        bar.advance()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(ROUNDS + 1):
        for kind in KINDS:
            bar.rename(f"generating with the {name} model, {LABELS[kind]}")
            answer = running[kind].ask("generate", prompt=PROMPT, tokens=TIMED[name], seed=None)
            if turn > 0:  # the first one warms up
                rates[kind].append(answer["tokens"] / answer["seconds"])
            found[kind]["memory"] = answer["memory"]
            bar.advance()
    for kind in KINDS:
        found[kind]["tokens_per_second"] = median(rates[kind])
        found[kind]["rounds"] = rates[kind]
    for what in ("checkpoint", "footprint"):
        if not found["packed"][what] < found["plain"][what]:
            part.wrong.append(
                f"{name} model: the packed {what} has {found['packed'][what]} bytes, no fewer than bf16's "
                f"{found['plain'][what]}."
            )
    if found["packed"]["packed"] != size.linear_layers:
        part.wrong.append(
            f"{name} model: {found['packed']['packed']} packed weights, expected {size.linear_layers}."
        )
    return found


def samples(part: Part, running: dict[str, Server], frequencies: float, seed: int, bar: Bar) -> dict[str, Any]:
    """Losses on held-out text, and what both models write; the bf16 model judges what the packed one wrote."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        bar.rename(f"held-out text, {LABELS[kind]}")
        loss = running[kind].ask("held_out_loss")
        bar.advance()
        bar.rename(f"writing, {LABELS[kind]}")
        text = running[kind].ask("generate", prompt=PROMPT, tokens=WRITTEN, seed=seed)["text"]
        judged = running["plain"].ask("loss_of_text", written=text, prompt=PROMPT)
        found[kind] = {"loss": loss, "text": text, "loss_of_text": judged}
        bar.advance()
        if not judged < frequencies:
            part.wrong.append(
                f"{LABELS[kind]} wrote text with a loss of {judged:.2f} by the bf16 model, no better than "
                f"characters by their frequency ({frequencies:.2f})."
            )
    away = found["packed"]["loss"] / found["plain"]["loss"] - 1
    if not abs(away) <= LOSS_LIMIT:
        part.wrong.append(
            f"the packed model is {100 * away:+.2f} % from bf16's loss, the limit {100 * LOSS_LIMIT:g} %."
        )
    if not found["plain"]["loss"] < frequencies:
        part.wrong.append(f"the model learned nothing: its loss is {found['plain']['loss']:.2f}.")
    return found


def run(part: Part, settings: Settings) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    text = Text(settings.device)
    trained, wide = settings.out / "trained", settings.out / "wide"
    model = tiny_llama.make(TRAINED, settings.seed, settings.device)
    with Bar("training a Llama", STEPS) as bar:
        losses = tiny_llama.train(
            model, text, STEPS, RATE, settings.seed, lambda loss: bar.advance(loss=f"{loss:.3f}")
        )
    parameters = model.num_parameters()
    tiny_llama.save(model, trained)
    terminal.say(f"    trained {TRAINED}, {parameters:,} parameters: {trained}")
    del model
    with (
        servers(settings.device) as running,
        Bar("making a wide model", 1 + 2 * (3 + 2 * (ROUNDS + 1)) + 4, "") as bar,
    ):
        large = tiny_llama.make(WIDE, settings.seed)
        wide_parameters = large.num_parameters()
        tiny_llama.save(large, wide)
        del large
        bar.advance()
        figures: dict[str, Any] = {"training_losses": losses, "parameters": parameters}
        try:
            for name, size, source in (("trained", TRAINED, trained), ("wide", WIDE, wide)):
                bar.rename(f"opaq quantize, opaq verify: {name} model")
                packed, reports = quantized(part, settings, source, name)
                bar.advance()
                measured = measure(part, name, size, {"plain": source, "packed": packed}, running, bar)
                figures[name] = {"serving": measured, **reports}
                if name == "trained":
                    figures["samples"] = samples(part, running, text.frequencies, settings.seed, bar)
        finally:
            shutil.rmtree(wide, ignore_errors=True)
            shutil.rmtree(wide.with_name(f"wide-{FORMAT}"), ignore_errors=True)
    figures["wide_parameters"] = wide_parameters
    part.figures = figures
    add_blocks(part, settings, figures, text.frequencies)


def megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:.1f}"


def serving_table(caption: str, found: dict[str, Any], more: list[tuple[str, ...]]) -> Table:
    plain, packed = found["plain"], found["packed"]
    rows: list[tuple[str, ...]] = []
    for title, key in (
        ("checkpoint's tensors, MB", "checkpoint"),
        ("parameters in memory (`get_memory_footprint()`), MB", "footprint"),
        ("resident after generating, more than before loading, MB", "memory"),
    ):
        a, b = plain[key], packed[key]
        ratio = f"{b / a:.2f}" if a and b else ""
        rows.append((title, megabytes(a), megabytes(b), ratio))
    for title, key, digits in (
        ("seconds to load", "seconds", 2),
        ("tokens per second", "tokens_per_second", 1),
    ):
        a, b = plain[key], packed[key]
        rows.append((title, f"{a:.{digits}f}", f"{b:.{digits}f}", f"{b / a:.2f}"))
    return Table(caption, ("", "bf16", "NVFP4, packed", "packed / bf16"), [*rows, *more])


def add_blocks(part: Part, settings: Settings, figures: dict[str, Any], frequencies: float) -> None:
    written, trained, wide = figures["samples"], figures["trained"], figures["wide"]
    weights = trained["verify"]["weights"]
    worst = min(row["sqnr_db"] for row in weights if row["sqnr_db"] is not None)
    share = trained["quantize"]["quantized"]["share"]
    away = written["packed"]["loss"] / written["plain"]["loss"] - 1
    part.blocks += [
        f"A Llama ({TRAINED}, {figures['parameters']:,} parameters, tokens are bytes) learns this repository's "
        f"documentation in {STEPS} steps, is saved by `save_pretrained`, and goes through the command:",
        Listing(
            "Commands, from the build folder",
            f"opaq quantize --format {FORMAT} demo/trained demo/trained-{FORMAT}\n"
            f"opaq verify demo/trained-{FORMAT} demo/trained --html demo/verify-trained.html\n",
        ),
        f"{100 * share:.1f} % of its parameters are quantized. `opaq verify` "
        f"{'passed' if trained['verify']['pass'] else 'failed'}: {len(weights)} weights compared, the lowest "
        f"SQNR is {worst:.2f} dB. Its report is verify-trained.html beside this page. Then transformers loads "
        "both checkpoints, each in a process of its own, the quantized one with "
        '`quantization_config=opaq.Config(precision="near")`: its weights stay packed.',
        serving_table(
            f"The trained model, generating {TIMED['trained']} tokens; in turns, median of {ROUNDS}",
            trained["serving"],
            [
                (
                    "loss on held-out text, nats per byte",
                    f"{written['plain']['loss']:.4f}",
                    f"{written['packed']['loss']:.4f}",
                    f"{1 + away:.4f}",
                )
            ],
        ),
        "What a model of this size shows: that the checkpoint works and costs next to no accuracy. Not "
        "speed: its products take microseconds, so tokens per second are those of transformers' Python code "
        "around them. Embeddings, the output head and norms stay in bf16 and weigh more here than in large "
        "models; resident memory also counts buffers that the first call allocates.",
    ]
    for kind in KINDS:
        part.blocks.append(
            Listing(
                f"Written by {LABELS[kind]}, sampled at temperature 0.6 after {PROMPT!r}; by the bf16 model "
                f"it has a loss of {written[kind]['loss_of_text']:.2f} (characters by their frequency: "
                f"{frequencies:.2f})",
                PROMPT + written[kind]["text"],
                is_prose=True,
            )
        )
    part.blocks += [
        f"The same with a wider model ({WIDE}, {figures['wide_parameters']:,} parameters) whose weights are "
        "random, so it writes nothing of meaning, but takes the time and memory that a trained one would. "
        "One token at a time reads every weight once, so speed follows the bytes of the weights. Resident "
        "memory counts pages of the checkpoint's file too: bf16 weights stay in them, so loading takes no "
        "time; packed weights are copied into tiles, and the system may take the file's pages back.",
        serving_table(
            f"The wider model with random weights, generating {TIMED['wide']} tokens; in turns, median of "
            f"{ROUNDS}",
            wide["serving"],
            [],
        ),
    ]
    speeds = {LABELS[kind]: wide["serving"][kind]["tokens_per_second"] for kind in KINDS}
    sizes = {LABELS[kind]: wide["serving"][kind]["footprint"] / 1e6 for kind in KINDS}
    if importlib.util.find_spec("matplotlib") is not None:
        import pictures

        pictures.pairs(
            {"tokens per second": speeds, "MB of parameters in memory": sizes}, settings.out / "serving.svg"
        )
        said = "; ".join(
            f"{label}: {speeds[label]:.1f} tokens per second, {sizes[label]:.1f} MB" for label in speeds
        )
        part.blocks.append(
            Picture("serving.svg", f"Two bar charts of the wider model. {said}.", "The wider model.")
        )
    plain, packed = (wide["serving"][kind] for kind in KINDS)
    part.headline = (
        f"Trained: {100 * away:+.2f} % loss, text like bf16's. {WIDE}: "
        f"{packed['footprint'] / plain['footprint']:.2f} of bf16's bytes, "
        f"{packed['tokens_per_second'] / plain['tokens_per_second']:.1f} times its tokens per second."
    )

"""Part 3: a character-level GPT trained in bf16 and in each recipe, side by side.

Every model has the same initial weights and batches and runs under torch.compile(fullgraph=True). The text is
this repository's documentation, so the losses change with it; the results are the ratios to bf16. Each recipe's
final validation loss must be within its limit of bf16's. With a GPU that opaq can use, all models are trained
on the processor and on the GPU, and the two final losses of a model must be within the same limits of each
other: a GPU sums in a different order."""

from __future__ import annotations

import importlib.util
import time
import warnings
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

import opaq
import terminal
from demo_page import Part, Picture, Table
from recipes import RECIPES
from terminal import Bar
from tiny_gpt import BATCH, LAYERS, LENGTH, WIDTH, MasterAdamW, Text, TinyGPT

if TYPE_CHECKING:
    from run_demo import Settings

LIMITS = {"fp8-delayed": 0.01, "fp8-current": 0.01, "fp8-block": 0.01, "mxfp8": 0.01, "nvfp4": 0.03}
ACROSS = {"bf16": 0.01, **LIMITS}  # relative difference of the GPU's loss to the processor's
STEPS = 150
RATE = 3e-3
BACKEND = "aot_eager"  # the same graph as Inductor's, whose compilation takes longer than it saves here
EVALUATIONS = 10  # spread evenly over the steps
FINAL = 3  # the final validation loss is the mean of the last FINAL evaluations
FINAL_STEPS = 20  # the final training loss is the mean of the last FINAL_STEPS steps
WINDOW = 21  # steps over which the shown differences are averaged


@dataclass
class Run:
    """Losses and times of one training run."""

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0  # total, with compilation and evaluations

    @property
    def train(self) -> float:
        return mean(self.train_losses[-FINAL_STEPS:])

    @property
    def validation(self) -> float:
        return mean(self.validation_losses[-FINAL:])

    def to(self, bf16: Run) -> float:
        """Relative difference of the final validation loss to bf16's."""
        return self.validation / bf16.validation - 1

    def smoothed(self, bf16: Run) -> list[float]:
        """Difference of the training loss to bf16's on the same batches, in percent, averaged over WINDOW
        steps."""
        pairs = [windows(run.train_losses) for run in (self, bf16)]
        return [100 * (a / b - 1) for a, b in zip(*pairs, strict=True)]

    def figures(self, bf16: Run) -> dict[str, Any]:
        final = {"train": self.train, "validation": self.validation, "to_bf16": self.to(bf16)}
        return {**final, "ms_per_step": 1e3 * median(self.step_seconds), **asdict(self)}


def windows(losses: list[float]) -> list[float]:
    """Moving averages over WINDOW steps, over fewer at both ends."""
    half = WINDOW // 2
    return [mean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def train(name: str, text: Text, seed: int, steps: int) -> Run:
    torch.compiler.reset()  # a compiled graph is for one recipe
    torch.manual_seed(seed)
    model = TinyGPT(text.vocabulary).to(text.device)  # the same initial weights for every recipe
    optimizer = MasterAdamW(model, RATE, steps)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=BACKEND)
    validation = text.validation()
    evaluated = {round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    run = Run(name)
    began = time.perf_counter()
    with (
        Bar(f"{name}, compiling", steps) as bar,
        opaq.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]),
    ):
        for step, (tokens, targets) in enumerate(text.batches(steps, seed), 1):
            step_began = time.perf_counter()
            loss = compiled(tokens, targets)
            loss.backward()
            optimizer.step()
            run.train_losses.append(loss.item())
            run.step_seconds.append(time.perf_counter() - step_began)
            if step == 1:
                bar.rename(name)
            if step in evaluated:
                with torch.no_grad():
                    losses = [compiled(*batch).item() for batch in validation]
                run.validation_steps.append(step)
                run.validation_losses.append(mean(losses))
            bar.advance(loss=f"{run.train_losses[-1]:.3f}")
    run.seconds = time.perf_counter() - began
    return run


def wrong_of(runs: dict[str, Run], frequencies: float) -> list[str]:
    bf16 = runs["bf16"]
    found = []
    if not bf16.validation < frequencies:
        found.append(
            f"bf16: the validation loss is {bf16.validation:.4f}, expected less than {frequencies:.4f}."
        )
    for name, limit in LIMITS.items():
        away = runs[name].to(bf16)
        if not abs(away) <= limit:  # NaN is wrong too
            found.append(
                f"{name}: the final loss differs by {100 * away:+.2f} % from bf16's, the limit is "
                f"{100 * limit:g} %."
            )
        if runs[name].train_losses == bf16.train_losses:
            found.append(f"{name}: the losses are equal to bf16's bit by bit, so nothing was quantized.")
    return found


def differ(runs: dict[str, Run], on_gpu: dict[str, Run]) -> list[str]:
    """A sentence for each model whose losses on the GPU and on the processor differ by more than the limit."""
    return [
        f"{name}: the final loss on the GPU differs by {100 * on_gpu[name].to(runs[name]):+.2f} % from the "
        f"processor's, the limit is {100 * limit:g} %."
        for name, limit in ACROSS.items()
        if not abs(on_gpu[name].to(runs[name])) <= limit
    ]


def train_all(device: str, seed: int) -> tuple[Text, dict[str, Run]]:
    text = Text(device)
    runs: dict[str, Run] = {}
    for name in RECIPES:
        one = runs[name] = train(name, text, seed, STEPS)
        away = f", {100 * one.to(runs['bf16']):+.2f} % of bf16's" if name != "bf16" else ""
        where = " on the GPU" if device == "cuda" else ""
        terminal.say(f"    {name:12} validation loss {one.validation:.4f}{away}; {one.seconds:.1f} s{where}")
    return text, runs


def run(part: Part, settings: Settings) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch's, about its own pytrees
    text, runs = train_all("cpu", settings.seed)
    on_gpu: dict[str, Run] = {}
    part.wrong += wrong_of(runs, text.frequencies)
    if settings.device == "cuda":
        _, on_gpu = train_all("cuda", settings.seed)
        part.wrong += [f"on the GPU: {sentence}" for sentence in wrong_of(on_gpu, text.frequencies)]
        part.wrong += differ(runs, on_gpu)
    part.figures = {
        "steps": STEPS,
        "seed": settings.seed,
        "characters": text.size,
        "frequencies": text.frequencies,
        "limits": LIMITS,
        "runs": {name: one.figures(runs["bf16"]) for name, one in runs.items()},
    }
    if on_gpu:
        gpu_figures = {name: one.figures(on_gpu["bf16"]) for name, one in on_gpu.items()}
        part.figures |= {"gpu_limits": ACROSS, "gpu_runs": gpu_figures}
    add_blocks(part, settings, runs, text)
    if on_gpu:
        add_gpu_blocks(part, runs, on_gpu)
    worst = max(LIMITS, key=lambda name: abs(runs[name].to(runs["bf16"])) / LIMITS[name])
    part.headline = (
        f"Final losses of {len(LIMITS)} recipes against bf16; the nearest to its limit is {worst}, "
        f"{100 * runs[worst].to(runs['bf16']):+.2f} % (limit {100 * LIMITS[worst]:g} %)."
    )
    if on_gpu:
        far = max(ACROSS, key=lambda name: abs(on_gpu[name].to(runs[name])) / ACROSS[name])
        part.headline += (
            f" Losses on the GPU against the processor's: the nearest to its limit is {far}, "
            f"{100 * on_gpu[far].to(runs[far]):+.2f} % (limit {100 * ACROSS[far]:g} %)."
        )


def add_blocks(part: Part, settings: Settings, runs: dict[str, Run], text: Text) -> None:
    bf16 = runs["bf16"]
    part.blocks.append(
        f"A GPT with {LAYERS} layers of width {WIDTH} is trained on this repository's documentation at the "
        f"level of characters: {STEPS} steps of {BATCH} x {LENGTH} of {text.size:,} characters, an eighth of "
        "which is kept for validation. All models have the same initial weights and the same batches. Losses "
        f"are in nats per character; predicting by character frequencies alone gives {text.frequencies:.2f}."
    )
    if importlib.util.find_spec("matplotlib") is not None:
        import pictures

        pictures.curves(runs, LIMITS, windows, settings.out / "training.svg")
        ends = "; ".join(f"{name}: {100 * runs[name].to(bf16):+.2f} %" for name in LIMITS)
        part.blocks.append(
            Picture(
                "training.svg",
                "Six charts: bf16's loss, and for each of five recipes the difference to it in percent at "
                f"each step, with the limits. Final differences: {ends}.",
                "Top left: bf16's loss. The others: each recipe's difference to bf16 in the training loss, "
                f"averaged over {WINDOW} steps (line), and in the validation loss (dots). The green band is "
                "the limit of the final validation loss; grey lines are the other recipes.",
            )
        )
    rows = []
    for name, one in runs.items():
        rows.append(
            (
                name,
                f"{one.train:.4f}",
                f"{one.validation:.4f}",
                f"{100 * one.to(bf16):+.2f} %" if name in LIMITS else "",
                f"{100 * LIMITS[name]:g} %" if name in LIMITS else "",
                f"{1e3 * median(one.step_seconds):.0f}",
                f"{one.seconds:.1f}",
            )
        )
    part.blocks.append(
        Table(
            f"Final losses: training, mean of the last {FINAL_STEPS} steps; validation, mean of the last "
            f"{FINAL} evaluations",
            ("recipe", "training", "validation", "to bf16", "limit", "ms per step", "seconds"),
            rows,
        )
    )
    part.blocks.append(
        "Training with a recipe is slower than bf16 at this width: a product of "
        f"{WIDTH} columns takes less time than quantizing both operands, and opaq's kernels for "
        "processors have no instructions that multiply these formats directly."
    )


def add_gpu_blocks(part: Part, runs: dict[str, Run], on_gpu: dict[str, Run]) -> None:
    """Adds the table of the same training on the GPU."""
    rows = [
        (
            name,
            f"{runs[name].validation:.4f}",
            f"{one.validation:.4f}",
            f"{100 * one.to(runs[name]):+.2f} %",
            f"{100 * ACROSS[name]:g} %",
            f"{100 * one.to(on_gpu['bf16']):+.2f} %" if name in LIMITS else "",
            f"{1e3 * median(one.step_seconds):.0f}",
            f"{one.seconds:.1f}",
        )
        for name, one in on_gpu.items()
    ]
    head = ("recipe", "processor", "GPU", "difference", "limit", "to bf16 on the GPU", "ms per step", "seconds")
    part.blocks.append(
        Table("The same training on the GPU: validation losses beside those of the processor", head, rows)
    )
    part.blocks.append(
        "Initial weights and batches are the same in both. The GPU sums in a different order and uses "
        "different random numbers for stochastic rounding, so the losses are not equal bit by bit."
    )

"""Training with opaq: a character-level GPT in bf16 and in each quantization recipe, side by side.

Every model starts from the same weights, sees the same batches and runs under torch.compile(fullgraph=True).
What it learns is this repository's own documentation, so the losses move with the text; what counts are the
ratios to bf16. Each recipe's validation loss has to end within its limit of bf16's, or the exit status is 1."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from matplotlib.figure import Figure
from tiny_gpt import BATCH, LAYERS, LENGTH, ROOT, WIDTH, MasterAdamW, Text, TinyGPT
from tqdm import tqdm

import opaq
from opaq import recipe

RECIPES = {
    "bf16": None,
    "fp8-delayed": recipe.DelayedScaling(),
    "fp8-current": recipe.Float8CurrentScaling(),
    "fp8-block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),  # 2D weights, random Hadamard transform, stochastic rounding
}
LIMITS = {"fp8-delayed": 0.01, "fp8-current": 0.01, "fp8-block": 0.01, "mxfp8": 0.01, "nvfp4": 0.03}
STEPS, QUICK_STEPS = 200, 40
RATE = 3e-3
EVALUATIONS = 10  # spread evenly over the steps
FINAL = 3  # the final validation loss is the mean of that many last evaluations
FINAL_STEPS = 20  # and the final training loss of that many last steps


@dataclass
class Run:
    """What the training of one model gave."""

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0  # all of it, compilation and evaluations included

    @property
    def train(self) -> float:
        return mean(self.train_losses[-FINAL_STEPS:])

    @property
    def validation(self) -> float:
        return mean(self.validation_losses[-FINAL:])

    def numbers(self, ratio: float) -> dict[str, Any]:
        final = {"train": self.train, "validation": self.validation, "ratio_to_bf16": ratio}
        return {**final, "ms_per_step": 1e3 * median(self.step_seconds), **asdict(self)}


def train(name: str, text: Text, seed: int, steps: int, backend: str) -> Run:
    torch.compiler.reset()  # a graph belongs to one recipe
    torch.manual_seed(seed)
    model = TinyGPT(text.vocabulary)
    optimizer = MasterAdamW(model, RATE, steps)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    validation = text.validation()
    evaluated = {round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    run = Run(name)
    began = time.perf_counter()
    bar = tqdm(text.batches(steps, seed), f"{name} (compiling)", steps, leave=False, disable=None, unit="step")
    with opaq.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        for step, (tokens, targets) in enumerate(bar, 1):
            step_began = time.perf_counter()
            loss = compiled(tokens, targets)
            loss.backward()
            optimizer.step()
            run.train_losses.append(loss.item())
            run.step_seconds.append(time.perf_counter() - step_began)
            bar.set_description(name)
            if step in evaluated:
                with torch.no_grad():
                    losses = [compiled(*batch).item() for batch in validation]
                run.validation_steps.append(step)
                run.validation_losses.append(mean(losses))
            bar.set_postfix(loss=f"{run.train_losses[-1]:.3f}")
    run.seconds = time.perf_counter() - began
    return run


def findings(runs: dict[str, Run], frequencies: float) -> list[str]:
    """What is wrong, in sentences."""
    bf16 = runs["bf16"]
    found = []
    if not bf16.validation < frequencies:
        found.append(f"bf16 learned nothing: {bf16.validation:.4f} is no better than {frequencies:.4f}.")
    for name, limit in LIMITS.items():
        if name not in runs:
            continue
        away = runs[name].validation / bf16.validation - 1
        if not abs(away) <= limit:  # NaN is wrong too
            found.append(
                f"{name} ended {100 * away:+.2f} % from bf16's loss, and the limit is {100 * limit:g} %."
            )
        if runs[name].train_losses == bf16.train_losses:
            found.append(f"{name} gave bf16's losses to the last bit, so nothing was quantized.")
    return found


def draw(runs: dict[str, Run], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, ratios = figure.subplots(1, 2)
    bf16 = runs["bf16"]
    for i, run in enumerate(runs.values()):
        color = f"C{i}"
        steps = range(1, len(run.train_losses) + 1)
        curves.plot(steps, run.train_losses, color=color, alpha=0.25, linewidth=0.8)
        curves.plot(run.validation_steps, run.validation_losses, color=color, label=run.name)
        pairs = zip(run.validation_losses, bf16.validation_losses, strict=True)
        ratios.plot(run.validation_steps, [100 * (a / b - 1) for a, b in pairs], color=color, label=run.name)
    for limit in sorted(set(LIMITS.values())):
        for sign in (-1, 1):
            ratios.axhline(100 * sign * limit, color="grey", linewidth=0.8, linestyle="--")
    curves.set(title="loss: validation, and training (faint)", xlabel="step", ylabel="nats per character")
    ratios.set(title="validation loss against bf16; dashed: the limits", xlabel="step", ylabel="%")
    curves.legend()
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    others = [name for name in RECIPES if name != "bf16"]
    parser.add_argument("--steps", type=int, help=f"training steps of each model (default {STEPS})")
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=others,
        default=others,
        metavar="RECIPE",
        help=f"which to train beside bf16 (default: all): {', '.join(others)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend (default inductor)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build/demo",
        help="folder for train.png and train.json (default build/demo in the repository)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"only {QUICK_STEPS} steps; the limits are the same"
    )
    given = parser.parse_args()
    if given.steps is None:
        given.steps = QUICK_STEPS if given.quick else STEPS
    if given.steps < FINAL_STEPS:
        parser.error(f"--steps is {given.steps}, expected {FINAL_STEPS} or more")
    return given


def main() -> int:
    given = arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch's, about its own pytrees
    text = Text()
    print(
        f"PyTorch {torch.__version__}, opaq {opaq.__version__}, {torch.get_num_threads()} threads\n"
        f"{LAYERS} layers of width {WIDTH}; {given.steps} steps of {BATCH} x {LENGTH} characters; the text has "
        f"{text.size}, an eighth of them for validation\n"
        f"losses in nats per character; knowing only how frequent each is would give {text.frequencies:.4f}\n"
    )
    print(f"{'recipe':12} {'train':>8} {'validation':>11} {'of bf16':>8} {'seconds':>8} {'ms/step':>8}")
    runs: dict[str, Run] = {}
    numbers = {}
    for name in RECIPES:
        if name != "bf16" and name not in given.recipes:
            continue
        run = runs[name] = train(name, text, given.seed, given.steps, given.backend)
        row = numbers[name] = run.numbers(run.validation / runs["bf16"].validation)
        print(
            f"{name:12} {run.train:8.4f} {run.validation:11.4f} {row['ratio_to_bf16']:8.4f} {run.seconds:8.1f} "
            f"{row['ms_per_step']:8.1f}",
            flush=True,
        )
    wrong = findings(runs, text.frequencies)
    given.out.mkdir(parents=True, exist_ok=True)
    draw(runs, given.out / "train.png")
    settings = {"steps": given.steps, "seed": given.seed, "backend": given.backend, "characters": text.size}
    result = {**settings, "frequencies": text.frequencies, "limits": LIMITS, "wrong": wrong, "runs": numbers}
    (given.out / "train.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nthe curves are in {given.out / 'train.png'}, the numbers in {given.out / 'train.json'}")
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

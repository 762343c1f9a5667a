"""The recipes of the demonstration, by name."""

from __future__ import annotations

from opaq import recipe

RECIPES = {
    "bf16": None,
    "fp8-delayed": recipe.DelayedScaling(),
    "fp8-current": recipe.Float8CurrentScaling(),
    "fp8-block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),  # 2D weights, random Hadamard transform, stochastic rounding
}

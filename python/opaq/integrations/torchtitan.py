"""torchtitan: its linear layers as opaq.Linear, switched on by an option of its trainer: docs/training.md.

--override.imports opaq.integrations.torchtitan.linear --override.imports
'opaq.integrations.torchtitan.linear={"recipe": "NVFP4BlockScaling", "options": {"disable_rht": true}}'"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear as TitanLinear

from opaq import recipe as recipes
from opaq.linear import Linear


class OpaqLinear(Linear, TitanLinear):
    """torchtitan's linear layer with a recipe of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        recipe: str = "MXFP8BlockScaling"  # a class of opaq.recipe
        options: dict[str, Any] = field(default_factory=dict)  # its arguments

    def __init__(self, config: OpaqLinear.Config) -> None:
        Linear.__init__(self, config.in_features, config.out_features, bias=config.bias)
        self.recipe = make_recipe(config.recipe, config.options)


def make_recipe(name: str, options: dict[str, Any]) -> recipes.Recipe:
    """The recipe of that name."""
    known = [kind.__name__ for kind in recipes.Recipe.__subclasses__() if kind is not recipes.CustomRecipe]
    if name not in known:
        raise ValueError(f"opaq: there is no recipe {name!r}, expected one of {', '.join(known)}")
    made = getattr(recipes, name)(**options)
    assert isinstance(made, recipes.Recipe)
    return made


@override(target=TitanLinear.Config, fqns=["*layers.*"], exact=True, description="opaq.Linear by a recipe")
def linear(
    cfg: TitanLinear.Config, *, recipe: str = "MXFP8BlockScaling", options: dict[str, Any] | None = None
) -> Any:
    """Every linear layer of the blocks; the output layer and routers' gates, which are another class, do not
    change."""
    make_recipe(recipe, options or {})  # raises before anything is built
    return derive(cfg, OpaqLinear.Config, recipe=recipe, options=options or {})

"""Megatron-LM: its column- and row-parallel layers with opaq's products, as a provider of modules for its
specs: docs/training.md. Parameters, initialization, sharding and checkpoints stay Megatron's."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from opaq import functional
from opaq._parallel import Parallel, group_of
from opaq.recipe import DelayedScaling, Recipe


def _multiply(layer: Any, x: Any, weight: Any, bias: Any, how: dict[str, Any]) -> Any:
    """Replaces Megatron's `linear_with_grad_accumulation_and_async_allreduce`: x weight^T, with the gradient of
    x reduced over the ranks if Megatron asks for it."""
    if how.get("gradient_accumulation_fusion") or how.get("grad_output_buffer") is not None:
        raise NotImplementedError(
            "opaq: gradient_accumulation_fusion and defer_embedding_wgrad_compute are not supported; "
            "set gradient_accumulation_fusion=False"
        )
    if layer.sequence_parallel:  # untested: Megatron allocates its buffers on a GPU
        raise NotImplementedError("opaq: sequence_parallel=True is not supported in Megatron")
    parallel = Parallel()
    if how.get("allreduce_dgrad"):
        name, size = group_of(how["tp_group"])
        parallel = Parallel("column", False, name, size) if size > 1 else parallel
    caller = "opaq.integrations.megatron"
    return functional.linear(x, weight, bias, recipe=layer.recipe, parallel=parallel, _caller=caller)


class OpaqColumnParallelLinear(ColumnParallelLinear):
    """Splits the out features. `recipe` None means the active opaq.autocast's."""

    recipe: Recipe | None = None

    def _forward_impl(self, input: Any, weight: Any, bias: Any = None, **how: Any) -> Any:  # noqa: A002
        return _multiply(self, input, weight, bias, how)


class OpaqRowParallelLinear(RowParallelLinear):
    """Splits the in features; Megatron reduces the output. `recipe` None means the active opaq.autocast's."""

    recipe: Recipe | None = None

    def _forward_impl(self, input: Any, weight: Any, bias: Any = None, **how: Any) -> Any:  # noqa: A002
        return _multiply(self, input, weight, bias, how)


class OpaqSpecProvider(LocalSpecProvider):
    """Megatron's local modules with opaq's linear layers, which use `recipe`."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        if isinstance(recipe, DelayedScaling):
            raise NotImplementedError(
                "opaq: DelayedScaling is not supported in Megatron; use Float8CurrentScaling"
            )
        self.recipe = recipe

    def _with_recipe(self, kind: type) -> type:
        return kind if self.recipe is None else type(kind.__name__, (kind,), {"recipe": self.recipe})

    def column_parallel_linear(self) -> type:
        return self._with_recipe(OpaqColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        return self._with_recipe(OpaqRowParallelLinear)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            raise NotImplementedError(
                "opaq: moe_grouped_gemm is not supported in Megatron; its experts run one by one"
            )
        both = MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear())
        return SequentialMLP, both

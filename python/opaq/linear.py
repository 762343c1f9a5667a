"""Linear: Transformer Engine's linear layer, as a subclass of PyTorch's. It holds parameters and state;
`opaq.functional.linear` computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from opaq import functional
from opaq._autocast import LATEST, active, autocast, model_init_recipe, preserves_high_precision, recomputing
from opaq._operators import expect_tensors, ops
from opaq._parallel import Parallel, group_of, sum_gradient
from opaq._plan import any_quantizer, plan_set
from opaq.functional import DelayedState
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
from opaq.quantizer import derive, with_usage
from opaq.recipe import DelayedScaling, Recipe

HISTORY_LENGTH = 1024  # rows of an amax history; a recipe uses its first amax_history_len
_STATE = DelayedState._fields
_levels = autocast._levels
_linear = ops.linear_forward.default
_UNSUPPORTED = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "delay_wgrad_compute",
    "symmetric_ar_type",
)


class Linear(nn.Linear):
    """y = x w^T + bias, under the active `opaq.autocast`.

    The arguments are Transformer Engine's. `tp_group` is a process group or a one-dimensional DeviceMesh;
    `parallel_mode` "column" splits the out features over it, "row" the in features. `parameters_split` splits
    the out features into several named weights. In addition, `save_original_weight` saves the unquantized
    weight for the backward and quantizes it again there, which suits FSDP2; `order="any"` lets products add up
    sums in any order, for speed on GPUs; `dtype` is another name for params_dtype."""

    weight: Any
    bias: Any
    recipe: Recipe | None = None  # used outside any autocast; set by opaq.convert_training

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Mapping[str, int] | tuple[str, ...] | None = None,
        device: torch.device | str | None = None,
        *,
        save_original_input: bool = False,
        save_original_weight: bool = False,
        order: str = "fixed",
        name: str | None = None,
        dtype: torch.dtype | None = None,
        **unsupported: Any,
    ) -> None:
        for key, value in unsupported.items():
            if key != "ub_name" and key not in _UNSUPPORTED:
                raise TypeError(f"opaq.Linear: unknown argument {key!r}")
            if value and key != "ub_name":
                raise NotImplementedError(f"opaq.Linear: {key}={value!r} is not supported")
        mode = parallel_mode or ""
        if mode not in ("", "column", "row"):
            raise ValueError(f"opaq.Linear: parallel_mode is {mode!r}, expected 'column', 'row' or None")
        self_parallel = _parallel_of(mode, sequence_parallel, tp_group, tp_size)
        size = self_parallel.size if mode else tp_size if tp_group is None else 1
        split = {"column": out_features, "row": in_features}.get(mode, 0)
        if split % max(size, 1):
            raise ValueError(
                f"opaq.Linear: {split} {'out' if mode == 'column' else 'in'} features cannot be divided among "
                f"{size} ranks"
            )
        nn.Module.__init__(self)
        self.in_features = in_features // size if mode == "row" else in_features
        self.out_features = out_features // size if mode == "column" else out_features
        self.parallel = self_parallel
        if fuse_wgrad_accumulation and parameters_split is not None:
            raise NotImplementedError(
                "opaq.Linear: fuse_wgrad_accumulation is not supported with parameters_split"
            )
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.save_original_weight = save_original_weight
        self.order = order
        self.name = name or ""
        self.init_method = init_method
        self._rng = (get_rng_state_tracker, rng_tracker_name)
        self._parts = self._part_sizes(parameters_split, size if mode == "column" else 1)
        self._cached_weight: QuantizedTensor | None = None
        self._inference: tuple[Recipe | None, str] = None, ""
        self._has_delayed_state = isinstance(active(), DelayedScaling)
        dtype = params_dtype or dtype or torch.get_default_dtype()
        for part, rows in self._parts.items():
            made = torch.empty(rows, self.in_features, dtype=dtype, device=device)
            self.register_parameter(f"{part}weight", nn.Parameter(made))
            biases = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None
            self.register_parameter(f"{part}bias", biases)
        if list(self._parts) != [""]:
            self.weight = self.bias = None
        for key, shape in zip(_STATE, ((3,), (HISTORY_LENGTH, 3), (2,), (HISTORY_LENGTH, 2)), strict=True):
            self.register_buffer(key, torch.empty(shape, device=device), persistent=self._has_delayed_state)
        self.reset_parameters()
        if (recipe := model_init_recipe()) is not None:
            self._quantize_weights(recipe, preserves_high_precision())

    # ---- parameters and state ----

    def _part_sizes(self, split: Mapping[str, int] | tuple[str, ...] | None, size: int) -> dict[str, int]:
        """The rows of each weight, by the prefix of its name."""
        if split is None:
            return {"": self.out_features}
        if not isinstance(split, Mapping):
            if self.out_features % len(split):
                raise ValueError(
                    f"opaq.Linear: {self.out_features} out features cannot be divided among {len(split)} "
                    "parameters"
                )
            split = dict.fromkeys(split, self.out_features * size // len(split))
        if sum(split.values()) != self.out_features * size or any(rows % size for rows in split.values()):
            raise ValueError(
                f"opaq.Linear: parameters_split is {dict(split)}, expected multiples of {size} that make "
                f"{self.out_features * size}"
            )
        return {f"{name.removesuffix('_')}_": rows // size for name, rows in split.items()}

    def reset_parameters(self) -> None:
        """Initializes weights by init_method or normal(0, 0.023), biases and histories with 0, scales with
        1."""
        tracker, tracked = self._rng
        context: AbstractContextManager[Any] = nullcontext() if tracker is None else tracker().fork(tracked)
        with context, torch.no_grad():
            for part in self._parts:
                weight, bias = getattr(self, f"{part}weight"), getattr(self, f"{part}bias")
                values = weight
                if isinstance(weight, QuantizedTensor):
                    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                if self.init_method is not None:
                    self.init_method(values)
                else:
                    values.normal_(0.0, 0.023)
                if values is not weight:
                    weight.copy_(values)
                if bias is not None:
                    bias.zero_()
        self.reset_state()

    def reset_state(self) -> None:
        """Resets delayed scaling: histories 0, scales 1."""
        for key in _STATE:
            getattr(self, key).fill_(_at_first(key))

    def _quantize_weights(self, recipe: Recipe, preserve: bool) -> None:
        text = recipe.linear_quantizers(self.name).weight
        if isinstance(recipe, DelayedScaling):
            text = derive(text, "current")  # no history yet: the weight's own amax gives its scale
        for part in self._parts if text else ():
            weight = getattr(self, f"{part}weight")
            made = nn.Parameter(quantize_tensor(weight.detach(), with_usage(text, True, True)))
            if preserve:
                kept = _Preserved(weight.detach().cpu())
                made.get_high_precision_init_val, made.clear_high_precision_init_val = kept.get, kept.clear
            self.register_parameter(f"{part}weight", made)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        """Moves delayed scaling's state to the new device only: a cast leaves it float32, `to_empty` keeps its
        values, and a move from the meta device resets it."""
        state = {key: self._buffers.pop(key) for key in _STATE}
        super()._apply(fn, recurse)
        for key, tensor in state.items():
            moved = fn(tensor)
            if tensor.is_meta and not moved.is_meta:
                moved = torch.full_like(moved, _at_first(key), dtype=tensor.dtype)
            elif moved is not tensor:
                moved = tensor.to(moved.device)
            self._buffers[key] = moved
        self._cached_weight = None
        return self

    def _leave_meta(self) -> None:
        """Resets delayed scaling's state if the parameters have left the meta device without it, for example by
        assignment."""
        if not self.scale_fwd.is_meta or (device := next(self.parameters()).device).type == "meta":
            return
        if torch.compiler.is_compiling():  # tensors created in a graph do not keep what its backward writes
            raise RuntimeError(
                "opaq.Linear: delayed scaling's state is on the meta device and the parameters are not; call "
                "to_empty, load_state_dict or the module once before it is compiled"
            )
        for key in _STATE:
            setattr(self, key, torch.full_like(getattr(self, key), _at_first(key), device=device))

    def _uses_delayed_state(self) -> bool:
        """Whether delayed scaling is in use: created for it, loaded, or after a backward. Found from the data:
        a flag set in a forward would be a side effect, which torch.compile does not support everywhere."""
        history = self.amax_history_fwd
        return self._has_delayed_state or (not history.is_meta and bool((history != 0).any()))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in _STATE if self._uses_delayed_state() else ():
            tensor = getattr(self, key)
            destination[prefix + key] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Delayed scaling's state is optional: the parameters of a plain Linear are enough."""
        given = {key: state_dict.pop(prefix + key, None) for key in _STATE}
        self._non_persistent_buffers_set.update(_STATE)  # loaded below if the state dict has it
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._leave_meta()
        for key, tensor in given.items():
            mine = getattr(self, key)
            if tensor is not None and tensor.shape != mine.shape:
                sizes = f"{tuple(tensor.shape)}, expected {tuple(mine.shape)}"
                arguments[-1].append(f"opaq.Linear: {prefix}{key} has the shape {sizes}")
            elif tensor is not None:
                with torch.no_grad():
                    _local(mine).copy_(_local(tensor))
                self._has_delayed_state = True
        if self._has_delayed_state:
            self._non_persistent_buffers_set.difference_update(_STATE)
        self._cached_weight = None

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != LATEST}
        return {**kept, "_cached_weight": None, "_inference": (None, "")}

    def extra_repr(self) -> str:
        more = f", {self.parallel}" if self.parallel.mode else ""
        has_bias = any(getattr(self, f"{part}bias") is not None for part in self._parts)
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}{more}"

    # ---- computing ----

    def _whole(self, kind: str) -> Any:
        """The weight, or the bias, concatenated from all parts."""
        found = [getattr(self, f"{part}{kind}") for part in self._parts]
        if len(found) == 1 or found[0] is None:
            return found[0]
        if any(isinstance(tensor, QuantizedTensor) for tensor in found):
            raise NotImplementedError(
                "opaq.Linear: parameters_split is not supported with quantized parameters"
            )
        return torch.cat(found)

    def _state(self, recipe: Recipe | None) -> DelayedState | None:
        if not isinstance(recipe, DelayedScaling):
            return None
        self._leave_meta()
        rows = recipe.amax_history_len
        scale_fwd, history_fwd, scale_bwd, history_bwd = (_local(getattr(self, key)) for key in _STATE)
        if rows != HISTORY_LENGTH:
            history_fwd, history_bwd = history_fwd[:rows], history_bwd[:rows]
        return DelayedState(scale_fwd, history_fwd, scale_bwd, history_bwd)

    def _cache_for(
        self, recipe: Recipe | None, is_first_microbatch: bool | None, weight: Any, x: torch.Tensor
    ) -> tuple[Any, bool]:
        """The cached quantized weight, and whether to cache a new one."""
        if is_first_microbatch is None or recipe is None or isinstance(weight, QuantizedTensor):
            return None, False
        quantizers = recipe.linear_quantizers(self.name)
        if not (text := quantizers.weight):
            return None, False
        cached = None if is_first_microbatch else self._cached_weight
        if cached is not None:
            fits = with_usage(text, True, True), with_usage(text, True, False)
            needs_columns = torch.is_grad_enabled() and x.requires_grad and not quantizers.backward_override
            if cached._quantizer_text not in (fits[:1] if needs_columns else fits):
                cached = None
        return cached, cached is None

    def _main_grad(self, weight: Any) -> Any:
        if not self.fuse_wgrad_accumulation or not torch.is_grad_enabled() or not weight.requires_grad:
            return None
        if getattr(self.weight, "main_grad", None) is None:
            raise ValueError("opaq.Linear: fuse_wgrad_accumulation=True needs a tensor weight.main_grad")
        return self.weight.main_grad

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """inp [..., in_features]; the result is [..., out_features], or a pair of it and the bias, which is
        then not added, with `return_bias`. `is_first_microbatch`: True quantizes the weight and caches it,
        False uses the cached one, None does neither. With `fp8_output` the result is a QuantizedTensor, with
        `fp8_grad` the gradient of inp."""
        level = _levels.top
        if self.recipe is not None and level.around is None and recomputing(self) is None:
            with autocast(recipe=self.recipe):
                return self.forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        recipe = level.recipe
        if not torch.compiler.is_compiling():
            level.used = True
            if recipe is not None and self._inference[0] is recipe and not torch.is_grad_enabled():
                if is_first_microbatch is None and not fp8_output and (y := self._infer(inp)) is not None:
                    self.__dict__[LATEST] = level
                    return y
            if (scope := recomputing(self)) is not None:
                with scope:
                    return self.forward(inp, is_first_microbatch, fp8_output, fp8_grad)
            if self._inference[0] is not recipe:
                self._inference = recipe, self._inference_plan(recipe)
        weight, bias = self._whole("weight"), self._whole("bias")
        if isinstance(weight, DTensor):
            return self._forward_distributed(inp, weight, bias, is_first_microbatch, fp8_output, fp8_grad)
        later = bias is not None and (self.return_bias or self.parallel.mode == "row")
        added = None if later else bias
        y = self._forward_local(
            inp, weight, added, recipe, is_first_microbatch, fp8_output, fp8_grad, self.parallel
        )
        if later and self.parallel.mode == "row":
            bias = sum_gradient(bias, self.parallel)
        if self.return_bias:
            return y, bias
        return y + bias if later else y

    def _inference_plan(self, recipe: Recipe | None) -> str:
        """The plan of a plain call without gradients; "" if a call needs more than one operator, or the recipe
        must be evaluated each time."""
        if recipe is None or self.parallel.mode or self.return_bias or list(self._parts) != [""]:
            return ""
        if isinstance(recipe, DelayedScaling) or type(recipe).linear_quantizers is not Recipe.linear_quantizers:
            return ""
        quantizers = recipe.linear_quantizers()
        plan = plan_set(x=quantizers.input, w=quantizers.weight, order=self.order)
        return "" if any_quantizer(plan, "is_stochastic", "x", "w") else plan

    def _infer(self, x: torch.Tensor) -> Any:
        """The fast path of `forward` without gradients; None if it does not apply."""
        plan, parameters = self._inference[1], self._parameters
        weight = parameters.get("weight")
        if not plan or type(x) is not torch.Tensor or type(weight) is not nn.Parameter or x.is_meta:
            return None
        if torch._C._is_any_autocast_enabled():
            return None
        try:
            return _linear([x], [weight], parameters.get("bias"), x.shape, weight.shape, x.dtype, plan)[0]
        except RuntimeError:
            return None  # forward raises it again, in its own name

    def _forward_local(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: Any,
        recipe: Recipe | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
        parallel: Parallel,
        bias_later: bool = False,
    ) -> Any:
        if not isinstance(x, torch.Tensor):
            expect_tensors("opaq.Linear", x=x)
        kind = x.device.type
        if not isinstance(x, QuantizedTensor) and kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        cached, keeps = self._cache_for(recipe, is_first_microbatch, weight, x)
        y = functional.linear(
            x,
            weight,
            bias,
            recipe=recipe,
            name=self.name,
            cached_weight=cached,
            cache_weight=keeps,
            delayed_state=self._state(recipe),
            fp8_output=fp8_output,
            fp8_grad=fp8_grad,
            save_original_input=self.save_original_input,
            save_original_weight=self.save_original_weight,
            order=self.order,
            main_grad=self._main_grad(weight),
            accumulate=not (is_first_microbatch or getattr(self.weight, "overwrite_main_grad", False)),
            bias_later=bias_later,
            parallel=parallel,
            _caller="opaq.Linear",
        )
        if keeps:
            y, self._cached_weight = y
        return y

    def _forward_distributed(
        self, x: Any, weight: Any, bias: Any, is_first_microbatch: bool | None, fp8_output: bool, fp8_grad: bool
    ) -> Any:
        """For a weight that ColwiseParallel or RowwiseParallel has split: the local operator between
        redistributions."""
        mesh, placements = weight.device_mesh, weight.placements
        if len(placements) != 1 or placements[0] not in (Shard(0), Shard(1), Replicate()):
            raise NotImplementedError(f"opaq.Linear: a weight placed as {placements} is not supported")
        if fp8_output or fp8_grad or self.return_bias:
            what = "fp8_output, fp8_grad and return_bias"
            raise NotImplementedError(f"opaq.Linear: {what} are not supported with a DTensor weight")
        column, row = placements[0] == Shard(0), placements[0] == Shard(1)
        wanted = Shard(x.dim() - 1) if row else Replicate()
        if not isinstance(x, DTensor):
            x = _distributed(x, mesh, wanted, weight.shape[1])
        x = x.redistribute(mesh, [wanted]).to_local(grad_placements=[Partial() if column else wanted])
        # a replicated bias is added by the first rank only, so the sum over ranks contains it once
        adds_bias = not row or mesh.get_local_rank() == 0
        y = self._forward_local(
            x,
            weight.to_local(),
            None if bias is None else bias.to_local(),
            active(),
            is_first_microbatch,
            False,
            False,
            Parallel(),
            bias_later=not adds_bias,
        )
        made = Shard(y.dim() - 1) if column else Partial() if row else Replicate()
        return _distributed(y, mesh, made, weight.shape[0])


def _distributed(local: torch.Tensor, mesh: Any, placement: Any, features: int) -> Any:
    """A DTensor with `features` in its last dimension, which may be split unevenly."""
    shape = (*local.shape[:-1], features)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def _local(tensor: Any) -> Any:
    """The local tensor; parallelize_module makes DTensors of all buffers."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _at_first(key: str) -> float:
    return 1.0 if key.startswith("scale") else 0.0


def _parallel_of(mode: str, sequence: bool, group: Any, size: int) -> Parallel:
    if not mode:
        return Parallel()
    if group is None:
        if size > 1:
            raise ValueError(f"opaq.Linear: tp_size is {size}, but there is no tp_group")
        return Parallel()
    name, members = group_of(group)
    if size not in (1, members):
        raise ValueError(f"opaq.Linear: tp_size is {size}, but tp_group has {members} ranks")
    return Parallel(mode, sequence, name, members) if members > 1 else Parallel()


class _Preserved:
    """Implements Transformer Engine's two methods of a quantized parameter: get and clear its initial value."""

    def __init__(self, value: torch.Tensor | None) -> None:
        self.value = value

    def get(self) -> torch.Tensor | None:
        return self.value

    def clear(self) -> None:
        self.value = None

"""MLP, MoE and GroupedLinear: what `opaq.functional` computes as one operator, as modules that hold parameters.
They run and train under the active `opaq.autocast`, as `opaq.Linear` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from opaq import functional
from opaq._adapters import Adapters, adapted_product
from opaq._autocast import model_init_recipe, recomputing
from opaq._tables import ACTIVATIONS
from opaq.packed import PackedModule, autocast_input, input_quantizer_text, weight_quantizer, zeros
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer

_Init = Callable[[torch.Tensor], Any]
# Activations by other names; the gate is that of the operator.
_SYNONYMS = {"swiglu": "silu", "swish": "silu", "geglu": "gelu"}


class _Stacked(PackedModule):
    """Parameters that are weights, plain or quantized, and biases."""

    def _make(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        biases: Mapping[str, tuple[int, ...]],
        bias: bool,
        quantizer: Quantizer | str,
        init_method: _Init | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        if model_init_recipe() is not None:  # packed weights have no gradient of their own
            raise NotImplementedError(f"opaq.{type(self).__name__}: quantized_model_init is not supported")
        dtype = dtype or torch.get_default_dtype()
        device = torch.get_default_device() if device is None else device
        self.init_method = init_method
        for name, shape in shapes.items():
            if str(quantizer):
                packed = zeros(shape, weight_quantizer(quantizer), dtype, device)
                self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            else:
                plain = torch.empty(shape, dtype=dtype, device=device)
                self.register_parameter(name, nn.Parameter(plain))
        for name, shape in biases.items():
            made = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if bias else None
            self.register_parameter(name, made if made is None else made.requires_grad_(not str(quantizer)))
        for name in self.scale_names:
            self.register_buffer(name, None)
        if not str(quantizer):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights normal(0, 0.023) or by init_method, biases 0."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is None:
                    continue
                if name not in self.weight_names:
                    parameter.zero_()
                    continue
                values = parameter
                if isinstance(parameter, QuantizedTensor):
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                for matrix in values if values.dim() == 3 else [values]:
                    matrix.normal_(0.0, 0.023) if self.init_method is None else self.init_method(matrix)
                if values is not parameter:
                    parameter.copy_(values)


class _Experts(_Stacked):
    """Base of MLP and MoE: two weights with an activation between."""

    weight_names = ("gate_up", "down")
    scale_names = ("input_scale", "hidden_scale")
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any
    input_scale: Any
    hidden_scale: Any

    def _make_experts(
        self,
        stack: tuple[int, ...],
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        numbers: dict[str, float | None],
        bias: bool,
        quantizers: tuple[Quantizer | str, Quantizer | str, Quantizer | str],
        more: dict[str, Any],
    ) -> None:
        if activation not in ACTIVATIONS:
            nearest = get_close_matches(_SYNONYMS.get(activation, str(activation)), ACTIVATIONS, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(
                f"opaq.{type(self).__name__}: activation is {activation!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}{hint}"
            )
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation = activation
        self.limit, self.alpha, self.beta = (numbers[name] for name in ("limit", "alpha", "beta"))
        quantizer, input_quantizer, hidden_quantizer = quantizers
        self.input_quantizer = input_quantizer_text(input_quantizer)
        self.hidden_quantizer = input_quantizer_text(hidden_quantizer) or self.input_quantizer
        inner = intermediate_size if activation.endswith("_no_mul") else 2 * intermediate_size
        shapes = {"gate_up": (*stack, inner, hidden_size), "down": (*stack, hidden_size, intermediate_size)}
        biases = {"gate_up_bias": (*stack, inner), "down_bias": (*stack, hidden_size)}
        self._make(shapes, biases, bias, quantizer, **more)

    def _options(self) -> dict[str, Any]:
        """The constant arguments of functional.mlp and functional.moe."""
        names = "activation", "limit", "alpha", "beta", "input_quantizer", "hidden_quantizer"
        more = "precision", "order", *self.scale_names
        return {name: getattr(self, name) for name in (*names, *more)}

    def extra_repr(self) -> str:
        said = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        said += f", activation={self.activation!r}, bias={self.gate_up_bias is not None}"
        if isinstance(self.gate_up, QuantizedTensor):
            said += f", quantizer={self.gate_up._quantizer_text!r}"
        return said + (f", input_quantizer={self.input_quantizer!r}" if self.input_quantizer else "")


class MLP(_Experts):
    """activation(x gate_up^T) down^T as one operator.

    `gate_up` is [2 intermediate, hidden], the gate first, or [intermediate, hidden] where the activation has no
    gate (`..._no_mul`); `down` is [hidden, intermediate]. With a `quantizer` both are packed, and zeros until
    they are loaded. `input_quantizer` and `hidden_quantizer` quantize the inputs of the two products; without
    them the active recipe does, if there is one. Activations and their limit, alpha, beta:
    docs/experts.md."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        bias: bool = False,
        quantizer: Quantizer | str = "",
        input_quantizer: Quantizer | str = "",
        hidden_quantizer: Quantizer | str = "",
        init_method: _Init | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._make_experts(
            (),
            hidden_size,
            intermediate_size,
            activation,
            {"limit": limit, "alpha": alpha, "beta": beta},
            bias,
            (quantizer, input_quantizer, hidden_quantizer),
            {"init_method": init_method, "dtype": dtype, "device": device},
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size]; the result has the same shape."""
        if (scope := recomputing(self)) is not None:
            with scope:
                return self.forward(x)
        weights = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return functional.mlp(autocast_input(x), *weights, **self._options(), _caller="opaq.MLP")


class MoE(_Experts):
    """A mixture of experts as one operator: for each token, the weighted sum of its experts' outputs.

    The router is the caller's: models differ in it, it is small, and it stays in high precision. Like vLLM's
    and transformers' experts, `forward` takes its result: for every token the ids of its experts and their
    weights. Ids -1 and `num_experts` mean no expert.

    `gate_up` is [experts, 2 intermediate, hidden] and `down` [experts, hidden, intermediate]; the rest is as in
    MLP. With `num_local_experts` the module holds that many experts from `first_expert` on, and its result is
    their part of the sum, to be summed over the ranks. A shared expert, an `opaq.MLP` that every token goes
    through (`shared_intermediate_size`), is added by the rank that holds expert 0."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        bias: bool = False,
        shared_intermediate_size: int = 0,
        num_local_experts: int | None = None,
        first_expert: int = 0,
        weights_on_input: bool = False,
        quantizer: Quantizer | str = "",
        input_quantizer: Quantizer | str = "",
        hidden_quantizer: Quantizer | str = "",
        init_method: _Init | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        local = num_experts - first_expert if num_local_experts is None else num_local_experts
        if first_expert < 0 or local < 1 or first_expert + local > num_experts:
            raise ValueError(
                f"opaq.MoE: {local} experts from {first_expert} on are not among {num_experts} experts"
            )
        self.num_experts, self.first_expert = num_experts, first_expert
        self.weights_on_input = weights_on_input
        numbers: dict[str, Any] = {"limit": limit, "alpha": alpha, "beta": beta}
        quantizers = quantizer, input_quantizer, hidden_quantizer
        more: dict[str, Any] = {"init_method": init_method, "dtype": dtype, "device": device}
        self._make_experts(
            (local,), hidden_size, intermediate_size, activation, numbers, bias, quantizers, more
        )
        self.shared_expert: MLP | None = None
        if shared_intermediate_size and first_expert == 0:
            self.shared_expert = MLP(
                hidden_size,
                shared_intermediate_size,
                activation=activation,
                **numbers,
                bias=bias,
                quantizer=quantizer,
                input_quantizer=input_quantizer,
                hidden_quantizer=hidden_quantizer,
                **more,
            )

    @property
    def num_local_experts(self) -> int:
        """The number of experts in this module."""
        return int(self.gate_up.shape[0])

    def forward(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden_size]; topk_weights and topk_ids [tokens, k]."""
        if (scope := recomputing(self)) is not None:
            with scope:
                return self.forward(hidden_states, topk_weights, topk_ids)
        x = autocast_input(hidden_states)
        y = functional.moe(
            x,
            topk_weights,
            topk_ids,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            num_experts=self.num_experts,
            first_expert=self.first_expert,
            weights_on_input=self.weights_on_input,
            **self._options(),
            _caller="opaq.MoE",
        )
        return y if self.shared_expert is None else y + self.shared_expert(x)

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        local = "" if self.num_local_experts == self.num_experts else f", here {self.first_expert} to {last}"
        return f"num_experts={self.num_experts}{local}, {super().extra_repr()}"


class GroupedLinear(_Stacked):
    """Several linear layers of one size, each for its own rows of the input: one operator.

    The arguments are Transformer Engine's, and so is `forward(inp, m_splits)`: m_splits[i] rows go through
    layer i. The weights are one parameter `weight` [num_gemms, out_features, in_features], the biases one
    `bias` [num_gemms, out_features]: one argument of the operator and of a compiled graph, whatever num_gemms
    is, and one gradient. A state dict of Transformer Engine's with weight0, bias0, weight1, ... is loaded
    too."""

    weight_names = ("weight",)
    weight: Any
    bias: Any

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: _Init | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        quantizer: Quantizer | str = "",
        dtype: torch.dtype | None = None,
        **unsupported: Any,
    ) -> None:
        for key, value in unsupported.items():
            if key not in _UNSUPPORTED:
                raise TypeError(f"opaq.GroupedLinear: unknown argument {key!r}")
            if value not in (_UNSUPPORTED[key], None) and key not in ("ub_name", "rng_tracker_name"):
                raise NotImplementedError(f"opaq.GroupedLinear: {key}={value!r} is not supported")
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        shapes = {"weight": (num_gemms, out_features, in_features)}
        biases = {"bias": (num_gemms, out_features)}
        self._make(shapes, biases, bias, quantizer, init_method, params_dtype or dtype, device)

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor, adapters: Adapters | None = None
    ) -> torch.Tensor:
        """m_splits: a list of integers, which a compiled graph takes as constants, or an int64 tensor.
        `adapters` are those of a LoRA layer around this one."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"opaq.GroupedLinear: m_splits has {len(m_splits)} entries, expected {self.num_gemms}"
            )
        if (scope := recomputing(self)) is not None:
            with scope:
                return self.forward(inp, m_splits, adapters)
        x = autocast_input(inp).reshape(-1, inp.shape[-1])
        if not isinstance(m_splits, torch.Tensor):
            m_splits = torch.tensor(m_splits, dtype=torch.int64, device=inp.device)
        found = (adapters or {}).get("weight", ())
        y = adapted_product(x, m_splits, self.weight, self.bias, found, _caller="opaq.GroupedLinear")
        return y.view(*inp.shape[:-1], self.out_features)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *arguments: Any) -> None:
        """Stacks Transformer Engine's parameters."""
        for name in ("weight", "bias"):
            keys = [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            if prefix + name not in state_dict and all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, metadata, *arguments)

    def extra_repr(self) -> str:
        said = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        said += f", bias={self.bias is not None}"
        if isinstance(self.weight, QuantizedTensor):
            said += f", quantizer={self.weight._quantizer_text!r}"
        return said


# Transformer Engine's arguments that opaq.GroupedLinear does not have, and the values at which they do nothing.
_UNSUPPORTED: dict[str, Any] = {
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "return_bias": False,
    "parallel_mode": None,
    "ub_overlap_rs": False,
    "ub_overlap_ag": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "save_original_input": False,
}

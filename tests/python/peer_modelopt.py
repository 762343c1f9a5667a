"""Quantizes weights with nvidia-modelopt's own calibration and export, on the CPU."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

from conftest import need

torch = need("torch")
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("ignore")  # about the version of transformers, which is not used here
    mtq = need("modelopt.torch.quantization")
    export = need("modelopt.torch.export.quant_utils")

CONFIGS = {
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "fp8": "FP8_DEFAULT_CFG",
    "fp8row": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8blk2": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
}


class Layers(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Linear layers by number; forward() passes an input of ones through each, for the calibration."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for w in weights:
            layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
            layer.weight.data = w.clone()
            self.layers.append(layer)

    def forward(self, *_: Any) -> None:
        for layer in self.layers:
            layer(torch.ones(1, layer.in_features, dtype=layer.weight.dtype))


def modelopt_states(name: str, weights: list[Any], fused: list[list[int]]) -> list[dict[str, Any]]:
    """The tensors that its exporter writes for weights; those of a list in `fused` have the same input."""
    model = Layers(weights)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mtq.quantize(model, getattr(mtq, CONFIGS[name]), forward_loop=lambda m: m())
        for numbers in fused:
            export.preprocess_linear_fusion([model.layers[i] for i in numbers])
    states = []
    for layer in model.layers:
        scale = export.get_weight_scaling_factor(layer)
        second = export.get_weight_scaling_factor_2(layer)
        kind, block = export.get_quantization_format(layer), export.get_weight_block_size(layer)
        state = {"weight": export.to_quantized_weight(layer.weight.data, scale, kind, second, block)}
        state["weight_scale"] = scale.squeeze() if scale.numel() == 1 and name == "fp8" else scale
        if second is not None:
            state["weight_scale_2"] = second.squeeze()
        states.append(state)
    return states

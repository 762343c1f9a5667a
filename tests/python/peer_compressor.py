"""Quantizes a weight with compressed-tensors' own observers and compressors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conftest import need

torch = need("torch")


def compressed_tensors() -> SimpleNamespace:
    """The functions and classes of compressed-tensors, by name."""
    quantization = need("compressed_tensors.quantization")
    utils = need("compressed_tensors.quantization.utils")
    compressors = {
        "nvfp4": need("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor,
        "mxfp4": need("compressed_tensors.compressors.mxfp4").MXFP4PackedCompressor,
        "mxfp8": need("compressed_tensors.compressors.mxfp8").MXFP8QuantizationCompressor,
    }
    naive = need("compressed_tensors.compressors.naive_quantized").FloatQuantizationCompressor
    common = {"type": "float", "symmetric": True, "dynamic": False}
    settings = {
        "fp8": {"num_bits": 8, "strategy": "tensor"},
        "fp8row": {"num_bits": 8, "strategy": "channel"},
        "fp8blk1": {"num_bits": 8, "strategy": "group", "group_size": 128},
        "fp8blk2": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        "nvfp4": {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    }
    return SimpleNamespace(
        args={name: quantization.QuantizationArgs(**common, **given) for name, given in settings.items()},
        scheme=lambda args: quantization.QuantizationScheme(targets=["Linear"], weights=args),
        qparams=utils.calculate_qparams,
        gparam=utils.generate_gparam,
        dequantize=need("compressed_tensors.quantization.lifecycle.forward").dequantize,
        unpack=need("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8,
        compressor=lambda name: compressors.get(name, naive),
    )


def blocks_of(name: str, w: torch.Tensor) -> torch.Tensor:
    """The weight with the elements that share a scale along the last axis; the other axes are those of the
    scales."""
    if name == "fp8":
        return w.reshape(1, -1)
    if name == "fp8row":
        return w.unsqueeze(1)
    if name == "fp8blk2":
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128))
        return padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    return w.unflatten(-1, (-1, {"fp8blk1": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[name]))


def compressed_state(
    peer: SimpleNamespace, name: str, w: torch.Tensor, global_scale: torch.Tensor | None = None
) -> dict[str, Any]:
    """The state that compressed-tensors writes for a weight, which may share its global scale with others."""
    args = peer.args[name]
    blocks = blocks_of(name, w)
    state = {"weight": w}
    if name == "nvfp4":
        own = peer.gparam(w.min(), w.max())
        state["weight_global_scale"] = own if global_scale is None else global_scale
    state["weight_scale"], state["weight_zero_point"] = peer.qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    made: dict[str, Any] = peer.compressor(name).compress(state, peer.scheme(args))
    return made

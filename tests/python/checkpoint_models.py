"""Small models with random weights, and checkpoints of them in every layout that opaq loads. The quantized
tensors come from compressed-tensors' own observers and compressors, or from a few lines of PyTorch; none from
opaq. Each layout also has a decoder in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import need
from small_models import MODELS, config_of, make_empty, make_model  # noqa: F401

torch = need("torch")
need("compressed_tensors")
safetensors = need("safetensors.torch")

from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor  # noqa: E402
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor  # noqa: E402
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor  # noqa: E402
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

revert = need("transformers.core_model_loading").revert_weight_conversion
Tensors = dict[str, Any]

# ---- decoding ----

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def codes(packed: Any) -> Any:
    """The values of E2M1 codes, two in a byte, the low half first."""
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return E2M1[both.long()]


def powers(scale: Any) -> Any:
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def spread(values: Any, scale: Any, rows: int, columns: int) -> Any:
    """Multiplies values with the scale of their block."""
    scale = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return values * scale[..., : values.shape[-2], : values.shape[-1]]


# ---- layouts ----


@dataclass(frozen=True)
class Layout:
    """One layout: how a weight is quantized to tensors, how these are decoded, and its quantization_config."""

    quantize: Callable[[Any], Tensors]  # by the end of their names: "weight_packed", ...
    dequantize: Callable[[Tensors], Any]
    config: dict[str, Any] = field(default_factory=dict)
    leaves: tuple[str, ...] = ("weight",)


def _args(**given: Any) -> Any:
    return QuantizationArgs(type="float", symmetric=True, **given)


def _nvfp4_args(**more: Any) -> Any:
    return _args(num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, **more)


def _mx_args(bits: int, **more: Any) -> Any:
    return _args(num_bits=bits, strategy="group", group_size=32, scale_dtype=torch.uint8, **more)


def _blocks_of(args: Any, w: Any) -> Any:
    """The weight with the elements that share a scale along the last axis."""
    if args.strategy == "tensor":
        return w.reshape(1, -1)
    if args.strategy == "channel":
        return w.unsqueeze(1)
    if args.strategy == "block":
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128))
        return padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    return w.unflatten(-1, (-1, args.group_size))


def _ct_quantize(compressor: Any, args: Any, given: tuple[str, float] | None) -> Callable[[Any], Tensors]:
    def quantize(w: Any) -> Tensors:
        w = w.float()
        blocks, state = _blocks_of(args, w), {"weight": w}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(w.min(), w.max())
        state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        state = compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
        state.pop("weight_zero_point", None)
        if given:
            state[given[0]] = torch.tensor([given[1]])
        return state

    return quantize


def _ct_config(text: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    def plain(args: Any) -> Any:
        return None if args is None else json.loads(args.model_dump_json())

    group = {
        "targets": ["Linear"],
        "format": text,
        "weights": plain(weights),
        "input_activations": plain(inputs),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": text,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$", "re:.*router$"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def _ct(
    text: str, compressor: Any, dequantize: Any, weights: Any, inputs: Any = None, given: Any = None
) -> Layout:
    return Layout(_ct_quantize(compressor, weights, given), dequantize, _ct_config(text, weights, inputs))


def _fp4_nearest(x: Any) -> Any:
    """E2M1 codes, ties to even, packed."""
    magnitude = x.abs().contiguous()
    code = torch.bucketize(magnitude, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    code += sum(
        (magnitude == tie).long() for tie in (0.75, 1.75, 3.5)
    )  # ties to even: these round up, the others down
    code = (code + 8 * (x < 0).long()).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4


def _modelopt_nvfp4(w: Any) -> Tensors:
    w = w.float()
    whole = w.abs().max() / (6 * 448)
    blocks = w.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    data = _fp4_nearest((blocks / (scale.float() * whole).unsqueeze(-1)).flatten(-2))
    given = torch.tensor(3.0 / 2688)
    return {"weight": data, "weight_scale": scale, "weight_scale_2": whole, "input_scale": given}


def _modelopt_fp8(w: Any) -> Tensors:
    w = w.float()
    scale = w.abs().max() / 448
    data = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(4.0 / 448)}


def _mxfp8(w: Any) -> Tensors:
    blocks = w.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448))
    data = (blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": (exponent + 127).to(torch.uint8)}


def _deepseek(w: Any) -> Tensors:
    w = w.float()
    blocks = _blocks_of(_args(num_bits=8, strategy="block", block_structure=[128, 128]), w)
    scale = blocks.abs().amax(-1) / 448
    data = (w / spread(torch.ones_like(w), scale, 128, 128)).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale_inv": scale}


def _gpt_oss(w: Any) -> Tensors:
    """Quantizes a whole projection, (experts, in, out) as in the model."""
    blocks = w.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    data = _fp4_nearest((blocks * torch.exp2(-exponent).unsqueeze(-1)).clamp(-6, 6))
    return {"_blocks": data, "_scales": (exponent + 127).to(torch.uint8)}


def _nvfp4_ct_value(t: Tensors) -> Any:
    return spread(codes(t["weight_packed"]), t["weight_scale"].float() / t["weight_global_scale"], 1, 16)


def _nvfp4_modelopt_value(t: Tensors) -> Any:
    return spread(codes(t["weight"]), t["weight_scale"].float() * t["weight_scale_2"], 1, 16)


def _mxfp4_value(t: Tensors) -> Any:
    return spread(codes(t["weight_packed"]), powers(t["weight_scale"]), 1, 32)


def _mxfp8_value(t: Tensors) -> Any:
    return spread(t["weight"].float(), powers(t["weight_scale"]), 1, 32)


def _fp8_value(t: Tensors) -> Any:
    return t["weight"].float() * t["weight_scale"].float()


def _fp8_block_value(t: Tensors) -> Any:
    scale = t["weight_scale"] if "weight_scale" in t else t["weight_scale_inv"]
    return spread(t["weight"].float(), scale, 128, 128)


def _gpt_oss_value(t: Tensors) -> Any:
    """(experts, out, in), as opaq stores it."""
    return spread(codes(t["_blocks"].flatten(-2)), powers(t["_scales"]), 1, 32)


def _modelopt_config(algorithm: str) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*.mlp.gate", "*.router"],
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }


_FP8_TENSOR = _args(num_bits=8, strategy="tensor")
LAYOUTS: dict[str, Layout] = {
    "ct-nvfp4": _ct(
        "nvfp4-pack-quantized",
        NVFP4PackedCompressor,
        _nvfp4_ct_value,
        _nvfp4_args(),
        _nvfp4_args(dynamic="local", observer="static_minmax"),
        ("input_global_scale", 2688 / 3.0),
    ),
    "ct-nvfp4a16": _ct("nvfp4-pack-quantized", NVFP4PackedCompressor, _nvfp4_ct_value, _nvfp4_args()),
    "ct-mxfp4": _ct(
        "mxfp4-pack-quantized", MXFP4PackedCompressor, _mxfp4_value, _mx_args(4), _mx_args(4, dynamic=True)
    ),
    "ct-mxfp8": _ct(
        "mxfp8-quantized", MXFP8QuantizationCompressor, _mxfp8_value, _mx_args(8), _mx_args(8, dynamic=True)
    ),
    "ct-fp8-dynamic": _ct(
        "float-quantized",
        FloatQuantizationCompressor,
        _fp8_value,
        _args(num_bits=8, strategy="channel"),
        _args(num_bits=8, strategy="token", dynamic=True),
    ),
    "ct-fp8-block": _ct(
        "float-quantized",
        FloatQuantizationCompressor,
        _fp8_block_value,
        _args(num_bits=8, strategy="block", block_structure=[128, 128]),
        _args(num_bits=8, strategy="group", group_size=128, dynamic=True),
    ),
    "ct-fp8-static": _ct(
        "float-quantized",
        FloatQuantizationCompressor,
        _fp8_value,
        _FP8_TENSOR,
        _FP8_TENSOR,
        ("input_scale", 4.0 / 448),
    ),
    "modelopt-nvfp4": Layout(_modelopt_nvfp4, _nvfp4_modelopt_value, _modelopt_config("NVFP4")),
    "modelopt-fp8": Layout(_modelopt_fp8, _fp8_value, _modelopt_config("FP8")),
    "modelopt-mxfp8": Layout(_mxfp8, _mxfp8_value, _modelopt_config("MXFP8")),
    "deepseek-fp8": Layout(
        _deepseek,
        _fp8_block_value,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    ),
    "gpt-oss-mxfp4": Layout(
        _gpt_oss,
        _gpt_oss_value,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        ("gate_up_proj", "down_proj"),
    ),
}


def is_quantized(name: str, layout: Layout) -> bool:
    """Whether a plain checkpoint's tensor is one that the layout quantizes."""
    module, _, leaf = name.rpartition(".")
    if leaf not in layout.leaves or leaf != "weight":
        return leaf in layout.leaves
    last = module.rpartition(".")[2]
    return last.endswith("_proj") or last in ("kv_a_proj_with_mqa", "kv_b_proj", "w1", "w2", "w3")


def plain_tensors(model: Any) -> Tensors:
    """The tensors of a plain checkpoint, with one weight per expert."""
    return {name: tensor.detach().clone() for name, tensor in revert(model, model.state_dict()).items()}


def quantize_tensors(plain: Tensors, layout: Layout) -> tuple[Tensors, Tensors]:
    """The tensors of a quantized checkpoint, and the decoded weights under their plain names."""
    stored, values = {}, {}
    for name, tensor in plain.items():
        if not is_quantized(name, layout):
            stored[name] = tensor
            continue
        made = layout.quantize(tensor)
        values[name] = layout.dequantize(made)
        stored |= {name.removesuffix("weight") + end: t.contiguous() for end, t in made.items()}
    return stored, values


def write_checkpoint(folder: Path, model: Any, layout: Layout, shard_bytes: int | None = None) -> Tensors:
    """Writes the model's checkpoint in this layout. Returns the decoded weights."""
    stored, values = quantize_tensors(plain_tensors(model), layout)
    write_config(folder, model, layout.config)
    write_tensors(folder, stored, shard_bytes)
    return values


def write_config(folder: Path, model: Any, quantization: Any = None) -> None:
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    config = {**model.config.to_dict(), "dtype": str(model.dtype).removeprefix("torch.")}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))


def write_tensors(folder: Path, stored: Tensors, shard_bytes: int | None = None) -> None:
    """Writes one file, or shards of about this size with an index."""
    if shard_bytes is None:
        safetensors.save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    shards: list[Tensors] = [{}]
    for name, tensor in stored.items():
        if sum(t.nbytes for t in shards[-1].values()) > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    places = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        safetensors.save_file(shard, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

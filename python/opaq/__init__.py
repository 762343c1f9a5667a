"""opaq: quantized tensor formats and layers. A thin layer over libopaq, which has all layouts and arithmetic.

`quantize`, `dequantize` and `QuantizedArray` need NumPy; everything that takes a torch.Tensor, including the
operators `torch.ops.opaq`, needs PyTorch. Both are optional and imported when first used."""

from __future__ import annotations

import ctypes
import difflib
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from opaq import _library, _missing, _peft_hook, _transformers_hook
from opaq._import_hook import when_imported
from opaq._library import OpaqError, OpaqUnsupportedError
from opaq._tables import Buffer, BufferRow, Extent, FormatRow, formats, proto
from opaq.quantizer import Quantizer

if TYPE_CHECKING:
    from opaq._autocast import autocast, checkpoint_contexts, quantized_model_init
    from opaq._explain import explain
    from opaq._kernels import force_kernels, forced_kernels, kernels
    from opaq._noise import sqnr
    from opaq._summary import Summary
    from opaq.array import QuantizedArray, dequantize, quantize
    from opaq.integrations.transformers import Config
    from opaq.linear import Linear
    from opaq.model import dequantize_, quantize_, tile_
    from opaq.moe import MLP, GroupedLinear, MoE
    from opaq.packed import QuantizedLinear
    from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
    from opaq.tensor_proto import TensorProto, TensorSpec, to_tensor_proto
    from opaq.training import TrainingSummary, convert_training, revert_training

__all__ = [
    "MLP",
    "Buffer",
    "BufferRow",
    "Config",
    "Extent",
    "FormatRow",
    "GroupedLinear",
    "Linear",
    "MoE",
    "OpaqError",
    "OpaqUnsupportedError",
    "QuantizedArray",
    "QuantizedLinear",
    "QuantizedTensor",
    "Quantizer",
    "Summary",
    "TensorProto",
    "TensorSpec",
    "TrainingSummary",
    "autocast",
    "checkpoint_contexts",
    "convert_training",
    "dequantize",
    "dequantize_",
    "explain",
    "force_kernels",
    "forced_kernels",
    "formats",
    "functional",
    "kernels",
    "library_info",
    "proto",
    "quantize",
    "quantize_",
    "quantize_tensor",
    "quantized_model_init",
    "recipe",
    "revert_training",
    "runner",
    "sqnr",
    "tile_",
    "to_tensor_proto",
]

__version__ = _library.version


def library_info() -> dict[str, Any]:
    """Prints and returns a description of the loaded library: version, path, back ends, the processor's
    features, PyTorch's version if it is imported, and the kernels of each format."""
    library = _library.library
    features = ctypes.create_string_buffer(256)
    library.opaq_cpu_describe(library.opaq_cpu_features(), features, len(features))
    kernels = {}
    for row in formats():
        spec = Quantizer(row.name).spec
        found = library.opaq_quantize_kernel(spec), library.opaq_dequantize_kernel(spec)
        kernels[row.name] = tuple(kernel.decode() for kernel in found)
    info = {
        "version": _library.version,
        "path": str(_library.path),
        "backends": [
            name
            for kind, name in enumerate(("cpu", "cuda"))
            if library.opaq_device_check(_library.Device(kind, -1), None) == 0
        ],
        "cpu": features.value.decode().split(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "kernels": kernels,
    }
    for key, value in info.items():
        print(f"{key:9} {', '.join(value) if isinstance(value, list) else value}")
    return info


_LAZY_NAMES = {
    "opaq._explain": ("explain",),
    "opaq._kernels": ("force_kernels", "forced_kernels", "kernels"),
    "opaq._autocast": ("autocast", "checkpoint_contexts", "quantized_model_init"),
    "opaq._noise": ("sqnr",),
    "opaq._summary": ("Summary",),
    "opaq.integrations.transformers": ("Config",),
    "opaq.array": ("QuantizedArray", "dequantize", "quantize"),
    "opaq.linear": ("Linear",),
    "opaq.model": ("dequantize_", "quantize_", "tile_"),
    "opaq.moe": ("MLP", "GroupedLinear", "MoE"),
    "opaq.packed": ("QuantizedLinear",),
    "opaq.quantized_tensor": ("QuantizedTensor", "quantize_tensor"),
    "opaq.tensor_proto": ("TensorProto", "TensorSpec", "to_tensor_proto"),
    "opaq.training": ("TrainingSummary", "convert_training", "revert_training"),
}


_ALWAYS_AVAILABLE = "not needed, every format runs on every machine; python -m opaq doctor describes this one"
_NO_INTEGERS = "not supported, opaq has floating-point formats only"
# Names of Transformer Engine and torchao, and what opaq has instead.
_FOREIGN_NAMES = {
    "fp8_autocast": "use opaq.autocast(recipe=...)",
    "fp8_model_init": "use opaq.quantized_model_init(recipe=...)",
    "fp8": "use opaq.autocast and opaq.recipe",
    "common": "use opaq.recipe for common.recipe",
    "get_default_recipe": "use opaq.recipe.default_recipe",
    "get_default_fp8_recipe": "use opaq.recipe.default_recipe",
    "is_fp8_available": _ALWAYS_AVAILABLE,
    "is_mxfp8_available": _ALWAYS_AVAILABLE,
    "is_nvfp4_available": _ALWAYS_AVAILABLE,
    "is_fp8_block_scaling_available": _ALWAYS_AVAILABLE,
    "QuantizerRole": "use opaq.recipe.QuantizerRole",
    "checkpoint": "use torch.utils.checkpoint; for several recipes context_fn=opaq.checkpoint_contexts",
    "moe_permute": "not needed, opaq.MoE and opaq.functional.moe route tokens themselves",
    "moe_unpermute": "not needed, opaq.MoE and opaq.functional.moe route tokens themselves",
    "onnx_export": "not supported, use torch.export",
    "initialize_ub": "not supported, communication does not overlap with products",
    "parallel_cross_entropy": "not supported, use torch.nn.functional.cross_entropy",
    "ops": "not supported, use modules of opaq and torch.nn",
    "optimizers": "not supported, use torch.optim",
    "Float8Quantizer": "use opaq.Quantizer('fp8+delayed')",
    "Float8CurrentScalingQuantizer": "use opaq.Quantizer('fp8')",
    "Float8BlockQuantizer": "use opaq.Quantizer('fp8blk2')",
    "MXFP8Quantizer": "use opaq.Quantizer('mxfp8')",
    "NVFP4Quantizer": "use opaq.Quantizer('nvfp4')",
    "Float8Tensor": "use opaq.QuantizedTensor",
    "MXFP8Tensor": "use opaq.QuantizedTensor",
    "NVFP4Tensor": "use opaq.QuantizedTensor",
    "Float8BlockwiseQTensor": "use opaq.QuantizedTensor",
    "LayerNorm": "use torch.nn.LayerNorm",
    "RMSNorm": "use torch.nn.RMSNorm",
    "TransformerLayer": "use your own layer after opaq.convert_training(model)",
    "MultiheadAttention": "use torch.nn.functional.scaled_dot_product_attention between opaq.Linear layers",
    "DotProductAttention": "use torch.nn.functional.scaled_dot_product_attention",
    "Fp8Padding": "not needed, any number of rows is allowed",
    "Fp8Unpadding": "not needed, any number of rows is allowed",
    "make_graphed_callables": "use torch.compile, or torch.cuda.make_graphed_callables",
    "convert_to_float8_training": "use opaq.convert_training(model, recipe)",
    "Float8Linear": "use opaq.Linear",
    "Float8LinearRecipeName": "use a recipe: opaq.recipe.Float8CurrentScaling() for TENSORWISE",
    "Float8WeightOnlyConfig": "use opaq.quantize_(model, 'fp8row')",
    "Float8DynamicActivationFloat8WeightConfig": (
        "use opaq.quantize_(model, 'fp8', activations='fp8'); for PerRow: 'fp8row'"
    ),
    "Float8StaticActivationFloat8WeightConfig": "opaq.Config() reads calibrated scales from a checkpoint",
    "NVFP4WeightOnlyConfig": "use opaq.quantize_(model, 'nvfp4')",
    "NVFP4DynamicActivationNVFP4WeightConfig": "use opaq.quantize_(model, 'nvfp4', activations='nvfp4')",
    "MXDynamicActivationMXWeightConfig": (
        "use opaq.quantize_(model, 'mxfp8+rule=rceil', activations='mxfp8+rule=rceil')"
    ),
    "Int8WeightOnlyConfig": _NO_INTEGERS,
    "Int4WeightOnlyConfig": _NO_INTEGERS,
    "IntxWeightOnlyConfig": _NO_INTEGERS,
    "ScaleCalculationMode": "use a rule: 'mxfp8+rule=ocp' for FLOOR, 'mxfp8+rule=rceil' for RCEIL",
    "precompute_float8_dynamic_scale_for_fsdp": "not needed",
    "FqnToConfig": "call opaq.quantize_ once for each format, with ignore=",
    "MXTensor": "use opaq.QuantizedTensor",
    "compute_error": "use opaq.sqnr(x, quantized)",
    "TorchAoConfig": "use opaq.Config",
    "NVFP4Linear": "use opaq.Linear or opaq.QuantizedLinear",
    "DelayedScaling": "use opaq.recipe.DelayedScaling",
    "Float8CurrentScaling": "use opaq.recipe.Float8CurrentScaling",
    "Float8BlockScaling": "use opaq.recipe.Float8BlockScaling",
    "MXFP8BlockScaling": "use opaq.recipe.MXFP8BlockScaling",
    "NVFP4BlockScaling": "use opaq.recipe.NVFP4BlockScaling",
    "Format": "use opaq.recipe.Format",
    "set_num_threads": "use torch.set_num_threads; functions of NumPy arrays take threads=",
    "LayerNormLinear": "use torch.nn.LayerNorm before opaq.Linear",
    "LayerNormMLP": "use torch.nn.LayerNorm before opaq.MLP",
    "pytorch": "use opaq itself, as in `import opaq as te`",
}


def __getattr__(name: str) -> Any:
    try:
        for module, names in _LAZY_NAMES.items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        if name in ("functional", "recipe", "runner"):
            return importlib.import_module(f"opaq.{name}")
    except ModuleNotFoundError as error:
        _missing.explain(name, error)
    nearest = difflib.get_close_matches(name, __all__, 1)
    hint = f": {_FOREIGN_NAMES[name]}" if name in _FOREIGN_NAMES else ""
    hint = hint or (f"; did you mean {nearest[0]!r}?" if nearest else "")
    text = f"module 'opaq' has no attribute {name!r}{hint}"
    if hint:
        _missing.refuse(name, text)
    raise AttributeError(text)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    """Registers the operators with PyTorch, and the hooks for libraries that use it."""
    importlib.import_module("opaq.quantized_tensor")
    when_imported("torch.utils.flop_counter", lambda _: importlib.import_module("opaq._flops").register())
    _transformers_hook.install()
    _peft_hook.install()


def _register_later(_: Any) -> None:
    try:
        _register()
    except ImportError as error:  # raising would make `import torch` fail
        warnings.warn(f"{error}", RuntimeWarning, stacklevel=2)


# Register now if PyTorch is imported, otherwise on its import: programs that use NumPy only never load PyTorch.
if _library.path.with_name("libopaq_torch.so").exists():
    if sys.modules.get("torch") is not None:
        _register()
    else:
        when_imported("torch", _register_later)

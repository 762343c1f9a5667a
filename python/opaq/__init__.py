"""opaq: quantized tensor formats. A thin skin over libopaq, which holds all layouts and all arithmetic.

What needs NumPy (`quantize`, `dequantize`, `QuantizedArray`) or PyTorch (`quantize_tensor`, `QuantizedTensor`,
`TensorProto`, `TensorSpec`, `to_tensor_proto`, the operators `torch.ops.opaq`) is there if that is
installed."""

from __future__ import annotations

import ctypes
import difflib
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from opaq import _library, _peft_hook, _transformers_hook
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
    """Prints and returns what is running: version, path, back ends, the processor's features, PyTorch's
    version if it was imported, the kernels of each format."""
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
            if library.opaq_device_check(_library.Device(kind, 0), None) == 0
        ],
        "cpu": features.value.decode().split(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "kernels": kernels,
    }
    for key, value in info.items():
        print(f"{key:9} {', '.join(value) if isinstance(value, list) else value}")
    return info


_LATER = {
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


# Transformer Engine's and torchao's names for what is called otherwise here.
_ELSEWHERE = {
    "fp8_autocast": "opaq.autocast(recipe=...)",
    "fp8_model_init": "opaq.quantized_model_init(recipe=...)",
    "DelayedScaling": "opaq.recipe.DelayedScaling",
    "Float8CurrentScaling": "opaq.recipe.Float8CurrentScaling",
    "Float8BlockScaling": "opaq.recipe.Float8BlockScaling",
    "MXFP8BlockScaling": "opaq.recipe.MXFP8BlockScaling",
    "NVFP4BlockScaling": "opaq.recipe.NVFP4BlockScaling",
    "Format": "opaq.recipe.Format",
    "LayerNormLinear": "torch.nn.LayerNorm before opaq.Linear",
    "LayerNormMLP": "torch.nn.LayerNorm before opaq.MLP",
    "pytorch": "opaq itself",
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name in ("functional", "recipe", "runner"):
        return importlib.import_module(f"opaq.{name}")
    if name in _ELSEWHERE:
        raise AttributeError(f"module 'opaq' has no attribute {name!r}: it is {_ELSEWHERE[name]}")
    nearest = difflib.get_close_matches(name, __all__, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise AttributeError(f"module 'opaq' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    """With PyTorch the operators are registered, and saved tensors can be loaded."""
    importlib.import_module("opaq.quantized_tensor")
    when_imported("torch.utils.flop_counter", lambda _: importlib.import_module("opaq._flops").register())
    _transformers_hook.install()
    _peft_hook.install()


def _register_later(_: Any) -> None:
    try:
        _register()
    except ImportError as error:  # it is PyTorch's import that would fail
        warnings.warn(f"{error}", RuntimeWarning, stacklevel=2)


# Now if PyTorch has been imported, else when it is: who has arrays only does not wait for it.
if _library.path.with_name("libopaq_torch.so").exists():
    if "torch" in sys.modules:
        _register()
    else:
        when_imported("torch", _register_later)

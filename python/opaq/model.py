"""quantize_: packs the linear layers and stacked expert weights of a model in place, one module at a time.
dequantize_ undoes it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opaq import _stacked
from opaq._library import library
from opaq._memory import return_freed
from opaq._names import Names
from opaq._noise import sqnr
from opaq._summary import QuantizedModule, Summary
from opaq._tables import buffers_of, make_proto
from opaq._warnings import DEFAULT_IGNORE, patterns_of, warn_nothing_done, warn_unmatched
from opaq.linear import Linear
from opaq.packed import PackedModule, QuantizedLinear, input_quantizer_text, weight_quantizer, why_not_packed
from opaq.quantized_tensor import QuantizedTensor, quantize_tensor
from opaq.quantizer import Quantizer, query, with_tiles

PRECISIONS = ("exact", "near", "fast", "fast32")  # enum opaq_precision
ORDERS = ("fixed", "any")  # enum opaq_order
_Undo = Callable[[], None]
_HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name]


# ---- selection of modules ----


def _why_not(module: nn.Linear) -> str:
    """Why a linear layer cannot be replaced; "" if it can."""
    kind, weight = type(module), module._parameters.get("weight")
    if isinstance(module, Linear) and (module.parallel.mode or module.return_bias):
        return "an opaq.Linear that is parallel or returns its bias"
    if kind.forward not in (nn.Linear.forward, Linear.forward) or "forward" in vars(module):
        return f"{kind.__name__} has a forward of its own"
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "the module around it reads its weight itself"
    if weight is None:
        return "its weight is computed from other parameters"
    if isinstance(weight, QuantizedTensor):
        return "its weight is quantized already"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    return ""


class _Job:
    """Linear layers that share one weight, or one module of experts."""

    def __init__(self, name: str, modules: list[nn.Module], keys: tuple[str, ...]) -> None:
        self.name = name
        self.modules = modules
        self.keys = keys

    def weights(self) -> list[Any]:
        return [self.modules[0]._parameters[key] for key in self.keys]

    def is_stacked(self) -> bool:
        return not isinstance(self.modules[0], nn.Linear)

    def label(self, key: str) -> str:
        return f"{self.name}.{key}" if self.is_stacked() else self.name


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear) or _stacked.is_packed(module)


def _check(model: nn.Module, quantizer: str, activations: str, precision: str | None, order: str) -> None:
    """Checks the arguments of `quantize_` before any work."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"opaq.quantize_: model is a {type(model).__name__}, expected a torch.nn.Module")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"opaq.quantize_: precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if order not in ORDERS:
        raise ValueError(f"opaq.quantize_: order is {order!r}, expected one of {', '.join(ORDERS)}")
    for what, given in (("quantizer", quantizer), ("activations", activations)):
        if reason := why_not_packed(given):
            raise ValueError(f"opaq.quantize_: {what}={given!r} {reason}")
    if isinstance(model, nn.Linear):
        raise ValueError("opaq.quantize_: the model is a linear layer itself; see QuantizedLinear.from_linear")
    adapted: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    for name, module in model.named_modules():
        if isinstance(module, adapted):
            raise ValueError(
                f"opaq.quantize_: {name} has adapters of PEFT, which would be packed too; call quantize_ "
                "before get_peft_model, or merge the adapters first (merge_and_unload)"
            )


def _warn(model: nn.Module, ignore: Collection[str], jobs: list[_Job], left: dict[str, str]) -> None:
    names = [name for name, _ in model.named_modules()]
    packed = [name for name, reason in left.items() if reason == "quantized already"]
    warn_unmatched("opaq.quantize_", ignore, names, 3)
    if packed:
        warnings.warn(
            f"opaq.quantize_: {len(packed)} of {len(packed) + sum(len(job.modules) for job in jobs)} linear "
            f"layers and experts are quantized already and stay as they are, the first is {packed[0]}; name "
            "them in ignore to mix formats, or call opaq.dequantize_ to quantize them again",
            stacklevel=3,
        )
    elif not jobs:
        warn_nothing_done("opaq.quantize_", "quantized", len(names), left, 3)


def _find(model: nn.Module, ignore: Collection[str], activations: str) -> tuple[list[_Job], dict[str, str]]:
    """The modules to pack, and those that are not, with the reason."""
    jobs: dict[Any, _Job] = {}
    left: dict[str, str] = {}
    names = Names(ignore)
    for name, module in model.named_modules():
        keys = _stacked.weight_names(module)
        if _is_packed(module):
            left[name] = "ignored" if name in names else "quantized already"
            continue
        if not keys and not isinstance(module, nn.Linear):
            continue
        reason = _stacked.why_not(module, activations) if keys else _why_not(module)
        if name in names:
            reason = "ignored"
        if reason:
            left[name] = reason
        elif keys:
            jobs[name] = _Job(name, [module], keys)
        else:
            jobs.setdefault(id(module.weight), _Job(name, [], ("weight",))).modules.append(module)
    # a weight shared with a parameter that stays plain is skipped: packed, it would be stored twice
    found = list(jobs.values())
    packed = {(module, key) for job in found for module in job.modules for key in job.keys}
    plain = {
        id(parameter): f"{name}.{key}"
        for name, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (module, key) not in packed
    }
    kept = []
    for job in found:
        if tied := [plain[id(weight)] for weight in job.weights() if id(weight) in plain]:
            left[job.name] = f"tied to {tied[0]}"
        else:
            kept.append(job)
    return kept, left


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """The parents of each module, and its names in them."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for child, module in parent._modules.items():
            if module is not None:
                found.setdefault(module, []).append((parent, child))
    return found


# ---- replacing ----


def _bar(total: int, what: str, shown: bool) -> Any:
    if shown and total and importlib.util.find_spec("tqdm"):
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=what, unit="module")
    return None


def _packed_bytes(jobs: list[_Job], quantizer: str) -> int:
    """The size of the packed weights in bytes. Raises, before anything is changed, if the library refuses
    one."""
    total = 0
    for job in jobs:
        for key, weight in zip(job.keys, job.weights(), strict=True):
            shape = _stacked.rowwise_shape(job.modules[0], weight) if job.is_stacked() else weight.shape
            try:
                made = make_proto(tuple(shape), str(weight.dtype).removeprefix("torch."), Quantizer(quantizer))
            except (TypeError, ValueError) as error:
                raise ValueError(f"opaq.quantize_: {job.label(key)}: {error}") from error
            total += sum(buffer.bytes for buffer in buffers_of(made))
    return total


def _free_bytes(device: torch.device) -> float:
    """Free memory in bytes; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return inf


def _is_plainly_rowwise(weight: QuantizedTensor) -> bool:
    return weight.device.type == "cpu" and bool(query(weight._quantizer_text, "is_plain_rowwise"))


def can_be_tiled(weight: QuantizedTensor) -> bool:
    """Whether a weight can be tiled: tiles of a stack must not span two experts."""
    if not query(weight._quantizer_text, "can_be_tiled"):
        return False
    tiled = Quantizer(with_tiles(weight._quantizer_text, True)).spec
    return bool(weight.dim() == 2 or weight.shape[-2] % library.opaq_rows_together(tiled) == 0)


def _pack(
    name: str, weight: torch.Tensor, quantizer: str, tiles: bool
) -> tuple[QuantizedTensor, QuantizedModule]:
    plain = weight.detach().contiguous()
    packed = quantize_tensor(plain, quantizer)
    if tiles and can_be_tiled(packed) and _is_plainly_rowwise(packed):
        packed = packed.tiled()
    size = sum(buffer.nbytes for buffer in packed.buffers())
    ratio = None if plain.is_meta else sqnr(plain, packed)
    return packed, QuantizedModule(name, tuple(plain.shape), plain.nbytes, size, ratio)


def _replace(places: list[tuple[nn.Module, str]], old: nn.Module, new: nn.Module) -> _Undo:
    """Puts the new module in all places of the old one, with its hooks and training mode."""
    new.train(old.training)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))

    def put(module: nn.Module) -> None:
        for parent, child in places:
            setattr(parent, child, module)

    put(new)
    return lambda: put(old)


def _undo_all(undo: list[_Undo]) -> None:
    for step in reversed(undo):
        step()


def _quantize_job(
    job: _Job, quantizer: str, activations: str, how: tuple[str | None, str], places: dict[nn.Module, Any]
) -> tuple[list[QuantizedModule], list[_Undo]]:
    """Packs the weights of one job and installs them; how: precision and order. Changes nothing if it fails."""
    module, (precision, order) = job.modules[0], how
    if job.is_stacked():
        made, rows = {}, []
        for key, weight in zip(job.keys, job.weights(), strict=True):
            made[key], row = _pack(
                job.label(key), _stacked.rowwise(module, weight), quantizer, precision is not None
            )
            rows.append(row)
        return rows, [_stacked.put(module, made, activations, precision or "exact", order)]
    packed, row = _pack(job.name, job.weights()[0], quantizer, precision is not None)
    new = [QuantizedLinear.from_weight(packed, module.bias, activations) for module in job.modules]
    for layer in new[1:]:
        layer.weight = new[0].weight  # keep the sharing
    for layer in new:
        layer.precision, layer.order = precision or "exact", order
    return [row], [_replace(places.pop(old), old, layer) for old, layer in zip(job.modules, new, strict=True)]


def quantize_(
    model: nn.Module,
    quantizer: Quantizer | str = "nvfp4",
    *,
    activations: Quantizer | str = "",
    ignore: Iterable[str] = DEFAULT_IGNORE,
    precision: str | None = "exact",
    order: str = "fixed",
    progress: bool = True,
) -> Summary:
    """Quantizes the weights of a model's linear layers and stacked experts in place; returns a summary.

    `quantizer` is for the weights, `activations` for the layers' inputs ("": not quantized). `ignore` lists
    modules to skip, with everything inside them: full names or ends of names, globs with * and ?, and regular
    expressions after "re:". With a `precision` the weights of a model on the CPU are also tiled, for speed (see
    `tile_`); "near" is a good choice for serving. None leaves them in rows, as do quantizers with other copies
    or orders (`+columnwise`, `+swizzle`). Packed layers are skipped with a warning unless `ignore` names them;
    call it twice to mix formats. With `order="any"` products may add up sums in any order, for speed
    on GPUs; a token's bits may then depend on the other tokens of its batch.

    Errors are raised before anything is changed where possible. Weights are packed one at a time. If memory
    allows, the old weights are kept until all are done, so a failure or an interruption leaves the model
    unchanged; otherwise each is released at once."""
    text, inputs = (
        weight_quantizer(quantizer, "opaq.quantize_"),
        input_quantizer_text(activations, "opaq.quantize_"),
    )
    _check(model, text, inputs, precision, order)
    patterns = patterns_of("opaq.quantize_", ignore)
    jobs, left = _find(model, patterns, inputs)
    _warn(model, patterns, jobs, left)
    total = len(jobs)
    keeps = not jobs or _packed_bytes(jobs, text) < _free_bytes(jobs[0].weights()[0].device)
    rows: list[QuantizedModule] = []
    undo: list[_Undo] = []
    places, bar, waiting = _places(model), _bar(total, "quantizing", progress), deque(jobs)
    del jobs
    try:
        while waiting:
            made, steps = _quantize_job(waiting.popleft(), text, inputs, (precision, order), places)
            rows += made
            undo += steps if keeps else []
            steps.clear()
            if bar is not None:
                bar.update()
    except BaseException as error:
        _undo_all(undo)
        done = total - len(waiting) - 1
        if keeps or not done or not isinstance(error, Exception):
            raise
        raise RuntimeError(
            f"opaq.quantize_: stopped after {done} of {total} modules, which stay quantized: there was no "
            f"memory to keep their weights as well: {error}"
        ) from error
    finally:
        if bar is not None:
            bar.close()
    undo.clear()  # the plain weights
    return_freed()
    not_finite = [row.name for row in rows if row.sqnr is not None and isnan(row.sqnr)]
    if not_finite:
        warnings.warn(
            f"opaq.quantize_: {len(not_finite)} of {len(rows)} weights have NaNs or infinities, the first is "
            f"{not_finite[0]}; each makes all weights that share its scale useless",
            stacklevel=2,
        )
    return Summary(text, inputs, tuple(rows), left)


def tile_(model: nn.Module, precision: str = "exact", *, progress: bool = False) -> int:
    """Reorders the packed weights of a model into the tiles that CPU kernels read, in place, one at a time.
    Returns the number of weights. `precision` is the lowest accuracy you accept for unquantized inputs: "exact"
    (float32), "near" (int16, an error below 1e-4), "fast" (int8, one scale per token) or "fast32" (int8, one
    scale per 32 columns). docs/performance.md has errors and speeds. Weights on a GPU stay in rows, with a
    warning."""
    if precision not in PRECISIONS:
        raise ValueError(f"opaq.tile_: precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    on_gpu = sum(module._parameters[name].device.type == "cuda" for module, name in _packed_weights(model))
    if on_gpu:
        warnings.warn(
            f"opaq.tile_: {on_gpu} weights on a GPU stay in rows: tiles are for processors",
            stacklevel=2,
        )
    count = _tile(model, precision, lambda w: w.device.type != "cuda" and can_be_tiled(w), progress)
    if not count:
        modules = sum(1 for _ in model.modules())
        warnings.warn(
            f"opaq.tile_: nothing was tiled: none of the {modules} modules has packed weights; opaq.quantize_ "
            "packs and tiles them",
            stacklevel=2,
        )
    return count


def tile_loaded(model: nn.Module, precision: str) -> None:
    """Tiles the weights of a model that was loaded packed, where `quantize_` would have."""
    _tile(model, precision, lambda weight: can_be_tiled(weight) and _is_plainly_rowwise(weight), False)


def set_order(model: nn.Module, order: str) -> None:
    """Sets the order of sums of a model that was loaded packed, as `quantize_` would have."""
    for module, _ in _packed_weights(model):
        module.order = order


def _packed_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that have packed weights, and the weights' names in them."""
    return [
        (module, name)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, QuantizedTensor)
        and (isinstance(module, PackedModule) or _stacked.is_packed(module))
    ]


def _tile(
    model: nn.Module, precision: str, is_wanted: Callable[[QuantizedTensor], bool], progress: bool
) -> int:
    found = _packed_weights(model)
    done: dict[int, nn.Parameter] = {}
    bar = _bar(len(found), "tiling", progress)
    for module, name in found:
        weight = module._parameters[name]
        module.precision = precision
        if id(weight) not in done and is_wanted(weight):
            done[id(weight)] = nn.Parameter(weight.detach().tiled(), requires_grad=weight.requires_grad)
        module.register_parameter(name, done.get(id(weight), weight))  # keep the sharing
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    return_freed()
    return len(found)


def dequantize_(model: nn.Module) -> int:
    """Replaces packed linear layers and experts by plain ones with the dequantized values. Returns the number
    of modules. A failure leaves the model unchanged."""
    undo: list[_Undo] = []
    plain: dict[int, nn.Parameter] = {}
    places = _places(model)
    found = [m for m in model.modules() if isinstance(m, QuantizedLinear) or _stacked.is_packed(m)]
    try:
        for module in found:
            if not isinstance(module, QuantizedLinear):
                undo.append(_stacked.take_back(module))
                continue
            layer = module.to_linear(plain.get(id(module.weight)))
            plain[id(module.weight)] = layer.weight  # keep the sharing
            undo.append(_replace(places[module], module, layer))
    except BaseException:
        _undo_all(undo)
        raise
    return len(found)

"""Runners: prepared weights behind an integer handle. A runner is created once, from weights; the operators
`torch.ops.opaq.linear_gemm`, `mlp_gemm` and `moe_gemm` then take its integer (docs/runners.md).

The library owns weights, plan and lookup. Python describes the tensors, and can register its own objects as
runners."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from opaq import _library
from opaq._library import RUNNER_KINDS, call, library
from opaq._operators import DTYPES, NUMBERS, expect_tensors, operators, ops
from opaq._plan import experts_plan, given_by, parts_of, plan_for, texts_of
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer, with_tiles

_ROWS = dict(zip(RUNNER_KINDS, (ops.linear_gemm, ops.mlp_gemm, ops.moe_gemm), strict=True))


@dataclass(frozen=True)
class RunnerInfo:
    """Properties of a runner."""

    kind: str  # "linear", "mlp" or "moe"
    in_features: int
    out_features: int
    experts: int  # 0 except for "moe"
    multiplications: int  # for each row of the input, in a "moe" for each chosen expert too; 0 if not known
    bytes: int
    format: str  # the weights' quantizer, or "bf16", "f16", "f32"
    kernel: str


class Runner:
    """The handle of a runner. The runner lives until `destroy` or the end of its `with`, not until this object
    is collected: its integer may be in graphs."""

    def __init__(self, handle: int) -> None:
        self.id = handle
        found = self.info()
        self.kind, self.out_features = found.kind, found.out_features
        self._is_destroyed = False

    def info(self) -> RunnerInfo:
        """The properties of the runner."""
        found = _library.RunnerInfo()
        call("opaq_runner_query", self.id, found)
        return RunnerInfo(
            RUNNER_KINDS[found.kind],
            found.in_features,
            found.out_features,
            found.experts,
            found.multiplications,
            found.bytes,
            found.format.decode(errors="replace"),
            found.kernel.decode(errors="replace"),
        )

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Runs it on x, or for a "moe" on hidden states, router weights and expert ids."""
        made: torch.Tensor = _ROWS[self.kind](*inputs, self.id, self.out_features)
        return made

    def destroy(self) -> None:
        """Invalidates the handle; a run in progress completes normally."""
        call("opaq_runner_destroy", self.id)
        self._is_destroyed = True

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_destroyed:
            self.destroy()

    def __repr__(self) -> str:
        return f"Runner({self.id}, {self.kind!r})"


def runner_count() -> int:
    """The number of runners in this process."""
    found: int = library.opaq_runner_count()
    return found


# ---- from weights ----


def _tensor_of(tensor: torch.Tensor) -> _library.Tensor:
    made = _library.Tensor(data=tensor.data_ptr(), dtype=NUMBERS.get(tensor.dtype, -1), rank=tensor.dim())
    made.device = _library.Device(int(tensor.device.type != "cpu"), tensor.device.index or 0)
    if tensor.dim() > len(made.shape):
        raise ValueError(
            f"opaq.runner: a tensor has {tensor.dim()} dimensions, at most {len(made.shape)} are allowed"
        )
    made.shape[: tensor.dim()], made.strides[: tensor.dim()] = tuple(tensor.shape), tensor.stride()
    return made


def _fill(value: _library.Value, given: Any) -> None:
    """Converts an argument from PyTorch to the library; None stays empty."""
    if isinstance(given, str):
        text = given.encode(errors="surrogatepass")
        value.text, value.count = text, len(text)
    elif isinstance(given, torch.Size):
        value.sizes, value.count = (ctypes.c_int64 * len(given))(*given), len(given)
    elif given is not None:
        tensors = given if isinstance(given, list) else [given]
        value.tensors = (_library.Tensor * len(tensors))(*map(_tensor_of, tensors))
        value.count = len(tensors)


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for given in arguments:
        yield from (t for t in (given if isinstance(given, list) else [given]) if isinstance(t, torch.Tensor))


def _create(name: str, arguments: dict[str, Any], quantizes: bool) -> Runner:
    """Creates a runner from an operator's arguments without the activations."""
    row = operators()[name]
    values = (_library.Value * len(row.arguments))()
    for value, argument in zip(values, row.arguments, strict=True):
        _fill(value, arguments.get(argument))
    handle = ctypes.c_int64()
    device = next((t.device for t in _tensors(arguments.values()) if t.device.type == "cuda"), None)
    if device is not None:
        stream = torch.cuda.current_stream(device).cuda_stream
        execution = _library.Execution(device=_library.Device(1, device.index or 0), stream=stream)
        call("opaq_runner_create", library.opaq_op_at(row.index), values, execution, handle)
        return Runner(handle.value)
    with _library.threads(torch.get_num_threads() if quantizes else 1) as execution:
        call("opaq_runner_create", library.opaq_op_at(row.index), values, execution, handle)
    return Runner(handle.value)


def _plain(tensor: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """A bias unchanged; a scale, which may be a number, as float32 on the weight's device."""
    if tensor is None or isinstance(tensor, torch.Tensor):
        return None if tensor is None else tensor.detach().contiguous()
    return torch.tensor([tensor], dtype=torch.float32, device=weight.device)


def _weight(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part.detach().contiguous() for part in parts_of(tensor)]


def _tiled(precision: str | None, quantizer: str, *weights: torch.Tensor) -> tuple[Any, ...]:
    """With a precision and on the CPU: the tiled quantizer for plain weights, and packed weights in tiles."""
    if precision is None or any(weight.device.type == "cuda" for weight in weights):
        return quantizer, *weights
    tiles = [w.detach().tiled() if isinstance(w, QuantizedTensor) else w for w in weights]
    return with_tiles(quantizer, True) if quantizer else "", *tiles


def create_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantizer: Quantizer | str = "",
    input_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | float | None = None,
    precision: str | None = None,
    order: str = "fixed",
) -> Runner:
    """x w^T + bias. `weight` [N, K] is a QuantizedTensor, or a plain tensor that `quantizer`, if there is one,
    quantizes now. x is quantized by `input_quantizer` in every run, with `input_scale` instead of its own
    amax. With a `precision` (see `opaq.tile_`) the weight is kept in tiles, for speed on processors.
    `order`: see `opaq.functional.quantized_linear`."""
    expect_tensors("opaq.runner.create_linear", weight=weight, bias=bias)
    by_weight, by_input = texts_of(quantizer, input_quantizer)
    by_weight, weight = _tiled(precision, by_weight, weight)
    plan = plan_for(
        "opaq.runner.create_linear",
        x=by_input,
        w=by_weight,
        w_given=given_by(weight),
        precision=precision or "exact",
        order=order,
    )
    arguments = {
        "w": _weight(weight),
        "bias": _plain(bias, weight),
        "w_shape": weight.shape,
        "plan": plan,
        "input_scale": _plain(input_scale, weight),
    }
    return _create("linear", arguments, bool(by_weight))


def _create_experts(
    name: str,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    scales: Sequence[torch.Tensor | float | None],
    inputs: Sequence[str],
    quantizer: str,
    *words: Any,
) -> Runner:
    quantizers = inputs[0], inputs[1] or inputs[0], quantizer
    plan = experts_plan(f"opaq.runner.create_{name}", quantizers, (given_by(gate_up), given_by(down)), *words)
    arguments = {
        "gate_up": _weight(gate_up),
        "down": _weight(down),
        "gate_up_bias": _plain(biases[0], gate_up),
        "down_bias": _plain(biases[1], down),
        "gate_up_shape": gate_up.shape,
        "down_shape": down.shape,
        "plan": plan,
        "input_scale": _plain(scales[0], gate_up),
        "hidden_scale": _plain(scales[1], down),
    }
    return _create(name, arguments, bool(quantizer))


def create_mlp(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    quantizer: Quantizer | str = "",
    input_quantizer: Quantizer | str = "",
    hidden_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | float | None = None,
    hidden_scale: torch.Tensor | float | None = None,
    precision: str | None = None,
    order: str = "fixed",
) -> Runner:
    """A runner that computes `opaq.functional.mlp`. Plain weights are quantized now by `quantizer`, the inputs
    of both products in every run, by `input_quantizer` and `hidden_quantizer` (default: the same)."""
    weights = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    expect_tensors("opaq.runner.create_mlp", **weights)
    by_weight, *inputs = texts_of(quantizer, input_quantizer, hidden_quantizer)
    by_weight, gate_up, down = _tiled(precision, by_weight, gate_up, down)
    biases, scales = (gate_up_bias, down_bias), (input_scale, hidden_scale)
    words = activation, (limit, alpha, beta), precision, (None, 0, False), order
    return _create_experts("mlp", gate_up, down, biases, scales, inputs, by_weight, *words)


def create_moe(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    first_expert: int = 0,
    weights_on_input: bool = False,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    quantizer: Quantizer | str = "",
    input_quantizer: Quantizer | str = "",
    hidden_quantizer: Quantizer | str = "",
    input_scale: torch.Tensor | float | None = None,
    hidden_scale: torch.Tensor | float | None = None,
    precision: str | None = None,
    order: str = "fixed",
) -> Runner:
    """A runner that computes `opaq.functional.moe`. Plain weights are quantized now by `quantizer`, each
    expert's separately."""
    weights = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    expect_tensors("opaq.runner.create_moe", **weights)
    by_weight, *inputs = texts_of(quantizer, input_quantizer, hidden_quantizer)
    by_weight, gate_up, down = _tiled(precision, by_weight, gate_up, down)
    biases, scales = (gate_up_bias, down_bias), (input_scale, hidden_scale)
    words = activation, (limit, alpha, beta), precision, (num_experts, first_expert, weights_on_input), order
    return _create_experts("moe", gate_up, down, biases, scales, inputs, by_weight, *words)


# ---- a Python object as a runner ----


@dataclass
class _Registered:
    """A Python object registered as a runner."""

    obj: Any
    method: str
    handle: int = 0


_METHODS = ("_run_impl", "run")  # method names, in order of preference
_registered: dict[int, _Registered] = {}  # by the context pointer that the library passes back
_states_by_handle: dict[int, int] = {}
_states = count(1)


class _DeviceBytes:
    """Memory of a GPU, as PyTorch takes it from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


def _borrowed(tensor: _library.Tensor) -> torch.Tensor:
    """A tensor on borrowed memory, valid during the call."""
    shape, strides = tensor.shape[: tensor.rank], tensor.strides[: tensor.rank]
    dtype, is_cpu = DTYPES[tensor.dtype], tensor.device.type == 0
    device = torch.device("cpu") if is_cpu else torch.device("cuda", tensor.device.index)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = reach * dtype.itemsize
    if is_cpu:
        memory = torch.frombuffer((ctypes.c_char * size).from_address(tensor.data), dtype=dtype)
    else:
        memory = torch.as_tensor(_DeviceBytes(tensor.data, size), device=device).view(dtype)
    return memory.as_strided(shape, strides)


def _raise_later(reason: BaseException) -> Any:
    """A return value for the C caller that reads as 0 and, when ctypes converts it, schedules `reason`
    (KeyboardInterrupt, SystemExit, ...) on this thread. The conversion runs no bytecode, so the interpreter
    raises the exception only after the operator has returned. PyThreadState_SetAsyncExc takes a class;
    instantiating this one returns the existing exception object."""
    carrier = type("Carrier", (type(reason),), {"__new__": lambda *_: reason})
    targets = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(carrier)
    threads = map(ctypes.pythonapi.PyThreadState_SetAsyncExc, *([target] for target in targets))  # one thread
    return type("Zero", (), {"__index__": partial(sum, threads, -1)})()


def _text_of(reason: Exception) -> str:
    try:
        return f"{type(reason).__name__}: {reason}"
    except Exception:  # its own __str__
        return type(reason).__name__


def _run_object(state: int, given: Any, error: Any) -> Any:
    output = None
    try:
        output = _borrowed(given.contents.output.contents)
        inputs = [_borrowed(given.contents.inputs[i]) for i in range(given.contents.input_count)]
        with torch.no_grad():
            entry = _registered[state]
            result = getattr(entry.obj, entry.method)(*inputs)
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"{entry.method} returned {type(result).__name__}, expected a tensor")
            if (result.shape, result.dtype) != (output.shape, output.dtype):
                raise ValueError(
                    f"{entry.method} returned {result.dtype} of shape {tuple(result.shape)}, expected "
                    f"{output.dtype} of shape {tuple(output.shape)}"
                )
            output.copy_(result)
    except BaseException as reason:  # an exception cannot pass through C
        if not isinstance(reason, Exception):
            if output is not None:
                output.fill_(torch.nan)
            return _raise_later(reason)
        text = _text_of(reason).replace("\0", " ")
        error.contents.text = text.encode("ascii", "backslashreplace")[: _library.Error.text.size - 1]
        return 1  # OPAQ_ERROR_ARGUMENT
    return 0


def _forget_object(state: int) -> None:
    if (entry := _registered.pop(state, None)) is not None:
        _states_by_handle.pop(entry.handle, None)


_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_library.RunnerCall), ctypes.POINTER(_library.Error)
)(_run_object)
_FORGET = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget_object)
_FUNCTIONS = _library.RunnerFunctions(
    _library.RUNNER_ABI, None, ctypes.cast(_RUN, ctypes.c_void_p), ctypes.cast(_FORGET, ctypes.c_void_p)
)


def register(obj: Any, kind: str, in_features: int, out_features: int, experts: int = 0) -> Runner:
    """A Python object with a method `_run_impl` or `run` as a runner: run(x), or run(hidden_states,
    topk_weights, topk_ids), returns the output. Its arguments are borrowed: they must not be changed, nor kept
    after it returns. An exception becomes the operator's error; KeyboardInterrupt and
    SystemExit are raised unchanged."""
    method = next((name for name in _METHODS if callable(getattr(obj, name, None))), None)
    if method is None:
        raise TypeError(f"opaq.runner: {type(obj).__name__} has no run method, nor _run_impl")
    if kind not in RUNNER_KINDS:
        raise ValueError(f"opaq.runner: kind is {kind!r}, expected {', '.join(RUNNER_KINDS)}")
    info = _library.RunnerInfo(RUNNER_KINDS.index(kind), in_features, out_features, experts)
    info.kernel = type(obj).__name__.encode("ascii", "backslashreplace")[:63]
    handle, state = ctypes.c_int64(), next(_states)
    _registered[state] = entry = _Registered(obj, method)
    try:
        call("opaq_runner_register", info, _FUNCTIONS, state, handle)
    except BaseException:
        _forget_object(state)
        raise
    entry.handle = handle.value
    _states_by_handle[handle.value] = state
    return Runner(handle.value)


# ---- names of other runner registries ----

_EXPERTS = ("num_experts", "num_local_experts", "experts")


def _first_int(obj: Any, *names: str) -> int | None:
    found = (getattr(obj, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int)), None)


def register_runner(
    obj: Any,
    kind: str | None = None,
    in_features: int | None = None,
    out_features: int | None = None,
    experts: int | None = None,
) -> int:
    """`register` with defaults read from the object: `num_experts` (a mixture), `hidden_size`,
    `in_features` and `out_features`, or the shape of a plain `weight` [out, in]. Returns the integer."""
    shape = getattr(getattr(obj, "weight", None), "shape", ())
    sizes = tuple(shape) if len(shape) == 2 and obj.weight.dtype != torch.uint8 else (None, None)
    experts = _first_int(obj, *_EXPERTS) if experts is None else experts
    hidden = _first_int(obj, "hidden_size")
    out_features = _first_int(obj, "out_features") or sizes[0] if out_features is None else out_features
    in_features = _first_int(obj, "in_features") or sizes[1] if in_features is None else in_features
    if kind is None:
        kind = "moe" if experts else "linear" if out_features else "mlp"
    if kind != "linear":
        out_features = in_features = in_features or hidden or out_features
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if not size:
            raise ValueError(
                f"opaq.runner: {type(obj).__name__} has no {name}: give it an attribute {name} "
                f"(a {kind} runner: {'a plain weight' if kind == 'linear' else 'hidden_size'} will do), "
                f"or pass {name}="
            )
    assert in_features and out_features
    return register(obj, kind, in_features, out_features, (experts or 0) if kind == "moe" else 0).id


def get_runner(runner_id: int) -> Any:
    """The object that `register_runner` or `register` was given, or the Runner of one made from weights."""
    found = Runner(runner_id)
    state = _states_by_handle.get(runner_id)
    return found if state is None else _registered[state].obj


def unregister_runner(runner_id: int) -> None:
    """`Runner.destroy` by the integer."""
    Runner(runner_id).destroy()

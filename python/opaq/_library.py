"""libopaq through ctypes: the structs and functions of include/opaq/*.h, and how errors become exceptions.
Needs the standard library only. The tests compare every declaration here with the headers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The version whose headers this file mirrors. A patch release changes no declaration.
MAJOR, MINOR = 0, 2

SPEC_TEXT_BYTES = 128
PLAN_TEXT_BYTES = 1024
# enum opaq_spec_property
_PROPERTIES = "is_delayed is_stochastic is_tiled is_plain_rowwise can_be_tiled tensor_amaxes column_covers_rows"
PROPERTIES = tuple(f"{_PROPERTIES} rows_per_scale has_row_scales gives_amax".split())
DERIVATIONS = ("tiled", "untiled", "current", "handed_on", "row_amaxes")  # enum opaq_derivation
ROLES = ("data", "scale", "amax")  # enum opaq_role
DIMS = ("one", "rows", "columns")  # enum opaq_dim
USAGES = {"rowwise": 1, "columnwise": 2, "both": 3}  # enum opaq_usage
ELEMENT_OF_SPEC = -1
RUNNER_KINDS = ("linear", "mlp", "moe")  # enum opaq_runner_kind
RUNNER_ABI = 1
_NAMED = {"void": None, "text": ctypes.c_char_p, "enum": ctypes.c_int, "size_t": ctypes.c_size_t}


def _type(name: str) -> Any:
    """The ctypes type of a name in the declarations below: a C type, an enum or struct without its prefix
    opaq_, or "text", a constant zero-terminated string."""
    if name.endswith("*"):
        return ctypes.c_void_p if name == "void*" else ctypes.POINTER(_type(name[:-1]))
    if name in _NAMED:
        return _NAMED[name]
    return globals().get(name) or getattr(ctypes, "c_" + name.removesuffix("_t"))


def _fields(text: str) -> list[tuple[str, Any]]:
    """Fields as C writes them: "int32_t rank; int64_t shape[8]"."""
    fields = []
    for declaration in text.split(";"):
        kind, name = declaration.split()
        name, _, length = name.rstrip("]").partition("[")
        fields.append((name, _type(kind) * int(length) if length else _type(kind)))
    return fields


class Error(ctypes.Structure):
    _fields_ = _fields("enum status; char text[512]")


class ElementInfo(ctypes.Structure):
    _fields_ = _fields(
        "text name; int bits; int exponent_bits; int mantissa_bits; int bias; float largest; int has_infinity;"
        "int has_nan"
    )


class Extent(ctypes.Structure):
    _fields_ = _fields("enum dim; int32_t per; int32_t to")


class BufferRow(ctypes.Structure):
    _fields_ = _fields(
        "text name; enum role; int usage; uint32_t options_needed; uint32_t options_excluded; int element;"
        "int rank; Extent extent[2]"
    )


class FormatRow(ctypes.Structure):
    _fields_ = _fields(
        "enum format; text name; uint32_t elements; enum element_default; uint32_t options; uint32_t rules;"
        "int32_t block_rows; int32_t block_columns; int32_t buffer_count; BufferRow* buffers"
    )


class LayoutRow(ctypes.Structure):
    _fields_ = _fields(
        "enum layout; enum format; text method; text data; text scale; text global; text input;"
        "text data_dtypes; text scale_dtypes; text scale_shape; text global_shape; enum rule;"
        "text data_shape; text global_dtypes; text input_dtypes"
    )


class LayoutShape(ctypes.Structure):
    _fields_ = _fields("int32_t rank; int32_t rows_dim; int32_t columns_dim; int64_t size[4]")


class Spec(ctypes.Structure):
    _fields_ = _fields(
        "uint8_t format; uint8_t element; uint8_t usage; uint8_t rule; uint16_t options;"
        "uint16_t hadamard_mask; uint16_t e4m3_max; uint8_t error_mode; uint8_t reserved; float epsilon"
    )


class ConfigValue(ctypes.Structure):
    _fields_ = _fields("int32_t depth; int32_t kind; text key; text text; int64_t integer")


class ConfigScheme(ctypes.Structure):
    _fields_ = _fields(
        "LayoutRow* row; Spec weight; Spec stacked; int32_t has_input; int32_t has_input_given; Spec input;"
        "Spec input_given; text input_scale"
    )


class Device(ctypes.Structure):
    _fields_ = _fields("int32_t type; int32_t index")


class Proto(ctypes.Structure):
    _fields_ = _fields(
        "int32_t rank; int32_t dtype; int32_t is_quantized; Device device; int64_t shape[8]; Spec spec"
    )


class Buffer(ctypes.Structure):
    _fields_ = _fields(
        "text name; enum role; int usage; enum element; int packing; int entry_bytes; int32_t rank;"
        "int64_t shape[8]; int64_t strides[8]; size_t bytes"
    )


class Span(ctypes.Structure):
    _fields_ = _fields("void* data; size_t bytes")


class View(ctypes.Structure):
    _fields_ = _fields("Proto proto; int64_t row_stride; Span buffer[6]")


class Parallel(ctypes.Structure):
    _fields_ = _fields("void* run; void* context")


class Execution(ctypes.Structure):
    _fields_ = _fields("Device device; void* stream; Parallel* parallel")


class Random(ctypes.Structure):
    _fields_ = _fields("uint64_t seed; uint64_t offset")


class QuantizeArgs(ctypes.Structure):
    _fields_ = _fields("float* scale; float* amax_rowwise; float* amax_columnwise; float* amax; Random random")


class Noise(ctypes.Structure):
    _fields_ = _fields("double signal; double noise")


class ArgumentRow(ctypes.Structure):
    _fields_ = _fields("text name; enum kind; text default_text")


class OutputRow(ctypes.Structure):
    _fields_ = _fields(
        "text name; enum shape_source; int shape_argument; int first_argument; int dtype_argument; int dtype;"
        "int device_argument; int slots; int is_random"
    )


class Form(ctypes.Structure):
    _fields_ = _fields("int32_t kind; Spec spec")


class Tensor(ctypes.Structure):
    _fields_ = _fields(
        "void* data; int32_t dtype; int32_t rank; Device device; int64_t shape[8]; int64_t strides[8]"
    )


class Stored(ctypes.Structure):
    _fields_ = _fields("Tensor data; Tensor scale; Tensor global")


class Value(ctypes.Structure):
    _fields_ = _fields("Tensor* tensors; text text; int64_t* sizes; int64_t count; int64_t integer")


class Op(ctypes.Structure):
    _fields_ = _fields(
        "text name; int argument_count; ArgumentRow argument[16]; int output_count; OutputRow output[6];"
        "int returns_one"
    )


class RunnerInfo(ctypes.Structure):
    _fields_ = _fields(
        "int32_t kind; int64_t in_features; int64_t out_features; int64_t experts;"
        "int64_t multiplications; size_t bytes; char format[264]; char kernel[64]"
    )


class RunnerCall(ctypes.Structure):
    _fields_ = _fields(
        "Tensor* inputs; int32_t input_count; Tensor* output; Span workspace; Execution* execution"
    )


class RunnerFunctions(ctypes.Structure):
    _fields_ = _fields("uint32_t abi; void* workspace; void* run; void* destroy")


# The functions that Python calls, without the prefix opaq_. Those that end in Error* return a status.
FUNCTIONS = """
text version()
text status_name(enum)
uint32_t cpu_features()
size_t cpu_describe(uint32_t, text, size_t)
ElementInfo* element_info(enum)
void element_decode_array(enum, void*, int64_t, float*)
void element_encode_array(enum, float*, int64_t, enum, void*)
void element_encode_stochastic_array(enum, float*, uint32_t*, int64_t, void*)
FormatRow* format_row(enum)
LayoutRow* layout_row(int)
text layout_name(enum)
int layout_shape(text, enum, int64_t, int64_t, LayoutShape*)
int layout_scheme(enum, int, ConfigScheme*)
enum config_read(ConfigValue*, int64_t, void**, Error*)
void config_destroy(void*)
ConfigScheme* config_scheme(void*, int64_t)
text config_target(void*, int64_t, int64_t)
text config_ignored(void*, int64_t)
text config_weight_name(void*, int64_t)
enum patterns_create(void**, Error*)
enum patterns_add(void*, text, Error*)
int64_t patterns_find(void*, text)
void patterns_destroy(void*)
text option_name(enum)
text activation_name(enum)
text rule_name(enum)
enum spec_parse(text, size_t, Spec*, Error*)
enum spec_print(Spec*, text, size_t, Error*)
int64_t spec_query(Spec*, enum)
enum spec_derive(Spec*, enum, Spec*, Error*)
enum plan_set(text, text, text, text, size_t, Error*)
enum plan_get(text, text, text, size_t, Error*)
enum proto_make(int64_t*, int, enum, Spec*, Device, Proto*, Error*)
int proto_buffer_count(Proto*)
enum proto_buffer(Proto*, int, Buffer*, Error*)
enum view_plain(int64_t*, int64_t*, int, enum, Device, void*, size_t, View*, Error*)
enum view_quantized(Proto*, Span*, int, View*, Error*)
enum pool_create(int, void**, Error*)
void pool_destroy(void*)
Parallel pool_parallel(void*)
enum quantize(View*, QuantizeArgs*, Execution*, View*, Error*)
enum dequantize(View*, int, Execution*, View*, Error*)
int64_t amax_count(Proto*, enum)
enum noise_measure(View*, View*, int, Execution*, Noise*, Error*)
double noise_sqnr(Noise*)
int64_t rows_together(Spec*)
text quantize_kernel(Spec*)
text dequantize_kernel(Spec*)
int op_count()
Op* op_at(int)
int op_changes(Op*)
enum op_form(Op*, Value*, int, Form*, Error*)
enum runner_create(Op*, Value*, Execution*, int64_t*, Error*)
enum runner_register(RunnerInfo*, RunnerFunctions*, void*, int64_t*, Error*)
enum runner_query(int64_t, RunnerInfo*, Error*)
enum runner_destroy(int64_t, Error*)
int runner_count()
text linear_kernel(Spec*, Spec*, enum, enum)
text device_linear_kernel(Device, Spec*, Spec*, enum, enum)
text kernel_at(int, int*)
text kernel_forced()
enum kernel_force(text, Error*)
enum cpu_check(Error*)
enum device_check(Device, Error*)
enum stored_import(View*, int64_t, Stored*, Error*)
enum stored_export(View*, int64_t, int64_t, Stored*, Error*)
enum stored_check(Proto*, int64_t, Stored*, Error*)
enum stored_describe(Proto*, int64_t, Stored*, Error*)
"""


class OpaqError(ValueError):
    """An error of the library, with its text; `status` is the name of the opaq_status ("TEXT", "SHAPE")."""

    def __init__(self, text: str, status: str = "UNKNOWN") -> None:
        super().__init__(text)
        self.status = status


class OpaqUnsupportedError(OpaqError, NotImplementedError):
    """A valid request that is not supported."""


def error_of(status: int, text: str) -> OpaqError:
    """The exception for a status of the library."""
    name = library.opaq_status_name(status).decode()
    return (OpaqUnsupportedError if name == "UNSUPPORTED" else OpaqError)(text, name)


def _find() -> Path:
    given = os.environ.get("OPAQ_LIBRARY")
    if given and not Path(given).is_file():
        raise ImportError(f"opaq: OPAQ_LIBRARY is {given!r}, which is not a file.")
    if given:
        return Path(given).resolve()
    package = Path(__file__).resolve().parent
    beside = package / "libopaq.so"
    built = package.parents[1] / "build" / "libopaq.so"  # the package in its repository, after `make`
    for file in (beside, built):
        if file.exists():
            return file
    raise ImportError(
        f"opaq: there is no libopaq.so beside the package ({package}) and OPAQ_LIBRARY does not name one; "
        "install opaq with pip, run make in its repository, or set OPAQ_LIBRARY to the libopaq.so of a build."
    )


def _load(file: Path) -> ctypes.CDLL:
    try:
        opened = ctypes.CDLL(str(file))
        opened.opaq_version.restype = ctypes.c_char_p
        version = opened.opaq_version().decode()
    except (OSError, AttributeError) as error:
        raise ImportError(f"opaq: {file} is not a libopaq that can be opened here: {error}") from error
    if version.split(".")[:2] != [str(MAJOR), str(MINOR)]:
        raise ImportError(f"opaq: {file} has version {version}, this package needs {MAJOR}.{MINOR}.")
    for line in FUNCTIONS.split("\n")[1:-1]:
        result, name, arguments = line.rstrip(")").replace("(", " ", 1).split(" ", 2)
        function = getattr(opened, "opaq_" + name)
        function.restype = _type(result)
        function.argtypes = [_type(kind) for kind in arguments.split(", ") if kind]
    return opened


path = _find()
library = _load(path)
version: str = library.opaq_version().decode()


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status; anything but OPAQ_OK becomes an OpaqError."""
    error = Error()
    status = getattr(library, name)(*arguments, ctypes.byref(error))
    if status != 0:
        raise error_of(status, error.text.decode(errors="replace"))


call("opaq_cpu_check")  # report an invalid OPAQ_CPU at import


@contextmanager
def threads(count: int) -> Iterator[Any]:
    """An execution on the CPU with `count` threads; 0 means one per processor."""
    if count == 1:
        yield None
        return
    pool = ctypes.c_void_p()
    call("opaq_pool_create", count, pool)
    try:
        parallel = library.opaq_pool_parallel(pool)
        yield ctypes.pointer(Execution(parallel=ctypes.pointer(parallel)))
    finally:
        library.opaq_pool_destroy(pool)

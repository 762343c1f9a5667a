"""An independent implementation of docs/formats.md, for the golden vectors. Needs NumPy and ml_dtypes only.

It is written from the specification and shares no code with the C library. All arithmetic is float32 with
one rounding per operation; ml_dtypes does every cast to a narrow element. Both copies of a tensor use the
same functions: a copy is a matrix whose blocks run along its last axis, x itself (rowwise) or x transposed
(columnwise).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
FLT_MIN_NORMAL = np.finfo(np.float32).tiny
NAN = np.float32(np.nan)  # 0x7FC00000

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
AnyArray = NDArray[Any]
Bits = ByteArray | None  # the random byte of each element

ROWWISE, COLUMNWISE, BOTH = 1, 2, 3
FORMATS = ("fp8", "fp8row", "fp8blk1", "fp8blk2", "mxfp8", "mxfp4", "nvfp4")
RULES = ("te", "ocp", "rceil", "compressed-tensors", "modelopt")

# ---------------------------------------------------------------------------------------- elements

ELEMENT_TYPE = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
LARGEST = {"e2m1": F32(6), "e4m3": F32(448), "e5m2": F32(57344)}
LARGEST_CODE = {"e2m1": 0x7, "e4m3": 0x7E, "e5m2": 0x7B}
NAN_CODE = {"e2m1": 0x7, "e4m3": 0x7F, "e5m2": 0x7F}
SIGN_BIT = {"e2m1": 0x8, "e4m3": 0x80, "e5m2": 0x80}
MX_EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}


def decode(element: str, codes: ByteArray) -> FloatArray:
    """The values of codes (one per byte)."""
    return canonical(codes.astype(np.uint8).view(ELEMENT_TYPE[element]).astype(np.float32))


def encode(element: str, v: FloatArray) -> ByteArray:
    """Saturating, nearest, ties to even; every NaN becomes the positive NaN code."""
    code = np.clip(v, -LARGEST[element], LARGEST[element]).astype(ELEMENT_TYPE[element]).view(np.uint8)
    return np.where(np.isnan(v), np.uint8(NAN_CODE[element]), code)


def encode_stochastic(element: str, v: FloatArray, bits: ByteArray) -> ByteArray:
    """The largest code value that is at most |v| + bits/256 * step, with the sign of v."""
    grid = decode(element, np.arange(LARGEST_CODE[element] + 1, dtype=np.uint8))
    a = np.abs(v)
    below = np.clip(np.searchsorted(grid, a, side="right") - 1, 0, len(grid) - 2)
    step = grid[below + 1] - grid[below]
    t = a + (bits.astype(np.float32) / F32(256)) * step
    code = np.searchsorted(grid, t, side="right") - 1
    code = code + np.where(np.signbit(v), SIGN_BIT[element], 0)
    return np.where(np.isnan(v), NAN_CODE[element], code).astype(np.uint8)


def encode_e2m1_below_zero(v: FloatArray) -> ByteArray:
    """E2M1 with the sign bit only where v < 0 (rules compressed-tensors and modelopt)."""
    code = encode("e2m1", np.abs(v)) + np.where(v < 0, np.uint8(8), np.uint8(0))
    return np.where(np.isnan(v), np.uint8(7), code)


def encode_e2m1_modelopt_mx(v: FloatArray) -> ByteArray:
    """As above, but ties go to the smaller magnitude and an exact zero becomes code 8."""
    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    code = np.searchsorted(halfway, np.abs(v), side="left") + np.where(v < 0, 8, 0)
    code = np.where(v == 0, 8, code)
    return np.where(np.isnan(v), 7, code).astype(np.uint8)


def canonical(v: FloatArray) -> FloatArray:
    """Every NaN becomes 0x7FC00000."""
    return np.where(np.isnan(v), NAN, v).astype(np.float32)


def to_bf16(v: FloatArray) -> FloatArray:
    """Rounded to bfloat16 (IEEE overflow: infinity) and widened again."""
    return v.astype(ml_dtypes.bfloat16).astype(np.float32)


# ------------------------------------------------------------------------------------- random bits
def philox4x32_10(counter: tuple[NDArray[np.uint64], ...], key: tuple[int, int]) -> list[NDArray[np.uint64]]:
    """Ten rounds of Philox 4x32 on arrays of counters; 32-bit words in uint64."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def random_bytes(rows: int, n: int, seed: int, offset: int, columnwise: bool) -> ByteArray:
    """One random byte for each element (row, c) of a copy."""
    groups = ceil_div(n, 16)
    g = np.arange(rows * groups, dtype=np.uint64)
    high = ((offset >> 32) + (0x80000000 if columnwise else 0)) & 0xFFFFFFFF
    low = np.full_like(g, offset & 0xFFFFFFFF)
    counter = (g & np.uint64(0xFFFFFFFF), g >> np.uint64(32), low, np.full_like(g, high))
    words = np.stack(philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    return words.astype("<u4").view(np.uint8).reshape(rows, groups * 16)[:, :n]


# --------------------------------------------------------------------------------------- spec text
@dataclass(frozen=True)
class Spec:
    """A quantizer, parsed from its text."""

    format: str
    element: str = "e4m3"
    usage: int = ROWWISE
    delayed: bool = False
    pow2: bool = False
    two_d: bool = False
    rht: int | None = None  # the sign mask
    sr: bool = False
    rowscaled: bool = False
    four_over_six: str | None = None  # "mae" or "mse"
    swizzle: bool = False
    global_: bool = False
    tiled: bool = False
    e4m3_max: int = 448
    eps: str = "0"  # the shortest decimal text that gives the same float32
    rule: str = "te"

    @property
    def is_mx(self) -> bool:
        return self.format in ("mxfp8", "mxfp4")

    @property
    def is_fp8(self) -> bool:
        return self.format.startswith("fp8")

    def text(self) -> str:
        """The canonical text."""
        four_bits = self.format in ("mxfp4", "nvfp4")
        parts = [self.format + (".e5m2" if self.element == "e5m2" and not four_bits else "")]
        parts += {ROWWISE: [], COLUMNWISE: ["columnwise"], BOTH: ["both"]}[self.usage]
        parts += ["delayed"] * self.delayed + ["pow2"] * self.pow2 + ["2d"] * self.two_d
        if self.rht is not None:
            parts.append("rht" if self.rht == 0xD7E8 else f"rht=0x{self.rht:04x}")
        parts += ["sr"] * self.sr + ["rowscaled"] * self.rowscaled
        if self.four_over_six:
            parts.append("4over6" if self.four_over_six == "mae" else "4over6=mse")
        parts += ["swizzle"] * self.swizzle + ["global"] * self.global_ + ["tiled"] * self.tiled
        if self.format == "nvfp4" and self.e4m3_max != (256 if self.four_over_six else 448):
            parts.append(f"e4m3max={self.e4m3_max}")
        if F32(self.eps) != 0:
            parts.append(f"eps={self.eps}")
        if self.rule != "te":
            parts.append(f"rule={self.rule}")
        return "+".join(parts)


def parse(text: str) -> Spec:
    """Parses a spec text. Does not check which options exclude each other."""
    head, *options = text.split("+")
    name, _, element = head.partition(".")
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}")
    allowed = ("e2m1",) if name in ("mxfp4", "nvfp4") else ("e4m3", "e5m2")
    if element and element not in allowed:
        raise ValueError(f"{name} does not take {element!r}")
    spec = Spec(name, element or allowed[0])
    e4m3_max = 0
    for option in options:
        key, _, value = option.partition("=")
        if option in ("rowwise", "columnwise", "both"):
            spec = replace(spec, usage={"rowwise": ROWWISE, "columnwise": COLUMNWISE, "both": BOTH}[option])
        elif option in ("delayed", "pow2", "2d", "sr", "rowscaled", "swizzle", "global", "tiled"):
            flag: dict[str, Any] = {{"2d": "two_d", "global": "global_"}.get(option, option): True}
            spec = replace(spec, **flag)
        elif key == "rht":
            spec = replace(spec, rht=int(value, 16) if value else 0xD7E8)
        elif key == "4over6" and value in ("", "mae", "mse"):
            spec = replace(spec, four_over_six=value or "mae")
        elif key == "e4m3max" and value in ("448", "256"):
            e4m3_max = int(value)
        elif key == "eps":
            spec = replace(spec, eps=value)
        elif key == "rule" and value in RULES:
            spec = replace(spec, rule=value)
        else:
            raise ValueError(f"unknown option {option!r}")
    return replace(spec, e4m3_max=e4m3_max or (256 if spec.four_over_six else 448))


# ------------------------------------------------------------------------------------------ blocks
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def pad(v: AnyArray, rows: int, columns: int) -> AnyArray:
    """v, extended with zeros to rows x columns."""
    out = np.zeros((rows, columns), v.dtype)
    out[: v.shape[0], : v.shape[1]] = v
    return out


def block_shape(s: Spec, rows: int, n: int) -> tuple[int, int]:
    """Rows and columns that share a scale in a copy of rows x n."""
    if s.format == "fp8":
        return max(rows, 1), max(n, 1)
    if s.format == "fp8row":
        return 1, max(n, 1)
    length = 128 if s.is_fp8 else 32 if s.is_mx else 16
    return (length if s.two_d or s.format == "fp8blk2" else 1), length


def to_blocks(s: Spec, v: FloatArray) -> FloatArray:
    """Zero-padded to whole blocks and reshaped: (block row, row in it, block column, column in it)."""
    br, bc = block_shape(s, *v.shape)
    rows, n = round_up(v.shape[0], br), round_up(v.shape[1], bc)
    rows = br if s.format == "fp8" else rows  # one scale even for an empty tensor
    n = bc if s.format in ("fp8", "fp8row") else n
    return pad(v, rows, n).reshape(rows // br, br, n // bc, bc)


def spread(s: Spec, per_block: FloatArray, rows: int, n: int) -> FloatArray:
    """Repeats per-block values for each element of a copy."""
    br, bc = block_shape(s, rows, n)
    return np.repeat(np.repeat(per_block, br, axis=0), bc, axis=1)[:rows, :n]


def amax_of(s: Spec, v: FloatArray, axis: tuple[int, ...]) -> FloatArray:
    """The largest |v|; rule te ignores NaNs, the others return them."""
    largest = np.fmax if s.rule == "te" else np.maximum
    return canonical(largest.reduce(np.abs(v), axis=axis, initial=F32(0)))


# ------------------------------------------------------------------------------------------ copies
@dataclass
class Copy:
    """One quantized copy, before its codes and scales are arranged in memory."""

    codes: ByteArray  # one per byte, rows x n
    scale: AnyArray  # one per block: float32 (FP8) or bytes
    amax: FloatArray = field(default_factory=lambda: np.zeros(1, np.float32))


def round_elements(s: Spec, scaled: FloatArray, bits: Bits) -> ByteArray:
    """Rounds scaled values to codes, as the rule rounds."""
    assert scaled.dtype == np.float32
    if bits is not None:
        return encode_stochastic(s.element, scaled, bits)
    if s.element == "e2m1" and s.rule == "modelopt" and s.is_mx:
        return encode_e2m1_modelopt_mx(scaled)
    if s.element == "e2m1" and s.rule in ("compressed-tensors", "modelopt"):
        return encode_e2m1_below_zero(scaled)
    if s.rule == "compressed-tensors":  # a zero point of 0 is added
        scaled = scaled + F32(0)
    return encode(s.element, scaled)


def fp8_copy(s: Spec, v: FloatArray, bits: Bits, given: float | None, dtype_max: np.float32) -> Copy:
    amax = amax_of(s, to_blocks(s, v), (1, 3))
    largest = LARGEST[s.element]
    if s.rule != "te":
        scale = np.full_like(amax, F32(given)) if s.delayed else amax / largest
        scale = np.where(
            (scale == 0) & (not s.delayed), F32(2.0**-23 if s.rule == "compressed-tensors" else 1), scale
        )
        codes = round_elements(s, v / spread(s, scale, *v.shape), bits)
        return Copy(codes, canonical(scale), amax.ravel())
    if s.delayed:
        scale = np.full_like(amax, F32(given))
    else:
        a = np.where(amax < F32(s.eps), F32(s.eps), amax)
        scale = largest / a
        scale = np.where(np.isinf(scale), FLT_MAX if s.format in ("fp8", "fp8row") else dtype_max, scale)
        scale = np.where((a == 0) | ~np.isfinite(a), F32(1), scale)
        if s.pow2:
            scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    codes = round_elements(s, v * spread(s, scale, *v.shape), bits)
    return Copy(codes, canonical(F32(1) / scale), amax.ravel())


def mx_scale(s: Spec, a: FloatArray) -> ByteArray:
    """The E8M0 byte for an amax, by rule."""
    largest = LARGEST[s.element]
    powers = decode("e8m0", np.arange(255, dtype=np.uint8))
    if s.rule in ("te", "rceil"):
        e = np.minimum(np.searchsorted(powers, a * (F32(1) / largest), side="left"), 254)
        return np.where((s.rule == "rceil") & ~np.isfinite(a), 255, e).astype(np.uint8)
    if s.rule == "modelopt":
        d = a / largest
        log2 = np.log2(d.astype(np.float64)).astype(np.float32)
        zero = (d == 0) | np.isnan(d)
        return np.where(zero, 0, np.clip(np.ceil(np.where(zero, F32(0), log2)) + 127, 0, 254)).astype(np.uint8)
    raw = canonical(a).view(np.uint32).astype(np.int64) + ((1 << 21) if s.rule == "compressed-tensors" else 0)
    x = raw >> 23
    e = np.where(x == 0, 0, np.maximum(0, x - MX_EMAX[s.element]))
    return np.where((x >= 255) | np.isnan(a), 255, e).astype(np.uint8)


def mx_copy(s: Spec, v: FloatArray, bits: Bits) -> Copy:
    e = mx_scale(s, amax_of(s, to_blocks(s, v), (1, 3)))
    inverse = decode("e8m0", np.where(e == 255, 255, 254 - e).astype(np.uint8))
    return Copy(round_elements(s, v * spread(s, inverse, *v.shape), bits), e)


def nvfp4_copy(s: Spec, v: FloatArray, bits: Bits) -> Copy:
    amax = amax_of(s, v, (1,)) if s.rowscaled else amax_of(s, v, (0, 1)).reshape(1)
    A = amax[:, None] if s.rowscaled else amax.reshape(1, 1)  # broadcasts to (block row, block column)
    blocks = to_blocks(s, v)
    b = amax_of(s, blocks, (1, 3))
    m = F32(s.e4m3_max)
    if s.rule == "compressed-tensors":
        g = (F32(1) / np.maximum(A, FLT_MIN_NORMAL)) * F32(2688)
        g = np.where(np.isfinite(g), g, F32(1))
        scale = encode("e4m3", g * (b / F32(6)))
        scale = np.where(scale == 0, encode("e4m3", np.array(0.125, np.float32)), scale)
        divisor: FloatArray = np.divide(decode("e4m3", scale), g)
        codes = round_elements(s, np.divide(v, spread(s, divisor, *v.shape)), bits)
        return Copy(codes, scale, canonical(g.ravel()) if s.global_ else amax)
    if s.rule == "modelopt":
        c = np.broadcast_to(A / F32(2688), b.shape)
        scale32 = b / (F32(6) * c)
        scale32 = np.where((scale32 == 0) | (c == 0), F32(1), scale32)
        scale = encode("e4m3", np.clip(scale32, F32(2.0**-9), F32(448)))
        codes = round_elements(s, v / spread(s, decode("e4m3", scale) * c, *v.shape), bits)
        codes = np.where(A / F32(2688) == 0, np.uint8(0), codes)
        return Copy(codes, scale, canonical(amax / F32(2688)) if s.global_ else amax)

    G = np.fmin((m * F32(6)) / A, FLT_MAX)
    G = np.where((A == 0) | (G == 0), F32(1), G)

    def multiplier(scale: ByteArray) -> FloatArray:
        return np.fmin(F32(1) / (decode("e4m3", scale) * (F32(1) / G)), FLT_MAX)

    if not s.four_over_six:
        scale = encode("e4m3", np.fmin(b * (G * (F32(1) / F32(6))), FLT_MAX))
        return Copy(round_elements(s, v * spread(s, multiplier(scale), *v.shape), bits), scale, amax)

    base = (b / F32(6)) * G
    candidates = [encode("e4m3", np.fmin(x, F32(448))) for x in (base, base * F32(1.5))]
    error6, error4 = (four_over_six_error(s, blocks, c, multiplier(c), A) for c in candidates)
    scale = np.where(error4 < error6, candidates[1], candidates[0])
    return Copy(round_elements(s, v * spread(s, multiplier(scale), *v.shape), bits), scale, amax)


def four_over_six_error(
    s: Spec, blocks: FloatArray, scale: ByteArray, t: FloatArray, A: FloatArray
) -> FloatArray:
    """The error of one candidate scale per block, summed in the order of docs/formats.md."""
    wide = (slice(None), None, slice(None), None)
    q = decode("e2m1", encode("e2m1", blocks * t[wide]))
    d = ((q * decode("e4m3", scale)[wide]) * A[wide]) / (F32(6) * F32(s.e4m3_max)) - blocks
    d = np.abs(d) if s.four_over_six == "mae" else d * d
    rows = np.zeros(d.shape[:3], np.float32)
    for i in range(16):
        rows = rows + d[:, :, :, i]
    while rows.shape[1] > 1:  # 16 -> 8 -> 4 -> 2 -> 1: row i with row i + half
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def butterflies(v: FloatArray) -> FloatArray:
    """The unnormalised Walsh-Hadamard transform of groups of 16 along the last axis."""
    shape = v.shape
    v = v.reshape(-1, 16).copy()
    for h in (1, 2, 4, 8):
        low = [i for i in range(16) if not i & h]
        high = [i + h for i in low]
        v[:, low], v[:, high] = v[:, low] + v[:, high], v[:, low] - v[:, high]
    return v.reshape(shape)


def flip_signs(v: FloatArray, mask: int) -> FloatArray:
    return np.where((mask >> (np.arange(v.shape[1]) % 16)) & 1 == 1, -v, v)


def quantize_copy(
    s: Spec, x: FloatArray, usage: int, dtype_max: np.float32, scale: float | None, seed: int, offset: int
) -> Copy:
    """One copy of x (already float32) for one usage."""
    columnwise = usage == COLUMNWISE
    if columnwise and s.format == "fp8":  # the columnwise copy is the transpose of the rowwise one
        rowwise = quantize_copy(s, x, ROWWISE, dtype_max, scale, seed, offset)
        return Copy(rowwise.codes.T, rowwise.scale, rowwise.amax)
    v = x.T if columnwise else x
    if columnwise and s.rht is not None:
        v = pad(v, v.shape[0], round_up(v.shape[1], 16))
        v = canonical(to_bf16(butterflies(flip_signs(v, s.rht) * F32(0.25))))
    v = np.ascontiguousarray(v)
    bits = random_bytes(v.shape[0], v.shape[1], seed, offset, columnwise) if s.sr else None
    if s.is_fp8:
        return fp8_copy(s, v, bits, scale, dtype_max)
    return mx_copy(s, v, bits) if s.is_mx else nvfp4_copy(s, v, bits)


def dequantize_copy(s: Spec, copy: Copy, usage: int, rows: int, columns: int) -> FloatArray:
    """Dequantizes a copy to float32, rows x columns."""
    q = decode(s.element, copy.codes)
    if s.is_fp8:
        factor = copy.scale
    elif s.is_mx:
        factor = decode("e8m0", copy.scale)
    else:
        A = copy.amax[:, None] if s.rowscaled else copy.amax.reshape(1, 1)
        scale = decode("e4m3", copy.scale)
        if s.global_ and s.rule == "compressed-tensors":
            factor = np.where((scale == 0) & (A == 0), F32(0), scale / A)
        elif s.global_:
            factor = scale * A
        else:
            factor = (scale * A) * (F32(1) / (F32(6) * F32(s.e4m3_max)))
    columnwise = usage == COLUMNWISE
    if columnwise and s.format == "fp8":  # one scale for the tensor, so both copies have it
        y = q * factor
    else:
        y = q * spread(s, factor, *q.shape)
    if columnwise and s.rht is not None:
        y = flip_signs(butterflies(y * F32(0.25)), s.rht)
    y = y.T if columnwise else y
    return canonical(np.ascontiguousarray(y[:rows, :columns]))


# ------------------------------------------------------------------------------------------ layout
def pack(codes: ByteArray, group: int) -> ByteArray:
    """Two codes per byte, the even element in the low half; rows are padded to whole groups."""
    codes = pad(codes, codes.shape[0], round_up(codes.shape[1], group))
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def swizzle(scale: ByteArray) -> ByteArray:
    """The bytes of a scale matrix in 128 x 4 tiles."""
    rows, columns = scale.shape
    r, c = np.indices((rows, columns))
    out = np.zeros(rows * columns, np.uint8)
    out[((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale
    return out


def tile_codes(s: Spec, codes: ByteArray) -> ByteArray:
    """4-bit codes in tiles of 16 x 64: eight stripes of 64 bytes for 8 columns each, with four bytes per row;
    the first four columns are in the low halves, the others in the high halves. 8-bit codes in tiles of 32 x
    32: pairs of columns, with two bytes per row each."""
    if s.format not in ("nvfp4", "mxfp4"):
        padded = pad(codes, round_up(codes.shape[0], 32), round_up(codes.shape[1], 32))
        rows, columns = padded.shape
        tiles = padded.reshape(rows // 32, 32, columns // 32, 16, 2).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(tiles).reshape(rows, columns)
    padded = pad(codes, round_up(codes.shape[0], 16), round_up(codes.shape[1], 64))
    rows, columns = padded.shape
    stripes = padded.reshape(rows // 16, 16, columns // 64, 8, 2, 4).transpose(0, 2, 3, 1, 4, 5)
    packed = stripes[..., 0, :] | (stripes[..., 1, :] << 4)
    return np.ascontiguousarray(packed).astype(np.uint8).reshape(rows, columns // 2)


def tile_scales(scale: ByteArray, tile_rows: int) -> ByteArray:
    """Scales ordered by block column, then by the rows of a tile."""
    rows, blocks = scale.shape
    made = scale.reshape(rows // tile_rows, tile_rows, blocks).transpose(0, 2, 1)
    return np.ascontiguousarray(made).reshape(rows, blocks)


def layout_data(s: Spec, copy: Copy, columnwise: bool) -> ByteArray:
    if s.tiled:
        return tile_codes(s, copy.codes)
    if s.format == "nvfp4":
        return pack(copy.codes, 16)
    codes = copy.codes.T if columnwise and s.is_mx else copy.codes
    return pack(codes, 32) if s.format == "mxfp4" else np.ascontiguousarray(codes)


def layout_scale(s: Spec, copy: Copy, columnwise: bool) -> AnyArray:
    rows, n = copy.codes.shape
    if s.format == "fp8":
        return copy.scale.reshape(1)
    if s.format == "fp8row":
        return copy.scale.reshape(rows, 1)
    if s.format == "fp8blk1":
        return pad(copy.scale.T, ceil_div(n, 128), round_up(rows, 4))
    if s.format == "fp8blk2":
        return pad(copy.scale, ceil_div(rows, 128), round_up(ceil_div(n, 128), 4))
    br, bc = block_shape(s, rows, n)
    each_row = np.repeat(copy.scale, br, axis=0)[:rows]
    if s.tiled:
        tile_rows, tile_columns = (32, 32) if s.format == "mxfp8" else (16, 64)
        blocks = round_up(n, tile_columns) // bc
        return tile_scales(pad(each_row, round_up(rows, tile_rows), blocks), tile_rows)
    matrix = pad(each_row, round_up(rows, 128), round_up(ceil_div(n, bc), 4))
    listed = matrix.T if s.is_mx and columnwise else matrix
    return swizzle(matrix).reshape(listed.shape) if s.swizzle else np.ascontiguousarray(listed)


def to_bytes(v: AnyArray) -> ByteArray:
    """float32 as little-endian bytes in an added last axis; bytes unchanged."""
    if v.dtype == np.uint8:
        return np.ascontiguousarray(v)
    return np.ascontiguousarray(v.astype("<f4")).view(np.uint8).reshape(*v.shape, 4)


@dataclass
class Result:
    """Buffers in flatten order, the returned amax (format fp8), and the copies by usage."""

    buffers: list[tuple[str, ByteArray]]
    amax: np.float32 | None
    copies: dict[int, Copy]
    spec: Spec
    shape: tuple[int, int]

    def dequantize(self, usage: int) -> FloatArray:
        with np.errstate(all="ignore"):
            return dequantize_copy(self.spec, self.copies[usage], usage, *self.shape)


def quantize(text: str, x: AnyArray, scale: float | None = None, seed: int = 0, offset: int = 0) -> Result:
    """Quantizes a float32, bfloat16 or float16 matrix; `scale` is the given scale of `delayed`."""
    s = parse(text)
    dtype_max = F32(ml_dtypes.finfo(x.dtype).max)
    with np.errstate(all="ignore"):
        wide = canonical(x.astype(np.float32))
        usages = [u for u in (ROWWISE, COLUMNWISE) if s.usage & u]
        copies = {u: quantize_copy(s, wide, u, dtype_max, scale, seed, offset) for u in usages}
        buffers: list[tuple[str, ByteArray]] = []
        for usage, copy in copies.items():
            columnwise = usage == COLUMNWISE
            side = "_columnwise" if columnwise else "_rowwise"
            data = "_transpose" if columnwise else "_data"
            data = "_tiles" if s.tiled else data if s.format == "fp8" else side + "_data"
            scales = "_tile_scales" if s.tiled and not s.is_fp8 else side + "_scale_inv"
            buffers.append((data, layout_data(s, copy, columnwise)))
            if s.format != "fp8":
                buffers.append((scales, to_bytes(layout_scale(s, copy, columnwise))))
        first = copies[usages[0]]
        if s.format == "fp8":
            buffers.append(("_scale_inv", to_bytes(layout_scale(s, first, False))))
        if s.format == "nvfp4":
            kept = "_global" if s.global_ else "_amax"
            names = {ROWWISE: kept + "_rowwise", COLUMNWISE: kept + "_columnwise"}
            buffers += [(names[u], to_bytes(copies[u].amax)) for u in usages]
    return Result(buffers, first.amax[0] if s.format == "fp8" else None, copies, s, x.shape)

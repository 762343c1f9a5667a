"""Element conversions against PyTorch's casts. PyTorch differs in these:

e4m3   PyTorch 2.13 saturates, infinity included, and keeps a NaN's sign;
e5m2   it overflows to infinity, as the IEEE variant; its NaN is 0x7F or 0xFF where opaq's is 0x7E or 0xFE;
e8m0   it ignores the sign and stores zero as 0x00, where opaq has 0xFF for both;
f16, bf16   it overflows to infinity; its NaNs are not compared, they depend on the processor."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import need
from element_values import (
    IEEE,
    SATURATE,
    Floats,
    all_codes,
    bits_of,
    decode,
    encode,
    hard_values,
    random_values,
    widened,
)

torch = need("torch")

DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


def torch_codes(element: str, values: Floats) -> NDArray:
    cast = torch.from_numpy(values.copy()).to(DTYPES[element])
    return cast.view(torch.uint16 if cast.element_size() == 2 else torch.uint8).numpy()


def inputs(element: str) -> Floats:
    parts = [hard_values(element), widened("bf16"), widened("f16"), random_values(1_000_000, 9)]
    return np.concatenate(parts)


@pytest.mark.parametrize("element", DTYPES)
def test_every_code_decodes(element: str) -> None:
    codes = all_codes(element)
    want = torch.from_numpy(codes).view(DTYPES[element]).to(torch.float32).numpy()
    got = decode(element, codes)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(bits_of(got)[number], bits_of(want)[number])


@pytest.mark.parametrize(
    ("element", "overflow"), [("e4m3", SATURATE), ("e5m2", IEEE), ("f16", IEEE), ("bf16", IEEE)]
)
def test_numbers_encode(element: str, overflow: int) -> None:
    values = inputs(element)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(encode(element, values, overflow), torch_codes(element, values))


def test_powers_of_two_encode() -> None:
    values = inputs("e8m0")
    values = values[values > 0]
    got, want = encode("e8m0", values, IEEE), torch_codes("e8m0", values)
    np.testing.assert_array_equal(got, want)


def test_numbers_without_an_e8m0_code() -> None:
    values = np.array([0.0, -0.0, -1.0, -3.5, -np.inf, np.nan], np.float32)
    assert list(encode("e8m0", values, IEEE)) == [0xFF] * 6
    assert list(torch_codes("e8m0", values)) == [0, 0, 127, 129, 0xFF, 0xFF]


def test_nans_differ_as_documented() -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert list(encode("e4m3", nans, SATURATE)) == [0x7F] * 4
    assert list(encode("e4m3", nans, IEEE)) == list(torch_codes("e4m3", nans)) == [0x7F, 0xFF, 0x7F, 0xFF]
    assert list(encode("e5m2", nans, SATURATE)) == [0x7F] * 4
    assert list(encode("e5m2", nans, IEEE)) == [0x7E, 0xFE, 0x7E, 0xFE]
    assert list(torch_codes("e5m2", nans)) == [0x7F, 0xFF, 0x7F, 0xFF]

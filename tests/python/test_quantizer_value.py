"""Quantizer as a value: one text per value, one value per text, and errors with their position.
tests/c/test_spec_errors.c tests all invalid texts."""

from __future__ import annotations

import copy
import pickle
import re
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

import opaq
from element_values import round_to_float32
from opaq import OpaqError, Quantizer
from reference_quantizer import parse
from spec_texts import combinations, is_valid, valid_texts

NAMES = [row.name for row in opaq.formats()]


def value_of(text: str) -> bytes:
    return bytes(Quantizer(text).spec)


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("row", opaq.formats(), ids=NAMES)
def test_every_combination_parses_or_is_refused(row: opaq.FormatRow) -> None:
    counts = {True: 0, False: 0}
    for text in combinations(row):
        valid = is_valid(text)
        counts[valid] += 1
        if valid:
            quantizer = Quantizer(text)
            assert str(quantizer) == parse(text).text()
            assert Quantizer(str(quantizer)) == quantizer
        else:
            with pytest.raises(OpaqError) as caught:
                Quantizer(text)
            assert caught.value.status in ("SPEC", "TEXT"), text
    assert counts[True] > 30 and counts[False] > 0


def test_one_text_per_value() -> None:
    texts = valid_texts()
    assert len(texts) > 700
    values = {text: value_of(text) for text in texts}
    assert len(set(values.values())) == len(texts)
    assert len({Quantizer(text) for text in texts}) == len(texts)
    for text in texts:
        assert str(Quantizer(text)) == text


def test_properties_agree_with_the_text() -> None:
    for text in valid_texts():
        quantizer, spec = Quantizer(text), parse(text)
        assert (quantizer.format, quantizer.element, quantizer.rule) == (spec.format, spec.element, spec.rule)
        assert {"rowwise": 1, "columnwise": 2, "both": 3}[quantizer.usage] == spec.usage
        flags = {
            "global": spec.global_,
            "2d": spec.two_d,
            "rht": spec.rht is not None,
            "4over6": bool(spec.four_over_six),
        }
        names = ("delayed", "pow2", "sr", "rowscaled", "swizzle", "tiled")
        flags |= {name: getattr(spec, name) for name in names}
        assert {name for name, is_set in flags.items() if is_set} == set(quantizer.options)


def test_order_and_defaults_do_not_matter() -> None:
    for order in permutations(["both", "rht=0x0001", "sr", "rowscaled", "swizzle"]):
        assert str(Quantizer("+".join(["nvfp4", *order]))) == "nvfp4+both+rht=0x0001+sr+rowscaled+swizzle"
    for order in permutations(["eps=1e-3", "pow2", "sr", "columnwise", "rule=te"]):
        assert str(Quantizer("+".join(["fp8row.e4m3", *order]))) == "fp8row+columnwise+pow2+sr+eps=1e-3"
    for text, canonical in (
        ("nvfp4.e2m1+rowwise+e4m3max=448+rule=te", "nvfp4"),
        ("nvfp4+rht=0xd7e8", "nvfp4+rht"),
        ("nvfp4+e4m3max=256+4over6=mae", "nvfp4+4over6"),
        ("fp8+eps=0", "fp8"),
        ("fp8+eps=0.000e-7", "fp8"),
        ("fp8+delayed+eps=0", "fp8+delayed"),
        ("fp8+eps=250e-2", "fp8+eps=2.5"),
        ("fp8+eps=00.25", "fp8+eps=2.5e-1"),
    ):
        assert str(Quantizer(text)) == canonical
        assert Quantizer(text) == Quantizer(canonical) and hash(Quantizer(text)) == hash(Quantizer(canonical))


# -------------------------------------------------------------------------------------- Python's view


def test_repr_evaluates_to_itself() -> None:
    for text in valid_texts():
        quantizer = Quantizer(text)
        assert eval(repr(quantizer), {"Quantizer": Quantizer}) == quantizer
    assert repr(Quantizer("nvfp4+2d")) == "Quantizer('nvfp4+2d')"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy(protocol: int) -> None:
    quantizer = Quantizer("fp8blk1+both+pow2+eps=1e-12")
    assert pickle.loads(pickle.dumps(quantizer, protocol)) == quantizer
    assert copy.copy(quantizer) == copy.deepcopy(quantizer) == quantizer


def test_equality_is_with_quantizers_only() -> None:
    assert Quantizer("mxfp8") == Quantizer("mxfp8+rowwise")
    assert Quantizer("mxfp8") != Quantizer("mxfp8+both")
    assert Quantizer("mxfp8") != "mxfp8"
    assert len({Quantizer("mxfp8"), Quantizer("mxfp8.e4m3"), "mxfp8"}) == 2


def test_it_cannot_be_changed() -> None:
    quantizer = Quantizer("mxfp8")
    for name in ("_text", "_spec", "format", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(quantizer, name, 1)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(quantizer, name)
    quantizer.spec.format = 0  # changes a copy
    assert str(quantizer) == "mxfp8" and quantizer.format == "mxfp8"


@pytest.mark.parametrize("wrong", [None, 7, b"nvfp4", ["nvfp4"], Quantizer("nvfp4")])
def test_only_a_str_is_accepted(wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"expected a str such as 'nvfp4\+2d', got {type(wrong).__name__}"):
        Quantizer(wrong)


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("nvfp4+2d+rth", 9),
        ("fp8+pow2+eps=1e39", 9),
        ("fp8+pow2\n", 4),
        ("fp8+pow2\0", 4),
    ],
)
def test_an_error_has_the_position(text: str, position: int) -> None:
    with pytest.raises(OpaqError) as caught:
        Quantizer(text)
    assert caught.value.status == "TEXT"
    assert isinstance(caught.value, ValueError)
    found = re.search(r"at position (\d+)", str(caught.value))
    assert found, str(caught.value)
    # the position of the wrong part, or of its value
    assert position <= int(found.group(1)) <= position + len(text[position:].partition("=")[0]) + 1, str(
        caught.value
    )


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("nvfp4+2d+rht", "2d", "rht"),
        ("nvfp4+global", "te", "global"),
    ],
)
def test_a_contradiction_names_both_parts(text: str, one: str, other: str) -> None:
    with pytest.raises(OpaqError) as caught:
        Quantizer(text)
    assert caught.value.status == "SPEC"
    message = str(caught.value).replace(text, "")
    assert one in message and other in message, str(caught.value)


def test_long_and_unprintable_texts_are_refused() -> None:
    for text in ("fp8+eps=0." + "0" * 118, "x" * 100_000, "nvfp4+\u00e9", "nvfp4+\udcff", "\0"):
        with pytest.raises(OpaqError) as caught:
            Quantizer(text)
        assert caught.value.status == "TEXT"


def test_a_long_number_is_read() -> None:
    assert str(Quantizer("fp8+eps=0." + "0" * 117)) == "fp8"


def test_error_survives_pickling() -> None:
    with pytest.raises(OpaqError) as caught:
        Quantizer("nvfp4+rth")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status) == (str(caught.value), "TEXT")


# ---------------------------------------------------------------------------------------------- eps


def epsilon(text: str) -> np.float32:
    return np.float32(Quantizer("fp8+eps=" + text).spec.epsilon)


def decimal(value: np.float32, digits: int) -> str:
    """In the grammar's notation, without a plus sign."""
    return f"{value:.{digits}e}".replace("e+", "e")


def test_eps_is_read_with_one_rounding() -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(1, 0x7F800000, 400, np.uint32).view(np.float32)
    texts = [decimal(v, digits) for v in values for digits in (3, 8, 20)]
    halfway = "1.000000059604644775390625"  # midway between 1 and the next float32; exact as a double
    texts += [halfway, halfway + "0000000001", halfway[:-1] + "4999999999", "1.000000178813934326171875"]
    texts += ["1e-45", "7e-46", "7.1e-46", "3.4028234e38", "3.40282356e38", "0.1", "16777217"]
    for text in texts:
        assert epsilon(text) == float(round_to_float32(Fraction(text))), text


def significant(number: str) -> int:
    return len(number.partition("e")[0].replace(".", "").strip("0"))


def check_printed(values: NDArray[np.float32]) -> None:
    for value in values:
        printed = str(Quantizer("fp8+eps=" + decimal(value, 12))).removeprefix("fp8+eps=")
        assert float(round_to_float32(Fraction(printed))) == value
        shortest = np.format_float_scientific(value, unique=True, trim="-")
        assert significant(printed) <= significant(shortest), (printed, shortest)


def test_eps_is_printed_with_the_fewest_digits() -> None:
    values = np.random.default_rng(3).integers(1, 0x7F800000, 3000, np.uint32).view(np.float32)
    check_printed(np.concatenate([values, np.array([1e-12, 2.5, 0.25, 1e10], np.float32)]))


def test_eps_powers_of_two_are_printed_with_the_fewest_digits() -> None:
    check_printed(np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fp8+delayed", (True, False, False, 1)),
        ("nvfp4+rht+sr+both", (False, True, False, 16)),
        ("mxfp4+tiled", (False, False, True, 1)),
        ("fp8blk1+both", (False, False, False, 128)),
    ],
)
def test_properties_are_the_librarys(text: str, found: tuple[bool, bool, bool, int]) -> None:
    made = Quantizer(text)
    assert (made.is_delayed, made.is_stochastic, made.is_tiled, made.rows_per_scale) == found


def test_plans_are_the_librarys() -> None:
    plan = pytest.importorskip("opaq._plan")
    text = plan.plan_set("grad=xw cache", x="nvfp4+sr+rht", cache=False, reduce=True, precision="exact")
    assert text == "x=nvfp4+rht+sr grad=xw reduce"
    assert [plan.plan_get(text, key) for key in ("x", "w", "reduce")] == ["nvfp4+rht+sr", "", "reduce"]
    assert plan.any_quantizer(text, "is_stochastic", "w", "x") and not plan.any_quantizer(
        text, "is_delayed", "x"
    )

"""Fields of a quantization_config with values of every wrong JSON type: a ValueError with a message, or
success, and no other exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opaq.checkpoint import read_layout

FILES = sorted((Path(__file__).parents[1] / "cli").glob("config_*.txt"))
CONFIGS: dict[str, Any] = {
    file.stem.removeprefix("config_"): json.JSONDecoder().raw_decode(file.read_text())[0]["quantization_config"]
    for file in FILES
}
CONFIGS |= {
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "deepseek": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp8",
        "ignored_layers": ["lm_head"],
        "modules_to_not_convert": None,
    },
    "transformers-fp8": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "modelopt-mixed": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "exclude_modules": ["lm_head"],
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
        },
    },
    "sparse": {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "dense"},
        "transform_config": {"config_groups": {}},
        "config_groups": {},
    },
}
OWN = {
    "quant_method": "opaq",
    "quantizer": "nvfp4",
    "activations": "",
    "ignore": ["lm_head"],
    "precision": None,
}
VALUES = (
    None,
    True,
    False,
    0,
    7,
    -1,
    1.5,
    -2.5,
    1e300,
    "",
    "no such thing",
    [],
    [7],
    [None],
    [[]],
    [{}],
    {},
    {"a": 7},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each field, starting with the root."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def variants(config: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """A configuration with one field replaced or removed at a time."""
    for path in places(config):
        for value in VALUES:
            changed = copy.deepcopy([config])
            *way, last = (0, *path)
            place: Any = changed
            for key in way:
                place = place[key]
            place[last] = value
            yield path, changed[0]
        if path:
            del place[last]
            yield path, changed[0]


def check(read: Any, config: Any) -> int:
    """Returns the number of variants that were rejected, each with a message."""
    read(copy.deepcopy(config))
    refused = 0
    for path, changed in variants(config):
        try:
            read(changed)
        except ValueError as error:  # includes OpaqError
            refused += 1
            assert "opaq" in str(error) or "expected" in str(error), (path, changed)
        except Exception as error:
            raise AssertionError(f"{path}: {changed} is a {type(error).__name__}: {error}") from error
    return refused


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints(name: str) -> None:
    assert check(read_layout, CONFIGS[name]) > 20


def test_a_configuration_of_opaq() -> None:
    config = pytest.importorskip("opaq.integrations.transformers").Config
    assert check(config.from_dict, OWN) > 20
    assert check(lambda given: config(checkpoint=given), CONFIGS["gpt-oss"]) > 3
    for name in OWN:
        for wrong in VALUES:
            with suppress(ValueError):
                config(**{**OWN, name: wrong})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_block_size": 128}, "weight_block_size is 128, an integer, expected a list"),
        ({"ignored_layers": "lm_head"}, 'ignored_layers is "lm_head", a string, expected a list'),
        ({"ignored_layers": [1]}, "ignored_layers has 1, an integer, expected a list of strings"),
        ({"activation_scheme": {}}, "activation_scheme is {}, an object, expected a string"),
        ({"quant_method": ["fp8"]}, r'quant_method is \["fp8"\], expected one of compressed-tensors'),
    ],
)
def test_messages(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_layout({**CONFIGS["deepseek"], **change})

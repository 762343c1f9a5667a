#!/usr/bin/env python3
"""Small files and folders that a reader of checkpoints must reject, or accept although they look odd.

make_hostile.py FOLDER writes them; make_hostile.py --seeds FOLDER writes the same as inputs of the fuzz
targets, a folder for each. tests/python/test_cli_hostile.py runs the command on each in a temporary folder, and
makes links, pipes, names with control characters and headers of a hundred million brackets itself."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = tuple[str, list[int], int]  # dtype, shape, bytes


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file, with the header as it is."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensors(entries: dict[str, Entry], metadata: dict[str, str] | None = None) -> bytes:
    """A valid file: tensors of zeros in sequence."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return file_of(json.dumps(header, ensure_ascii=False).encode(), bytes(end))


def one(member: str, data: bytes = bytes(8)) -> bytes:
    """A file of one tensor "a", its value given as text."""
    return file_of(('{"a":' + member + "}").encode(), data)


def place(shape: str = "[2]", offsets: str = "[0,8]", dtype: str = '"F32"') -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def files() -> Iterator[tuple[str, bytes]]:
    """Single files by name."""
    whole = one(place())
    for count in range(9):
        yield f"bytes_{count}", whole[:count]
    yield "cut_in_header", whole[:20]
    yield "cut_in_data", whole[:-1]
    yield "longer_than_tensors", whole + b"\0"
    yield "length_2_64", file_of(b"{}", length=2**64 - 1)
    yield "length_2_63", file_of(b"{}", length=2**63)
    yield "length_above_limit", file_of(b"{}", length=100_000_001)
    yield "length_one_too_many", file_of(b"{}", length=3)
    yield "length_0", file_of(b"", bytes(16))
    yield "not_an_object", file_of(b"[]")
    yield "space_in_front", file_of(b" {}")
    yield "byte_order_mark", file_of(b"\xef\xbb\xbf{}")
    yield "comment", file_of(b"{/**/}")
    yield "comma_at_the_end", file_of(b'{"__metadata__":{},}')
    yield "two_objects", file_of(b"{}{}")
    yield "zeros_after_header", file_of(b"{}\0\0\0\0\0\0")
    yield "depth_65", file_of(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}")
    yield "brackets", file_of(b'{"a":' + b"[" * 500)
    yield "no_utf8", file_of(b'{"\xff":' + place().encode() + b"}", bytes(8))
    yield "surrogate_alone", file_of(b'{"\\ud800":' + place().encode() + b"}", bytes(8))
    yield "name_twice", file_of(f'{{"a":{place()},"a":{place()}}}'.encode(), bytes(8))
    yield "name_twice_escaped", file_of(f'{{"a":{place()},"\\u0061":{place()}}}'.encode(), bytes(8))
    yield "member_twice", one('{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}')
    yield "name_empty", file_of(f'{{"":{place()}}}'.encode(), bytes(8))
    yield "name_with_zero", file_of(f'{{"a\\u0000b":{place()}}}'.encode(), bytes(8))
    yield "name_with_escape", file_of(f'{{"a\\u001b[2J":{place()}}}'.encode(), bytes(8))
    yield "name_with_c1", file_of(f'{{"a\\u009b2J":{place()}}}'.encode(), bytes(8))
    yield "name_with_newline", file_of(f'{{"a\\nb":{place()}}}'.encode(), bytes(8))
    yield "name_of_1001_bytes", file_of(f'{{"{"a" * 1001}":{place()}}}'.encode(), bytes(8))
    yield "tensor_is_a_number", one("1")
    yield "tensor_is_null", one("null")
    yield "tensor_is_a_list", one("[]")
    yield "member_unknown", one('{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}')
    yield "member_with_zero", one('{"dtype":"F32","shape":[2],"data_offsets":[0,8],"shape\\u0000":1}')
    yield "dtype_missing", one('{"shape":[2],"data_offsets":[0,8]}')
    yield "dtype_unknown", one(place(dtype='"F31"'))
    yield "dtype_small", one(place(dtype='"f32"'))
    yield "dtype_a_number", one(place(dtype="32"))
    yield "dtype_with_zero", one(place(dtype='"F32\\u0000"'))
    yield "dtype_with_escape", one(place(dtype='"\\u001b]0;F32\\u0007"'))
    yield "shape_missing", one('{"dtype":"F32","data_offsets":[0,8]}')
    yield "shape_a_number", one(place("2"))
    yield "shape_an_object", one(place('{"0":2}'))
    for text in ("-1", "1.5", "2.0", "1e999", "2e0", "-0", "null", '"2"', "[2]", "18446744073709551616", "NaN"):
        shown = text.replace("-", "minus_").replace(".", "_").strip('"[]')
        kind = {'"': "_text", "[": "_list"}.get(text[0], "")
        yield f"size_{shown}{kind}", one(place(f"[{text}]"))
    yield "size_2_63", one(place("[9223372036854775808]"))
    yield "size_2_63_less_1", one(place("[9223372036854775807]"))
    yield "sizes_overflow", one(place("[4294967296,4294967296]"))
    yield "sizes_overflow_to_8_bytes", one(place("[4611686018427387904,4,2]"))
    yield "sizes_overflow_and_empty", one(place("[4611686018427387904,4611686018427387904,0]", "[0,0]"), b"")
    yield "size_huge_and_empty", one(place("[0,9223372036854775807]", "[0,0]"), b"")
    yield "rank_17", one(place("[" + ",".join(["1"] * 16) + ",2]"))
    yield "half_bytes", one(place("[3]", "[0,2]", '"F4"'), bytes(2))
    yield "offsets_missing", one('{"dtype":"F32","shape":[2]}')
    for offsets in ("[0]", "[0,8,8]", "[8,0]", "[0,-8]", "[0,8.0]", "[0,9]", "[1,8]", '["0","8"]', "8"):
        shown = offsets.strip("[]").replace(",", "_").replace(".", "_").replace("-", "minus_").replace('"', "t")
        yield f"offsets_{shown}", one(place(offsets=offsets))
    yield "offsets_2_64", one(place(offsets="[18446744073709551608,18446744073709551616]"))
    yield "offsets_wrap", one(place(offsets="[18446744073709551608,0]"))
    pair = '{{"a":{},"b":{}}}'
    for name, first, second, size in (
        ("overlap", "[0,8]", "[4,12]", 12),
        ("same_place", "[0,8]", "[0,8]", 8),
        ("gap", "[0,8]", "[9,17]", 17),
        ("gap_in_front", "[1,9]", "[9,17]", 17),
    ):
        yield name, file_of(pair.format(place(offsets=first), place(offsets=second)).encode(), bytes(size))
    inside = pair.format(place(), place("[0]", "[4,4]"))
    yield "empty_inside_another", file_of(inside.encode(), bytes(8))
    yield "metadata_a_list", file_of(b'{"__metadata__":[]}')
    yield "metadata_of_numbers", file_of(b'{"__metadata__":{"a":1}}')
    yield "metadata_nested", file_of(b'{"__metadata__":{"a":{}}}')
    yield "metadata_with_zero", file_of(b'{"__metadata__":{"a":"b\\u0000c"}}')
    yield "metadata_twice", file_of(b'{"__metadata__":{},"__metadata__":{}}')

    # unusual and valid
    yield "right_no_tensors", file_of(b"{}")
    yield "right_spaces_behind", file_of(b"{}" + b" " * 14)
    yield "right_no_dimensions", tensors({"a": ("F32", [], 4)})
    yield "right_empty", tensors({"a": ("F32", [0], 0), "b": ("BF16", [3, 0, 5], 0), "c": ("I64", [1], 8)})
    yield "right_rank_16", tensors({"a": ("U8", [1] * 16, 1)})
    yield "right_metadata", tensors({"a": ("F32", [2], 8)}, {"format": "pt", "a\nb": "\u001b"})
    yield "right_any_order", file_of(pair.format(place(offsets="[8,16]"), place()).encode(), bytes(16))
    yield "right_unicode", tensors({"схема.重み": ("F32", [1], 4)})

    # weights whose tensors do not match
    w, s = "m.weight", "m.weight_scale"
    yield "scale_of_3", tensors({w: ("F8_E4M3", [128, 64], 8192), s: ("F32", [3], 12)})
    yield "scale_empty", tensors({w: ("F8_E4M3", [128, 64], 8192), s: ("F32", [0], 0)})
    yield "scale_of_columns", tensors({w: ("F8_E4M3", [32, 64], 2048), s: ("F32", [64, 1], 256)})
    yield "scale_turned", tensors({w: ("F8_E4M3", [4, 256], 1024), s: ("U8", [8, 4], 32)})
    yield "scale_flat", tensors({w: ("F8_E4M3", [4, 256], 1024), s: ("U8", [32], 32)})
    yield "scale_split_elsewhere", tensors({w: ("F8_E4M3", [4, 256], 1024), s: ("U8", [2, 16], 32)})
    yield "scale_of_no_rows", tensors({w: ("F8_E4M3", [0, 64], 0), s: ("F32", [5, 1], 20)})
    yield "scale_of_no_columns", tensors({w: ("F8_E4M3", [4, 0], 0), s: ("U8", [4, 1], 4)})
    yield "scale_of_no_stack", tensors({w: ("F8_E4M3", [0, 4, 64], 0), s: ("U8", [4, 2], 8)})
    stack = {w: ("F8_E4M3", [3, 4, 64], 768)}
    yield "scale_of_another_stack", tensors({**stack, s: ("U8", [2, 4, 2], 16)})
    yield "scale_for_one_of_the_stack", tensors({**stack, s: ("U8", [4, 2], 8)})
    packed = {"m.weight_packed": ("U8", [4, 16], 64)}
    fp4 = {**packed, s: ("F8_E4M3", [4, 2], 8)}
    yield "global_missing", tensors(fp4)
    yield "global_of_2", tensors({**fp4, "m.weight_global_scale": ("F32", [2], 8)})
    yield "global_empty", tensors({**fp4, "m.weight_global_scale": ("F32", [0], 0)})
    yield "global_of_bf16", tensors({**fp4, "m.weight_global_scale": ("BF16", [1], 2)})
    yield (
        "packed_and_plain",
        tensors({**fp4, "m.weight_global_scale": ("F32", [1], 4), "m.weight": ("BF16", [4, 32], 256)}),
    )
    yield (
        "packed_twice",
        tensors(
            {**packed, s: ("U8", [4, 1], 4), w: ("F8_E4M3", [4, 32], 128)},
        ),
    )
    blocks = {"m.mlp.experts.down_proj_blocks": ("U8", [2, 4, 3, 8], 192)}
    yield "blocks_of_8_bytes", tensors({**blocks, "m.mlp.experts.down_proj_scales": ("U8", [2, 4, 3], 24)})
    yield "right_no_rows", tensors({w: ("F8_E4M3", [0, 64], 0), s: ("F32", [0, 1], 0)})
    yield "right_no_columns", tensors({w: ("F8_E4M3", [4, 0], 0), s: ("U8", [4, 0], 0)})
    yield "right_no_stack", tensors({w: ("F8_E4M3", [0, 4, 64], 0), s: ("U8", [0, 4, 2], 0)})
    yield (
        "right_many_of_nothing",
        tensors(
            {"m.mlp.experts.gate_up_proj": ("BF16", [1 << 40, 0, 64], 0)},
        ),
    )
    yield "right_codes_without_scales", tensors({w: ("F8_E4M3", [4, 64], 256)})
    yield "right_scale_of_no_dimensions", tensors({w: ("F8_E4M3", [4, 64], 256), s: ("F32", [], 4)})
    yield (
        "right_input_scale_of_integers",
        tensors({w: ("F8_E4M3", [4, 64], 256), s: ("F32", [1], 4), "m.input_scale": ("I64", [7], 56)}),
    )


PLAIN = tensors({"a": ("F32", [2], 8)})
OTHER = tensors({"b": ("F32", [2], 8)})


def index(names: dict[str, Any]) -> bytes:
    return json.dumps({"metadata": {"total_size": 8}, "weight_map": names}).encode()


def folders() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Folders by name: their files."""
    model, listing = "model.safetensors", "model.safetensors.index.json"
    yield "no_safetensors", {"config.json": b"{}"}
    yield "index_of_nothing", {model: PLAIN, listing: index({})}
    yield "index_is_a_list", {model: PLAIN, listing: b"[]"}
    yield "index_is_empty", {model: PLAIN, listing: b""}
    yield "index_without_map", {model: PLAIN, listing: b'{"metadata":{}}'}
    yield "index_map_is_a_list", {model: PLAIN, listing: b'{"weight_map":[]}'}
    for name, value in (
        ("above", "../secret.safetensors"),
        ("absolute", "/etc/passwd"),
        ("below", "inner/model.safetensors"),
        ("backwards", "..\\secret.safetensors"),
        ("dots", ".."),
        ("dot", "."),
        ("empty", ""),
        ("long", "a" * 300),
        ("zero", "model.safetensors\0.txt"),
        ("escape", "\x1b[2Jmodel.safetensors"),
        ("number", 1),
        ("null", None),
        ("list", [model]),
    ):
        yield f"index_file_{name}", {model: PLAIN, listing: index({"a": value})}
    yield "index_file_missing", {model: PLAIN, listing: index({"a": "model-00001-of-00002.safetensors"})}
    yield "index_tensor_missing", {model: PLAIN, listing: index({"a": model, "b": model})}
    yield (
        "index_leaves_a_file_out",
        {
            "model-1.safetensors": PLAIN,
            "model-2.safetensors": OTHER,
            listing: index({"a": "model-1.safetensors", "b": "model-1.safetensors"}),
        },
    )
    yield "index_name_empty", {model: PLAIN, listing: index({"": model})}
    yield (
        "index_wrong_file",
        {
            "model-1.safetensors": PLAIN,
            "model-2.safetensors": OTHER,
            listing: index({"a": "model-2.safetensors", "b": "model-1.safetensors"}),
        },
    )
    yield "index_tensor_twice", {model: PLAIN, listing: b'{"weight_map":{"a":"model.safetensors","a":"x"}}'}
    yield "index_too_deep", {model: PLAIN, listing: b'{"weight_map":' + b'{"a":' * 64 + b"1" + b"}" * 65}
    yield "index_names_itself", {model: PLAIN, listing: index({"a": listing})}
    yield (
        "two_indexes",
        {
            model: PLAIN,
            listing: index({"a": model}),
            "other.safetensors.index.json": index({"a": model}),
        },
    )
    yield "tensor_in_two_files", {"model-1.safetensors": PLAIN, "model-2.safetensors": PLAIN}
    yield "second_file_is_cut", {"model-1.safetensors": PLAIN, "model-2.safetensors": OTHER[:-1]}
    yield "config_is_a_list", {model: PLAIN, "config.json": b"[]"}
    yield "config_is_a_number", {model: PLAIN, "config.json": b"1"}
    yield "config_is_empty", {model: PLAIN, "config.json": b""}
    yield "config_key_twice", {model: PLAIN, "config.json": b'{"model_type":"a","model_type":"b"}'}
    yield "config_too_deep", {model: PLAIN, "config.json": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"}
    yield "config_is_cut", {model: PLAIN, "config.json": b'{"model_type":"lla'}
    yield "modelopt_is_a_list", {model: PLAIN, "hf_quant_config.json": b"[]"}
    yield (
        "right_configs_of_odd_types",
        {
            model: PLAIN,
            "config.json": b'{"quantization_config":[1e999,-1],"text_config":7,"hidden_size":"a"}',
            "hf_quant_config.json": b'{"quantization":"NVFP4"}',
        },
    )
    yield (
        "right_method_with_zero",
        {
            model: PLAIN,
            "config.json": b'{"quantization_config":{"quant_method":"fp8\\u0000"}}',
        },
    )
    endless = {"quant_method": "compressed-tensors", "ignore": ["re:(a|b)" + "*" * 100, "re:" + "(" * 500]}
    yield (
        "right_ignore_that_takes_forever",
        {
            model: PLAIN,
            "config.json": json.dumps({"quantization_config": endless}).encode(),
        },
    )
    yield "right_hidden_index", {model: PLAIN, "._model.safetensors.index.json": b"\0\5\26\7"}


def made() -> dict[str, bytes]:
    """Every file of the folder by its path in it."""
    found = {f"{name}.safetensors": data for name, data in files()}
    for folder, parts in folders():
        found |= {f"{folder}/{name}": data for name, data in parts.items()}
    return found


def header_seed(data: bytes) -> bytes:
    """As fuzz/fuzz_cli_header.c reads it: the number of bytes after the header, and the file without them."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    end = min(8 + length, len(data))
    return struct.pack("<H", min(len(data) - end, 65535)) + data[:end]


def seeds() -> dict[str, bytes]:
    """Inputs by target and name."""
    found = {f"fuzz_cli_header/{name}": header_seed(data) for name, data in files()}
    for folder, parts in folders():
        for name, data in parts.items():
            if name.endswith(".json"):
                target = "fuzz_cli_index" if name.endswith("index.json") else "fuzz_cli_config"
                found[f"{target}/{folder}"] = data
    return found


def write(to: Path, contents: dict[str, bytes]) -> None:
    for path, data in contents.items():
        target = to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def main() -> int:
    arguments = sys.argv[1:]
    is_seeds = arguments[:1] == ["--seeds"]
    if len(arguments) != 1 + is_seeds:
        print("usage: make_hostile.py [--seeds] FOLDER", file=sys.stderr)
        return 2
    write(Path(arguments[-1]), seeds() if is_seeds else made())
    return 0


if __name__ == "__main__":
    sys.exit(main())

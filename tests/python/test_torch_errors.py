"""Errors of the library are exceptions with its message; they leak nothing and do not affect other calls."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opaq
from conftest import devices, need
from torch_cases import QUANTIZERS, given_for, make_tensor, quantized, same_buffers, same_bytes

torch = need("torch")
ops = torch.ops.opaq
F32 = torch.float32


def refused(match: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(RuntimeError, match=match) as caught:
        function(*arguments, **named)
    assert str(caught.value).startswith("opaq: "), str(caught.value)


# ---------------------------------------------------------------------------------------- tensors


def test_wrong_dtypes(device: str) -> None:
    x = torch.ones(4, 32, device=device)
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64):
        refused("quantize: .*expected f", ops.quantize, x.to(dtype), "mxfp8")
    buffers = ops.quantize(x, "mxfp8")
    for dtype in (torch.float64, torch.uint8, torch.int64, torch.bool):
        refused("dequantize: .*expected f", ops.dequantize, buffers, "mxfp8", [4, 32], dtype)


def test_layouts_that_are_refused(device: str) -> None:
    x = make_tensor((8, 64), device)
    for view, text in (
        (torch.ones((1,) * 9, device=device), "x has 9 dimensions, at most 8 are allowed"),
        (torch.ones((), device=device), "rank is 0, expected 1 to 8"),
    ):
        refused("quantize: .*" + text, ops.quantize, view, "mxfp8")
    freed = torch.ones(8, 64, device=device)
    freed.untyped_storage().resize_(0)
    refused("quantize: .*NULL", ops.quantize, freed, "mxfp8")
    with pytest.raises(
        NotImplementedError, match="opaq::quantize"
    ):  # PyTorch's own message: there is no such kernel
        ops.quantize(x.to_sparse(), "mxfp8")


def test_meta_gives_meta_and_mixed_devices_are_an_error(device: str) -> None:
    x = make_tensor((8, 64), device)
    on_meta = ops.quantize(x.to("meta"), "nvfp4+both")
    assert [(b.shape, b.dtype) for b in on_meta] == [(b.shape, b.dtype) for b in ops.quantize(x, "nvfp4+both")]
    assert all(buffer.is_meta for buffer in on_meta)
    buffers, far = ops.quantize(x, "mxfp8"), torch.ones(1, device="meta")
    for mixed in ([buffers[0], buffers[1].to("meta")], [buffers[0].to("meta"), buffers[1]]):
        if mixed[1].is_meta:
            refused("some tensors are on meta", ops.dequantize, mixed, "mxfp8", [8, 64], F32)
        else:
            assert ops.dequantize(mixed, "mxfp8", [8, 64], F32).is_meta
    refused("some tensors are on meta", ops.quantize, x, "fp8+delayed", far)
    refused("some tensors are on meta", ops.quantize, x, "fp8", None, far)


def test_cuda_without_a_back_end_is_an_error() -> None:
    if not torch.cuda.is_available() or "cuda" in devices():
        pytest.skip("needs a CUDA device and a build without the CUDA back end")
    x = torch.ones(4, 32, device="cuda")
    refused("cuda", ops.quantize, x, "mxfp8")
    buffers = [buffer.cuda() for buffer in ops.quantize(x.cpu(), "mxfp8")]
    refused("cuda", ops.dequantize, buffers, "mxfp8", [4, 32], F32)
    refused("cuda", ops.convert, buffers, "mxfp8", "mxfp8+swizzle", [4, 32], F32)
    refused("cuda", ops.slice_rows, buffers, "mxfp8", [4, 32], [2, 32], F32, 0)
    refused("cuda", ops.dequantize, [buffers[0], buffers[1].cpu()], "mxfp8", [4, 32], F32)
    w = torch.ones(8, 32, device="cuda")
    refused("linear_forward: .*cuda", ops.linear_forward, [x], [w], None, [4, 32], [8, 32], F32, "x=mxfp8")


# ------------------------------------------------------------------------------- texts and arguments


def test_wrong_texts(device: str) -> None:
    x = make_tensor((4, 32), device)
    for text, part in (
        ("mxfp9", 'unknown format "mxfp9" at position 0'),
        ("", "spec"),
        ("nvfp4+2d+rth", 'unknown option "rth" at position 9'),
        ("nvfp4+2d+rht", "2d.*rht|rht.*2d"),
        ("mxfp8\0+both", "unknown format"),
        ("fp8" + "+both" * 50, "at most 127"),
        ("é" * 20, "spec"),
    ):
        refused("quantize: .*(" + part + ")", ops.quantize, x, text)
        with pytest.raises(opaq.OpaqError):
            opaq.quantize_tensor(x, text)
    buffers = ops.quantize(x, "fp8")
    refused("dequantize: .*unknown format", ops.dequantize, buffers, "fp7", [4, 32], F32)
    refused("convert: .*unknown format", ops.convert, buffers, "fp8", "fp7", [4, 32], F32)
    refused("would round again", ops.convert, buffers, "fp8", "fp8.e5m2", [4, 32], F32)
    for wrong in (None, 3, opaq.Quantizer("fp8")):
        with pytest.raises(RuntimeError, match="Expected a value of type 'str'"):
            ops.quantize(x, wrong)


def test_wrong_arguments(device: str) -> None:
    x, one, two = make_tensor((4, 32), device), torch.ones(1, device=device), torch.ones(2, device=device)
    seeds = torch.tensor([1, 2], device=device)
    for text, named, part in (
        ("fp8+delayed", {}, "scale"),
        ("fp8", {"scale": one}, "scale"),
        ("fp8+delayed", {"scale": two}, "scale is 2 x f32, expected 1"),
        ("fp8+delayed", {"scale": one.double()}, "scale is 1 x float64"),
        ("fp8+delayed", {"scale": torch.ones(4, device=device)[::4][:0]}, "scale is 0 x f32"),
        ("nvfp4", {"amax_rowwise": two}, "amax_rowwise is 2 x f32, expected 1"),
        ("mxfp8", {"amax_rowwise": one}, "amax_rowwise"),
        ("fp8+sr", {}, "random is missing"),
        ("fp8", {"random": seeds}, "random is given"),
        ("fp8+sr", {"random": seeds.int()}, "random is .*expected two contiguous int64"),
        ("fp8+sr", {"random": seeds[:1]}, "random is .*expected two contiguous int64"),
        ("fp8+sr", {"random": seeds[None]}, "random is .*expected two contiguous int64"),
    ):
        refused("quantize: .*" + part, ops.quantize, x, text, **named)


def test_wrong_buffers(device: str) -> None:
    buffers = quantized("nvfp4", (8, 64), device).buffers()
    data, scales, amax = buffers
    for wrong, part in (
        (buffers[:2], "got 2 buffers, expected 3"),
        (buffers + buffers, "got 6 buffers, expected 3"),
        (buffers * 30, "buffers"),
        ([scales, data, amax], r'"_rowwise_data" is uint8\[128,4\], expected uint8\[8,32\]'),
        ([data.float(), scales, amax], r'"_rowwise_data" is f32\[8,32\], expected uint8\[8,32\]'),
        ([data.long(), scales, amax], r'"_rowwise_data" is int64\[8,32\]'),
        ([data, scales.to(torch.float16), amax], r'"_rowwise_scale_inv" is f16\[128,4\]'),
        ([data, scales, amax[0]], r'"_amax_rowwise" is f32\[\], expected f32\[1\]'),
        ([data.view(2, 4, 32), scales, amax], r'"_rowwise_data" is uint8\[2,4,32\]'),
    ):
        refused("dequantize: .*" + part, ops.dequantize, wrong, "nvfp4", [8, 64], F32)
        refused("convert: .*" + part, ops.convert, wrong, "nvfp4", "nvfp4+swizzle", [8, 64], F32)
        refused("slice_rows: .*" + part, ops.slice_rows, wrong, "nvfp4", [8, 64], [4, 64], F32, 0)
    for function, rest in (
        (ops.dequantize, ("nvfp4", [8, 64], F32)),
        (ops.convert, ("nvfp4", "nvfp4+swizzle", [8, 64], F32)),
        (ops.gather_rows, ("nvfp4", [4, 64], [8, 64], F32)),
    ):
        with pytest.raises(NotImplementedError, match="no tensor arguments"):  # PyTorch cannot choose a kernel
            function([], *rest)
    refused("usage is 2, expected", ops.dequantize, buffers, "nvfp4", [8, 64], F32, 2)
    for usage in (-1, 3, 2**32 + 1):
        refused(f"usage is {usage}, expected 0", ops.dequantize, buffers, "nvfp4", [8, 64], F32, usage)


def test_shapes_that_overflow_or_do_not_fit(device: str) -> None:
    buffers = quantized("mxfp8", (8, 64), device).buffers()
    for shape, part in (
        ([2**62, 64], r"2\^62"),
        ([2**62], r"2\^62"),
        ([2**40, 2**40], r"2\^62|overflow|elements"),
        ([2**63 - 1, 2**63 - 1], r"2\^62|overflow|elements"),
        ([2**31, 2**31, 2**31], r"2\^62|overflow|elements"),
        ([-1, 64], "dimension 0 is -1"),
        ([], "rank is 0"),
        ([1] * 9, "9 dimensions, at most 8 are allowed"),
        ([1] * 1000, "1000 sizes, at most 8"),
        ([8, 32], r"expected uint8\[8,32\]"),
        ([64, 8], r"expected uint8\[64,8\]"),
        ([2, 4, 64], r"expected uint8\[2,4,64\]"),
        ([0, 64], r"expected uint8\[0,64\]"),
    ):
        refused("dequantize: .*(" + part + ")", ops.dequantize, buffers, "mxfp8", shape, F32)
        refused("convert: .*(" + part + ")", ops.convert, buffers, "mxfp8", "mxfp8+swizzle", shape, F32)
    sliced = (buffers, "mxfp8", [8, 64])
    for to, start, part in (
        ([4, 64], 5, "4 rows from row 5 on, of a tensor with 8 rows"),
        ([4, 64], -1, "4 rows from row -1 on, of a tensor with 8 rows"),
        ([4, 64], 2**63 - 1, "of a tensor with 8 rows"),
        ([4, 64], -(2**63), "of a tensor with 8 rows"),
        ([9, 64], 0, "9 rows from row 0 on, of a tensor with 8 rows"),
        ([4, 32], 0, "the last dimensions are 64 and 32"),
        ([2**60, 64], 0, r"2\^62"),
    ):
        refused("slice_rows: .*" + part, ops.slice_rows, *sliced, to, F32, start)
    for shard, to, part in (
        ([3, 64], [8, 64], "shards of 3 rows do not make 8 rows"),
        ([0, 64], [8, 64], "shards of 0 rows do not make 8 rows"),
        ([4, 64], [8, 64], r"expected uint8\[256,4\]"),
        ([4, 32], [8, 64], "the last dimensions are 32 and 64"),
        ([1, 0], [2**50, 0], "expected uint8"),
    ):
        refused("gather_rows: .*" + part, ops.gather_rows, buffers, "mxfp8", shard, to, F32)


def test_shards_of_different_tensors_are_refused(device: str) -> None:
    first, second = (quantized("fp8", shape, device).buffers() for shape in ((4, 64), (4, 64)))
    second[1] = second[1] * 2
    gathered = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    if device == "cpu":
        refused(
            "shard 1 has another tensor-wide scale", ops.gather_rows, gathered, "fp8", [4, 64], [8, 64], F32
        )
    else:  # a GPU cannot compare them without waiting: the last shard's scale counts
        assert same_bytes(ops.gather_rows(gathered, "fp8", [4, 64], [8, 64], F32)[1], second[1])


def test_out_of_memory() -> None:
    """PyTorch cannot allocate 2^50 bytes; that is an error, and later calls work."""
    buffers = quantized("fp8", (8, 64), "cpu").buffers()
    refused("dequantize: ", ops.dequantize, buffers, "fp8", [2**24, 2**24], F32)
    assert ops.dequantize(buffers, "fp8", [8, 64], F32).shape == (8, 64)


# ----------------------------------------------------------------------------------------------------- leaks


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def failing_calls(x: Any, one: Any, seeds: Any, buffers: list[Any]) -> list[Callable[[int], Any]]:
    """Each fails at another step: reading arguments, creating outputs, running; with optionals, with lists."""
    whole = [2, 32]
    return [
        lambda i: ops.quantize(x, f"nvfp4+there-is-no-such-option-and-its-name-is-long-{i}"),
        lambda i: ops.quantize(x, "fp8", one, one, one, seeds),
        lambda i: ops.quantize(x.t(), "fp8", one),  # after a copy
        lambda i: ops.dequantize([b.t() for b in buffers], "nvfp4", whole, F32),
        lambda i: ops.quantize(x.reshape((1,) * 8 + (64,)), "mxfp8", one, None, None, seeds),
        lambda i: ops.dequantize(buffers * 25, "nvfp4", whole, F32),
        lambda i: ops.dequantize(buffers[::-1], "nvfp4", whole, F32),
        lambda i: ops.dequantize(buffers, "nvfp4", [2**62, 2**62], F32),
        lambda i: ops.convert(buffers, "nvfp4", "nvfp4+both", whole, F32),
        lambda i: ops.slice_rows(buffers, "nvfp4", whole, whole, F32, i + 1),
        lambda i: ops.gather_rows(buffers, "nvfp4", [1, 32], whole, F32),
    ]


def leaks(work: Callable[[], None]) -> bool:
    """Whether every round of `work` increases memory or the number of tensors. Single rounds may: pools
    grow."""
    work()
    for _ in range(3):
        tensors, resident = live_tensors(), resident_bytes()
        work()
        if live_tensors() == tensors and resident_bytes() - resident < 1 << 20:
            return False
    return True


def fail(calls: list[Callable[[int], Any]], count: int) -> None:
    for i in range(count // len(calls)):
        for call in calls:
            try:
                call(i)
            except RuntimeError as error:
                assert str(error).startswith("opaq: ")
            else:
                raise AssertionError("did not fail")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
@pytest.mark.slow
def test_a_hundred_thousand_failures_leak_nothing(device: str) -> None:
    x, one, seeds = (
        make_tensor((2, 32), device),
        torch.ones(1, device=device),
        torch.tensor([1, 2], device=device),
    )
    want = ops.quantize(x, "nvfp4")
    calls = failing_calls(x, one, seeds, want)
    assert not leaks(lambda: fail(calls, 50_000))
    assert same_buffers(ops.quantize(x, "nvfp4"), want)


def test_no_argument_is_referenced_after_an_error() -> None:
    """A tensor on memory of a NumPy array: a reference to it would keep the array alive."""
    memory = np.ones((2, 32), np.float32)
    before = sys.getrefcount(memory)
    x = torch.from_numpy(memory)
    amax, buffers = x[0, :1], ops.quantize(x, "nvfp4")
    fail(failing_calls(x, amax, torch.tensor([1, 2]), [x, *buffers[1:]]), 1_000)
    assert sys.getrefcount(memory) > before
    del x, amax
    gc.collect()
    assert sys.getrefcount(memory) == before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
@pytest.mark.slow
def test_successful_calls_leak_nothing(device: str) -> None:
    x, one, seeds = (
        make_tensor((2, 32), device),
        torch.ones(1, device=device),
        torch.tensor([1, 2], device=device),
    )

    def succeed() -> None:
        for _ in range(8_000):
            buffers = ops.quantize(x, "nvfp4+both+sr", None, one, one, seeds)
            ops.dequantize(buffers, "nvfp4+both+sr", [2, 32], F32)
            ops.convert(buffers, "nvfp4+both+sr", "nvfp4+sr", [2, 32], F32)
            opaq.quantize_tensor(x, "fp8").dequantize()

    assert not leaks(succeed)


# ---------------------------------------------------------------------------------------------- many threads


def test_eight_threads_at_once(device: str) -> None:
    """Valid and invalid calls mixed; each thread gets its own bytes or message."""
    texts = QUANTIZERS[::2]
    inputs = [make_tensor((20 + n, 48), device) for n in range(8)]
    want = {
        (n, text): ops.quantize(x, text, **given_for(text, device))
        for n, x in enumerate(inputs)
        for text in texts
    }

    def work(number: int) -> int:
        x, failures = inputs[number], 0
        for turn in range(12):
            for text in texts:
                got = ops.quantize(x, text, **given_for(text, device))
                assert same_buffers(got, want[number, text]), text
                try:
                    ops.dequantize(got[:-1], text, x.shape, F32)
                except RuntimeError as error:
                    assert str(error) == f"opaq: dequantize: got {len(got) - 1} buffers, expected {len(got)}", (
                        text
                    )
                    failures += 1
                try:
                    ops.quantize(x, f"thread-{number}-{turn}")
                except RuntimeError as error:
                    assert f'"thread-{number}-{turn}"' in str(error)
                    failures += 1
        return failures

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [12 * 2 * len(texts)] * 8


def test_threads_with_new_quantizers_and_big_tensors(device: str) -> None:
    """New quantizer texts, and work that is itself divided among threads."""
    x = make_tensor((300, 272), device)
    texts = [f"fp8+eps={n}.{k}e-3" for n in range(1, 9) for k in range(1, 6)]

    def work(number: int) -> list[Any]:
        order = texts[number * 5 :] + texts[: number * 5]
        made = {text: opaq.quantize_tensor(x, text).dequantize() for text in order}
        return [made[text] for text in texts]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert all(same_buffers(other, found[0]) for other in found[1:])

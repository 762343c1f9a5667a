"""What the CUDA back end has to do besides the operators' own tests: results near the CPU's, streams, special
values, errors. The tests run on the CPU too, where they compare it with itself; what only a GPU can show is
skipped there. test_gpu_invariance.py and test_gpu_large.py have batch invariance and large tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import opaq
from conftest import need
from torch_cases import FORMATS, QUANTIZERS, given_for, make_tensor, same_buffers, same_bytes

torch = need("torch")

from opaq import functional  # noqa: E402
from opaq._operators import result_places  # noqa: E402

ops = torch.ops.opaq
F32, BF16 = torch.float32, torch.bfloat16
EXPERTS, CHOICES, HIDDEN, INNER = 4, 2, 96, 64


def need_gpu(device: str, bytes_free: int = 0) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < bytes_free:
        pytest.skip(f"needs {bytes_free / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


def numbers(shape: tuple[int, ...], seed: int, device: str, dtype: Any = F32) -> Any:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def near(got: Any, want: Any, limit: float = 1e-5) -> bool:
    """Whether two tensors have the same NaNs and infinities, and differ elsewhere by less than `limit` of their
    norm."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got.isnan(), want.isnan()):
        return False
    difference = (got - want)[finite]
    return bool(difference.norm() <= limit * want[finite].norm())


# ---------------------------------------------------------------------------------------------- like the CPU

PLANS = ("", "x=fp8 w=fp8 dy=fp8.e5m2", "x=fp8row w=fp8row dy=fp8row", "x=fp8blk1 w=fp8blk2 dy=fp8blk1")
PLANS += (
    "x=mxfp8 w=mxfp8 dy=mxfp8",
    "x=nvfp4 w=nvfp4+2d dy=nvfp4",
    "x=nvfp4+rht w=nvfp4+2d dy=nvfp4+rht",
    "w=mxfp4",
)
ODD = ((1, 1, 1), (3, 7, 5), (17, 33, 65), (65, 127, 129), (130, 257, 40))


def step(shape: tuple[int, int, int], plan: str, device: str) -> list[Any]:
    """All results of the operators of a linear layer, forward and backward."""
    rows, columns, terms = shape
    x, w, dy = (
        numbers((rows, terms), 1, device),
        numbers((columns, terms), 2, device),
        numbers((rows, columns), 3, device),
    )
    sizes = [rows, terms], [columns, terms]
    made = ops.linear_forward([x], [w], numbers((columns,), 4, device), *sizes, F32, plan)
    _, kept_x, kept_w, _, _ = (made[begin:end] for begin, end in result_places("linear_forward", plan))
    return [*made, *ops.linear_backward([dy], kept_x or [x], kept_w or [w], *sizes, F32, F32, plan)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.replace(" ", ",") or "plain")
def test_products_of_odd_shapes(plan: str, device: str) -> None:
    for shape in ODD:
        words = f"{plan} grad=xwb".strip()
        for got, want in zip(step(shape, words, device), step(shape, words, "cpu"), strict=True):
            assert same_bytes(got, want) if got.dtype == torch.uint8 else near(got, want), shape


def experts(tokens: int, device: str) -> tuple[Any, ...]:
    """The arguments of a mixture of experts; the first rows do not depend on the number of tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand((520, EXPERTS), generator=generator).argsort(1)[:, :CHOICES]
    x, weights = numbers((520, HIDDEN), 6, device)[:tokens], numbers((520, CHOICES), 7, device)[:tokens].abs()
    up, down = numbers((EXPERTS, 2 * INNER, HIDDEN), 8, device), numbers((EXPERTS, HIDDEN, INNER), 9, device)
    return x, weights, ids.to(device)[:tokens], up, down


@pytest.mark.parametrize("text", ["", "fp8row", "mxfp8", "mxfp4", "nvfp4"])
def test_experts_and_their_gradients(text: str, device: str) -> None:
    for tokens in (1, 65):
        results = []
        for where in ("cpu", device):
            x, weights, ids, up, down = experts(tokens, where)
            leaves = [x, weights] if text else [x, weights, up, down]
            leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            stacks = [opaq.quantize_tensor(w, text) for w in (up, down)] if text else leaves[2:]
            y = functional.moe(leaves[0], leaves[1], ids, *stacks)
            y.backward(numbers(tuple(y.shape), 10, where))
            alone = functional.mlp(leaves[0], *(w[0] for w in stacks))
            results.append([y, alone, *(leaf.grad for leaf in leaves)])
        assert all(near(got, want, 2e-5) for got, want in zip(results[1], results[0], strict=True)), tokens


SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3e38)


def test_special_values_have_the_bytes_of_the_cpu(device: str) -> None:
    for text in QUANTIZERS:
        for special in SPECIAL:
            x = numbers((37, 80), 11, "cpu")
            x[3, 5], x[20, 70], x[36] = special, special, special
            want = ops.quantize(x, text, **given_for(text))
            got = ops.quantize(x.to(device), text, **given_for(text, device))
            assert same_buffers(got, want), (text, special)
            back = ops.dequantize(got, text, [37, 80], BF16), ops.dequantize(want, text, [37, 80], BF16)
            assert same_bytes(*back), (text, special)


@pytest.mark.parametrize("special", SPECIAL[:3], ids=str)
def test_special_values_stay_in_their_rows(special: float, device: str) -> None:
    x, w = numbers((40, 96), 12, "cpu"), numbers((24, 96), 13, "cpu")
    x[7, 30] = special
    for plan in ("", "x=mxfp8 w=mxfp8", "x=fp8row w=fp8row"):
        want = ops.linear(x, [w], None, w.shape, plan)
        got = ops.linear(x.to(device), [w.to(device)], None, w.shape, plan)
        assert near(got, want) and got[:7].isfinite().all() and got[8:].isfinite().all(), plan


def test_empty_inputs(device: str) -> None:
    for plan in ("grad=xwb", "x=mxfp8 w=mxfp8 dy=mxfp8 grad=xwb", "x=nvfp4 w=nvfp4 dy=nvfp4 grad=xwb"):
        made = step((0, 24, 32), plan, device)
        assert made[0].shape == (0, 24) and made[-3].shape == (0, 32)
        assert not made[-2].any() and not made[-1].any()
    x, weights, ids, up, down = experts(0, device)
    assert functional.moe(x, weights, ids, up, down).shape == (0, HIDDEN)
    splits = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    assert functional.grouped_linear(x, splits, up).shape == (0, 2 * INNER)


# ---------------------------------------------------------------------------------------- streams and devices


def test_two_streams_at_once(device: str) -> None:
    """Two calls that would corrupt each other's results if they shared memory or ignored their stream."""

    def work(x: Any, w: Any) -> list[Any]:
        q = ops.quantize(x, "nvfp4+both+rht")
        return [*q, ops.linear(x, [w], None, w.shape, "x=nvfp4 w=nvfp4"), ops.quantize(x, "fp8")[0]]

    size = 1024 if device == "cuda" else 40
    inputs = [
        (numbers((size, size), 20 + i, device), numbers((size // 2, size), 30 + i, device)) for i in range(2)
    ]
    want = [work(*given) for given in inputs]
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in inputs]
    results: list[list[Any]] = [[], []]
    if device == "cuda":
        torch.cuda.synchronize()
    for _ in range(8):
        for i, stream in enumerate(streams):
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                results[i].append(work(*inputs[i]))
    if device == "cuda":
        torch.cuda.synchronize()
    for i in range(2):
        assert all(same_buffers(got, want[i]) for got in results[i]), i


def test_a_tensor_of_a_gpu_that_is_not_current(device: str) -> None:
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = make_tensor((40, 130), "cpu")
    with torch.cuda.device(0):
        got = ops.quantize(x.to("cuda:1"), "nvfp4+both")
        assert torch.cuda.current_device() == 0 and got[0].device.index == 1
    assert same_buffers(got, ops.quantize(x, "nvfp4+both"))


# ----------------------------------------------------------------------------------------------------- errors


def test_an_error_does_not_corrupt_the_next_call(device: str) -> None:
    x, w = make_tensor((40, 96), device), make_tensor((24, 96), device)
    want = ops.quantize(x, "nvfp4+both"), ops.linear(x, [w], None, w.shape, "x=mxfp8 w=mxfp8")
    wrong: tuple[Any, ...] = (
        lambda: ops.quantize(x, "nvfp5"),
        lambda: ops.quantize(x.double(), "nvfp4"),
        lambda: ops.linear(x, [w[:, :32]], None, [24, 32], ""),
        lambda: ops.quantize(x, "fp8+delayed", torch.ones(2, device=device)),
        lambda: ops.dequantize(want[0][:1], "nvfp4+both", [40, 96], F32),
    )
    for call in wrong:
        with pytest.raises(RuntimeError, match="opaq: "):
            call()
        assert same_buffers(ops.quantize(x, "nvfp4+both"), want[0])
        assert same_bytes(ops.linear(x, [w], None, w.shape, "x=mxfp8 w=mxfp8"), want[1])
    if device == "cuda":
        with pytest.raises(RuntimeError, match="opaq: .*another device"):
            ops.linear(x, [w.cpu()], None, w.shape, "")
        torch.cuda.synchronize()
        assert torch.ones(3, device=device).sum().item() == 3


def test_an_expert_that_does_not_exist(device: str) -> None:
    """The CPU refuses it. A GPU cannot report it without waiting: the slot adds nothing."""
    x, weights, ids, up, down = experts(8, device)
    none, far = ids.clone(), ids.clone()
    none[3, 1], far[3, 1] = -1, 99
    want = functional.moe(x, weights, none, up, down)
    if device == "cpu":
        with pytest.raises(ValueError, match="99"):
            functional.moe(x, weights, far, up, down)
    else:
        assert same_bytes(functional.moe(x, weights, far, up, down), want)


@pytest.fixture
def little_memory(device: str) -> Iterator[Any]:
    """A function that leaves PyTorch that number of free bytes on the GPU."""
    need_gpu(device, 8 << 30)
    total = torch.cuda.get_device_properties(0).total_memory

    def leave(size: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_in_the_middle(little_memory: Any, device: str) -> None:
    x, small = torch.ones(16384, 16384, dtype=BF16, device=device), make_tensor((40, 130), device)
    want = ops.quantize(small, "nvfp4+both")
    little_memory(400 << 20)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="(?i)memory|allocate"):
            ops.quantize(x, "mxfp8+both")  # 264 MiB for each of two copies
        assert torch.cuda.memory_allocated() == before
        assert same_buffers(ops.quantize(small, "nvfp4+both"), want)
    torch.cuda.set_per_process_memory_fraction(1.0)
    codes = ops.quantize(x, "mxfp8+both")[0]
    assert bool((codes == codes[0, 0]).all())


def test_out_of_memory_in_a_mixture(little_memory: Any, device: str) -> None:
    """The memory that is left holds the result, but not the workspace, a row for each choice of a token."""
    x = numbers((1, 1024), 60, device, BF16).expand(65536, 1024).contiguous()
    weights = torch.full((65536, CHOICES), 0.5, device=device)
    ids = torch.arange(65536 * CHOICES, device=device).reshape(65536, CHOICES) % EXPERTS
    up, down = numbers((EXPERTS, 512, 1024), 61, device, BF16), numbers((EXPERTS, 1024, 256), 62, device, BF16)
    few = x[:40], weights[:40], ids[:40], up, down
    want = functional.moe(*few)
    little_memory(200 << 20)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="(?i)memory|allocate"):
            functional.moe(x, weights, ids, up, down)
        assert torch.cuda.memory_allocated() == before
        assert same_bytes(functional.moe(*few), want)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert same_bytes(functional.moe(x, weights, ids, up, down)[:40], want)


@pytest.mark.parametrize("name", FORMATS)
def test_runners_keep_their_weights(name: str, device: str) -> None:
    weight, x = numbers((72, 160), 50, device, BF16), numbers((9, 160), 51, device, BF16)
    want = ops.linear(x, [weight], None, weight.shape, f"w={name}")
    with opaq.runner.create_linear(weight.clone(), quantizer=name) as runner:
        torch.empty(1 << 20, device=device).fill_(7)  # memory that the copy had
        assert same_bytes(runner(x), want)
    if name == "fp8":
        with opaq.runner.create_linear(
            weight, quantizer="nvfp4", input_quantizer="nvfp4", input_scale=3.5
        ) as runner:
            scale = torch.tensor([3.5], device=device)
            assert same_bytes(runner(x), ops.linear(x, [weight], None, weight.shape, "x=nvfp4 w=nvfp4", scale))


class Doubling:
    """A runner in Python, whose arguments are borrowed memory of the device."""

    def run(self, x: Any) -> Any:
        return x * 2


def test_a_python_runner_gets_tensors_of_the_device(device: str) -> None:
    x = numbers((5, 32), 52, device, BF16)
    with opaq.runner.register(Doubling(), "linear", 32, 32) as runner:
        assert same_bytes(runner(x), x * 2)

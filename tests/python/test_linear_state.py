"""The state of a Linear, with the meta device, files and copies: training continues bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opaq
from conftest import need
from linear_reference import CASES, values
from linear_training import MAIN, STATE, WRAPS, Net, same, train, under
from torch_cases import same_buffers, same_bytes

torch = need("torch")


def saved(value: Any) -> Any:
    """Saved and loaded with weights_only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_state_dict(net: Any, state: Any) -> Any:
    made = Net(net.first.weight.device.type)
    made.load_state_dict(state)
    return made


WAYS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda net: of_state_dict(net, net.state_dict()),
    "torch.save": lambda net: of_state_dict(net, saved(net.state_dict())),
    "assign": lambda net: assigned(net),
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
}


def assigned(net: Any) -> Any:
    made = Net("meta")
    made.load_state_dict(saved(net.state_dict()), assign=True)
    return made.to(net.first.weight.device)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAIN)
def test_training_continues_from_a_saved_state(name: str, way: str, device: str) -> None:
    net = Net(device)
    with under(CASES[name]):
        train(net, net, 3, device=device)
        again = WAYS[way](net)
        assert same(train(net, net, 3, device=device), train(again, again, 3, device=device))
    assert again.first.weight is not net.first.weight


def test_a_copy_has_its_own_state(device: str) -> None:
    net = Net(device)
    again = copy.deepcopy(net)
    before = [getattr(net.first, key).clone() for key in STATE]
    with under(CASES["delayed"]):
        train(again, again, 2, device=device)
    assert same_buffers([getattr(net.first, key) for key in STATE], before)
    assert not same_bytes(again.first.scale_fwd, net.first.scale_fwd)


# ------------------------------------------------------------------------------------------------ state dicts


def test_the_state_exists_after_its_first_use(device: str) -> None:
    """A module that has not used delayed scaling saves the same keys as nn.Linear."""
    module, x = opaq.Linear(72, 40, device=device), values((8, 72), 1, device)
    plain = torch.nn.Linear(72, 40, device=device)
    for name in ("none", "current", "block", "mxfp8", "nvfp4"):
        with under(CASES[name]):
            module(x).sum().backward()
    assert list(module.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    with under(CASES["delayed"]):
        module(x).sum().backward()
    assert list(module.state_dict()) == ["weight", "bias", *STATE]
    assert [tuple(getattr(module, key).shape) for key in STATE] == [(3,), (1024, 3), (2,), (1024, 2)]
    with opaq.autocast(recipe=CASES["delayed"].make()):  # constructed for that recipe
        assert set(STATE) < set(opaq.Linear(72, 40, device=device).state_dict())


def test_state_dicts_of_a_plain_linear(device: str) -> None:
    module, plain = opaq.Linear(72, 40, device=device), torch.nn.Linear(72, 40, device=device)
    assert module.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    x = values((8, 72), 1, device)
    torch.testing.assert_close(module(x), plain(x))
    other = torch.nn.Linear(72, 40, device=device)
    assert other.load_state_dict(module.state_dict(), strict=True).unexpected_keys == []
    assert torch.equal(other.weight, plain.weight) and isinstance(module, torch.nn.Linear)


def test_a_state_dict_is_left_as_it_was(device: str) -> None:
    net = Net(device)
    with under(CASES["delayed"]):
        train(net, net, 2, device=device)
    state = net.state_dict()
    keys = list(state)
    for _ in range(2):  # loading does not consume keys
        made = of_state_dict(net, state)
        assert list(state) == keys and same_bytes(made.first.scale_fwd, net.first.scale_fwd)


def test_a_state_of_the_wrong_shape_is_refused(device: str) -> None:
    module = opaq.Linear(72, 40, device=device)
    with under(CASES["delayed"]):
        module(values((8, 72), 1, device)).sum().backward()
    state = {**module.state_dict(), "scale_fwd": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"scale_fwd has the shape \(4,\), expected \(3,\)"):
        opaq.Linear(72, 40, device=device).load_state_dict(state)


# ------------------------------------------------------------------------------------------- casts and devices


CASTS: dict[str, Callable[[Any], Any]] = {
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "bfloat16()": lambda module: module.bfloat16(),
    "half()": lambda module: module.half(),
    "to(device, dtype)": lambda module: module.to(module.weight.device, torch.bfloat16),
    "around": lambda module: torch.nn.Sequential(module).to(torch.bfloat16)[0],
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_leaves_the_state_float32(cast: str, device: str) -> None:
    module = opaq.Linear(72, 40, device=device)
    with under(CASES["delayed"]):
        module(values((8, 72), 1, device)).sum().backward()
    before = [getattr(module, key).clone() for key in STATE]
    module = CASTS[cast](module)
    assert module.weight.dtype in (torch.bfloat16, torch.float16)
    assert same_buffers([getattr(module, key) for key in STATE], before)  # dtypes too
    with under(CASES["delayed"]):
        module(values((8, 72), 1, device, module.weight.dtype)).sum().backward()


def test_from_the_meta_device(device: str) -> None:
    torch.manual_seed(6)
    want = opaq.Linear(72, 40, device=device)
    made = opaq.Linear(72, 40, device="meta")
    assert all(t.is_meta for t in (*made.parameters(), *made.buffers()))
    made.to_empty(device=device)
    torch.manual_seed(6)
    made.reset_parameters()
    for key, tensor in {**dict(want.named_parameters()), **dict(want.named_buffers())}.items():
        assert same_bytes(getattr(made, key).detach(), tensor.detach()), key


def emptied(net: Any, device: str) -> Any:
    """to_empty, with uninitialized memory filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return net.to_empty(device=device)
    finally:
        torch.use_deterministic_algorithms(before)


def reset(net: Any) -> Any:
    for layer in (net.first, net.second):
        layer.reset_parameters()
    return net


def loaded(net: Any, state: Any, **how: Any) -> Any:
    found = net.load_state_dict(state, strict=True, **how)
    assert found.missing_keys == found.unexpected_keys == []
    return net


ORDERS: dict[str, Callable[[Any, str], Any]] = {
    "to_empty, load": lambda state, device: loaded(emptied(Net("meta"), device), state),
    "to_empty, reset, load": lambda state, device: loaded(reset(emptied(Net("meta"), device)), state),
    "reset, to_empty, load": lambda state, device: loaded(emptied(reset(Net("meta")), device), state),
    "assign": lambda state, device: loaded(Net("meta"), saved(state), assign=True).to(device),
    "to_empty, assign": lambda state, device: loaded(emptied(Net("meta"), device), saved(state), assign=True),
    "to_empty of a real one, load": lambda state, device: loaded(emptied(Net(device), device), state),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_state_dict_is_loaded_into_a_module_from_the_meta_device(order: str, wrap: str, device: str) -> None:
    """In every order: the module has exactly the loaded keys, and trains like one that was never on the meta
    device. A state with delayed scaling comes from a module that was trained with it."""
    plain, trained = Net(device), Net(device)
    with under(CASES["delayed"]):
        train(trained, trained, 2, device=device)
    cases = [(plain, "delayed"), (trained, "delayed"), (plain, "none")]
    for source, name in cases if wrap == "eager" else cases[:1]:
        state = source.state_dict()
        made, want = ORDERS[order](state, device), loaded(Net(device), state)
        assert list(made.state_dict()) == list(state)
        assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
        with under(CASES[name]):
            torch._dynamo.reset()
            function = WRAPS[wrap](made)
            assert same(train(made, function, 2, device=device), train(want, want, 2, device=device)), name


@pytest.mark.parametrize("first", [reset, lambda net: net])
def test_reset_parameters_after_the_meta_device(first: Any, device: str) -> None:
    made, want = emptied(first(Net("meta")), device), Net(device)
    for net in (made, want):
        torch.manual_seed(6)
        reset(net)
    assert list(made.state_dict()) == ["first.weight", "first.bias", "second.weight"]
    with under(CASES["delayed"]):
        assert same(train(made, made, 2, device=device), train(want, want, 2, device=device))


def test_parameters_that_leave_the_meta_device_one_by_one(device: str) -> None:
    """Parameters are replaced one by one, as loaders of other libraries do: a delayed recipe creates its state,
    outside a compiled region."""
    made, want = Net("meta"), Net(device)
    for net, source in ((made.first, want.first), (made.second, want.second)):
        for key, parameter in source.named_parameters():
            setattr(net, key, torch.nn.Parameter(parameter.detach().clone()))
    assert list(made.state_dict()) == list(want.state_dict())
    with under(CASES["delayed"]):
        with pytest.raises(Exception, match="delayed scaling's state is on the meta device"):
            WRAPS["compiled"](made)(values((20, 72), 1, device, torch.bfloat16))
        assert same(train(made, made, 2, device=device), train(want, want, 2, device=device))


@pytest.mark.parametrize("name", MAIN)
def test_a_meta_module_runs_on_meta_tensors(name: str) -> None:
    net, x = Net("meta"), torch.empty(20, 72, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with under(CASES[name]):
        y = net(x)
    y.sum().backward()
    assert y.is_meta and y.shape == (20, 40) and x.grad.is_meta and net.first.weight.grad.shape == (56, 72)


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_quantized_parameters_from_the_meta_device(name: str, device: str) -> None:
    recipe = CASES[name].make()
    with opaq.quantized_model_init(recipe=recipe):
        torch.manual_seed(6)
        want = opaq.Linear(72, 40, device=device)
        made = opaq.Linear(72, 40, device="meta").to_empty(device=device)
    torch.manual_seed(6)
    made.reset_parameters()
    assert isinstance(made.weight, opaq.QuantizedTensor)
    assert same_buffers(made.weight.buffers(), want.weight.buffers())


def test_init_method(device: str) -> None:
    module = opaq.Linear(72, 40, device=device, init_method=lambda tensor: tensor.fill_(0.5))
    assert torch.equal(module.weight, torch.full_like(module.weight, 0.5)) and not module.bias.any()
    with opaq.quantized_model_init():
        module = opaq.Linear(72, 40, device=device, init_method=lambda tensor: tensor.fill_(0.5))
    assert torch.equal(module.weight.dequantize(), torch.full((40, 72), 0.5, device=device))


def test_init_draws_from_the_named_generator(device: str) -> None:
    """Like Megatron's tracker: a forked generator, active while parameters are initialized."""
    entered = []

    class Tracker:
        def fork(self, name: str) -> Any:
            entered.append(name)
            return torch.random.fork_rng(devices=[])

    before = torch.get_rng_state()
    opaq.Linear(8, 4, device=device, get_rng_state_tracker=Tracker, rng_tracker_name="model-parallel-rng")
    assert entered == ["model-parallel-rng"] and (device != "cpu" or torch.equal(before, torch.get_rng_state()))


# ---------------------------------------------------------------------------------------- quantized parameters


@pytest.mark.parametrize("way", ["state_dict", "torch.save", "deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_quantized_parameters_are_kept(name: str, way: str, device: str) -> None:
    with opaq.quantized_model_init(recipe=CASES[name].make(), preserve_high_precision_init_val=True):
        module, other = (opaq.Linear(72, 40, device=device) for _ in range(2))
    if way in ("state_dict", "torch.save"):
        again = other
        again.load_state_dict(module.state_dict() if way == "state_dict" else saved(module.state_dict()))
    else:
        again = WAYS[way](module)
        value = module.weight.get_high_precision_init_val()
        module.weight.clear_high_precision_init_val()
        assert torch.equal(again.weight.get_high_precision_init_val(), value)  # not the original's
    assert isinstance(again.weight, opaq.QuantizedTensor) and again.weight.requires_grad
    assert again.weight.quantizer == module.weight.quantizer
    assert same_buffers(again.weight.buffers(), module.weight.buffers())


def test_plain_weights_are_loaded_into_quantized_parameters(device: str) -> None:
    plain = torch.nn.Linear(72, 40, device=device)
    with opaq.quantized_model_init(recipe=CASES["mxfp8"].make()):
        module = opaq.Linear(72, 40, device=device)
    module.load_state_dict(plain.state_dict())
    want = opaq.quantize_tensor(plain.weight.detach(), module.weight.quantizer)
    assert same_buffers(module.weight.buffers(), want.buffers())


def test_a_distributed_checkpoint(device: str, tmp_path: Path) -> None:
    """In one process, with quantized parameters and delayed scaling's state."""
    checkpoint = need("torch.distributed.checkpoint")
    with opaq.quantized_model_init(recipe=CASES["mxfp8"].make()):
        module, other = (opaq.Linear(72, 40, device=device) for _ in range(2))
    for made in (module, other):
        with under(CASES["delayed"]):
            made(values((8, 72), 1, device)).sum().backward()
        other.scale_fwd.fill_(7)
    assert not same_buffers(module.weight.buffers(), other.weight.buffers())
    checkpoint.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    assert same_buffers(module.weight.buffers(), other.weight.buffers())
    assert same_buffers(*([getattr(made, key) for key in STATE] for made in (module, other)))


# ---------------------------------------------------------------------------------------------- random numbers


def test_a_seed_gives_the_same_gradients(device: str) -> None:
    """NVFP4's stochastic rounding takes numbers from PyTorch's generator, once for each forward."""
    net = Net(device)
    x = values((20, 72), 1, device, torch.bfloat16)
    gradients = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with under(CASES["nvfp4"]):
            y = net(x)
        net.zero_grad()
        y.sum().backward()
        gradients.append(net.first.weight.grad.clone())
    assert same_bytes(gradients[0], gradients[1]) and not same_bytes(gradients[0], gradients[2])


def test_every_call_rounds_differently(device: str) -> None:
    """And the mean is the unquantized value."""
    module = opaq.Linear(64, 32, bias=False, device=device)
    x, dy = values((16, 64), 1, device).requires_grad_(), values((16, 32), 2, device)
    torch.manual_seed(0)
    gradients = []
    for _ in range(64):
        with under(CASES["nvfp4"]):
            y = module(x)
        gradients.append(torch.autograd.grad(y, x, dy)[0])
    with under(CASES["nvfp4 no sr"]):
        nearest = torch.autograd.grad(module(x), x, dy)[0]
    weight = opaq.quantize_tensor(module.weight.detach(), "nvfp4+2d").dequantize()
    exact = dy @ weight
    mean = torch.stack(gradients).mean(0)
    assert len({gradient.cpu().numpy().tobytes() for gradient in gradients}) == 64
    assert (mean - exact).norm() < 0.4 * (nearest - exact).norm()


@pytest.mark.parametrize("name", [name for name in MAIN if name != "nvfp4"])
def test_the_generator_is_not_used_without_stochastic_rounding(name: str, device: str) -> None:
    net, x = Net(device), values((20, 72), 1, device, torch.bfloat16)
    before = torch.get_rng_state()
    with under(CASES[name]):
        net(x).sum().backward()
    with under(CASES["nvfp4"]), torch.no_grad():
        net(x)
    assert torch.equal(before, torch.get_rng_state())

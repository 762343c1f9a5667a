"""The output of `opaq quantize`, compared byte for byte with that of the packages that define the layouts, and
read by them.

compressed-tensors and nvidia-modelopt get the same weights as float32; all bytes must be equal, including
shared global scales. The values that compressed-tensors, transformers and opaq's own loader read must equal
those of `opaq convert --layout plain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cli_llama
from cli_llama import BLOCK, DTYPES, JOINED, KINDS, LAYERS, PAIRS, Jobs, is_quantized, same, tensors
from cli_run import command, run_well
from conftest import need

torch = need("torch")
need("compressed_tensors")
peer_compressor = need("peer_compressor")
safetensors = need("safetensors")
command()

EVERY = [(layout, name, dtype) for layout, name in PAIRS for dtype in DTYPES]
CT_LAYOUT = ("compressed-tensors",)
CT = cli_llama.FORMATS["compressed-tensors"]
MODELOPT = cli_llama.FORMATS["modelopt"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def peer() -> Any:
    return peer_compressor.compressed_tensors()


def groups(kind: str) -> list[list[str]]:
    """Weights that engines fuse to one matrix."""
    if kind != "llama":
        return []
    return [
        [f"model.layers.{layer}.{module}.{name}.weight" for name in names]
        for layer in range(LAYERS)
        for module, names in JOINED
    ]


def quantized_names(kind: str, dtype: str, name: str) -> Iterator[tuple[str, Any]]:
    for key, tensor in KINDS[kind](dtype).items():
        if is_quantized(key, tensor, name):
            yield key, tensor


# ---- files ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "name", "dtype"), EVERY)
def test_files(jobs: Jobs, kind: str, layout: str, name: str, dtype: str) -> None:
    """safetensors opens them, and every tensor that is not quantized is unchanged."""
    found = tensors(jobs.quantized(kind, dtype, layout, name))
    source = KINDS[kind](dtype)
    kept = {key for key, tensor in source.items() if not is_quantized(key, tensor, name)}
    assert kept and kept <= set(found)
    for key in kept:
        same(found[key], source[key], key)
    made = set(found) - kept
    weights = {key for key in source if key not in kept}
    assert all(any(key.startswith(weight) for weight in weights) for key in made)
    assert len(made) == len(weights) * (3 if name == "nvfp4" else 2)


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_headers_are_those_of_safetensors(jobs: Jobs, layout: str, name: str, tmp_path: Path) -> None:
    """The file equals, byte for byte, what the package writes for the same tensors and metadata."""
    path = jobs.quantized("odd", "bf16", layout, name) / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    cli_llama.safetensors.save_file(tensors(path.parent), tmp_path / "again.safetensors", metadata=metadata)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


# ---- compressed-tensors ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CT)
def test_bytes_of_compressed_tensors(jobs: Jobs, peer: Any, kind: str, dtype: str, name: str) -> None:
    found = tensors(jobs.quantized(kind, dtype, "compressed-tensors", name))
    source = KINDS[kind](dtype)
    shared: dict[str, Any] = {}
    for group in groups(kind):  # as in llm-compressor: the smallest of them
        own = [peer.gparam(source[key].float().min(), source[key].float().max()) for key in group]
        shared |= dict.fromkeys(group, torch.stack(own).min(0).values)
    for key, tensor in quantized_names(kind, dtype, name):
        state = peer_compressor.compressed_state(peer, name, tensor.float(), shared.get(key))
        state.pop("weight_zero_point", None)
        if name == "nvfp4":
            state["weight_global_scale"] = state["weight_global_scale"].reshape(1)
        for part, wanted in state.items():
            same(found[key.removesuffix("weight") + part], wanted, f"{key} {part}")


def decompressed(peer: Any, name: str, state: dict[str, Any]) -> Any:
    """A weight decoded by compressed-tensors; for nvfp4 in float32, because its compressor rounds the
    result."""
    compressor, scheme = peer.compressor(name), peer.scheme(peer.args[name])
    if name != "nvfp4":
        return compressor.decompress(state, scheme)["weight"].float()
    packed = state["weight_packed"]
    unpacked = peer.unpack(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
    scale, divisor = state["weight_scale"].float(), state["weight_global_scale"]
    exact = peer.dequantize(unpacked, scale, args=peer.args[name], global_scale=divisor)
    rounded = compressor.decompress(state, scheme)["weight"].float()
    torch.testing.assert_close(rounded, exact, rtol=2**-6, atol=0, equal_nan=True)
    return exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CT)
def test_compressed_tensors_reads_the_values(jobs: Jobs, peer: Any, kind: str, dtype: str, name: str) -> None:
    found = tensors(jobs.quantized(kind, dtype, "compressed-tensors", name))
    plain = tensors(jobs.plain(kind, dtype, "compressed-tensors", name))
    assert set(plain) == set(KINDS[kind](dtype))
    for key, _ in quantized_names(kind, dtype, name):
        module = key.removesuffix("weight")
        state = {k.removeprefix(module): t for k, t in found.items() if k.startswith(module)}
        assert torch.equal(decompressed(peer, name, state), plain[key]), key


@pytest.mark.parametrize("name", CT)
def test_any_bytes_are_decoded_equally(peer: Any, name: str, tmp_path: Path) -> None:
    """Codes and scales that no quantizer writes: NaNs, zeros, negative and huge scales."""
    random = torch.Generator().manual_seed(len(name))

    def any_bytes(*shape: int, most: int = 256) -> Any:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=random)

    rows, columns = 130, 160
    fp8 = torch.float8_e4m3fn
    shapes = {"fp8": (1,), "fp8row": (rows, 1), "fp8blk2": (2, 2)}
    if name in shapes:  # any float32
        scale = any_bytes(*shapes[name], 4).view(torch.float32).squeeze(-1)
        state = {"weight": any_bytes(rows, columns).view(fp8), "weight_scale": scale}
    elif name == "nvfp4":
        state = {
            "weight_packed": any_bytes(rows, columns // 2),
            "weight_scale": any_bytes(rows, columns // 16).view(fp8),
            "weight_global_scale": torch.tensor([-3.7e-5]),
        }
    else:  # the range of bf16, to which they are decompressed; 255 is NaN for OCP, 2^128 for compressed-tensors
        packed = any_bytes(rows, columns // 2) if name == "mxfp4" else any_bytes(rows, columns).view(fp8)
        state = {"weight_packed" if name == "mxfp4" else "weight": packed}
        state["weight_scale"] = any_bytes(rows, columns // 32, most=225) + 20
    path = tmp_path / "model.safetensors"
    cli_llama.safetensors.save_file({f"x.{part}": t.contiguous() for part, t in state.items()}, path)
    run_well("convert", "--quiet", "--layout", "plain", "--dtype", "f32", path, tmp_path / "plain.safetensors")
    found = cli_llama.safetensors.load_file(tmp_path / "plain.safetensors")["x.weight"]
    wanted = decompressed(peer, name, state)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("name", CT)
def test_nothing_but_zeros(peer: Any, name: str, tmp_path: Path) -> None:
    zeros = torch.zeros(128, 128)
    zeros[::3] = -0.0
    path = tmp_path / "model.safetensors"
    cli_llama.safetensors.save_file({"x.weight": zeros}, path)
    run_well("quantize", "--quiet", "--format", name, path, tmp_path / "to.safetensors")
    found = cli_llama.safetensors.load_file(tmp_path / "to.safetensors")
    for part, wanted in peer_compressor.compressed_state(peer, name, zeros).items():
        if part != "weight_zero_point":
            same(found[f"x.{part}"].reshape(wanted.shape), wanted, part)


# ---- nvidia-modelopt ----


def modelopt_takes(name: str, tensor: Any) -> bool:
    """ModelOpt needs whole blocks of 128 x 128, and more than one row if each has a scale."""
    rows, columns = tensor.shape
    return (name != "fp8blk2" or rows % 128 == columns % 128 == 0) and (name != "fp8row" or rows > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELOPT)
def test_bytes_of_modelopt(jobs: Jobs, kind: str, dtype: str, name: str) -> None:
    modelopt = need("peer_modelopt")
    found = tensors(jobs.quantized(kind, dtype, "modelopt", name))
    given = [(key, w.float()) for key, w in quantized_names(kind, dtype, name) if modelopt_takes(name, w)]
    if not given:
        assert name == "fp8blk2" and kind == "odd"
        return
    keys = [key for key, _ in given]
    fused = [[keys.index(key) for key in group] for group in groups(kind)]
    for key, state in zip(keys, modelopt.modelopt_states(name, [w for _, w in given], fused), strict=True):
        for part, wanted in state.items():
            same(found[key.removesuffix("weight") + part], wanted, f"{key} {part}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_deepseek_is_modelopt_with_other_names(jobs: Jobs, dtype: str) -> None:
    theirs = tensors(jobs.quantized("llama", dtype, "modelopt", "fp8blk2"))
    found = tensors(jobs.quantized("llama", dtype, "deepseek", "fp8blk2"))
    for key, _ in quantized_names("llama", dtype, "fp8blk2"):
        same(found[key], theirs[key], key)
        same(found[key + "_scale_inv"], theirs[key + "_scale"].squeeze(-1).squeeze(1), key)


# ---- against opaq's Python package ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_values_are_those_of_the_package(jobs: Jobs, layout: str, name: str, dtype: str) -> None:
    opaq = need("opaq")
    rule = {"compressed-tensors": "compressed-tensors", "modelopt": "modelopt", "deepseek": "modelopt"}[layout]
    rule = "te" if (layout, name) == ("deepseek", "mxfp8") else rule
    options = "+global" if name == "nvfp4" else ""
    plain = tensors(jobs.plain("odd", dtype, layout, name))
    for key, w in quantized_names("odd", dtype, name):
        spec = f"{name}{options}+rule={rule}" if rule != "te" else name
        q = opaq.quantize(w.float().numpy(), opaq.Quantizer(spec))
        same(plain[key], torch.from_numpy(opaq.dequantize(q)), key)


# ---- transformers ----


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(2, 34).reshape(2, 16)).logits.float()


def cosine(a: Any, b: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


@pytest.mark.parametrize("name", CT)
def test_transformers_loads_compressed_tensors(jobs: Jobs, name: str) -> None:
    """With its own loader, as engines run it: bf16, also for scales, with quantized inputs."""
    auto = need("transformers").AutoModelForCausalLM
    model = auto.from_pretrained(jobs.quantized("llama", "bf16", *CT_LAYOUT, name), dtype=torch.bfloat16)
    plain = auto.from_pretrained(jobs.plain("llama", "bf16", *CT_LAYOUT, name), dtype=torch.bfloat16)
    assert cosine(logits(model), logits(plain)) > (0.7 if "fp4" in name else 0.98)
    for key, _ in quantized_names("llama", "bf16", name):
        torch.testing.assert_close(model.get_parameter(key), plain.get_parameter(key), rtol=2**-6, atol=0)


@pytest.mark.parametrize("name", CT)
def test_transformers_computes_the_same(jobs: Jobs, name: str) -> None:
    """With inputs that are not quantized: weights and logits equal those of the plain checkpoint. In float32
    where supported: blocks are decompressed to bf16, which is exact for MX formats, but not for NVFP4."""
    dtype = torch.bfloat16 if name in BLOCK else torch.float32
    transformers = need("transformers")
    auto = transformers.AutoModelForCausalLM
    folder = jobs.quantized("llama", "bf16", *CT_LAYOUT, name)
    config = transformers.AutoConfig.from_pretrained(folder)
    for group in config.quantization_config["config_groups"].values():
        group["input_activations"] = None
    model = auto.from_pretrained(folder, config=config, dtype=dtype)
    plain = auto.from_pretrained(jobs.plain("llama", "bf16", *CT_LAYOUT, name), dtype=dtype)
    found = logits(model)  # also decompresses the weights
    assert cosine(found, logits(plain)) > (0.9995 if name == "nvfp4" else 0.999999)
    for key, _ in quantized_names("llama", "bf16", name):
        a, b = model.get_parameter(key), plain.get_parameter(key)
        torch.testing.assert_close(a, b, rtol=2**-6 if name == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_opaq_config_loads_it(jobs: Jobs, layout: str, name: str) -> None:
    transformers, opaq = need("transformers"), need("opaq")
    folder = jobs.quantized("llama", "bf16", layout, name)
    plain = tensors(jobs.plain("llama", "bf16", layout, name))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=opaq.Config()
    )
    seen = 0
    for key, _ in quantized_names("llama", "bf16", name):
        parameter = model.get_parameter(key)
        assert isinstance(parameter, opaq.QuantizedTensor), key
        same(parameter.dequantize(torch.float32), plain[key], key)
        seen += 1
    assert seen == 7 * LAYERS and BLOCK.get(name, 16) % 16 == 0
    assert bool(torch.isfinite(logits(model)).all())

"""vLLM's view of a quantized checkpoint: which checkpoints opaq serves, and which method each layer gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform

from opaq._library import Device, OpaqError, call, version
from opaq._memory import return_freed
from opaq._names import Names
from opaq.checkpoint import Layout, Scheme, read_layout
from opaq.integrations.vllm import METHOD, Options
from opaq.integrations.vllm_layers import (
    OpaqLinearMethod,
    OpaqMoEMethod,
    OpaqOnlineLinearMethod,
    OpaqOnlineMoEMethod,
    Prepared,
)
from opaq.quantizer import Quantizer

logger = init_logger("vllm.plugins.opaq")
_GPT_OSS = "gpt_oss_mxfp4"  # by this name vLLM loads the experts of gpt-oss as they are stored
_IGNORED = ("lm_head", "gate", "router", "shared_expert_gate")  # the default


def why_not_here(is_asked: bool) -> str:
    """Why no checkpoint is served on vLLM's platform; "" if it is. On CUDA, where vLLM has kernels of its own,
    the user has to choose opaq. Does not open the CUDA back end: this process may fork."""
    if current_platform.is_cpu():
        return ""
    where = f"vLLM runs on {current_platform.device_name}"
    if not current_platform.is_cuda():
        return f"{where}, and opaq has kernels for processors and CUDA only"
    if not is_asked and Options.from_environment().cuda != "1":
        return f"{where}; --quantization opaq or OPAQ_VLLM_CUDA=1 serves it with opaq there"
    return ""


def why_not(config: Any, is_asked: bool = False) -> str:
    """Why a checkpoint with this quantization_config is not served; "" if it is. is_asked: the user chose
    opaq."""
    if reason := why_not_here(is_asked):
        return reason
    try:
        _read(config)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _read(config: Mapping[str, Any]) -> Layout:
    if config.get("quant_method") == METHOD:
        raise ValueError(
            "the checkpoint was saved by opaq.Config, whose tensors vLLM does not load; "
            "`opaq quantize` writes one that it does"
        )
    nested = config.get("quantization")  # the key in ModelOpt's hf_quant_config.json
    config = {"quant_method": "modelopt", **nested} if isinstance(nested, Mapping) else dict(config)
    config["quant_method"] = {_GPT_OSS: "mxfp4"}.get(config["quant_method"], config["quant_method"])
    return read_layout(config)


@register_quantization_config(METHOD)
class OpaqConfig(QuantizationConfig):
    """Made from a checkpoint's quantization_config, or, for one in high precision, from OPAQ_VLLM_FORMAT."""

    def __init__(
        self,
        layout: Layout | None = None,
        quantizer: str = "",
        activations: str = "",
        ignore: Sequence[str] = _IGNORED,
    ) -> None:
        super().__init__()
        self.options = Options.from_environment()
        self.layout = layout
        self.quantizer = quantizer or ("" if layout is not None else self.options.format)
        self.activations, self.ignore = activations, Names(ignore)
        self.kv_cache_scheme: Any = None  # of compressed-tensors; vLLM reads it, and the numbers that it adds
        self.total_num_heads = self.total_num_kv_heads = None
        self.waiting = 0  # layers whose weights are not prepared yet
        self.prepared: list[Prepared] = []
        if reason := why_not_here(is_asked=True):
            raise ValueError(f"opaq: {reason}")
        if layout is None and not self.quantizer:
            raise ValueError(
                "opaq: the checkpoint is not quantized; OPAQ_VLLM_FORMAT=nvfp4, for example, quantizes it "
                "while it loads"
            )
        if self.quantizer:
            self.quantizer = str(Quantizer(self.quantizer))

    # ---- vLLM's interface ----

    def get_name(self) -> str:
        return _GPT_OSS if self.layout is not None and "weight" not in self.layout.weights else METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # of a GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OpaqConfig:
        if config.get("quant_method") == METHOD and "format" in config:
            given = {key: config[key] for key in ("activations", "ignore") if key in config}
            return cls(None, config["format"], **given)
        try:
            made = cls(_read(config))
        except ValueError as error:
            raise ValueError(f"opaq: {str(error).removeprefix('opaq: ')}") from None
        if config.get("quant_method") == "compressed-tensors":
            for key in ("kv_cache_scheme", "total_num_heads", "total_num_kv_heads"):
                setattr(made, key, config.get(key))
        return made

    @classmethod
    def from_config_dict_json(cls, text: str) -> OpaqConfig:
        return cls.from_config(json.loads(text))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Called before vLLM's own methods. A method that the user chose is kept."""
        if user_quant not in (None, METHOD) or not isinstance(hf_quant_cfg, Mapping):
            return None
        if hf_quant_cfg.get("quant_method") == METHOD and "format" in hf_quant_cfg:
            return METHOD
        if reason := why_not(hf_quant_cfg, user_quant == METHOD):
            if user_quant == METHOD:
                raise ValueError(f"opaq: {reason.removeprefix('opaq: ')}")
            logger.info("opaq leaves this checkpoint to vLLM: %s", reason.removeprefix("opaq: "))
            return None
        return METHOD

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Maps names of modules that vLLM renames."""
        if self.layout is not None:
            schemes = tuple(
                (_mapped(names, hf_to_vllm_mapper), scheme) for names, scheme in self.layout.schemes
            )
            self.layout = replace(
                self.layout, schemes=schemes, ignore=_mapped(self.layout.ignore, hf_to_vllm_mapper)
            )

    @staticmethod
    def get_cache_scale_mapper() -> Any:
        """The names of the cache's scales in all checkpoints that vLLM reads."""
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config

        return Fp8Config.get_cache_scale_mapper()

    def _cache_method(self) -> Any:
        """vLLM's own, which loads a checkpoint's scales of keys and values, and drops them if the cache is not
        quantized."""
        if self.kv_cache_scheme is None:
            return BaseKVCacheMethod(self)
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

        return compressed_tensors.CompressedTensorsKVCacheMethod(self)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Leaves vocabulary-parallel layers and attention to vLLM."""
        if isinstance(layer, (Attention, MLAAttention)):
            return None if self.layout is None else self._cache_method()
        if isinstance(layer, (LinearBase, RoutedExperts)) and not current_platform.is_cpu():
            _check_cuda()
        if isinstance(layer, LinearBase):
            head, dot, leaf = prefix.rpartition(".")
            names = [f"{head}{dot}{name}" for name in self.packed_modules_mapping.get(leaf, [leaf])]
            kinds: tuple[Any, ...] = UnquantizedLinearMethod, OpaqLinearMethod, OpaqOnlineLinearMethod
            given: tuple[Any, ...] = ()
        elif isinstance(layer, RoutedExperts):
            projections = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
            experts = prefix.removesuffix(".routed_experts")
            names = [f"{experts}.0.{name}" for name in projections if name]
            kinds = UnquantizedFusedMoEMethod, OpaqMoEMethod, OpaqOnlineMoEMethod
            given = (layer.moe_config,)
        else:
            return None
        plain, packed, online = kinds
        if self.layout is None:
            if any(name in self.ignore for name in names):
                return plain(*given)
            self.waiting += 1
            return online(*given, config=self)
        has_only_experts = "weight" not in self.layout.weights
        scheme = None if has_only_experts and isinstance(layer, LinearBase) else self._scheme(prefix, names)
        if scheme is None:
            return plain(*given)
        self.waiting += 1
        return packed(*given, config=self, scheme=scheme, prefix=prefix)

    def _scheme(self, prefix: str, names: Sequence[str]) -> Scheme | None:
        assert self.layout is not None
        found = [self.layout.scheme(name) for name in names]
        if any(scheme != found[0] for scheme in found):
            said = ", ".join(f"{n} {s.weight if s else 'plain'}" for n, s in zip(names, found, strict=True))
            raise ValueError(f"opaq: vLLM joins weights that are stored differently in {prefix}: {said}")
        return found[0]

    # ---- progress ----

    def done(self, *prepared: Prepared) -> None:
        """Records that a layer is prepared; the last one logs a summary of the model."""
        self.waiting -= 1
        self.prepared += prepared
        if self.waiting:
            return
        kinds: dict[tuple[str, str, str], list[Prepared]] = {}
        for row in self.prepared:
            kinds.setdefault((row.format, row.input, row.kernel), []).append(row)
        for (form, given, kernel), rows in kinds.items():
            size, inputs = sum(row.bytes for row in rows), f"inputs {given or 'as they are'}"
            found = f"{len(rows)} weights in {form}, {size / 1e6:.1f} MB, {inputs}, kernel {kernel}"
            how = self.options.precision + (f", order {rows[0].order}" if rows[0].order != "fixed" else "")
            logger.info("opaq %s: %s, precision %s", version, found, how)
        self.prepared = []
        return_freed()


def _check_cuda() -> None:
    """Raises with the reason if the CUDA back end cannot be used."""
    try:
        call("opaq_device_check", Device(1, torch.cuda.current_device() if torch.cuda.is_available() else 0))
    except OpaqError as error:
        raise ValueError(f"opaq: vLLM runs on {current_platform.device_name}: {error}") from None


def _mapped(names: Names, mapper: Any) -> Names:
    return Names(mapper.apply_list(list(names.patterns)))

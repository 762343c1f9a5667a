"""vLLM: serves packed checkpoints with opaq's operators, on processors and, if chosen, on CUDA. vLLM finds
`register` by the entry point group `vllm.general_plugins` and calls it in each of its processes: docs/vllm.md.

Imports neither vLLM nor PyTorch until it is called."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

METHOD = "opaq"  # the method's name in vLLM: --quantization opaq
ACTIVATIONS = ("checkpoint", "none")
ROWS = "rows"  # a precision: exact, with weights in rows


@dataclass(frozen=True)
class Options:
    """Settings from the environment."""

    format: str = ""  # OPAQ_VLLM_FORMAT: how a checkpoint in high precision is quantized while it loads
    precision: str = "exact"  # OPAQ_VLLM_PRECISION: the lowest accuracy that kernels may have, or "rows"
    activations: str = "checkpoint"  # OPAQ_VLLM_ACTIVATIONS: as the checkpoint says, or "none"
    cuda: str = "0"  # OPAQ_VLLM_CUDA: "1" also serves checkpoints on CUDA that are not assigned to opaq

    @classmethod
    def from_environment(cls) -> Options:
        from opaq.model import PRECISIONS

        given = {f.name: os.environ.get(f"OPAQ_VLLM_{f.name.upper()}") for f in fields(cls)}
        made = cls(**{name: value for name, value in given.items() if value})
        choices = ("precision", (*PRECISIONS, ROWS)), ("activations", ACTIVATIONS), ("cuda", ("0", "1"))
        for name, expected in choices:
            if (value := getattr(made, name)) not in expected:
                raise ValueError(
                    f"OPAQ_VLLM_{name.upper()} is {value!r}, expected one of {', '.join(expected)}"
                )
        return made

    @property
    def keeps_rows(self) -> bool:
        """Whether weights stay in rows, as a trainer has them, instead of tiles."""
        return self.precision == ROWS

    @property
    def lowest_precision(self) -> str:
        """The plan's word `precision`."""
        return "exact" if self.keeps_rows else self.precision


def register() -> None:
    """The entry point. May be called again."""
    from opaq.integrations import vllm_config  # noqa: F401  # registers its class with vLLM

"""opaq inside PyTorch: one node in the graph, sizes that change without a recompile, a weight kept packed."""

from __future__ import annotations

import warnings

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import opaq


class PackedLinear(torch.nn.Module):
    """x times a weight that lies in memory as the buffers of a quantizer."""

    def __init__(self, weight: torch.Tensor, quantizer: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(opaq.quantize_tensor(weight, quantizer), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.dequantize())


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch's, about its own pytrees
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(512, 1024)).bfloat16()
    counter = CompileCounterWithBackend("inductor")
    print(
        f"PyTorch {torch.__version__}, opaq {opaq.__version__}: torch.compile(fullgraph=True, dynamic=True)\n"
    )
    print(
        f"{'quantizer':14} {'weight bytes':>12} {'of bf16':>8} {'graphs':>7} {'opaq nodes':>11} {'cosine':>9}"
    )
    for quantizer in ("fp8", "fp8blk2", "mxfp8", "mxfp4", "nvfp4"):
        torch._dynamo.reset()
        counter.clear()
        model = PackedLinear(weight, quantizer)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for rows in (3, 17, 100):
            x = torch.randn(rows, 1024).bfloat16()
            y = compiled(x)
            assert torch.equal(y, model(x))
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
        lowered = exported.run_decompositions().graph.nodes
        nodes = sum(str(node.target).startswith("opaq.") for node in lowered)
        packed = sum(buffer.nbytes for buffer in model.weight.buffers())
        plain = torch.nn.functional.linear(x, weight)
        cosine = torch.nn.functional.cosine_similarity(y.float().flatten(), plain.float().flatten(), dim=0)
        share = packed / weight.nbytes
        print(f"{quantizer:14} {packed:12} {share:8.3f} {counter.frame_count:7} {nodes:11} {cosine:9.6f}")
    print("\nthree batch sizes, one graph each quantizer; compiled and eager results are equal by bytes")


if __name__ == "__main__":
    main()

"""Quantizes a NumPy array to NVFP4 and prints the buffers and the error of the rounding."""

import numpy as np

import opaq

x = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
q = opaq.quantize(x, opaq.Quantizer("nvfp4"))
for name, buffer in q.buffers.items():
    print(f"{name:20} {buffer.dtype!s:8} {buffer.shape}")
print(sum(buffer.nbytes for buffer in q.buffers.values()), "bytes instead of", x.nbytes)

error = opaq.dequantize(q) - x
sqnr = 10 * np.log10((x**2).mean() / (error**2).mean())
print(f"largest error {np.abs(error).max():.3f}, SQNR {sqnr:.1f} dB")

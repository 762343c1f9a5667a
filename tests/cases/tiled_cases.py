"""Tiled weights and precisions, which the tests of products with them and the benchmark iterate over, so that
every timed case is tested."""

QUANTIZERS = (
    *("nvfp4", "nvfp4+2d", "nvfp4+rowscaled", "nvfp4+global+rule=modelopt", "mxfp4", "mxfp8", "mxfp8.e5m2"),
    *("fp8", "fp8row", "fp8blk2", "nvfp4+rowscaled+global+rule=compressed-tensors"),
)

# How far each precision may be from the product of the dequantized weight, by the norm of all outputs.
ERRORS = {"exact": 1e-6, "near": 1e-4, "fast": 2e-2, "fast32": 2e-2}

# Timed quantizers of the weight, with the precisions that have separate kernels.
TIMED = {
    "nvfp4": ("exact", "near", "fast", "fast32"),
    "mxfp4": ("exact", "near", "fast"),
    "mxfp8": ("exact",),
    "fp8": ("exact",),
    "fp8blk2": ("exact",),
}

# Quantizers of weight and input whose codes are multiplied as integers.
TIMED_CODES = ("nvfp4", "mxfp4")

"""Environment variables that must be set before vLLM is imported."""

from __future__ import annotations

import os

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process, so that tests can access it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}.items():
    os.environ.setdefault(_name, _value)

"""What vLLM wants to know before it is imported."""

from __future__ import annotations

import os

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where tests can look at it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}.items():
    os.environ.setdefault(_name, _value)

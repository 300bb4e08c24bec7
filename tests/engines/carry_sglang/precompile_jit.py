"""Compiles for sm_90, without a GPU, the kernels that SGLang would compile where it serves.

    eval "$(sh .sglang/unpack_sglang.sh /tmp/sglang)"
    python precompile_jit.py --out DIR     then assemble_sglang.py once more, with --jit DIR

Needs torch for CUDA 13, its nvcc (CUDA_HOME) and ninja; an empty `libcuda.so.1` where there is no
driver. A kernel that is not among these is compiled on the GPU's machine, if that has an nvcc.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

Kernel = tuple[str, str, tuple[Any, ...]]
"""Module, function and arguments of a kernel."""

OPS = "sglang.kernels.ops"
GPU = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=228 << 10,
    warp_size=32,
)


def pretend() -> None:
    """A GPU of sm_90, of which SGLang asks while it is imported."""
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (GPU.major, GPU.minor),
        "get_device_properties": lambda *_: GPU,
        "get_device_name": lambda *_: GPU.name,
    }
    for name, function in stand_ins.items():
        setattr(torch.cuda, name, function)


def calls(rows: list[int], dims: list[int], dtype: torch.dtype) -> list[Kernel]:
    """Those of a model with these bytes of a token's keys, dimensions of heads and type."""
    rope = f"{OPS}.attention.rope"
    return [
        (f"{OPS}.attention.clamp_position", "_jit_clamp_position_module", (torch.int64,)),
        *[(f"{OPS}.kvcache.kvcache", "_jit_kvcache_module", (n, n)) for n in rows],
        *[(rope, "_jit_fused_rope_module", (True, n, dtype, dtype)) for n in dims],
        (f"{OPS}.activation.activation", "activation_module", (dtype,)),
        (f"{OPS}.layernorm.norm", "_jit_fused_add_rmsnorm_module", (dtype, False)),
        (rope, "_jit_rotary_embedding_module", ()),
        (f"{OPS}.moe.moe_align", "_jit_moe_align_module", (torch.int32,)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", default="2048,1024,128,64", help="bytes of a token's keys")
    parser.add_argument("--dims", default="128", help="dimensions of heads")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    o = parser.parse_args()
    os.environ["TVM_FFI_CACHE_DIR"] = os.path.abspath(o.out)
    pretend()
    rows, dims = ([int(n) for n in text.split(",")] for text in (o.rows, o.dims))
    start = time.time()

    def compiled(call: Kernel) -> bool:
        module, function, arguments = call
        try:
            getattr(importlib.import_module(module), function)(*arguments)
        except Exception as error:
            print(f"{function}{arguments}: {str(error)[-500:]}", flush=True)
            return False
        print(f"{function}{arguments}: after {time.time() - start:.0f} s", flush=True)
        return True

    todo = calls(rows, dims, getattr(torch, o.dtype))
    for module in {module for module, _, _ in todo}:
        importlib.import_module(module)
    with ThreadPoolExecutor(o.jobs) as pool:
        return int(not all(pool.map(compiled, todo)))


if __name__ == "__main__":
    sys.exit(main())

"""What a worker runs in: on a CPU, on a GPU, or with Triton's kernels run as Python."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

WHERE = ("cpu", "interpret", "cuda")


def prepare(where: str) -> None:
    """Before anything of the package is imported."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    os.environ["SPLITKV_CACHE"] = os.path.join(os.path.dirname(__file__), "no-cache")
    os.environ.pop("TRITON_INTERPRET", None)
    if where == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    if where == "interpret":
        _interpret(patch)
    from poisoning import poison_fresh_memory

    poison_fresh_memory(patch)


def _interpret(patch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU are planned as for an A100 and launch its kernels, which run as Python."""
    import torch
    from interpreting import bfloat16_as_on_a_gpu, without_waste

    without_waste(patch)
    bfloat16_as_on_a_gpu(patch)
    import splitkv.cache
    import splitkv.flash_attn
    import splitkv.integrations.torch_sdpa
    import splitkv.runtime.append
    import splitkv.runtime.warmup
    from splitkv.core.device import GPUS, Device, cpu
    from splitkv.kernels.append import AppendLauncher
    from splitkv.kernels.host.append_call import Append

    def device_of(tensor: torch.Tensor) -> Device:
        return GPUS["a100"] if tensor.device.type == "cpu" else cpu()

    for name, module in list(sys.modules.items()):
        if name.startswith("splitkv") and hasattr(module, "device_of"):
            patch.setattr(module, "device_of", device_of)

    def run(call: Append, tensors: object, options: object) -> object:
        return AppendLauncher(call)(call, call.given)

    patch.setattr(splitkv.runtime.append, "_run", run)
    # A growing cache is launched by what Triton compiled, and here it compiles nothing.
    patch.setattr(splitkv.runtime.dispatch, "GROWS", ())
    patch.setattr(
        splitkv.runtime.dispatch, "_unfit", lambda operands, kernel: kernel.unfit(operands)
    )
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())

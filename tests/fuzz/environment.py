"""What a worker runs in: on a CPU, on a GPU, or with Triton's kernels run as Python."""

from __future__ import annotations

import os
import sys
import warnings
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
        from interpreting import bfloat16_as_on_a_gpu, kernels_run_calls, without_waste

        without_waste(patch)
        bfloat16_as_on_a_gpu(patch)
        kernels_run_calls(patch)
    from poisoning import poison_fresh_memory

    poison_fresh_memory(patch)

"""`append` compiles for every architecture, without a GPU: few registers, hardly a spill.

The architectures take turns at the variants, of which every value is in one.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import cases
import torch
from compiling import AnyGPU, Layout, Recorder, measure, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.kernels import append as kernel
from splitkv.kernels.host.append_call import Append, Rotary

MAX_REGISTERS = 128
MAX_STACK_BYTES = 16  # an odd variant keeps a few bytes in local memory
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((128, 128), (64, 64), (80, 80), (192, 128), (256, 256)),
    "place": ("contiguous", "rows", "paged", "slots"),
    "page_size": (1, 16, 48),
    "seqlen": (1, 200),
    "packed": (False, True),
    "rotary": (None, "interleaved", "halves"),
    "q": (False, True),
    "start": (False, True),
    "leftpad": (False, True),
    "row_gap": (0, 8),
    "stored": (None, torch.int8, torch.float8_e4m3fn),
    "scale": ("token", "head", "tensor"),
    "mean": (False, True),
}


def valid(values: cases.Values) -> bool:
    slots = values.get("place") == "slots"
    if slots and (values.get("packed") or values.get("leftpad")):
        return False
    if values.get("stored", 0) is None and values.get("mean"):
        return False
    return not (values.get("rotary", "") is None and (values.get("q") or values.get("start")))


def call_of(values: cases.Values) -> Any:
    """A call whose tensors have no memory."""
    dtype, (head_dim, head_dim_v), batch = values["dtype"], values["dims"], 4
    slots, packed = values["place"] == "slots", values["packed"]
    lead = (batch * values["seqlen"],) if packed or slots else (batch, values["seqlen"])

    def tensor(*shape: int, of: torch.dtype = dtype) -> Any:
        gap = values["row_gap"] if len(shape) > 2 else 0
        return Layout(torch.Size(shape), of, gap)

    def index(*shape: int) -> Any:
        return tensor(*shape, of=torch.int32)

    sequences = lead[0] if slots else batch
    options: dict[str, Any] = {"before": None if slots else index(batch)}
    if slots:
        options["slots"] = tensor(lead[0], of=torch.int64)
    if packed:
        options |= {"cu_seqlens_new": index(batch + 1), "cu_seqlens_q": index(batch + 1)}
    if values["place"] == "rows":
        options["rows"] = index(batch)
    if values["place"] == "paged":
        options["page_table"] = index(batch, 64)
    if values["leftpad"]:
        options["leftpad"] = index(batch)
    if values["rotary"] is not None:
        table = tensor(4096, head_dim // 4)
        start = index(sequences) if values["start"] or slots else None
        options["rotary"] = Rotary(table, table, start, values["rotary"] == "interleaved")
        options["q"] = tensor(*lead, 8, head_dim) if values["q"] else None
    slab = (1024, values["page_size"]) if values["place"] in ("paged", "slots") else (batch, 4096)
    k, v = tensor(*lead, 2, head_dim), tensor(*lead, 2, head_dim_v)
    stored = values["stored"] or dtype
    caches = [tensor(*slab, 2, dim, of=stored) for dim in (head_dim, head_dim_v)]
    if values["stored"] is not None:
        shape = {"token": (*slab, 2), "head": (2,), "tensor": (1,)}[values["scale"]]
        scales = ("k_scale", "v_scale")
        options |= {name: Layout(torch.Size(shape), torch.float32) for name in scales}
        options["k_mean"] = tensor(2, head_dim, of=torch.float32) if values["mean"] else None
    return Append(k, v, *caches, **options)


@variants(AXES, most=10, valid=valid, ids=lambda v: f"{v['gpu']}-{v['place']}")
def test_compiles(values: cases.Values) -> None:
    major, minor = GPUS[values["gpu"]].capability
    recorder = Recorder(kernel.append_kv)
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.object(kernel, "append_kv", recorder),
    ):
        call = call_of(values)
        kernel.AppendLauncher(call, early=major >= 9)(call, call.given)
    (compiled,) = recorder.compiled
    made = measure(compiled)
    rounds = values["stored"] is not None
    assert bool(re.search("0f4B400000|0f46800000", made.ptx)) == rounds  # of int8, of e4m3
    assert ("0f4B400000" in made.ptx) == (values["stored"] == torch.int8)
    assert made.stack_bytes <= MAX_STACK_BYTES
    assert made.registers <= MAX_REGISTERS


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in AXES["gpu"]} == known

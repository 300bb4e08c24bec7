"""The backward again, by the kernels that its first call compiled: one workspace, and launches with
addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkv.core.problem import Operands
from splitkv.kernels.backward import rows
from splitkv.kernels.backward.launcher import PER_CALL_OF_SUM
from splitkv.kernels.backward.records import Gradients, GradientTensors, Stats
from splitkv.kernels.host.relaunch import AddressLaunch, Launched, bind_to_addresses, observed
from splitkv.kernels.host.workspace import allocation

GIVEN = ("q", "k", "v", "grad", "out", "lse", "grad_lse", "sink", "cu_q", "cu_k", "dq", "dk", "dv")
MADE = ("clear", "sums", "turns", "total", "delta", "weight", "sink_sums", "split")
UNUSED = ("sink_rows", "slope_rows")  # by these kernels
NAMES = (*GIVEN, *MADE, *UNUSED)
"""Names of the addresses of a call, in the order in which launches take them."""

SINK_SUMS = NAMES.index("sink_sums")

ALIGNED = 32  # fp32 numbers of a piece of the workspace
OPERANDS_AND_STATS = {
    "q_desc": "q",
    "grad_desc": "grad",
    "k_desc": "k",
    "v_desc": "v",
    "total_ptr": "total",
    "delta_ptr": "delta",
    "cu_q_ptr": "cu_q",
    "cu_k_ptr": "cu_k",
}
PER_CALL: dict[str, dict[str, Any]] = {
    "backward_rows": rows.PER_CALL,
    "backward_sum": PER_CALL_OF_SUM,
    "hopper_backward": {
        **OPERANDS_AND_STATS,
        "weight_ptr": "weight",
        "sink_sums_ptr": "sink_sums",
        "dk_ptr": "dk",
        "dv_ptr": "dv",
        "split_ptr": "split",
        "sums_desc": "sums",
        "turn_ptr": "turns",
    },
    "hopper_backward_queries": {**OPERANDS_AND_STATS, "dq_ptr": "dq"},
    "hopper_backward_round": {"sums_ptr": "sums", "dq_ptr": "dq", "cu_q_ptr": "cu_q"},
}
"""The arguments that change from call to call, by the kernel: see `bind_to_addresses`."""


class Workspace(NamedTuple):
    """The tensors of a first call that a later one has in one piece of memory, but for the sums of
    dsink, which are a tensor; None: not needed.

    clear   see `DqSums`, as sums and turns, which are in it; split: of `allocate_splits`
    """

    clear: Tensor | None
    sums: Tensor | None
    turns: Tensor | None
    stats: Stats
    split: Tensor | None

    @property
    def pieces(self) -> dict[str, Tensor]:
        """Memory of its own, by name."""
        of_stats = {name: getattr(self.stats, name) for name in ("total", "delta", "weight")}
        every = {"clear": self.clear, **of_stats, "split": self.split}
        return {name: x for name, x in every.items() if x is not None}


class BackwardRelaunch:
    """The kernels of one backward, launched again for calls of the same layouts.

    launches    in their order, as `bind_to_addresses` gives them
    tensors     of the first call, and its workspace
    """

    def __init__(
        self,
        launches: Sequence[AddressLaunch],
        x: Operands,
        tensors: GradientTensors,
        workspace: Workspace,
    ) -> None:
        self.launches = tuple(launches)
        device, self.offsets = x.q.device, dict[str, int]()
        numel = 0
        for name, piece in workspace.pieces.items():
            self.offsets[name] = numel
            numel += -(-piece.numel() // ALIGNED) * ALIGNED
        if workspace.sums is not None:
            self.offsets["sums"] = self.offsets["clear"]
            if workspace.turns is not None:
                self.offsets["turns"] = self.offsets["clear"] + workspace.sums.numel()
        self.new_memory = allocation((numel,), torch.float32, device)
        grads = tensors.dq, tensors.dk, tensors.dv
        self.new_grads = [allocation(g.shape, g.dtype, device, g.stride()) for g in grads]
        made = (self.offsets.get(name) for name in (*MADE, *UNUSED))
        self.places = [None if offset is None else 4 * offset for offset in made]
        self.new_sink_sums = None
        sums = workspace.stats.sink_sums
        if sums is not None:
            self.new_sink_sums = allocation(sums.shape, sums.dtype, device)
            self.sink_dtype = x.sink_logits.dtype
        self.device = device.index
        self.current_stream = torch._C._cuda_getCurrentRawStream

    def call(
        self, x: Operands, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None
    ) -> Gradients | None:
        """The gradients; None: the call has to go through Triton, as an address is not a multiple
        of 16 or a launch hook is set."""
        rest = grad_lse, x.sink_logits, x.cu_seqlens_q, x.cu_seqlens_k
        tensors = x.q, x.k, x.v, grad, out, lse, *rest
        addresses: list[int | None] = []
        bits = 0
        for t in tensors:
            if t is None:
                addresses.append(None)
            else:
                address = t.data_ptr()
                addresses.append(address)
                bits |= address
        if bits & 15 or observed():
            return None
        new_dq, new_dk, new_dv = self.new_grads
        dq, dk, dv, memory = new_dq(), new_dk(), new_dv(), self.new_memory()
        addresses += dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        first = memory.data_ptr()
        addresses += [None if place is None else first + place for place in self.places]
        sink_sums = None
        if self.new_sink_sums is not None:  # a tensor of its own, as a view of one takes longer
            sink_sums = self.new_sink_sums()
            addresses[SINK_SUMS] = sink_sums.data_ptr()
        stream = self.current_stream(self.device)
        for launch in self.launches:
            launch(stream, addresses)
        dsink = None
        if sink_sums is not None:
            dsink = sink_sums.sum(1).to(self.sink_dtype)
        return Gradients(dq, dk, dv, dsink, None)


def relaunch_of(
    launched: Sequence[Launched], x: Operands, tensors: GradientTensors, workspace: Workspace
) -> BackwardRelaunch | None:
    """A function that launches the kernels of a first call again; None: Triton has to, every
    time."""
    if observed():
        return None
    launches: list[Any] = [
        bind_to_addresses(one, PER_CALL[one.kernel.__name__], NAMES) for one in launched
    ]
    if None in launches:
        return None
    return BackwardRelaunch(launches, x, tensors, workspace)

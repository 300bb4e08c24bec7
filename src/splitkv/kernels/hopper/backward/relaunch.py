"""The backward by kernels that were compiled before: one workspace, and launches with addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels.backward.records import Gradients, Saved
from splitkv.kernels.hopper.backward.launches import GradientCall, Sizes, Workspace
from splitkv.kernels.host import workspace
from splitkv.kernels.host.address_kernel import (
    AddressKernel,
    AddressLaunch,
    KernelLaunch,
    address_kernel,
)
from splitkv.kernels.host.launch import ENTER_HOOKS, EXIT_HOOKS, KNOBS, observed
from splitkv.kernels.host.workspace import allocation

GIVEN = ("q", "k", "v", "grad", "out", "lse", "grad_lse", "sink", "cu_q", "cu_k")
RESULTS = ("dq", "dk", "dv", "dsink")
PIECES = (
    *("clear", "sums", "turns", "total", "delta", "weight", "sink_sums", "split"),
    *("sink_rows", "slope_rows"),  # of which these kernels have none
)
NAMES = (*GIVEN, *RESULTS, *PIECES)
"""Names of the addresses of a call, in the order in which launches take them."""
MOST_KEPT = 1 << 23
"""Numbers of a workspace that its stream keeps for the next call: 32 MiB of fp32. Whoever needs
more computes for longer than an allocation takes."""
Packed = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""The functions that launch the kernels of a call, and what each of them is given."""
MOST_PACKED = 4096  # calls whose Packed is kept, of about 2 KiB each; past it, they start afresh
_packed: dict[Hashable, Packed] = {}  # by layout and addresses: a layer's come again in every step
_numbers = itertools.count()


class BackwardRelaunch:
    """The kernels of one backward, launched for calls of the same layouts.

    launches    in their order, with addresses of NAMES
    call        one of these calls
    """

    def __init__(self, launches: Sequence[AddressLaunch], call: GradientCall, sizes: Sizes) -> None:
        x, device = call.saved, call.saved.q.device
        self.launches = tuple(launches)
        self.packed, self.number = _packed, next(_numbers)
        self.scale = call.operands.softmax_scale
        self.strides = x.q.stride(), x.k.stride(), x.v.stride(), call.grad.stride()
        self.of_lse = call.grad_lse is not None
        self.numel, strides = sizes.workspace.numel, sizes.gradients.of_tensors
        self.new_memory = allocation((self.numel,), torch.float32, device, (1,))
        layouts = zip((x.q, x.k, x.v), strides, strict=True)
        self.new_dq, self.new_dk, self.new_dv = (
            allocation(t.shape, t.dtype, device, n) for t, n in layouts
        )
        sinks, self.new_dsink = x.sink_logits, None
        if sinks is not None:
            self.new_dsink = allocation(sinks.shape, sinks.dtype, device)
        self.places = [sizes.workspace.places.get(name) for name in PIECES]
        self.device = device.index
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.capturing = torch._C._cuda_isCurrentStreamCapturing
        self.buffers: dict[int, workspace.Buffer] | None = None
        if self.numel <= MOST_KEPT:
            self.buffers = workspace.buffers(device.index)

    def call(
        self, saved: Saved, grad: Tensor, grad_lse: Tensor | None, scale: float
    ) -> Gradients | None:
        """The gradients; None: it is a call of another kind, or has to go through Triton, as an
        address is not a multiple of 16 or a launch hook is set."""
        x = saved
        # those of q, k and v, too: hooks of saved tensors may give others than the forward had
        strides = x.q.stride(), x.k.stride(), x.v.stride(), grad.stride()
        if strides != self.strides or scale != self.scale:
            return None
        at_q, at_k, at_v, at_grad = x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), grad.data_ptr()
        at_out, at_lse = x.out.data_ptr(), x.lse.data_ptr()
        bits = at_q | at_k | at_v | at_grad | at_out | at_lse
        at_grad_lse = at_sink = at_cu_q = at_cu_k = at_dsink = dsink = None
        if (grad_lse is not None) is not self.of_lse:
            return None
        if grad_lse is not None:
            if not grad_lse.is_contiguous():
                return None
            at_grad_lse = grad_lse.data_ptr()
            bits |= at_grad_lse
        if x.cu_seqlens_q is not None:
            at_cu_q, at_cu_k = x.cu_seqlens_q.data_ptr(), x.cu_seqlens_k.data_ptr()
            bits |= at_cu_q | at_cu_k
        if x.sink_logits is not None:
            at_sink = x.sink_logits.data_ptr()
            bits |= at_sink
        if bits & 15 or ENTER_HOOKS or EXIT_HOOKS or (KNOBS and observed()):
            return None
        if self.new_dsink is not None:
            dsink = self.new_dsink()
            at_dsink = dsink.data_ptr()
        dq, dk, dv = self.new_dq(), self.new_dk(), self.new_dv()
        stream, buffers = self.current_stream(self.device), self.buffers
        if buffers is None:
            memory = self.new_memory()
            first = memory.data_ptr()
        else:
            captured = stream and self.capturing()  # stream 0, the default, cannot be
            buffer: Any = None if captured else buffers.pop(stream, None)
            if buffer is None or buffer[1] < self.numel:
                buffer = workspace.make_buffer(self.device, self.numel, captured)
            first = buffer[0]
        given = at_q, at_k, at_v, at_grad, at_out, at_lse, at_grad_lse, at_sink, at_cu_q, at_cu_k
        addresses = given + (dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), at_dsink)
        key = self.number, addresses, stream, first
        try:
            packed = self.packed[key]
        except KeyError:
            packed = self.packed[key] = self.pack(addresses, stream, first)
        for function, args in packed:
            function(*args)
        if buffers is not None and not captured:
            buffers[stream] = buffer
        return Gradients(dq, dk, dv, dsink, None)

    def pack(self, addresses: Sequence[int | None], stream: int, first: int) -> Packed:
        """Makes the Packed of a call, and room to keep it.

        addresses   of GIVEN and RESULTS; first: of the workspace
        """
        if len(self.packed) >= MOST_PACKED:
            self.packed.clear()
        pieces = [None if place is None else first + 4 * place[0] for place in self.places]
        per_call = stream, *addresses, *pieces
        return [(launch.function, launch.pack(per_call)) for launch in self.launches]


def address_kernels(
    launches: Sequence[KernelLaunch], made: Sequence[Any], call: GradientCall, workspace: Workspace
) -> tuple[AddressKernel, ...] | None:
    """The kernels that Triton compiled for the launches of a call; None: no way is known to launch
    them with addresses."""
    present = {name for name, x in call.given.items() if x is not None}
    present |= {"dq", "dk", "dv", *workspace.places}
    if call.saved.sink_logits is not None:
        present.add("dsink")
    found: list[AddressKernel] = []
    for launch, compiled in zip(launches, made, strict=True):
        kernel = address_kernel(launch, compiled, NAMES, present)
        if kernel is None:
            return None
        found.append(kernel)
    return tuple(found)

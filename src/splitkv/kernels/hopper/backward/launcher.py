"""The host side of the backward on Hopper: the launches of a call, through Triton or with what it
compiled."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import HopperBackward, RowSplits
from splitkv.kernels.backward.records import Gradients
from splitkv.kernels.hopper.backward.launches import (
    GradientCall,
    allocate_backward,
    call_of,
    config_of,
    launches_of,
    sizes_of,
)
from splitkv.kernels.hopper.backward.relaunch import BackwardRelaunch, address_kernels
from splitkv.kernels.hopper.primitives.tma_limits import fits_tma
from splitkv.kernels.host.address_kernel import AddressKernel
from splitkv.kernels.host.launch import observed

MAX_KNOWN = 256  # layouts that launches are kept for; past it, they start afresh
compiled: dict[Hashable, tuple[AddressKernel, ...]] = {}
"""What Triton compiled for a backward, in the order of its launches: by all that it compiles for,
among calls whose strides are multiples of 16 that 32 bits hold."""


class HopperBackwardLauncher:
    """The kernels bound to a plan's problem, for calls of its lengths or less; called as
    `BackwardLauncher` is.

    The operands have to be such that `unfit` of tma_limits.py says nothing of them; the gradient of
    the output is copied where TMA cannot describe it.
    """

    def __init__(self, problem: Problem, device: Device, variant: HopperBackward) -> None:
        self.problem, self.device, self.variant = problem, device, variant
        self.config = config_of(problem, variant)
        self.known: dict[Hashable, BackwardRelaunch] = {}
        bounds = tuple(bound is None for bound in problem.mask.bounds)
        heads = problem.group, problem.head_dim, problem.head_dim_v
        splits = variant.row_splits.splits > 1
        self.variant_key = heads, bounds, replace(variant, row_splits=RowSplits()), splits

    def __call__(
        self,
        operands: Operands,
        seed: Tensor | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        of_slopes: bool,
    ) -> Gradients:
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif not fits_tma(grad_out):  # a copy, also of what is contiguous at another address
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        call = call_of(operands, out, lse, grad_out, grad_lse)
        again = self.known.get(call.kind) or self.bind(call)
        if again is not None:
            done = again.call(call.saved, grad_out, grad_lse, operands.softmax_scale)
            if done is not None:
                return done
        return self.dispatch(call)

    def again(
        self,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> BackwardRelaunch | None:
        """The launches of calls like this one with addresses, once they are known."""
        if grad_out is None:
            return None
        return self.known.get(call_of(operands, out, lse, grad_out, grad_lse).kind)

    def bind(self, call: GradientCall) -> BackwardRelaunch | None:
        """Launches with addresses of kernels that were compiled for calls like this one, whatever
        their lengths; None where there are none."""
        kernels = compiled.get(self.compiled_for(call))
        if kernels is None or observed():
            return None
        sizes = sizes_of(self, call)
        every = zip(kernels, launches_of(self, call, sizes), strict=True)
        launches = [kernel.bind(launch) for kernel, launch in every]
        again = BackwardRelaunch(launches, call, sizes)
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[call.kind] = again
        return again

    def dispatch(self, call: GradientCall) -> Gradients:
        """Launches through Triton, which compiles what these arguments need, and keeps that."""
        sizes = sizes_of(self, call)
        results = allocate_backward(call, sizes.workspace)
        every = launches_of(self, call, sizes)
        made = [launch.through_triton(results.tensors) for launch in every]
        if call.aligned and not observed():
            kernels = address_kernels(every, made, call, sizes.workspace)
            if kernels is not None:
                compiled[self.compiled_for(call)] = kernels
        return results.gradients

    def compiled_for(self, call: GradientCall) -> Hashable:
        """All that Triton compiles for in a call whose addresses are multiples of 16."""
        q, sinks = call.saved.q, call.saved.sink_logits
        types = q.device, q.dtype, None if sinks is None else sinks.dtype
        present = call.saved.cu_seqlens_q is None, call.grad_lse is None
        return types, (present, call.alignment), self.variant_key

"""Which kernels make the gradients of a call of attention over whole sequences.

This is above the kernels of the backward and below those of the forward, whose autograd asks it.
"""

from __future__ import annotations

from collections.abc import Callable

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.backward.launcher import BackwardLauncher
from splitkv.kernels.hopper.backward import launcher as hopper
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.kernels.host.sequences import SequenceLauncher


def backward_for(
    problem: Problem, device: Device, operands: Operands
) -> BackwardLauncher | hopper.HopperBackwardLauncher:
    """What makes the gradients of a call: the kernels for Hopper where they can, else those for any
    GPU."""
    if hopper.unsupported(problem, device) or unfit(operands):
        return BackwardLauncher(problem, device)
    return hopper.HopperBackwardLauncher(problem, device)


Bound = BackwardLauncher | hopper.HopperBackwardLauncher


def backward_of(
    launcher: SequenceLauncher,
    operands: Operands,
    make: Callable[[Problem, Device, Operands], Bound] = backward_for,
) -> Bound:
    """What makes the gradients of a call of a launcher, bound once for its layout: at addresses
    that are multiples of 16 bytes, and at others.

    make   binds one
    """
    x = operands
    aligned = not (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr()) & 15
    bound = launcher.backward_launchers
    found = bound.get((aligned, make))
    if found is None:
        found = bound[aligned, make] = make(launcher.problem, launcher.device, operands)
    return found

"""Which kernels make the gradients of a call of attention over whole sequences.

This is above the kernels of the backward and below those of the forward, whose autograd asks it.
"""

from __future__ import annotations

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.backward.launcher import BackwardLauncher
from splitkv.kernels.hopper.backward import launcher as hopper
from splitkv.kernels.hopper.primitives.tma_limits import unfit


def backward_for(
    problem: Problem, device: Device, operands: Operands
) -> BackwardLauncher | hopper.HopperBackwardLauncher:
    """What makes the gradients of a call: the kernels for Hopper where they can, else those for any
    GPU."""
    if hopper.unsupported(problem, device) or unfit(operands):
        return BackwardLauncher(problem, device)
    return hopper.HopperBackwardLauncher(problem, device)

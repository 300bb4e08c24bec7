"""The launcher of what makes the gradients of a call of attention over whole sequences.

This is above the kernels of the backward and below those of the forward, whose autograd calls it.
"""

from __future__ import annotations

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.core.variants import Backward, HopperBackward
from splitkv.kernels.backward.launcher import BackwardLauncher
from splitkv.kernels.hopper.backward.launcher import HopperBackwardLauncher
from splitkv.kernels.limits.prefill import refit


def backward_for(plan: Plan, operands: Operands) -> BackwardLauncher | HopperBackwardLauncher:
    """The kernels of `Plan.backward`, or of the plan that is for these operands' addresses."""
    found = refit(plan, operands).backward
    if isinstance(found, HopperBackward):
        return HopperBackwardLauncher(plan.problem, plan.device, found)
    assert isinstance(found, Backward), f"expected a plan with a backward, got {plan}"
    return BackwardLauncher(plan.problem, plan.device, found)

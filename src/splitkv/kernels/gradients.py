"""The launcher of what makes the gradients of a call of attention over whole sequences.

This is above the kernels of the backward, which are imported when one is bound, and below those of
the forward, whose autograd calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import Backward, HopperBackward
from splitkv.kernels.limits.prefill import refit

if TYPE_CHECKING:
    from splitkv.kernels.backward.launcher import BackwardLauncher
    from splitkv.kernels.hopper.backward.launcher import HopperBackwardLauncher
    from splitkv.kernels.host.sequences import SequenceLauncher

    Bound = BackwardLauncher | HopperBackwardLauncher

LEAVES = ("q", "k", "v", "sink_logits", "alibi_slopes")
"""The arguments of attention that have gradients, in their order."""


class Differentiable(Protocol):
    """A forward that is differentiated: a SequenceLauncher, or one length of many.

    plan                 says what makes the gradients; problem: of the calls
    backward_launchers   those that were bound, see `backward_of`
    backward_again       what launches the last backward again, by what bound its launcher; None:
                         there is no way
    """

    @property
    def plan(self) -> Plan: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def backward_launchers(self) -> dict[Any, Any]: ...
    @property
    def backward_again(self) -> dict[Any, Any]: ...

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(out, lse); seed: of dropout."""


def has_backward(launcher: Any) -> TypeGuard[SequenceLauncher]:
    """Whether a launcher is that of a kernel, whose gradients `backward_of` makes; those of torch
    operations are autograd's own."""
    from splitkv.kernels.host.sequences import SequenceLauncher

    return isinstance(launcher, SequenceLauncher)


def backward_for(plan: Plan, operands: Operands) -> Bound:
    """The kernels of `Plan.backward`, or of the plan that is for these operands' addresses."""
    found = refit(plan, operands).backward
    if isinstance(found, HopperBackward):
        from splitkv.kernels.hopper.backward.launcher import HopperBackwardLauncher

        return HopperBackwardLauncher(plan.problem, plan.device, found)
    assert isinstance(found, Backward), f"expected a plan with a backward, got {plan}"
    from splitkv.kernels.backward.launcher import BackwardLauncher

    return BackwardLauncher(plan.problem, plan.device, found)


def backward_of(
    launcher: Differentiable,
    operands: Operands,
    make: Callable[[Plan, Operands], Bound] = backward_for,
) -> Bound:
    """The launcher that makes the gradients of a call, bound once for its layout: at addresses
    that are multiples of 16 bytes, and at others.

    make   binds one
    """
    x = operands
    aligned = not (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr()) & 15
    bound = launcher.backward_launchers
    found = bound.get((aligned, make))
    if found is None:
        found = bound[aligned, make] = make(launcher.plan, operands)
    return found

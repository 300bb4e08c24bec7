"""Attention on sequences of ever new lengths whose gradients are wanted, as in packed training.

The forward is that of calls without gradients, see growing_sequences.py. The plan of a bucket of
lengths says what makes the gradients, too, and its launcher takes the exact lengths from each call.
What stays the same for a layout of tensors is an `AtLength`: autograd keeps it for the backward,
which keeps in it how its kernels are launched again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.lengths import relaunched
from splitkv.kernels.host.sequence_sizes import scale_and_softcap
from splitkv.planner.registry import kernel_named
from splitkv.runtime import growing
from splitkv.runtime.call_cache import Launcher, Result
from splitkv.runtime.growing import Bucket, keep
from splitkv.runtime.growing_sequences import SEQUENCES_GROW, GrowingSequences, layout_of

if TYPE_CHECKING:
    from splitkv.kernels.host.sequence_repeat import Sequences


class AtLength:
    """The forward of sequences of one length, as kernels/prefill.py differentiates it: in the place
    of a SequenceLauncher.

    forward_call         of every length; gives the LSE, too
    layout               of this length, by which that knows it
    plan                 of the bucket that this length is in
    backward_launchers   of the bucket: see kernels/gradients.py
    """

    def __init__(
        self,
        problem: Problem,
        forward_call: GrowingSequences,
        layout: tuple[Any, ...],
        plan: Plan,
        backward_launchers: Any,
    ) -> None:
        self.problem, self.forward_call, self.layout = problem, forward_call, layout
        self.plan, self.backward_launchers = plan, backward_launchers
        self.backward_again: dict[Any, Any] = {}
        self.forward_again: Sequences | None = None

    def forward(self, operands: Operands, seed: Tensor | None) -> Result:
        """(out, lse), without a graph."""
        assert seed is None, "dropout: expected none"
        again = self.forward_again
        if again is not None:
            done = relaunched(again, operands, *scale_and_softcap(operands))
            if done is not None:
                return done
        result = self.forward_call(operands)
        latest, again = self.forward_call.latest
        if latest == self.layout:
            self.forward_again = again
        return result


class GrowingGradients:
    """A launcher of attention for sequences of every length, which differ in nothing else,
    differentiable.

    problem, operands  of one of the lengths
    mask               that the caller asked for
    plan_for           plan_for(problem, operands): a plan for these operands
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        mask: Mask,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        with_lse = replace(problem, return_lse=True)
        self.problem, self.plan_for = problem, plan_for
        self.growing = GrowingSequences(with_lse, operands, mask, plan_for)
        self.plans: dict[Bucket, tuple[Plan, dict[Any, Any]]] = {}  # and backward launchers
        self.known: OrderedDict[Hashable, Launcher | AtLength] = OrderedDict()
        self.latest: tuple[Hashable, Launcher | AtLength | None] = (None, None)

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream."""
        x = operands
        here = layout_of(x.q, x.k, x.v, x.cu_seqlens_q, (x.seqlen_q, x.seqlen_k))
        x.seqlen_q, x.seqlen_k = here[0][:2]  # for the backward, too
        layout, at = self.latest
        if at is None or layout != here:
            at = self.known.get(here)
            if at is None:
                at = self.at_length(x, here)
                keep(self.known, here, at, growing.MAX_KNOWN)
            self.latest = here, at
        return _differentiable()(at, x) if isinstance(at, AtLength) else at(x)

    def at_length(self, operands: Operands, here: tuple[Any, ...]) -> Launcher | AtLength:
        """Binds the forward of this length: a launcher of its own where its layout is in no bucket,
        or where a kernel is chosen that does not take every length.

        here   of `layout_of`
        """
        x, growing = operands, self.growing
        bucket = growing.bucket_of(x, here)
        if bucket is not None:
            if bucket not in self.plans:
                alignment, longest = bucket
                plan = growing.planned(alignment, growing.problem_of(longest), x)
                self.plans[bucket] = plan, {}
            plan, launchers = self.plans[bucket]
            if plan.kernel in SEQUENCES_GROW:
                return AtLength(self.problem, growing, here, plan, launchers)
        lengths = here[0], growing.edges(*here[0][:2])
        exact = replace(growing.problem_of(lengths), return_lse=self.problem.return_lse)
        plan = self.plan_for(exact, x)
        made: Launcher = kernel_named(plan.kernel).bind(plan, x)
        return made


@cache
def _differentiable() -> Callable[[AtLength, Operands], Result]:
    """`attention` of a launcher with autograd, once a kernel is bound."""
    from splitkv.kernels.prefill import attention

    return attention

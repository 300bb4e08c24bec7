"""Attention on sequences of ever new lengths whose gradients are wanted, as in packed training.

The forward is that of calls without gradients, see growing_call.py. The plan of a bucket of lengths
says what makes the gradients, too, and its launcher takes the exact lengths from each call. What
stays the same for a layout of tensors is an `AtLength`: autograd keeps it for the backward, which
keeps in it how its kernels are launched again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.planner.registry import kernel_named
from splitkv.runtime.call_cache import Launcher, Result
from splitkv.runtime.growing_call import SEQUENCES_GROW, Bucket, GrowingSequences, keep


class AtLength:
    """The forward of sequences of one length, as kernels/prefill.py differentiates it: in the place
    of a SequenceLauncher.

    forward_call         of every length; gives the LSE, too
    plan                 of the bucket that this length is in
    backward_launchers   of the bucket: see kernels/gradients.py
    """

    def __init__(
        self, problem: Problem, forward_call: Launcher, plan: Plan, backward_launchers: Any
    ) -> None:
        self.problem, self.forward_call, self.plan = problem, forward_call, plan
        self.backward_launchers = backward_launchers
        self.backward_again: dict[Any, Any] = {}

    def forward(self, operands: Operands, seed: Tensor | None) -> Result:
        """(out, lse), without a graph."""
        assert seed is None, "dropout: expected none"
        return self.forward_call(operands)


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
        q, k = x.q, x.k
        if self.problem.kind == "dense":
            x.seqlen_q, x.seqlen_k = q.shape[1], k.shape[1]
        here = x.seqlen_q, x.seqlen_k, q.shape, k.shape, q.stride(), k.stride(), x.v.stride()
        layout, at = self.latest
        if at is None or layout != here:
            at = self.known.get(here)
            if at is None:
                at = self.at_length(x)
                keep(self.known, here, at)
            self.latest = here, at
        return _differentiable()(at, x) if isinstance(at, AtLength) else at(x)

    def at_length(self, operands: Operands) -> Launcher | AtLength:
        """Binds the forward of this length: a launcher of its own where its layout is in no bucket,
        or where a kernel is chosen that does not take every length."""
        x, growing = operands, self.growing
        assert x.seqlen_q is not None and x.seqlen_k is not None, "lengths of packed sequences"
        bucket = growing.bucket_of(x)
        if bucket is not None:
            if bucket not in self.plans:
                self.plans[bucket] = growing.planned(bucket, x), {}
            plan, launchers = self.plans[bucket]
            if plan.kernel in SEQUENCES_GROW:
                return AtLength(self.problem, growing, plan, launchers)
        lengths = x.seqlen_q, x.seqlen_k, growing.edges(x.seqlen_q, x.seqlen_k)
        exact = replace(growing.problem_of(lengths), return_lse=self.problem.return_lse)
        plan = self.plan_for(exact, x)
        made: Launcher = kernel_named(plan.kernel).bind(plan, x)
        return made


@cache
def _differentiable() -> Callable[[AtLength, Operands], Result]:
    """`attention` of a launcher with autograd, once a kernel is bound."""
    from splitkv.kernels.prefill import attention

    return attention

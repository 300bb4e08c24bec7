"""From the best candidate to the simplest rule that is hardly slower.

Parts of the rule are replaced by smaller ones, one after the other: a branch by one of its own
branches, a condition by True or False, an expression by one of its constants or arguments. A rule
stays in the race where its time is within `SLACK` of the best candidate's and it passes on what is
held out. Each step takes the smallest of those; it ends where none is smaller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from deap import gp

from splitkv.lab.evolve import grammar
from splitkv.lab.evolve.evaluate import Evaluation, Evaluator
from splitkv.lab.evolve.grammar import Policy, Slots, Truth

SLACK = 1.01


def distil(
    best: str, evaluator: Evaluator, slots: Slots, about: str, end: float = math.inf
) -> tuple[str, Evaluation]:
    """The rule as a file, and its figures; past `end` the simplest so far. ValueError where the
    best is not of the grammar."""
    policy = grammar.policy_of(best, slots)
    found = judged(policy, evaluator, about)
    if found.reason is not None or found.ratio is None:
        raise ValueError(f"best: expected a candidate that passes, got one that is: {found.reason}")
    bound = found.ratio * SLACK
    while simpler := next(
        (
            (smaller, its)
            for smaller in smaller_ones(policy, slots)
            if time.monotonic() < end
            and (its := judged(smaller, evaluator, about, bound)).reason is None
            and its.worst is not None
        ),
        None,
    ):
        policy, found = simpler
    return grammar.source_of(policy, about), found


def judged(
    policy: Policy, evaluator: Evaluator, about: str, bound: float = float("inf")
) -> Evaluation:
    try:
        options, us = evaluator.options(grammar.source_of(policy, about))
    except ValueError as error:
        return Evaluation(reason=str(error))
    return evaluator.evaluate(options, us, bound)


def smaller_ones(policy: Policy, slots: Slots) -> Iterator[Policy]:
    """Policies with one part replaced by a smaller one of its type, the smallest first."""
    found: dict[str, Policy] = {}
    for name, tree in policy.items():
        for i, node in enumerate(tree):
            part = tree.searchSubtree(i)
            for other in _replacements(tree, part, node.ret, slots.sets[name]):
                child = policy.copy()
                child[name] = gp.PrimitiveTree([*tree[: part.start], *other, *tree[part.stop :]])
                found.setdefault(grammar.source_of(child, ""), child)
    yield from sorted(found.values(), key=lambda child: child.size)


def _replacements(tree: Any, part: slice, kind: type, pset: Any) -> Iterator[list[Any]]:
    length = part.stop - part.start
    if length == 1:
        return
    for i in range(part.start + 1, part.stop):
        if tree[i].ret is kind:
            yield list(tree[tree.searchSubtree(i)])
    if kind is Truth:
        yield from ([pset.mapping[word]] for word in ("True", "False"))

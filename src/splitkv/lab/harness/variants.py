"""`splitkv.decode` as a variant that is timed: by default, policy, plan or number of splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import splitkv
from splitkv.core.errors import expect, expect_one_of
from splitkv.lab.harness.cases import Inputs
from splitkv.lab.harness.records import OURS
from splitkv.lab.harness.timing import Prepared, Variant
from splitkv.planner.policies.short_queries import asked_for
from splitkv.planner.registry import POLICIES


def our_variants(policies: Sequence[str] = (), num_splits: int = 0) -> list[Variant]:
    """`splitkv.decode` without options, or under plans of policies or with a number of splits."""
    expect(not (policies and num_splits), "num_splits", "0 with a policy", num_splits)
    for name in policies:
        expect_one_of("policy", name, POLICIES)
    if num_splits:
        return [our_variant(f"{OURS} ({num_splits} splits)", num_splits=num_splits)]
    return [our_variant(f"{OURS} ({name})", policy=name) for name in policies] or [
        our_variant(OURS)
    ]


def columns() -> list[Variant]:
    """The variants of the suites `seed004` and `seed004_int8`: keys in one part or in several,
    heads packed or apart."""
    return [
        our_variant(
            f"{OURS} ({'parts' if parts else 'one part'}, heads {'packed' if packed else 'apart'})",
            policy=asked_for(parts=parts, packed=packed),
        )
        for packed in (False, True)
        for parts in (False, True)
    ]


def our_variant(label: str, **decision: Any) -> Variant:
    """`decision`: a `plan`, or the arguments of `splitkv.plan`; none: `decode` decides."""

    def prepare(inputs: Inputs) -> Prepared:
        given = inputs.arguments(0)
        q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
        plan = decision.get("plan") or splitkv.plan(q, k, v, **decision, **given)
        chosen = {"plan": plan} if decision else {}
        calls = [inputs.arguments(i) | chosen for i in range(inputs.buffers)]
        return Prepared(lambda i: splitkv.decode(**calls[i]), splitkv.__version__, plan.as_dict())

    return Variant(label, "decode", prepare, decision=decision)

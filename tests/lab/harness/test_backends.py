"""Who runs the ways of a work: our plans, the arguments of FlashAttention-3, its process."""

from __future__ import annotations

import base64
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from reproducing import H200, taken

from splitkv.core.plan import Plan
from splitkv.lab.harness import backends, peers
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.work import Way, Work
from splitkv.lab.reproduce import works
from splitkv.testing import assert_close


def test_our_plans_are_the_splits_asked_for() -> None:
    sweep_work = works.split_sweep()
    plans = backends.our_plans(sweep_work, H200)
    made = {way.splits: plan for way, plan in plans.items() if isinstance(plan, Plan)}
    assert made.keys() == {0, *range(1, 17)}
    assert all(plan.config.num_splits == n for n, plan in made.items() if n)
    assert len({plan.kernel for plan in made.values()}) == 1
    assert str(plans[Way("s=17", 17)]) == "splits: expected at most 16, as there are tiles, got 17"
    for work in works.packing(True):
        plans = backends.our_plans(work, H200)
        assert {p.kernel for p in plans.values() if isinstance(p, Plan)} == {backends.ABLATED}
        heads = [p.problem.num_kv_heads for p in plans.values() if isinstance(p, Plan)]
        assert heads == [16, 16, 1, 1]


def test_unpacked_heads_read_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ABLATED", "torch_math")
    p = replace(CASES["mqa8_b1_512"].problem, batch=2, seqlen_k=40, seqlen_q=3)
    work = Work("packing", Case("small", p), (Way("split", 0, False), Way("both", 0)))
    inputs = Inputs(work.case, 1, device="cpu")
    ref, pt = inputs.references()
    for variant in backends.our_variants(work):
        assert not variant.unsupported(work.case)
        call, _, plan = variant.prepare(inputs)
        assert plan["problem"]["num_kv_heads"] == (8 if variant.kernel == "split" else 1)
        assert_close(call(0), ref, pt)


def test_fa3_is_asked_for_the_splits_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def fake(inputs: Any, **options: Any) -> None:
        given.append(options)

    monkeypatch.setattr(backends.peers, "fa3", fake)
    (work,) = (w for w in works.packing(True) if w.case.name == "packing_b256_1024")
    for variant in backends.fa3_variants(work):
        variant.prepare(None)
    assert [(g["num_splits"], g["pack_gqa"]) for g in given] == [
        *((1, False), (0, False), (1, True), (0, True))
    ]


def test_a_work_travels_to_another_process_and_what_ends_it_is_a_reason() -> None:
    work = works.split_sweep()
    line = base64.b64encode(pickle.dumps((work, 7))).decode()
    assert pickle.loads(base64.b64decode(line)) == (work, 7)
    echo = 'import sys\nfor _ in sys.stdin: print(\'{"kernel": "s=1", "us": 2}\\n{}\', flush=True)'
    there = backends.FlashAttention3([sys.executable, "-c", echo])
    rows = there.measure(work, 7)
    assert rows == [{"kernel": "s=1", "us": 2}]
    there.stop()
    dies = backends.FlashAttention3([sys.executable, "-c", "raise SystemExit('no library')"])
    rows = dies.measure(work, 7)
    dies.stop()
    assert [row["kernel"] for row in rows] == [way.name for way in work.ways]
    assert "no library" in rows[0]["reasons"][0]


def test_scales_of_unpacked_heads_are_those_of_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ABLATED", "torch_math")
    p = replace(CASES["packing_b2_131072_int8"].problem, seqlen_k=40)
    work = Work("packing int8", Case("small", p), (Way("split", 0, False), Way("both", 0)))
    inputs = Inputs(work.case, 1, device="cpu")
    ref, pt = inputs.references()
    for variant in backends.our_variants(work):
        assert_close(variant.prepare(inputs).call(0), ref, pt)


def test_every_way_of_a_step_is_a_plan_of_ours_or_a_reason() -> None:
    for work in taken("splitkv", works.works(True, 132)):
        plans = backends.our_plans(work, H200)
        assert all(isinstance(x, Plan) or str(x) for x in plans.values())
        if work.step in ("one launch", "page sizes", "kernels"):
            assert all(isinstance(x, Plan) for x in plans.values()), (work.case.name, plans)
        if work.step == "kernels":
            assert [x.kernel == works.TRITON for x in plans.values() if isinstance(x, Plan)] == [
                *(True, False)
            ]


def test_a_way_without_metadata_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    fa = SimpleNamespace(
        get_scheduler_metadata=lambda *_, **__: made.append("ahead"),
        flash_attn_with_kvcache=lambda *_, scheduler_metadata, **__: scheduler_metadata,
    )
    monkeypatch.setattr(peers, "import_module", lambda name: fa)
    inputs = Inputs(works.mqa(64), 1, device="cpu")
    for ahead, times in ((False, 0), (True, 1)):
        peers.fa3(inputs, ahead=ahead).call(0)
        assert len(made) == times
    (first, *_) = works.no_metadata(132)
    assert [way.ahead for way in first.ways] == [False] * 3

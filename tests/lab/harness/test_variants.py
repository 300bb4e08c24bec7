"""The plans of variants of decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results import FLOOR, MACHINE

from splitkv.core.device import GPUS
from splitkv.core.variants import Plain
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness.suites import select
from splitkv.lab.harness.variants import columns
from splitkv.planner.registry import make_plan


def test_the_columns_of_packing_are_four_plans() -> None:
    """Heads packed or apart, keys in one part or in several, of one kernel; 67 MB each."""
    device = GPUS["h200"]
    cases = select([], suite="seed004_int8")
    assert len(cases) == 8 and all(case.problem.rows == 48 for case in cases)
    assert {case.problem.kv_bytes for case in cases} == {2 * 262144 * 128}
    few = {}
    for case in cases:
        plans = [make_plan(case.problem, device, **column.decision) for column in columns()]
        assert {plan.kernel for plan in plans} == {"hopper_prefill_quantised"}
        assert [plan.config.pack_gqa for plan in plans] == [False, False, True, True]
        for plan in (plans[0], plans[2]):
            assert replace(plan.config, variant=Plain()) == plan.config.shape
        few[case.name] = plans[3].config.num_splits
    assert few["packing_b256_1024_int8"] == 1 and few["packing_b2_131072_int8"] > 30
    assert few["packing_b64_4096_int8"] == 2  # a cluster, where one part is none


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench.Floors, "__call__", lambda self, num_bytes: FLOOR)

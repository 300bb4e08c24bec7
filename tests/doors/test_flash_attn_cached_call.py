"""flash_attn_with_kvcache relaunches a call that is like an earlier one; nothing runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doors.test_flash_attn_kv_cache import PLAIN, Example
from runtime.test_decode_append import Appending, bound
from torch import Tensor

from splitkv.core.device import GPUS
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.flash_attn import cached_call, flash_attn_with_kvcache, kv_cache
from splitkv.kernels.host.append_call import Append
from splitkv.runtime import append_decode
from splitkv.runtime.call_cache import CallCache
from splitkv.runtime.schedule import Schedule

__all__ = ["bound"]  # a fixture


class Again(Appending):
    """A launcher that has a quicker way, which keeps what it is given."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        super().__init__(plan, operands)
        self.repeated: list[tuple[Any, ...]] = []
        self.result: Tensor | None = torch.zeros(1)

    def repeat(self, *args: Any, starts: Any = None) -> tuple[Tensor, None] | None:
        self.repeated.append(args if starts is None else (*args, starts))
        return None if self.result is None else (self.result, None)


@pytest.fixture
def steps(bound: list[Appending], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launchers that were bound."""
    monkeypatch.setattr("runtime.test_decode_append.Appending", Again)
    monkeypatch.setattr(cached_call, "calls", CallCache())
    return bound


def call_of(**changes: Any) -> dict[str, Any]:
    values = PLAIN | {"lse": False, "rotary": "halves", "mask": Mask(True, 4)}
    return Example(values | changes).call


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 5},
        {"page_size": 8},
        {"rows": True},
        {"rotary": None},
        {"rotary_seqlens": True},
        {"ragged_new": True},
        {"modifiers": "alibi"},
    ],
    ids=str,
)
def test_a_step_is_relaunched(changes: dict[str, Any], steps: list[Any]) -> None:
    call = call_of(**changes)
    flash_attn_with_kvcache(**call)
    (launcher,) = steps
    assert len(launcher.calls) == 1 and launcher.repeated == []
    for name in ("q", "k", "v", "cache_seqlens"):
        call[name] = call[name].clone()
    assert flash_attn_with_kvcache(**call) is launcher.result
    ((q, k, v, out, lens, table, _, slopes, *scales, scale, softcap, new),) = launcher.repeated
    assert q is call["q"] and k is call["k_cache"] and v is call["v_cache"] and out is None
    assert lens is call["cache_seqlens"] and slopes is call.get("alibi_slopes")
    tables = ("block_table", "page_table", "cache_batch_idx")
    assert table is next((call[name] for name in tables if name in call), None)
    assert scales == [None] * 3 and scale == 32**-0.5 and softcap == 0
    made: Append = launcher.calls[0].new
    assert isinstance(new, Append) and (new.k, new.v) == (call["k"], call["v"])
    assert new.before is lens and new.cu_seqlens_new is call.get("cu_seqlens_k_new")
    assert (new.rotary is None) == (made.rotary is None)
    if new.rotary is not None:
        assert made.rotary is not None
        assert new.rotary[:3] == made.rotary[:3] and new.rotary[3:] == made.rotary[3:]


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_leftpad": torch.zeros(3, dtype=torch.int32)},
        {"s_aux": torch.zeros(4)},
        {"softmax_scale": 0.5},
        {"softcap": 2.0},
        {"causal": False},
        {"window_size": (5, -1)},
        {"window_size": [4, -1]},
        {"rotary_interleaved": True},
        {"num_splits": 2},
        {"attention_chunk": 3},
        {"alibi_slopes": torch.ones(4)},
        {"cache_batch_idx": torch.tensor([2, 0, 1], dtype=torch.int32)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_another_call_is_checked(changes: dict[str, Any], steps: list[Any]) -> None:
    call = call_of()
    flash_attn_with_kvcache(**call)
    flash_attn_with_kvcache(**call | changes)
    assert all(launcher.repeated == [] for launcher in steps)


@pytest.fixture
def steps_apart(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launchers of decode that were bound behind `append`."""
    made: list[Any] = []

    def plan_for(problem: Problem, operands: Operands, *rest: Any) -> Plan:
        return Plan(problem, GPUS["h200"], "test", "a_kernel", Config(), "")

    def bind(problem: Problem, operands: Operands, plan: Plan) -> Again:
        assert not plan.problem.appends
        made.append(Again(plan, operands))
        return made[-1]

    monkeypatch.setattr(append_decode, "plan_for", plan_for)
    monkeypatch.setattr(append_decode, "bind", bind)
    return made


@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 5}, {"rows": True}, {"rotary": None}, {"ragged_new": True}],
    ids=str,
)
def test_a_step_after_append_is_relaunched(changes: dict[str, Any], steps_apart: list[Any]) -> None:
    """By the lengths after it and with the rotated q, whatever the addresses."""
    call, other = (call_of(**changes) for _ in range(2))
    caches = other["k_cache"], other["v_cache"]
    flash_attn_with_kvcache(**call)
    assert flash_attn_with_kvcache(**other) is steps_apart[0].result
    (launcher,) = steps_apart
    (first,), (again,) = launcher.calls, launcher.repeated
    q, k, v, out, lens, *_ = again
    example = Example(PLAIN | {"lse": False, "rotary": "halves", "mask": Mask(True, 4)} | changes)
    assert lens.tolist() == first.cache_seqlens.tolist()
    assert lens.tolist() == [n + new for n, new in zip(example.before, example.new, strict=True)]
    assert (k, v) == caches and out is None
    turned = "rotary_cos" in other
    assert torch.equal(q, other["q"]) != turned and q.shape == other["q"].shape
    place = example.place(0, example.before[0])
    if not changes.get("page_size"):  # which are in another order in each
        assert torch.equal(other["v_cache"][place], other["v"].flatten(0, -3)[0])


def test_a_schedule_is_known_by_its_plan(
    steps_apart: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "fitted_schedule", lambda schedule, *rest: schedule)
    monkeypatch.setattr(kv_cache, "fitted", lambda plan, *rest: plan)
    monkeypatch.setattr(kv_cache, "fit_plan", lambda plan, *rest: plan)
    monkeypatch.setattr(append_decode, "expect_same_shares", lambda *plans: None)
    call, starts = call_of(), [torch.zeros(3, 8, dtype=torch.int32) for _ in range(3)]
    problem = Problem("decode", 3, 4, 2, 32, 32, 1, 24)
    plan, equal = (Plan(problem, GPUS["h200"], "test", "a_kernel", Config(), "") for _ in range(2))
    for made in (plan, plan, equal):
        flash_attn_with_kvcache(**call, scheduler_metadata=Schedule(made, starts.pop(0)))
    first, other = steps_apart
    assert len(first.calls) == len(other.calls) == len(first.repeated) == 1
    flash_attn_with_kvcache(**call, scheduler_metadata=plan)
    assert len(steps_apart) == 3 and steps_apart[2].calls[0].starts is None


def test_the_lse_is_finished_the_long_way(steps: list[Any]) -> None:
    flash_attn_with_kvcache(**call_of())
    (options,) = cached_call.calls.recent
    given = dict.fromkeys(
        (*cached_call.TENSORS, *cached_call.ABSENT, *cached_call.SCALARS, "scheduler_metadata")
    )
    given |= call_of() | {"window_size": (4, -1), "return_softmax_lse": True}
    assert cached_call._options_of(given) == (None, [])


def test_other_layouts_are_checked(steps: list[Any]) -> None:
    call = call_of()
    flash_attn_with_kvcache(**call)
    for name in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos"):
        x = call[name]
        strided = torch.cat([x, x], -1)[..., : x.shape[-1]]
        flash_attn_with_kvcache(**call | {name: strided})
    assert all(launcher.repeated == [] for launcher in steps)
    with pytest.raises(ValueError, match="^k_cache"):
        flash_attn_with_kvcache(**call | {"k_cache": call["k_cache"].double()})


def test_what_cannot_be_repeated_goes_the_long_way(steps: list[Any]) -> None:
    call = call_of()
    flash_attn_with_kvcache(**call)
    (launcher,) = steps
    launcher.result = None  # an address that is no multiple of 16
    flash_attn_with_kvcache(**call)
    assert len(launcher.calls) == 2 and len(launcher.repeated) == 1


def test_a_cached_call_checks_nothing(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of()
    flash_attn_with_kvcache(**call)
    monkeypatch.setattr(kv_cache, "_expect_cache", None)
    flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("known", [False, True])
def test_an_int_of_cache_seqlens_goes_the_long_way(known: bool, steps: list[Any]) -> None:
    """No check recognises it, and that of a tensor does not take it for one."""
    call = call_of()
    if known:
        flash_attn_with_kvcache(**call)
    before = dict(cached_call.calls.recent)
    for _ in range(2):
        flash_attn_with_kvcache(**call | {"cache_seqlens": 1})
    assert cached_call.calls.recent == before and steps[-1].repeated == []
    assert steps[-1].calls[-1].new.before.tolist() == [1] * len(call["q"])

"""New tokens of calls by a schedule of the step, in Triton's interpreter: the whole call of
`flash_attn_with_kvcache`, its results and the caches afterwards, beside the definition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from doors.test_flash_attn_kv_cache import AXES as CALLS
from doors.test_flash_attn_kv_cache import Example
from doors.test_flash_attn_kv_cache import valid as has_new_to_rotate
from interpreting import kernels_run_calls
from torch import Tensor

from splitkv import Plan, Schedule
from splitkv.core.plan import SCHEDULED
from splitkv.core.problem import Operands
from splitkv.flash_attn import (
    cached_call,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    kv_cache,
)
from splitkv.kernels import decode_persistent
from splitkv.planner.policies import persistent
from splitkv.planner.policies.appending import FEW
from splitkv.runtime import append_decode, dispatch
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import assert_close

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
SMS = 5  # so few that programs go on with other sequences
AXES: cases.Axes = {
    **CALLS,
    "seqlens": ((1, 1), (3, 3), (2, 0), (4, 6), (1, 2)),
    "ragged_q": (False,),
    "num_splits": (0,),
    "schedule": SCHEDULED,
    "made": (True, False),  # a Schedule, or the Plan, by which programs find their shares
}


@contextmanager
def kernels_of_calls() -> Iterator[list[Plan]]:
    """Calls on the CPU run kernels meanwhile; the plans of those that follow a schedule."""
    followed: list[Plan] = []
    bind = decode_persistent.bind

    def noted(plan: Plan, operands: Operands) -> Any:
        followed.append(plan)
        return bind(plan, operands)

    with pytest.MonkeyPatch.context() as patch:
        kernels_run_calls(patch, SMS)
        patch.setattr(decode_persistent, "bind", noted)
        for module, name in (
            *((module, "calls") for module in (append_decode, dispatch, cached_call)),
            (kv_cache, "problems"),
        ):
            patch.setattr(module, name, CallCache())
        yield followed


def metadata_of(call: dict[str, Any], schedule: Any, **sizes: Any) -> Schedule:
    """A Schedule by one of the rules, for a call whose lengths are those before it."""
    q, k_cache, table = call["q"], call["k_cache"], call.get("page_table", call.get("block_table"))
    capacity = k_cache.shape[1] if table is None else table.shape[1] * k_cache.shape[1]
    new = call["k"].shape[1] if call["k"].dim() == 4 else int(call["cu_seqlens_k_new"].diff().max())
    made = get_scheduler_metadata(
        *(q.shape[0], q.shape[1], capacity, q.shape[2], *k_cache.shape[2:], call["cache_seqlens"]),
        q.dtype,
        call["v_cache"].shape[3],
        cu_seqlens_k_new=call.get("cu_seqlens_k_new"),
        cache_leftpad=call.get("cache_leftpad"),
        page_size=None if table is None else k_cache.shape[1],
        max_seqlen_k_new=new,
        causal=call.get("causal", False),
        window_size=call.get("window_size", (-1, -1)),
        attention_chunk=call.get("attention_chunk", 0),
        has_softcap=call.get("softcap", 0.0) > 0,
        policy=persistent.with_schedule(schedule, tile_n=16, **sizes),
    )
    assert isinstance(made, Schedule)
    return made


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES, has_new_to_rotate))))
def test_append_rotate_and_attend(number: int) -> None:
    """Rows, pages, padding, packed new tokens, rotations, masks and modifiers in pairs."""
    values = dict(PAIRS[number])
    example = Example(values)
    ref, _, caches = example.by_hand()
    pt = example.by_hand(upcast=False)[0]
    with kernels_of_calls() as followed:
        schedule = metadata_of(example.call, values["schedule"])
        metadata = schedule if values["made"] else schedule.plan
        result = flash_attn_with_kvcache(**example.call, scheduler_metadata=metadata)
    (plan,) = followed
    assert replace(plan.config, appends=False) == replace(schedule.plan.config, appends=False)
    assert plan.config.appends == plan.problem.appends
    out = result[0] if values["lse"] else result
    for name, wanted in caches.items():
        eps = torch.finfo(values["dtype"]).eps
        cache = example.call[name]
        torch.testing.assert_close(cache, wanted, rtol=2 * eps, atol=2 * eps, equal_nan=True)
    assert_close(out.flatten(0, -3), ref, pt, factor=3.0)


def random_call(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """A mix of lengths with room for what is new, in a cache of 8 bits or as it is; whether it is
    the former."""
    g = torch.Generator().manual_seed(draw.randrange(1 << 30))
    batch, heads, kv_heads, dim = draw.choice([1, 4, 9]), 4, draw.choice([1, 2]), 32
    seqlen_q, page_size = draw.choice([1, 2]), draw.choice([None, 1, 16])
    new, capacity = draw.choice([seqlen_q, 5]), 112
    stored = draw.choice([None, torch.int8, torch.float8_e4m3fn])

    def random_of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    slabs = (batch, capacity) if page_size is None else (batch * capacity // page_size, page_size)
    call: dict[str, Any] = {"causal": True, "q": random_of(batch, seqlen_q, heads, dim)}
    for name in "kv":
        cache = random_of(*slabs, kv_heads, dim)
        call[name] = random_of(batch, new, kv_heads, dim)
        if stored is not None:
            top = 30 if stored == torch.int8 else 8
            cache = (cache.float() * top).round().clamp(-127, 127).to(stored)
            each = (batch, kv_heads) if draw.random() < 0.5 else (1,)
            call[f"{name}_descale"] = (torch.rand(*each, generator=g) + 0.5) / top
        call[f"{name}_cache"] = cache
    if page_size is not None:
        pages = torch.randperm(slabs[0], generator=g).view(batch, -1).int()
        call["page_table"] = pages
    before = [min(capacity - new, int(draw.lognormvariate(2.5, 1.2))) for _ in range(batch)]
    before[draw.randrange(batch)] = draw.choice([0, capacity - new])
    call["cache_seqlens"] = torch.tensor(before, dtype=torch.int32)
    if stored is None and draw.random() < 0.5:
        angles = 6 * torch.rand(capacity, dim // 2, generator=g)
        call |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    if draw.random() < 0.3:
        call["window_size"] = (draw.choice([3, 40]), 0)
    return call, stored is not None


def cloned(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(seed: int) -> None:
    """The caches of a call without a schedule, bit for bit, and the definition's results."""
    draw = random.Random(seed)
    call, quantised = random_call(draw)
    new = call["k"].shape[1]
    schedule, programs_per_sm = draw.choice(SCHEDULED), draw.choice([1, 3])
    exact = cloned(call)
    if quantised:  # the same bits are stored of wider new tokens, and nothing is rotated
        exact |= {name: exact[name].float() for name in "qkv"}
    else:
        floats = [n for n, x in call.items() if isinstance(x, Tensor) and x.dtype == torch.bfloat16]
        exact |= {name: exact[name].float() for name in floats}
    ref = flash_attn_with_kvcache(**exact)
    pt = flash_attn_with_kvcache(**cloned(call))
    with kernels_of_calls() as followed:
        alone = cloned(call)
        flash_attn_with_kvcache(**alone)
        made = metadata_of(call, schedule, programs_per_sm=programs_per_sm)
        assert not followed
        for metadata in (made, made.plan):
            own = cloned(call)
            out = flash_attn_with_kvcache(**own, scheduler_metadata=metadata)
            assert_close(out, ref, pt)
            for name in ("k_cache", "v_cache"):
                assert torch.equal(bits(own[name]), bits(alone[name])), name
        assert [plan.config for plan in followed] == [made.plan.config] * 2
        assert all(plan.config.appends == (new <= FEW) for plan in followed)

"""Decode by a schedule of the step: random mixes of lengths, graphs, and the schedule itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import appending
import cases
import pytest
import schedules
import torch
from appending import Step
from running import DEVICE, HERE, SERVING, only, same_bits
from torch import Tensor

import splitkv
from splitkv import testing
from splitkv.core.options import options_of
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
from splitkv.kernels.schedule import head_tiles_of_share
from splitkv.planner import registry
from splitkv.planner.policies import persistent
from splitkv.runtime import dispatch
from splitkv.runtime.append import append
from splitkv.runtime.append_decode import append_and_decode
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import (
    AS_IS,
    Call,
    Codec,
    Contiguous,
    Mask,
    Paged,
    Problem,
    captured,
    check,
    make_operands,
)

MIXES, CHUNKS = 2000, 40
NEW_TOKENS = 40  # mixes with new tokens
HOPPER = ("hopper_decode_split",) if HERE.capability == (9, 0) else ()
KERNELS = (*HOPPER, "decode_split")
AXES: cases.Axes = {
    "place": (Contiguous(), Paged(16), Paged(256), Paged(1)),
    "rows": ((8, 1), (4, 2), (1, 1)),  # query heads a KV head, query tokens
    "window": ((False, 0), (True, 0), (True, 5)),  # whether there is one; sink tokens
    "codec": (AS_IS, Codec("fp8", "head"), Codec("int8", "token")),
    "sink_logits": (False, True),
    "programs_per_sm": (1, 2),
}
HOPPER_AXES = AXES | {"place": (Contiguous(), Paged(16), Paged(256))}
COMPILED = {"decode_split": cases.pairs(AXES), "hopper_decode_split": cases.pairs(HOPPER_AXES)}
"""Compile-time values of random mixes, which then share kernels."""
SIZES = ((1, 9000, 2), (2, 4000, 8), (7, 3000, 2), (33, 600, 2), (130, 200, 1), (300, 90, 1))
STEPS = ((4096, 1, 0, 300), (0, 0, 0, 0), (1, 1, 1, 1), (4096, 4096, 4096, 4096), (5, 2000, 64, 65))


def scheduled(problem: Problem, kernel: str, schedule: Any, **how: Any) -> Plan:
    """A plan whose programs follow a schedule; without one for the kernel that any GPU has."""
    policy = only(kernel, persistent.with_schedule(schedule, **how))
    return splitkv.plan(problem, policy=policy)


def lengths_of(draw: random.Random, batch: int, most: int) -> list[int]:
    """As an engine has them: by one of four distributions, and some none."""
    how = draw.choice(("lognormal", "uniform", "bimodal", "one long"))
    found = {
        "lognormal": lambda: int(draw.lognormvariate(0, 1.2) * most / 12),
        "uniform": lambda: draw.randint(1, most),
        "bimodal": lambda: most if draw.random() < 0.125 else draw.randint(0, most // 20),
        "one long": lambda: draw.randint(0, most // 40),
    }[how]
    lengths = [min(most, found()) for _ in range(batch)]
    lengths[draw.randrange(batch)] = most
    return lengths


def random_problem(
    draw: random.Random, compiled: cases.Values, sizes: Sequence[tuple[int, int, int]]
) -> Problem:
    """A problem of these compile-time values and one of these sizes, all others drawn."""
    group, seqlen_q = compiled["rows"]
    # few keys in all, as they are drawn on the host
    batch, most, heads = draw.choice(sizes)
    window, sink_tokens = compiled["window"]
    return replace(
        SERVING,
        batch=batch,
        num_heads=heads * group,
        num_kv_heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=most,
        place=compiled["place"],
        mask=Mask(True, most // 3 if window else -1, -1, sink_tokens),
        codec=compiled["codec"],
        sink_logits=compiled["sink_logits"],
    )


def drawn_once(patch: pytest.MonkeyPatch) -> None:
    """Caches of one shape are drawn once: that takes longer than all else, and what a mix tries are
    its lengths and what is beyond them."""
    draw, made, of = testing._stored, dict[Any, Any](), [None, 0]

    def stored(problem: Problem, g: Any, *shape: int) -> tuple[Tensor, Tensor | None]:
        of[:] = g, of[1] + 1 if of[0] is g else 0  # keys are a problem's first, values its second
        key = shape, of[1]
        if key not in made:
            made[key] = draw(problem, g, *shape)
        x, scale = made[key]
        return x.clone(), None if scale is None else scale.clone()

    patch.setattr(testing, "_stored", stored)


@pytest.mark.parametrize(("kernel", "chunk"), [(k, n) for k in KERNELS for n in range(CHUNKS)])
def test_random_mixes(kernel: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition's results, whatever the mix."""
    drawn_once(monkeypatch)
    turn, which = divmod(chunk, len(COMPILED[kernel]))
    compiled, sizes = COMPILED[kernel][which], SIZES[(turn + which) % 2 :: 2]
    for number in range(MIXES // CHUNKS // len(KERNELS)):
        seed = (chunk * MIXES + number) * len(KERNELS) + KERNELS.index(kernel)
        draw = random.Random(seed)
        problem, schedule = random_problem(draw, compiled, sizes), draw.choice(SCHEDULED)
        plan = scheduled(problem, kernel, schedule, programs_per_sm=compiled["programs_per_sm"])
        lengths = lengths_of(draw, problem.batch, problem.seqlen_k)

        def run(problem: Problem, call: Call, plan: Plan = plan) -> tuple[Tensor, Any]:
            made = splitkv.make_schedule(plan, call["cache_seqlens"])
            out, lse = splitkv.decode(**call, schedule=made)
            assert same_bits((out, lse), splitkv.decode(**call, plan=plan)), "its own schedule"
            return out, lse

        check(problem, seed=seed, device=DEVICE, run=run, lengths=lengths)


@pytest.mark.parametrize("codec", [AS_IS, Codec("fp8", "head"), Codec("int8", "token")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences_end_at_every_key_of_a_tile(kernel: str, codec: Codec, head_dim: int) -> None:
    """What is behind them is NaN; programs go from one to the next, and no box is left out that has
    a key."""
    lengths = random.Random(head_dim).sample(range(196), 196)
    sizes = {"batch": len(lengths), "head_dim": head_dim, "head_dim_v": head_dim}
    problem = replace(SERVING, seqlen_k=200, codec=codec, **sizes)
    plan = scheduled(problem, kernel, "head_ranges")
    plan = replace(plan, config=replace(plan.config, programs=23))

    def run(problem: Problem, call: Call) -> tuple[Tensor, Any]:
        return splitkv.decode(**call, plan=plan)

    check(problem, device=DEVICE, run=run, lengths=lengths)


@pytest.mark.parametrize("kernel", KERNELS)
def test_boxes_without_keys_hold_what_was_there(kernel: str) -> None:
    """A program whose tiles were NaN a moment ago goes on with short sequences."""
    lengths = [700 if n % 4 == 0 else n % 131 for n in range(160)]
    problem = replace(SERVING, batch=len(lengths), seqlen_k=700)
    plan = scheduled(problem, kernel, "head_ranges")
    plan = replace(plan, config=replace(plan.config, programs=7))
    call = make_operands(problem, device=DEVICE, lengths=lengths)
    wanted = splitkv.decode(**call, plan=plan)
    for name in ("k_cache", "v_cache"):
        call[name][::4] = torch.nan
    found = splitkv.decode(**call, plan=plan)
    assert found[0][::4].isnan().all()
    for n in (1, 2, 3):
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x[n::4], y[n::4])


def replay_with(
    other: Call, call: Call, start: Callable[[], None], results: tuple[Tensor, Tensor]
) -> None:
    """Replays the graph of a call with the tensors of another."""
    for name, x in other.items():
        if isinstance(x, Tensor):
            call[name].copy_(x)
    for x in results:
        x.fill_(torch.nan)
    start()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_a_graph_with_other_lengths(kernel: str, schedule: str, place: Any) -> None:
    """The schedule is made in the graph; every replay is right, and what an eager call gives."""
    problem = replace(SERVING, place=place, mask=Mask(True, 3000, -1, 4))
    plan = scheduled(problem, kernel, schedule)
    call = make_operands(problem, device=DEVICE, lengths=(64, 64, 64, 64))

    def layers() -> tuple[Tensor, Tensor]:
        made = splitkv.make_schedule(plan, call["cache_seqlens"])
        first = splitkv.decode(**call, schedule=made)
        assert isinstance(splitkv.decode(**call, schedule=made), tuple)
        return first

    start, results = captured(layers)

    def replay(problem: Problem, other: Call) -> tuple[Tensor, Tensor]:
        replay_with(other, call, start, results)
        assert same_bits(results, splitkv.decode(**other, plan=plan))
        return results[0].clone(), results[1].clone()

    for seed, lengths in enumerate(STEPS):
        check(problem, seed=seed, device=DEVICE, run=replay, lengths=lengths)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_the_default_in_a_graph(kernel: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a plan, as if a schedule cost nothing at equal lengths."""
    monkeypatch.setattr(persistent, "MOST_LONGER", math.inf)
    monkeypatch.setattr(registry, "_choices", {})
    monkeypatch.setattr(dispatch, "calls", CallCache())
    problem = replace(SERVING, place=place)
    plan = splitkv.plan(problem)
    assert (plan.kernel, plan.config.schedule) == (kernel, "head_ranges")
    call = make_operands(problem, device=DEVICE, lengths=(64, 64, 64, 64))
    start, results = captured(lambda: splitkv.decode(**call))

    def replay(problem: Problem, other: Call) -> tuple[Tensor, Tensor]:
        replay_with(other, call, start, results)
        assert same_bits(results, splitkv.decode(**other, plan=plan))
        assert same_bits(results, splitkv.decode(**other))
        return results[0].clone(), results[1].clone()

    for seed, lengths in enumerate(STEPS):
        check(problem, seed=seed, device=DEVICE, run=replay, lengths=lengths)


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("batch", [1, 70, 600, 1500])
def test_the_schedule_is_that_of_plain_python(schedule: str, batch: int) -> None:
    problem = replace(SERVING, batch=batch, seqlen_k=20_000, num_kv_heads=8)
    plan = scheduled(problem, "decode_split", schedule)
    draw = random.Random(batch)
    lengths = lengths_of(draw, batch, 20_000)
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    made = splitkv.make_schedule(plan, lens).starts.tolist()
    tile_n = plan.config.tile_n
    tiles = [schedules.num_tiles(problem.mask, n, 1, tile_n) for n in lengths]
    if schedule == "proportional":
        expected = schedules.proportional(tiles, plan.config.programs)
    else:
        config = plan.config
        head_tiles = head_tiles_of_share(plan)
        expected = schedules.ranges(tiles, head_tiles, config.programs, config.split_tiles)
    firsts: dict[int, schedules.Split] = {}
    for split in expected:
        firsts.setdefault(split.program, split)
    for program, start in enumerate(made):
        split = firsts.get(program)
        if split is None:
            assert start[4] == 0
        else:
            own = [split.sequence, split.head_tile, split.tile, split.by]
            assert start[:4] == own


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_waits_and_nothing_is_read_by_the_host(kernel: str, no_host_sync: Any) -> None:
    plan = scheduled(SERVING, kernel, "ranges")
    call = make_operands(SERVING, device=DEVICE)
    made = splitkv.make_schedule(plan, call["cache_seqlens"])
    splitkv.decode(**call, schedule=made)
    with no_host_sync():
        splitkv.make_schedule(plan, call["cache_seqlens"], out=made)
        splitkv.decode(**call, schedule=made)
        splitkv.decode(**call, plan=plan)


# --- new tokens --------------------------------------------------------------------------------


def random_step(draw: random.Random, compiled: cases.Values) -> Step:
    """A mix whose last tokens are not in the cache yet; its lengths are those before them."""
    values = {name: draw.choice(options) for name, options in appending.AXES.items()}
    values |= {"leftpad": False, "rotary_dim": 32}
    if values["rotary"] is None:
        values |= {"start": False, "q_step": 1}
    problem = random_problem(draw, compiled, SIZES)
    lengths = [max(n, 1) for n in lengths_of(draw, problem.batch, problem.seqlen_k)]
    return appending.step(problem, values, device=DEVICE, lengths=lengths)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16}[x.element_size()])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(NEW_TOKENS))
def test_new_tokens_in_random_mixes(kernel: str, seed: int) -> None:
    """In one launch and in two the bits of `append` and then decode by the same schedule, in the
    caches, too."""
    draw = random.Random(seed)
    found = [x for x in COMPILED[kernel] if x["codec"].granularity != "token"]
    made = random_step(draw, found[seed % len(found)])
    alone, call, problem = appending.separately(made)
    q, after = append(alone)
    call |= {"q": call["q"] if q is None else q, "cache_seqlens": after}
    schedule, programs_per_sm = draw.choice(SCHEDULED), draw.choice((1, 2))
    apart = scheduled(problem, kernel, schedule, programs_per_sm=programs_per_sm)
    wanted = splitkv.decode(**call, plan=apart)
    ref, pt = (testing.expected(problem, call, upcast=upcast)[0] for upcast in (True, False))
    testing.assert_close(wanted[0], ref, pt)
    assert after is not None
    plan = replace(apart, problem=made.problem)
    plans = [plan]
    if plan.problem.appends:  # else there are no new tokens
        plans.append(replace(plan, config=replace(plan.config, appends=True)))
    names = options_of("append_and_decode")
    arguments = {name: x for name, x in made.call.items() if name in names}
    tensors = [made.call[name] for name in ("q", "k_cache", "v_cache")]
    before = [x.clone() for x in tensors[1:]]
    schedules = [splitkv.make_schedule(x, after) for x in plans]
    ways: list[dict[str, Any]] = [{"plan": x} for x in plans]
    for how in (*ways, *({"schedule": x} for x in (*schedules, schedules[-1]))):
        for x, there in zip(tensors[1:], before, strict=True):
            bits(x).copy_(bits(there))
        result = append_and_decode(made.new, *tensors, **arguments, **how)
        assert same_bits(result, wanted), "the result"
        for name, x in zip(("k_cache", "v_cache"), tensors[1:], strict=True):
            assert torch.equal(bits(x), bits(call[name])), name


def step_by_a_schedule(call: dict[str, Any], schedule: Any) -> Tensor:
    """A step of a model: the schedule of its lengths, and the one layer that there is."""
    q, (pages, page_size, kv_heads, dim) = call["q"], call["k_cache"].shape
    sizes = q.shape[0], 1, pages // q.shape[0] * page_size - 1, q.shape[2], kv_heads, dim
    made = get_scheduler_metadata(
        *sizes,
        call["cache_seqlens"],
        page_size=page_size,
        max_seqlen_k_new=1,
        causal=True,
        policy=POLICIES[schedule],
    )
    assert isinstance(made, splitkv.Schedule)
    out: Tensor = flash_attn_with_kvcache(**call, scheduler_metadata=made)
    return out


POLICIES = {name: persistent.with_schedule(name) for name in SCHEDULED}


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_a_generation_in_a_graph(schedule: str, no_host_sync: Any) -> None:
    """A key a step, from none on, over the ends of tiles and pages: an eager call's bits."""
    call = appending.model_step((8, 2), 64, DEVICE)
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    replay, out = captured(lambda: step_by_a_schedule(call, schedule))
    for n in (call, other):
        n["cache_seqlens"].copy_(torch.tensor([0, 60, 127, 1000]))
    for name in ("k_cache", "v_cache"):
        other[name].copy_(call[name])
    for _ in range(10):
        for name in ("q", "k", "v"):
            call[name].normal_()
            other[name].copy_(call[name])
        replay()
        with no_host_sync():
            eager = step_by_a_schedule(other, schedule)
        assert torch.equal(out, eager)
        for n in (call, other):
            n["cache_seqlens"] += 7
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call[name], other[name])

"""decode on the GPU against the reference: every kernel that splits keys, every feature, any number
of splits, every schedule.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import cases
import pytest
import torch
from running import (
    DEVICE,
    EVERY_PLAN,
    HERE,
    SERVING,
    decode,
    each_kernel,
    in_pairs,
    into_poison,
    kernels,
    plan_of,
    plan_of_config,
    plan_with,
    plans,
    realistic,
    said,
    same_bits,
)

import splitkv
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.scores import Score
from splitkv.core.tiles import box_rows
from splitkv.planner.policies import variants as rules
from splitkv.planner.registry import kernel_named
from splitkv.runtime import dispatch
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import (
    AS_IS,
    Call,
    Codec,
    Paged,
    Problem,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

SPLITS = {"one": (1,), "several": (2, 3, 7, 64)}  # which hardly differ in what is compiled
HOPPER = "hopper_decode_split"
ALIGNED = "k: expected strides and an address that are multiples of 16 bytes"
INSTEAD = {HOPPER: f"decode_split: {ALIGNED}", "hopper_prefill": f"prefill: q{ALIGNED[1:]}"}
# Cases differ in what is compiled, splits hardly do: some cases with every number of splits.
SOME = [
    *each_kernel([*cases.PAIRWISE[::15], *cases.EDGES]),
    *each_kernel(cases.HOPPER[::15], HOPPER),
]
every_kernel = pytest.mark.parametrize("kernel", kernels(SERVING))


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        *each_kernel(cases.FEW, *(name for name in kernels(SERVING) if name != HOPPER)),
        *each_kernel(cases.HOPPER, HOPPER),
    ],
)
def test_pairwise(case: cases.Case, kernel: str) -> None:
    """Under the policy's plan, at the lengths of serving."""
    check(realistic(case), device=DEVICE, run=decode(kernel), **case.options)


@pytest.mark.parametrize(("case", "kernel"), each_kernel(cases.EDGES))
def test_edges(case: cases.Case, kernel: str) -> None:
    check(case.problem, device=DEVICE, run=decode(kernel), **case.options)


def in_pairs_of(
    found: Mapping[tuple[tuple[str, str], ...], Any], turns: Mapping[str, int] | None = None
) -> list[Any]:
    """`pytest.param`s of some of these, which are known by (axis, value) of the same axes: every
    pair of values of two axes that goes together.

    turns   of an axis how many of its values are one to pairs, and take turns
    """
    axes: dict[str, dict[str, None]] = {}
    for given in found:
        for name, value in given:
            axes.setdefault(name, {})[value] = None
    subsets = {
        frozenset(some)
        for given in found
        for n in range(len(axes))
        for some in combinations(given, n)
    }
    subsets |= set(map(frozenset, found))
    sizes = {name: (turns or {}).get(name, 1) for name in axes}
    alike = {
        name: [
            cases.Alike([*values][at : at + sizes[name]])
            for at in range(0, len(values), sizes[name])
        ]
        for name, values in axes.items()
    }
    chosen = cases.pairs(alike, lambda values: frozenset(values.items()) in subsets)
    return [
        pytest.param(*found[tuple(values.items())], id="-".join(values.values()))
        for values in chosen
    ]


SPLIT = {
    (("case", str(case)), ("kernel", kernel), ("splits", splits)): (case, kernel, splits)
    for case, kernel in (param.values for param in SOME)
    for splits in SPLITS
}


# Each case has a test on each kernel above: here neighbours, which are alike, take turns.
@pytest.mark.parametrize(("case", "kernel", "splits"), in_pairs_of(SPLIT, {"case": 2}))
def test_any_number_of_splits(case: cases.Case, kernel: str, splits: str) -> None:
    for num_splits in SPLITS[splits]:
        run = decode(kernel, num_splits=num_splits)
        with said(f"{num_splits} splits"):
            check(realistic(case), device=DEVICE, run=run, **case.options)


def scheduled() -> dict[tuple[tuple[str, str], ...], tuple[cases.Case, Plan]]:
    """A plan of every schedule but even parts, of which every number is above; of clusters, each a
    kernel of its own, another size from case to case."""
    found, turn = {}, Counter[str]()
    for case, kernel in (param.values for param in SOME):
        made = plans(realistic(case), kernel)
        del made["even"]
        clusters = [made.pop(name) for name in [*made] if name.startswith("cluster")]
        if clusters:
            made["cluster"] = clusters[turn[kernel] % len(clusters)]
            turn[kernel] += 1
        for name, plan in made.items():
            given = ("case", str(case)), ("kernel", kernel), ("schedule", name)
            found[given] = case, plan
    return found


SCHEDULED = scheduled()


@pytest.mark.parametrize(("case", "plan"), in_pairs_of(SCHEDULED, {"case": 3}))
def test_every_schedule(case: cases.Case, plan: Plan) -> None:
    check(realistic(case), device=DEVICE, run=decode(plan=plan), **case.options)


@pytest.mark.parametrize(("kernel", "name"), EVERY_PLAN)
def test_one_plan_for_shorter_caches(kernel: str, name: str) -> None:
    """The same launcher arguments serve what is shorter than planned."""
    problem = replace(SERVING, seqlen_k=1000)
    plan = plans(problem, kernel)[name]
    for lengths in ((1000, 1, 1, 1), (0, 0, 0, 0), (64, 65, 128, 1), (1000, 1000, 999, 1000)):
        check(problem, device=DEVICE, run=decode(plan=plan), lengths=lengths)
    check(replace(problem, seqlen_k=300), device=DEVICE, run=decode(plan=plan))


@every_kernel
@pytest.mark.parametrize("num_splits", [1024, 1000])
def test_the_most_splits(num_splits: int, kernel: str) -> None:
    problem = replace(SERVING, batch=1, seqlen_k=70000, num_heads=2, num_kv_heads=1)
    problem = replace(problem, head_dim=64, head_dim_v=64)
    check(problem, device=DEVICE, run=decode(kernel, num_splits), lengths=(69999,))


@every_kernel
@pytest.mark.parametrize("num_splits", [129, 300])
def test_one_tile_among_more_parts_than_a_merge_step(num_splits: int, kernel: str) -> None:
    """The short sequences are finished by the split kernel, and the merge has to leave them so."""
    problem = replace(SERVING, seqlen_k=20000, num_heads=2, num_kv_heads=1, head_dim=64)
    problem = replace(problem, head_dim_v=64, sink_logits=True)
    check(problem, device=DEVICE, run=decode(kernel, num_splits), lengths=(20000, 5, 0, 64))


@every_kernel
@pytest.mark.parametrize("batch", [33, 256])
def test_large_batches(batch: int, kernel: str) -> None:
    problem = replace(SERVING, batch=batch, seqlen_k=200, num_heads=4, num_kv_heads=1)
    problem = replace(problem, head_dim=64, head_dim_v=64)
    check(problem, device=DEVICE, run=decode(kernel), zero_length=True)
    check(problem, device=DEVICE, run=decode(kernel, num_splits=3), zero_length=True)


@every_kernel
@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_cache_for_all_sequences(num_splits: int, kernel: str) -> None:
    """A common prefix, expanded: sequences that lie 0 bytes apart."""
    problem = replace(SERVING, seqlen_k=500)
    call = make_operands(problem, device=DEVICE, poison=False)
    plan = plan_with(kernel, problem, num_splits)
    shared = {n: call[n][:1].expand_as(call[n]) for n in ("k_cache", "v_cache")}
    copied = {n: x.contiguous() for n, x in shared.items()}
    if kernel_named(kernel).unfit(bind(problem, call | shared)):
        with pytest.raises(ValueError, match=f"^plan: expected a kernel without {ALIGNED}; v: "):
            splitkv.decode(**call | shared, plan=plan)
        return
    results = [into_poison(problem, call | given, plan=plan) for given in (shared, copied)]
    assert same_bits(*results)


def misaligned(call: Call) -> Call:
    """The same tensors, each one element past where it would be aligned."""

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
        return room[1:].view(x.shape).copy_(x)

    return {name: moved(x) for name, x in call.items()}


def with_gaps(call: Call) -> Call:
    """The same keys and values, after each row four elements of NaN: 8 bytes, which TMA cannot
    skip.
    """

    def spread(x: torch.Tensor) -> torch.Tensor:
        *rest, dim = x.shape
        room = torch.full((*rest, dim + 4), math.nan, dtype=x.dtype, device=x.device)
        return room[..., :dim].copy_(x)

    return call | {name: spread(call[name]) for name in ("k_cache", "v_cache")}


def check_moved(problem: Problem, move: Callable[[Call], Call], **how: Any) -> None:
    """`check` with the same values elsewhere in memory."""
    check(problem, device=DEVICE, run=lambda p, call: into_poison(p, move(call), **how))


@every_kernel
@pytest.mark.parametrize("place", [cases.Contiguous(), Paged(16)], ids=str)
def test_addresses_of_any_alignment(place: Any, kernel: str) -> None:
    """One layout, addresses that are multiples of 16 and such that are not, in turns.

    TMA takes only the former. That another kernel runs the rest of the calls is said once.
    """
    problem = replace(SERVING, place=place, sink_logits=True, seqlen_k=500)
    plan = plan_with(kernel, problem, num_splits=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for move in (dict, misaligned, dict, misaligned):
            check_moved(problem, move, plan=plan)
    expected = [f"this call runs on {INSTEAD[kernel]}"] if kernel in INSTEAD else []
    assert [str(warning.message) for warning in said] == expected


@pytest.mark.parametrize("place", [cases.Contiguous(), Paged(16)], ids=str)
def test_a_first_call_at_any_address(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for what the tensors are; calls at other addresses later are right all the same."""
    monkeypatch.setattr(dispatch, "calls", CallCache())
    problem = replace(SERVING, place=place, seqlen_k=500)
    for move in (misaligned, dict, misaligned):
        check_moved(problem, move, num_splits=4)


@pytest.mark.parametrize("place", [cases.Contiguous(), Paged(16)], ids=str)
def test_strides_that_tma_cannot_take(place: Any) -> None:
    """A plan for the kernel that needs it is refused; a call without one runs on the next."""
    problem = replace(SERVING, place=place, seqlen_k=500)
    check_moved(problem, with_gaps)
    if HOPPER in kernels(problem):
        call = with_gaps(make_operands(problem, device=DEVICE))
        with pytest.raises(ValueError, match=f"^plan: expected a kernel without {ALIGNED}; v: "):
            splitkv.decode(**call, plan=plan_with(HOPPER, problem))


@every_kernel
def test_out_with_strides(kernel: str) -> None:
    problem = replace(SERVING, seqlen_q=3, seqlen_k=400)
    call = make_operands(problem, device=DEVICE)
    for num_splits in (1, 5):
        plan = plan_with(kernel, problem, num_splits)
        wanted, _ = splitkv.decode(**call, plan=plan)
        room = torch.full((4, 8, 3, 160), math.nan, dtype=torch.bfloat16, device=DEVICE)
        out = room.transpose(1, 2)[..., :128]
        result, _ = splitkv.decode(**call, plan=plan, out=out)
        assert result is out and torch.equal(out, wanted)
        assert room[..., 128:].isnan().all()


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("seqlen_q", [0, 1, 3])
@pytest.mark.parametrize("capacity", [0, 32])
@pytest.mark.parametrize("page_size", [None, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_to_attend_to(
    dtype: torch.dtype, page_size: int | None, capacity: int, seqlen_q: int, batch: int
) -> None:
    q = torch.randn(batch, seqlen_q, 4, 64, device=DEVICE, dtype=dtype)
    rest: dict[str, Any] = {"sink_logits": torch.randn(4, device=DEVICE, dtype=dtype)}
    rest["cache_seqlens"] = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    if page_size is not None:
        table = torch.full((batch, capacity // page_size), 99, dtype=torch.int32, device=DEVICE)
        rest["page_table"] = table
        cache = torch.full((3, page_size, 2, 64), math.nan, device=DEVICE, dtype=dtype)
    else:
        cache = torch.full((batch, capacity, 2, 64), math.nan, device=DEVICE, dtype=dtype)
    for num_splits in (0, 1, 4):
        out, lse = splitkv.decode(q, cache, cache, return_lse=True, num_splits=num_splits, **rest)
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == (batch, 4, seqlen_q) and (lse == -math.inf).all()


IN_CODECS = [*each_kernel(cases.QUANTIZED), *each_kernel(cases.HOPPER_QUANTIZED, HOPPER)]
QUANTIZING = kernels(replace(SERVING, codec=Codec("int8", "head")))


@pytest.mark.parametrize(("case", "kernel"), IN_CODECS)
def test_quantised_caches(case: cases.Case, kernel: str) -> None:
    check(realistic(case), device=DEVICE, run=decode(kernel), **case.options)


STORED_UNDER: cases.Axes = {
    "plan": tuple(plan for plan in EVERY_PLAN if plan[0] in QUANTIZING),
    "codec": cases.CODECS_ALIKE,
}


@pytest.mark.parametrize(tuple(STORED_UNDER), in_pairs(STORED_UNDER))
def test_quantised_caches_under_every_plan(plan: tuple[str, str], codec: Codec) -> None:
    kernel, name = plan
    problem = replace(SERVING, codec=codec)
    check(problem, device=DEVICE, run=decode(plan=plans(problem, kernel)[name]))


# Of 17 to 32 rows the policies take wide tiles where there are many keys.
OF_32_ROWS = replace(SERVING, num_heads=8 * SERVING.num_kv_heads, seqlen_q=4, return_lse=True)
OF_48_ROWS = replace(OF_32_ROWS, num_heads=16 * SERVING.num_kv_heads, seqlen_q=3)
WIDE_ROWS = {
    "32 rows": OF_32_ROWS,
    "48 rows, pages": replace(OF_48_ROWS, place=Paged(16), mask=Mask(True, 70, -1, 3)),
    "48 rows, int8": replace(OF_48_ROWS, codec=Codec("int8", "head"), products="half"),
    "32 rows, e4m3": replace(OF_32_ROWS, codec=Codec("fp8", "token"), place=Paged(48)),
}


WIDE = {
    (
        *(("rows", name), ("tile", f"{config.tile_n}_w{config.num_warps}")),
        *(("parts", f"{config.merge}{config.num_splits}"), ("programs", str(config.programs))),
        ("heads", "packed" if config.pack_gqa else "apart"),
    ): (problem, HOPPER, config)
    for name, problem in WIDE_ROWS.items()
    if not kernel_named(HOPPER).unsupported(problem, HERE)
    for config in kernel_named(HOPPER).configs(problem, HERE)
    if config.tile_m == 64 and config.num_stages == 2
}


@pytest.mark.parametrize(("problem", "kernel", "config"), in_pairs_of(WIDE))
def test_wide_tiles(problem: Problem, kernel: str, config: Config) -> None:
    """Tiles of 64 rows, in one part and with parts in clusters."""
    check(problem, device=DEVICE, run=decode(plan=plan_of_config(problem, kernel, config)))


def every_other(a: Sequence[Any], b: Sequence[Any], number: int) -> list[tuple[Any, Any]]:
    """Half of the pairs of these, with another number the other half: with several numbers every
    pair, and every number with each value."""
    found = product(enumerate(a), enumerate(b))
    return [(x, y) for (i, x), (j, y) in found if (i + j + number) % 2 == 0]


SMALL_PAGES = {
    "page16": replace(SERVING, place=Paged(16), return_lse=True),
    "page48": replace(SERVING, place=Paged(48), mask=Mask(True, 700, -1, 3), sink_logits=True),
    "page32": replace(SERVING, place=Paged(32), dtype="float16", score=Score(True, True)),
    "tokens": replace(SERVING, place=Paged(16), seqlen_q=2),
    "head_dim64": replace(SERVING, place=Paged(16), head_dim=64, head_dim_v=64),
    "e4m3": replace(SERVING, place=Paged(16), codec=Codec("fp8", "head"), return_lse=True),
    "int8, a scale a key": replace(SERVING, place=Paged(48), codec=Codec("int8", "token")),
    "int8, head_dim64": replace(
        SERVING, place=Paged(32), codec=Codec("int8", "head"), head_dim=64, head_dim_v=64
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL_PAGES)
def test_a_warp_that_asks_for_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long parts of large caches, here in short ones: in one part, in several, in so many
    that the ring holds all tiles, and in a pair, of lengths that end anywhere or are 0."""
    problem = replace(SMALL_PAGES[name], seqlen_k=2130)
    plan = plan_with(HOPPER, problem)
    for limit in ("LARGE_CACHE", "LARGE_CACHE_8BIT", "LONG_SPLIT", "LONG_SPLIT_8BIT"):
        monkeypatch.setattr(rules, limit, 0)
    cuts = *({"num_splits": n} for n in (1, 3, 34)), {"num_splits": 2, "merge": "cluster"}
    tiles = (64, 2), (64, 3), (32, 3), (128, 2)
    for cut, (tile_n, num_stages) in every_other(cuts, tiles, list(SMALL_PAGES).index(name)):
        shape = Config(1, 16, tile_n, 4, num_stages)
        asking = replace(plan, policy="asking", config=replace(shape, **cut))
        if box_rows(problem, tile_n) < tile_n:
            assert rules.has_producer_warp(problem, asking.config)
        for lengths in ((2130, 1, 64, 2129), (0, 1030, 5, 700)):
            check(problem, device=DEVICE, run=decode(plan=asking), lengths=lengths)


TOKENS = replace(SERVING, codec=Codec("int8", "token"), products="half", seqlen_k=2132)
IN_BULK = {
    "lse": replace(TOKENS, return_lse=True),
    "one head": replace(TOKENS, num_heads=8, num_kv_heads=1, mask=Mask(True, 700, -1, 70)),
    "eight heads": replace(TOKENS, num_heads=16, num_kv_heads=8, codec=Codec("fp8", "token")),
    "pages": replace(TOKENS, place=Paged(128), sink_logits=True),
    "16 rows": replace(TOKENS, seqlen_q=4, score=Score(True, True)),
    "widened": replace(TOKENS, products="widened", head_dim=64, head_dim_v=64),
}


@pytest.mark.long
@pytest.mark.parametrize("name", IN_BULK)
def test_scales_copied_in_bulk(name: str) -> None:
    """Those of all heads, of lengths that end anywhere or are 0; at an address that is no multiple
    of 16 bytes by themselves."""
    problem = IN_BULK[name]
    plan = plan_with(HOPPER, problem)
    cuts: list[dict[str, Any]] = [{"num_splits": 1}, {"num_splits": 3}]
    cuts.append({"num_splits": 2, "merge": "cluster"})
    shapes = every_other(cuts, ((64, 3), (128, 2)), list(IN_BULK).index(name))
    for cut, (tile_n, num_stages) in shapes:
        shape = Config(1, plan.config.tile_m, tile_n, 4, num_stages)
        copying = replace(plan, policy="copying", config=replace(shape, **cut))
        assert rules.copies_scales_in_bulk(problem, copying.config)
        for lengths in ((2130, 1, 64, 2129), (0, 1030, 5, 700)):
            check(problem, device=DEVICE, run=decode(plan=copying), lengths=lengths)

    def move(call: Call) -> Call:
        return call | misaligned({name: call[name] for name in ("k_scale", "v_scale")})

    for moved in (dict, move, dict):  # the last of the shapes
        check_moved(problem, moved, plan=copying)


@pytest.mark.parametrize("kernel", [name for name in QUANTIZING if name.endswith("decode_split")])
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("place", [cases.Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 12])
@pytest.mark.parametrize("codec", [AS_IS, Codec("int8", "token"), Codec("fp8", "token")], ids=str)
def test_scores_that_rise(
    codec: Codec, seqlen_q: int, place: Any, falling: bool, kernel: str
) -> None:
    """From below 1 to some 50 in base 2 along the keys, or in any order where pages are scattered,
    in 16 and 64 packed rows: what weights are relative to has to follow."""
    problem = replace(SERVING, codec=codec, seqlen_q=seqlen_q, place=place, batch=2)
    call = make_operands(problem, device=DEVICE)
    keys = call["k_cache"]
    sizes = torch.logspace(-2, 0.5, keys.shape[0] * keys.shape[1], device=DEVICE)
    sizes = (sizes.flip(0) if falling else sizes).reshape(keys.shape[:2])
    if codec == AS_IS:
        call["k_cache"] = (keys * sizes[:, :, None, None]).to(keys.dtype)
    else:
        call["k_scale"] = call["k_scale"] * sizes[:, :, None]
    call["softmax_scale"] = 1.0
    out, lse = decode(kernel, num_splits=3)(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("kernel", QUANTIZING)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_quantised_caches_of_any_size(size: float, granularity: Any, kernel: str) -> None:
    """Scales far from 1: neither p nor an accumulator runs over or under."""
    problem = replace(SERVING, codec=Codec("int8", granularity), seqlen_k=700)
    call = make_operands(problem, device=DEVICE)
    call["v_scale"] = call["v_scale"] * size
    call["k_scale"], call["q"] = call["k_scale"] / size, call["q"] * size
    out, lse = decode(kernel)(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("kernel", [name for name in QUANTIZING if name.endswith("decode_split")])
@pytest.mark.parametrize("products", ["half", "widened"])
def test_what_is_not_finite_stays_with_its_rows(products: str, kernel: str) -> None:
    """Scales of infinity, of what has NaN, and NaN in a row of q; a scale of 0 is one of zeros."""
    problem = replace(SERVING, codec=Codec("int8", "token"), seqlen_k=700, products=products)
    problem = replace(problem, batch=3, return_lse=False)
    call = make_operands(problem, device=DEVICE, lengths=(700, 650, 600), poison=False)
    for name, b, key, h in (("v", 0, 333, 1), ("k", 1, 222, 0)):
        call[f"{name}_scale"][b, key, h] = math.inf
        call[f"{name}_cache"][b, key, h] = 0  # as `quantize_kv` stores what has no finite scale
    call["v_scale"][1, 640:, 1] = 0.0
    call["q"][2, 0, 3, 7] = math.nan
    finite = torch.ones(problem.batch, problem.num_heads, dtype=torch.bool, device=DEVICE)
    finite[0, 4:] = finite[1, :4] = finite[2, 3] = False
    clean = call | {n: call[n].nan_to_num(0.0, posinf=1.0) for n in ("q", "k_scale", "v_scale")}
    ref, pt = (expected(problem, clean, upcast=x)[0][:, 0][finite] for x in (True, False))
    for num_splits in (1, 3):
        out = decode(kernel, num_splits=num_splits)(problem, call)[0][:, 0]
        assert torch.equal(out.isnan().any(-1), ~finite)
        assert_close(out[finite], ref, pt)


@pytest.mark.parametrize(("kernel", "name"), EVERY_PLAN)
def test_a_row_that_is_not_finite_is_written(kernel: str, name: str) -> None:
    """As NaN, whatever was there; the other rows are right."""
    problem = replace(SERVING, return_lse=False)
    call = make_operands(problem, device=DEVICE, poison=False)
    ref, pt = (expected(problem, call, upcast=x)[0] for x in (True, False))
    call["q"][1, 0, 3, 7] = math.nan
    out = torch.zeros_like(pt)
    splitkv.decode(**call, out=out, plan=plans(problem, kernel)[name])
    assert out[1, 0, 3].isnan().all()
    out[1, 0, 3] = pt[1, 0, 3]
    assert_close(out, ref, pt)


def test_falling_back_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    problem = replace(SERVING, head_dim=272, head_dim_v=272)
    call = make_operands(problem, device=DEVICE)
    plan = plan_of(problem, call)
    assert plan.kernel in ("torch_sdpa", "torch_math")
    with pytest.warns(UserWarning, match=f"decode runs on {plan.kernel}: head_dim 272: expected"):
        splitkv.decode(**call)
    splitkv.decode(**call | {"softmax_scale": 0.3})
    assert "head_dim 272: expected" in str(splitkv.explain(problem))


def test_more_query_tokens_run_on_the_kernels_for_whole_sequences() -> None:
    problem = replace(SERVING, seqlen_q=17)
    assert "prefill" in plan_of(problem, make_operands(problem, device=DEVICE)).kernel
    check(problem, device=DEVICE)


def test_gradients_are_those_of_plain_torch() -> None:
    problem = replace(SERVING, seqlen_k=200, needs_grad=True)
    with pytest.warns(UserWarning, match="gradient: expected inputs that require none"):
        dispatch._warned.clear()
        check(problem, device=DEVICE, poison=False)


@pytest.mark.parametrize("codec", [None, Codec("int8", "head")], ids=str)
def test_compiled(codec: Codec | None) -> None:
    """In a traced graph: the same bits, the caller's plan and memory."""
    problem = replace(SERVING, seqlen_k=600, sink_logits=True)
    problem = replace(problem, codec=codec) if codec else problem
    call = make_operands(problem, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plan = plan_of(problem, call)
        out = torch.full_like(call["q"], math.nan)
        wanted = splitkv.decode(**call)
        torch._dynamo.reset()
        compiled = torch.compile(splitkv.decode, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(**call), wanted)
        result, lse = compiled(**call, plan=plan, out=out)
    assert result is out and same_bits((out, lse), wanted)


def test_a_plan_for_another_gpu_is_refused() -> None:
    here = splitkv.plan(SERVING).device.arch
    other = splitkv.Device.named("a100" if here != "sm_80" else "h200")
    plan = splitkv.plan(SERVING, device=other)
    call = make_operands(SERVING, device=DEVICE)
    with pytest.raises(ValueError, match=f"^plan: expected one for {here}, got '{other.arch}'$"):
        splitkv.decode(**call, plan=plan)

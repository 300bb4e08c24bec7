"""The checks can fail, the operands are what they say, and the cases cover what they claim."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import cases
import pytest
import torch
from running import HERE, each_shape

import splitkv
from splitkv import testing
from splitkv.core.plan import Config
from splitkv.kernels import records
from splitkv.testing import (
    Call,
    Codec,
    Mask,
    Paged,
    Problem,
    Score,
    assert_close,
    assert_lse_close,
    check,
    expected,
    make_operands,
    repro,
)

DECODE = Problem(
    "decode", 3, 4, 2, 16, 16, 2, 20, dtype="bfloat16", mask=Mask(causal=True), lengths="device"
)


def bfloat16_triple() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ref = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    return ref.bfloat16(), ref, (ref.bfloat16() * 1.004).bfloat16()


def test_rounding_passes() -> None:
    out, ref, pt = bfloat16_triple()
    assert_close(out, ref, pt)
    assert_close(ref.bfloat16(), ref, ref.bfloat16())
    assert_close(ref[:0], ref[:0], ref[:0])


def test_a_wrong_element_fails_and_is_named() -> None:
    out, ref, pt = bfloat16_triple()
    out[2, 3, 1] += 0.25
    with pytest.raises(AssertionError, match=r"dq: .* at \[2, 3, 1\].*; 1 of 120 elements") as e:
        assert_close(out, ref, pt, name="dq")
    rounded = ref.bfloat16()
    rounding = (rounded + 0.3 - 0.3) - rounded
    bound = 2 * (pt - ref).abs().max() + 2 * rounding.abs().max()
    assert f"at most {bound.item():.3e}" in str(e.value)
    assert f"got {(out - ref).abs().max().item():.3e}" in str(e.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(bad: float) -> None:
    out, ref, pt = bfloat16_triple()
    out[0, 0, 2] = bad
    with pytest.raises(AssertionError, match=r"at \[0, 0, 2\]"):
        assert_close(out, ref, pt)
    out, ref, pt = bfloat16_triple()
    with pytest.raises(AssertionError, match="finite reference"):
        assert_close(out, torch.full_like(ref, bad), pt)
    with pytest.raises(AssertionError, match="finite reference"):
        assert_close(out, ref, torch.full_like(pt, bad))


def test_the_bound_follows_the_working_precision() -> None:
    out, ref, _ = bfloat16_triple()
    with pytest.raises(AssertionError):
        assert_close((out * 1.02).bfloat16(), ref, out)
    assert_close((out * 1.02).bfloat16(), ref, (out * 1.04).bfloat16())
    with pytest.raises(AssertionError):
        assert_close(out.float(), ref, ref)  # float32 results are held to float32
    with pytest.raises(AssertionError, match=r"expected \[4, 5, 6\], got \[4, 5, 1\]"):
        assert_close(out[..., :1], ref, ref)


def test_fewer_bits_than_the_working_precision_fail() -> None:
    _, ref, _ = bfloat16_triple()
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        with pytest.raises(AssertionError, match="out: expected an error of at most"):
            assert_close(ref.to(dtype), ref.double(), ref)
    with pytest.raises(AssertionError, match="out: expected a floating dtype, got torch.int32"):
        assert_close(ref.int(), ref.double(), ref)
    with pytest.raises(AssertionError, match=r"precision: expected \[4, 5, 6\], got \[1, 5, 6\]"):
        assert_close(ref, ref.double(), ref[:1])


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "lse_dtype", "message"),
    [
        ("float32", "bfloat16", "float32", "out: expected torch.float32, got torch.bfloat16"),
        ("bfloat16", "float16", "float32", "out: expected torch.bfloat16, got torch.float16"),
        ("bfloat16", "float32", "float32", "out: expected torch.bfloat16, got torch.float32"),
        ("bfloat16", "bfloat16", "float64", "lse: expected torch.float32, got torch.float64"),
    ],
)
def test_a_result_of_another_dtype_fails(
    dtype: str, out_dtype: str, lse_dtype: str, message: str
) -> None:
    """Also one that is right: who asks for float32 is not given what was rounded to bfloat16."""

    def other(problem: Problem, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = splitkv.decode(**call)
        return out.to(getattr(torch, out_dtype)), lse.to(getattr(torch, lse_dtype))

    with pytest.raises(AssertionError, match=f"^{message}\n"):
        check(replace(DECODE, dtype=dtype, return_lse=True), run=other)


def test_lse_infinities_are_exact() -> None:
    ref = torch.tensor([[0.0, -math.inf, 3.0]])
    assert_lse_close(ref + 5e-4, ref)
    for wrong in ([0.0, -1e30, 3.0], [-math.inf, -math.inf, 3.0], [0.0, math.inf, 3.0]):
        with pytest.raises(AssertionError):
            assert_lse_close(torch.tensor([wrong]), ref)
    for wrong in ([0.0, -math.inf, 3.01], [0.0, -math.inf, math.nan], [math.nan] * 3):
        with pytest.raises(AssertionError):
            assert_lse_close(torch.tensor([wrong]), ref)
    with pytest.raises(AssertionError):
        assert_lse_close(ref, torch.full_like(ref, math.nan))


WRONG = {
    "alignment": lambda p, call: (replace(p, seqlen_q=2), dict(call, q=call["q"].flip(1))),
    "mask": lambda p, call: (replace(p, mask=Mask()), call),
    "window": lambda p, call: (replace(p, mask=replace(p.mask, window_left=5)), call),
    "sink_tokens": lambda p, call: (replace(p, mask=replace(p.mask, sink_tokens=3)), call),
    "softcap": lambda p, call: (p, dict(call, softcap=0.0)),
    "alibi": lambda p, call: (p, dict(call, alibi_slopes=None)),
    "sink_logits": lambda p, call: (p, dict(call, sink_logits=None)),
    "k_scale": lambda p, call: (p, dict(call, k_scale=call["k_scale"].mean().view(1))),
    "v_scale": lambda p, call: (p, dict(call, v_scale=call["v_scale"].mean().view(1))),
    "lengths": lambda p, call: (p, dict(call, cache_seqlens=call["cache_seqlens"] - 1)),
    "heads": lambda p, call: (p, dict(call, q=call["q"].flip(2))),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_every_feature_shows_in_the_result(mistake: str) -> None:
    """A kernel that left the feature out would fail on random operands."""
    problem = replace(
        DECODE,
        mask=Mask(causal=True, window_left=6, sink_tokens=2),
        score=Score(True, True),
        sink_logits=True,
        codec=Codec("int8", "head"),
        return_lse=True,
    )

    def wrong(problem: Problem, call: testing.Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = expected(*WRONG[mistake](problem, call))
        return out.bfloat16(), lse

    check(problem, run=lambda p, c: (expected(p, c)[0].bfloat16(), expected(p, c)[1]))
    with pytest.raises(AssertionError):
        check(problem, run=wrong)


def test_check_compares_gradients() -> None:
    problem = replace(DECODE, kind="dense", lengths="host", needs_grad=True, dtype="float32")

    def wrong(problem: Problem, call: testing.Call) -> tuple[torch.Tensor, None]:
        out, _ = expected(problem, dict(call, v=call["v"].detach()))
        return (out + 0 * call["v"].sum()).float(), None

    check(problem, run=lambda p, c: (expected(p, c)[0].float(), None))
    with pytest.raises(AssertionError, match="dv: "):
        check(problem, run=wrong)


def test_a_failure_prints_a_line_that_repeats_it() -> None:
    problem = replace(DECODE, place=Paged(4), mask=Mask(True, 3), codec=Codec("fp8", "token"))

    def wrong(problem: Problem, call: testing.Call) -> tuple[torch.Tensor, None]:
        return expected(problem, call)[0] + 1, None

    with pytest.raises(AssertionError) as e:
        check(problem, seed=7, run=wrong, lengths=(3, 2, 1), strided=True)
    line = str(e.value).splitlines()[-1]
    assert line.strip() == repro(problem, 7, lengths=(3, 2, 1), strided=True)
    python, flag, code = shlex.split(line)
    assert (python, flag) == ("python", "-c")
    imports, call = code.split("; ", 1)
    asked = {}
    names: dict[str, object] = {}
    exec(imports, names)
    exec(call, names | {"check": lambda problem, **kwargs: asked.update(kwargs, problem=problem)})
    assert asked == {"problem": problem, "seed": 7, "lengths": (3, 2, 1), "strided": True}


def test_operands_depend_on_the_seed_alone() -> None:
    for kind, seed in product(("decode", "dense", "varlen"), (0, 1)):
        problem = replace(DECODE, kind=kind, lengths="host")
        first, again = (make_operands(problem, seed=seed) for _ in range(2))
        other = make_operands(problem, seed=seed + 1)
        assert torch.equal(first["q"], again["q"]) and not (
            first["q"].shape == other["q"].shape and torch.equal(first["q"], other["q"])
        )


def test_operands_of_every_case_have_the_shapes_of_their_problem() -> None:
    for case in cases.DECODE:
        p = case.problem
        call = make_operands(p, **case.options)
        assert call["q"].shape == (p.batch, p.seqlen_q, p.num_heads, p.head_dim)
        assert call["k_cache"].shape[2:] == (p.num_kv_heads, p.head_dim)
        assert call["v_cache"].shape[2:] == (p.num_kv_heads, p.head_dim_v)
        assert (call["cache_seqlens"] is not None) == (p.lengths == "device")
        assert (call["page_table"] is not None) == isinstance(p.place, Paged)
        assert all(call[n].stride(-1) == 1 for n in ("q", "k_cache", "v_cache"))
        assert call["q"].is_contiguous() != case.options.get("strided", False)
        if "lengths" in case.options:
            assert tuple(call["cache_seqlens"].tolist()) == case.options["lengths"]


def test_lengths_on_request() -> None:
    keys = make_operands(replace(DECODE, batch=8), zero_length=True)["cache_seqlens"]
    assert keys[0] == 20 and keys[-1] == 0 and keys[1:-1].unique().numel() > 1
    with pytest.raises(ValueError, match="lengths: expected 3 in 0..20"):
        make_operands(DECODE, lengths=(1, 2, 21))
    with pytest.raises(ValueError, match="lengths: expected a problem with lengths on the device"):
        make_operands(replace(DECODE, lengths="host"), lengths=(1, 2, 3))


def test_pages_are_shuffled_and_each_used_once() -> None:
    problem = replace(DECODE, place=Paged(4))
    call = make_operands(problem, lengths=(20, 0, 5))
    used = [call["page_table"][b, : -(-n // 4)].tolist() for b, n in enumerate((20, 0, 5))]
    flat = [page for row in used for page in row]
    assert len(flat) == len(set(flat)) == 7 and flat != sorted(flat)
    assert not call["k_cache"][used[0]].isnan().any()
    assert call["k_cache"][used[2][1], 1:].isnan().all()


def _covered(axes: cases.Axes, rows: list[cases.Values]) -> set[tuple[str, int, str, int]]:
    return {
        (a, axes[a].index(row[a]), b, axes[b].index(row[b]))
        for row in rows
        for a, b in combinations(axes, 2)
    }


def _all_pairs(axes: cases.Axes) -> set[tuple[str, int, str, int]]:
    return {
        (a, i, b, j)
        for a, b in combinations(axes, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }


@pytest.mark.parametrize("axes", [cases.AXES, cases.QUANTIZED_AXES], ids=["plain", "quantized"])
def test_every_pair_of_values_has_a_case(axes: cases.Axes) -> None:
    rows = cases.pairs(axes)
    assert _covered(axes, rows) == _all_pairs(axes)
    most = sorted((len(values) for values in axes.values()), reverse=True)
    assert len(rows) <= 2 * most[0] * most[1]
    assert rows == cases.pairs(axes)


def test_only_valid_cases_and_every_pair_that_has_one() -> None:
    axes = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (0, 1, 2, 3)}

    def valid(row: cases.Values) -> bool:
        # Together these leave no case with a=2 and d=3, though no single rule names that pair.
        return not (row.get("a") == 2 and row.get("c") == 1) and not (
            row.get("d") == 3 and row.get("c") == 0
        )

    rows = cases.pairs(axes, valid)
    complete = [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]
    possible = _covered(axes, [row for row in complete if valid(row)])
    assert all(valid(row) for row in rows)
    assert _covered(axes, rows) == possible
    assert ("a", 2, "d", 3) not in possible


def test_values_alike_take_turns() -> None:
    """As few cases as if they were one, each of them in some, and valid ones alone."""
    alike = cases.Alike(("b", "c", "d"))
    axes: cases.Axes = {"x": ("a", alike), "y": (0, 1, 2), "z": (0, 1, 2)}

    def valid(row: cases.Values) -> bool:
        return (row.get("x"), row.get("y")) != ("c", 1)

    rows = cases.pairs(axes, valid)
    assert len(rows) == len(cases.pairs({**axes, "x": ("a", "b")}))
    assert {row["x"] for row in rows} == {"a", *alike} and all(map(valid, rows))
    as_one = [row | {"x": alike if row["x"] in alike else row["x"]} for row in rows]
    assert _covered(axes, as_one) == _all_pairs(axes)
    assert rows == cases.pairs(axes, valid)


def test_the_leading_cases_hold_every_value_and_most_pairs() -> None:
    axes = cases.AXES
    rows = cases.pairs(axes)
    chosen, every = cases.leading(rows, len(rows) // 2)
    assert len(chosen) == len(rows) // 2 and all(row in rows for row in chosen)
    held, all_but_one = (
        [{row[name] for row in chosen[:n]} for name in axes] for n in (every, every - 1)
    )
    assert held == [set(axis) for axis in axes.values()] != all_but_one
    assert len(_covered(axes, chosen)) > 0.85 * len(_all_pairs(axes))
    with pytest.raises(ValueError, match="^most: expected enough cases for every value, got 7"):
        cases.leading(rows, 7)
    rest, _ = cases.leading(rows, every - 3, besides=chosen[:3])
    assert rest == chosen[3:every], "what is there already is not chosen again"


def test_every_config_has_a_case_with_every_value_of_the_first_axis() -> None:
    """And every shape of tile one with every other value, where some problem has it."""
    axes: cases.Axes = {
        "head_dim": (64, 128, 256),
        "dtype": ("bfloat16", "float32"),
        "seqlen": (7,),
    }
    kernels = {kernel.name: kernel for kernel in (records.HOPPER_PREFILL, records.PREFILL)}

    def problem_of(values: cases.Values) -> Problem:
        dim, seqlen = values["head_dim"], values["seqlen"]
        return Problem("dense", 1, 4, 2, dim, dim, seqlen, seqlen, dtype=values["dtype"])

    def held(values: cases.Values, name: str, config: Config) -> set[Any]:
        shape = replace(config, programs=0, pack_gqa=True)
        shapes = {(name, shape, axis, value) for axis, value in values.items()}
        return {(name, config, values["head_dim"]), *shapes}

    wanted, found = set[Any](), set[Any]()
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        for name, kernel in kernels.items():
            if not kernel.unsupported(problem_of(values), HERE):
                for config in kernel.configs(problem_of(values), HERE):
                    wanted |= held(values, name, config)
    params = each_shape(axes, problem_of, *kernels.values())
    for param in params:
        values, name, configs = param.values
        assert set(configs) <= set(kernels[name].configs(problem_of(values), HERE))
        for config in configs:
            found |= held(values, name, config)
    assert found == wanted
    assert len({param.id for param in params}) == len(params)


def test_case_names_are_unique() -> None:
    names = [case.name for case in cases.DECODE]
    assert len(names) == len(set(names))


def test_an_lse_of_rounded_queries_has_twice_their_error() -> None:
    ref = torch.tensor([0.5, float("-inf"), 2.0])
    rounded = ref + torch.tensor([0.01, 0.0, -0.005])
    assert_lse_close(ref + 0.02, ref, rounded=rounded)
    for wrong in (ref + 0.022, torch.tensor([0.5, -9.0, 2.0])):
        with pytest.raises(AssertionError, match="lse: expected an error of at most 0.021, got"):
            assert_lse_close(wrong, ref, rounded=rounded)

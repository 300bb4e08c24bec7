"""Scores that grow, fall and jump from one tile of keys to the next, on `hopper_prefill`.

It keeps weights relative to a maximum of keys before them as long as none is too
large, so what comes after a tile matters as nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from running import DEVICE, each_config, only, plan_of_config, same_bits
from torch import Tensor
from training import TRAINING, run

import splitkv
from splitkv.core.plan import Config
from splitkv.core.variants import Plain
from splitkv.kernels.records import HOPPER_PREFILL as KERNEL
from splitkv.testing import (
    Call,
    Mask,
    Problem,
    assert_close,
    assert_lse_close,
    expected,
    make_operands,
)

LEVEL_KEYS, LEVEL_Q = 64, 8.0
# Of scores in base 2, by 64 keys at a time; weights may be up to 2 ** 15 and a little more.
LEVELS: dict[str, list[float]] = {
    "creep": [10.0 * min(i, 24 - i) for i in range(25)],
    "from far below": [-14400.0] + [0.0] * 24,
    "close to the limit": [0.0, 14.0, 14.5, 13.0, 15.2, 15.0, 12.0] * 3 + [0.0] * 4,
    "stairs": [0.0, 15.0, 30.0, 45.0, 44.0, 60.0, 0.0, -60.0, 16.0, 17.0] * 2 + [18.0] * 5,
    "spikes": [0.0, 0.0, 100.0, 0.0, 0.0, 0.0, 0.0, 130.0, 0.0, 500.0] * 2 + [0.0] * 5,
    "one large": [40.0] + [0.0] * 24,
}
LEVELLED = replace(TRAINING, batch=1, seqlen_q=700, seqlen_k=1600)
AXES: tuple[tuple[int, str, Mask], ...] = (
    *((dim, "bfloat16", Mask(True)) for dim in (64, 128, 256)),
    *((dim, "bfloat16", Mask()) for dim in (64, 128, 256)),
    *((128, "float16", Mask()), (128, "bfloat16", Mask(True, 700, -1, 70))),
)
PROBLEMS = {
    f"{dim}-{dtype}-{mask}": replace(
        LEVELLED,
        head_dim=dim,
        head_dim_v=dim,
        dtype=dtype,
        mask=mask,
        sink_logits=mask == Mask(True),
    )
    for dim, dtype, mask in AXES
}


SHAPES = [
    param
    for param in each_config(PROBLEMS, KERNEL)
    if isinstance(config := param.values[2], Config) and config.pack_gqa and config.programs
]


def levelled(problem: Problem, levels: list[float]) -> Call:
    """Operands whose scores are about so large; those of odd tokens of q fall where others grow."""
    call = make_operands(problem, device=DEVICE)
    q, k = call["q"].float(), call["k"].float()
    turned = torch.ones(problem.seqlen_q, device=DEVICE)
    if max(map(abs, levels)) < 1000:  # what fp32 keeps of larger scores is less than the tolerance
        turned[1::2] = -1.0
    q[..., 0] = LEVEL_Q * turned[:, None]
    unit = LEVEL_Q * problem.head_dim**-0.5 / math.log(2)
    each = torch.tensor(levels, device=DEVICE).repeat_interleave(LEVEL_KEYS)
    k[..., 0] = each[: problem.seqlen_k, None] / unit
    return call | {"q": q.to(call["q"]), "k": k.to(call["k"])}


@pytest.mark.parametrize(("problem", "kernel", "config"), SHAPES)
def test_every_shape(problem: Problem, kernel: str, config: Config) -> None:
    plan = plan_of_config(problem, kernel, config)
    for levels in LEVELS.values():
        call = levelled(problem, levels)
        result = run(problem, call | {"plan": plan})
        ref, ref_lse = expected(problem, call)
        assert_close(result[0], ref, expected(problem, call, upcast=False)[0])
        assert result[1] is not None and ref_lse is not None
        assert_lse_close(result[1], ref_lse)
        assert same_bits(run(problem, call | {"plan": plan}), result)


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("mask", [Mask(), Mask(True), Mask(True, 300, -1, 70)], ids=str)
def test_other_rows_change_no_bit(mask: Mask, levels: list[float]) -> None:
    """Whether a warp looks for maxima, any of its rows decides; a row's own are as they were."""
    problem = replace(LEVELLED, mask=mask)
    call = levelled(problem, levels)
    plan = splitkv.plan(problem, policy=only(KERNEL.name))
    calm = call["q"].clone()
    calm[:, 1::2] = 0

    def of_even(q: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run(problem, call | {"q": q, "plan": plan})
        assert lse is not None
        return out[:, ::2], lse[..., ::2]

    assert same_bits(of_even(call["q"]), of_even(calm))


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_the_keys(parts: int) -> None:
    """Parts have maxima of their own, which may be far below those of their rows."""
    problem = replace(LEVELLED, kind="decode", seqlen_q=20, lengths="device")
    plan = splitkv.plan(problem, policy=only(KERNEL.name))
    plan = replace(plan, config=replace(plan.config, variant=Plain(), num_splits=parts))
    for levels in LEVELS.values():
        call = levelled(replace(LEVELLED, seqlen_q=20), levels)
        keys = {f"{name}_cache": call.pop(name) for name in "kv"}
        lengths = torch.tensor([problem.seqlen_k], dtype=torch.int32, device=DEVICE)
        call = make_operands(problem, device=DEVICE) | {"q": call["q"]} | keys
        call["cache_seqlens"] = lengths
        out, lse = run(problem, call | {"plan": plan})
        ref, ref_lse = expected(problem, call)
        assert_close(out, ref, expected(problem, call, upcast=False)[0])
        assert lse is not None and ref_lse is not None
        assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_that_are_infinite_or_nan(dtype: str) -> None:
    """Keys of minus infinity count as unseen; NaN stays in the rows that see it."""
    problem = replace(LEVELLED, dtype=dtype, mask=Mask(True))
    call = levelled(problem, [0.0] * 25)
    call["q"][..., 1] = call["q"][..., 1].abs() + 1
    call["k"][:, :, :, 1] = 0.0
    call["k"][:, 640:704, :, 1] = -math.inf
    plan = splitkv.plan(problem, policy=only(KERNEL.name))
    out, lse = run(problem, call | {"plan": plan})
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert lse is not None and ref_lse is not None
    assert_lse_close(lse, ref_lse)
    call["k"][:, 1200] = math.nan
    out, _ = run(problem, call | {"plan": plan})
    first = 1200 - (problem.seqlen_k - problem.seqlen_q)
    assert out[:, first:].isnan().all() and out[:, :first].isfinite().all()

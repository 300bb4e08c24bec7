"""Random problems by seed, SPLITKV_FUZZ_SEED or 0; a failure ends with one line that repeats it.

Nearly all of the time would go into compiling. So a family of problems has in common most of what a
kernel is compiled for, a problem and its plan are drawn from it, and then others that the same
compiled kernel serves. Families are drawn for each kernel, within its limits.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from running import (
    DEVICE,
    HERE,
    SERVING,
    decode,
    fixed_plan,
    kernels,
    plan_of_config,
    plan_with,
)

import splitkv
from splitkv.core.plan import Config, Plan
from splitkv.testing import Contiguous, Mask, Paged, Problem, Score, check

MAX_ROWS = 32  # of the kernel for Hopper
SEED = int(os.environ.get("SPLITKV_FUZZ_SEED", "0"))
FAMILIES, PLANS, PROBLEMS = 12, 2, 24  # of a kernel; of a family; of a plan


@dataclass(frozen=True)
class Family:
    """What a kernel is compiled for."""

    kernel: str
    dtype: str
    head_dims: tuple[int, int]
    group: int
    seqlens_q: tuple[int, ...]
    place: Any
    mask: str
    score: Score
    sink_logits: bool
    lengths: Any
    return_lse: bool


def any_gpu(rng: random.Random) -> dict[str, Any]:
    """Within the limits of decode_split."""
    dims = tuple(range(16, 257, 16))
    head_dim = rng.choice((64, 128, rng.choice(dims)))
    return {
        "dtype": rng.choice(("bfloat16", "bfloat16", "float16", "float32")),
        "head_dims": (head_dim, rng.choice((head_dim, head_dim, rng.choice(dims)))),
        "group": rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 64)),
        "seqlens_q": rng.choice(((1,), (1, 2), (3, 4), (rng.randint(1, 16),))),
        "place": rng.choice((Contiguous(), Paged(1), Paged(16), Paged(rng.randint(2, 300)))),
    }


def hopper(rng: random.Random) -> dict[str, Any]:
    """Within the limits of hopper_decode_split."""
    dims = (64, 128, 256)
    head_dim = rng.choice((128, rng.choice(dims)))
    group = rng.choice((1, 2, 3, 4, 5, 7, 8, 16, rng.randint(9, MAX_ROWS)))
    most = min(16, MAX_ROWS // group)
    tokens = tuple(n for n in rng.choice(((1,), (1, 2), (3, 4))) if n <= most)
    pages = (Paged(16), Paged(64), Paged(16 * rng.randint(1, 20)))
    return {
        "dtype": rng.choice(("bfloat16", "bfloat16", "float16")),
        "head_dims": (head_dim, rng.choice((head_dim, head_dim, rng.choice(dims)))),
        "group": group,
        "seqlens_q": rng.choice((tokens, (rng.randint(1, most),))) or (1,),
        "place": rng.choice((Contiguous(), Contiguous(), *pages)),
    }


LIMITS = {"decode_split": any_gpu, "hopper_decode_split": hopper, "prefill": any_gpu}


def family(kernel: str, rng: random.Random) -> Family:
    return Family(
        kernel=kernel,
        **LIMITS[kernel](rng),
        mask=rng.choice(("causal", "full", "window", "both_sides", "sink_tokens")),
        score=Score(softcap=rng.random() < 0.3, alibi=rng.random() < 0.3),
        sink_logits=rng.random() < 0.4,
        lengths=rng.choice(("device", "device", "host")),
        return_lse=rng.random() < 0.6,
    )


def mask(kind: str, rng: random.Random) -> Mask:
    left = rng.choice((rng.randint(0, 20), rng.randint(0, 600)))
    return {
        "causal": Mask(causal=True),
        "full": Mask(),
        "window": Mask(True, left),
        "both_sides": Mask(False, left, rng.randint(0, 9)),
        "sink_tokens": Mask(True, left, -1, rng.randint(1, 70)),
    }[kind]


def problem(of: Family, rng: random.Random) -> Problem:
    seqlen_k = rng.choice((rng.randint(1, 70), rng.randint(1, 700), rng.randint(1, 2500)))
    num_kv_heads = rng.randint(1, 3 if of.group < 16 else 1)
    return Problem(
        "decode",
        batch=rng.choice((1, rng.randint(1, 4), rng.randint(1, 12))),
        num_heads=num_kv_heads * of.group,
        num_kv_heads=num_kv_heads,
        head_dim=of.head_dims[0],
        head_dim_v=of.head_dims[1],
        seqlen_q=rng.choice(of.seqlens_q),
        seqlen_k=seqlen_k,
        dtype=of.dtype,
        mask=mask(of.mask, rng),
        place=of.place,
        score=of.score,
        sink_logits=of.sink_logits,
        lengths=of.lengths,
        return_lse=of.return_lse,
    )


def alike(first: Problem, of: Family, rng: random.Random) -> Problem:
    """Other lengths, another batch and mask, for the kernel that is compiled for the first."""
    sizes = {name: getattr(first, name) for name in ("num_heads", "num_kv_heads", "seqlen_q")}
    return replace(problem(of, rng), **sizes)


def how(of: Problem, kernel: str, rng: random.Random) -> dict[str, Any]:
    """The policy's plan, a number of splits, or a size of them."""
    kind = rng.choice(("policy", "policy", "splits", "fixed"))
    if kind == "splits":
        return {"num_splits": rng.choice((1, 2, 3, 5, rng.randint(1, 100)))}
    return {"plan": fixed_plan(of, rng.randint(64, 900), kernel)} if kind == "fixed" else {}


def config_of(of: Problem, kernel: str, asked: dict[str, Any]) -> Config:
    """What `decode` runs it under."""
    num_splits = asked.get("num_splits", 0)
    made = asked.get("plan") or splitkv.plan(of, device=HERE, num_splits=num_splits)
    return (made if made.kernel == kernel else plan_with(kernel, of, num_splits)).config


def under(config: Config, of: Problem, kernel: str) -> Plan:
    """A plan of the same shape and rule for another problem."""
    if config.schedule == "fixed":
        return fixed_plan(of, config.split_size, kernel)
    if config.schedule == "batch":
        config = replace(config, num_splits=config.programs - of.batch)
    return plan_of_config(of, kernel, config)


@pytest.mark.parametrize("n", range(FAMILIES))
@pytest.mark.parametrize("kernel", [name for name in LIMITS if name in kernels(SERVING)])
def test_fuzz(kernel: str, n: int) -> None:
    rng = random.Random(f"{SEED}-{kernel}-{n}")
    of = family(kernel, rng)
    for _ in range(PLANS):
        first = problem(of, rng)
        strided: dict[str, Any] = {"strided": True} if rng.random() < 0.2 else {}
        asked = how(first, kernel, rng)
        config = config_of(first, kernel, asked)
        for number in range(PROBLEMS):
            drawn = alike(first, of, rng) if number else first
            options, seed = dict(strided), rng.randrange(1 << 30)
            if drawn.lengths == "device" and rng.random() < 0.5:
                options["lengths"] = tuple(
                    rng.randint(0, drawn.seqlen_k) for _ in range(drawn.batch)
                )
            try:
                run = (
                    decode(plan=under(config, drawn, kernel)) if number else decode(kernel, **asked)
                )
                check(drawn, seed=seed, device=DEVICE, run=run, **options)
            except Exception as error:
                message = f"SPLITKV_FUZZ_SEED={SEED}, {kernel}, family {n}, under {config}"
                raise AssertionError(f"{error}\n  {message}") from error

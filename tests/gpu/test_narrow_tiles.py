"""Head dimensions below 64 where products are wgmma, on the GPU: values that reach shared memory by
registers, as they are dequantized or their rows are not aligned, beside those that are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from running import DEVICE, HERE, decode, label, plan_of_config, said, same_bits
from torch import Tensor
from torch.nn.functional import pad
from training import LEAVES, TRAINING, called, gradients

from splitkv.core.plan import Config, Plan
from splitkv.core.variants import Backward
from splitkv.kernels import prefill as prefill_launcher
from splitkv.kernels.backward.launcher import BackwardLauncher
from splitkv.kernels.limits import decode_split, prefill
from splitkv.kernels.limits.backward import key_configs, query_configs
from splitkv.planner.policies.backward import with_row_splits
from splitkv.testing import AS_IS, Call, Codec, Mask, Problem, check, make_operands

DIMS = ((128, 32), (64, 16), (32, 128), (32, 32), (16, 16), (48, 48))
STORED = {
    "aligned": (AS_IS, 0),
    "odd_rows": (AS_IS, 3),
    "fp8": (Codec("fp8", "head"), 0),
    "int8": (Codec("int8", "token"), 0),
}
DECODE = Problem(
    "decode", 4, 7, 1, 128, 32, 16, 1400, mask=Mask(True), lengths="device", return_lse=True
)
Run = Callable[[Problem, Call], tuple[Tensor, Tensor | None]]
of_dims = pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "x".join(map(str, dims)))


def by_wgmma(configs: Iterable[Config]) -> list[Config]:
    """The first of 64 rows or more with each number of warps that make a warpgroup."""
    found: dict[int, Config] = {}
    for config in configs:
        if config.tile_m >= 64 and config.num_warps % 4 == 0:
            found.setdefault(config.num_warps, config)
    return list(found.values())


def apart(run: Run, elements: int) -> Run:
    """Runs it on tensors whose rows are so many elements further apart than they are long."""

    def serve(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        names = [name for name in ("q", "k", "v", "k_cache", "v_cache") if name in call]
        further = {name: pad(call[name], (0, elements)) for name in names}
        cut = {name: further[name][..., : call[name].shape[-1]] for name in names}
        return run(problem, call | cut)

    return serve if elements else run


def twice(plan: Plan, problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
    results = [called(problem, call, plan=plan) for _ in range(2)]
    assert same_bits(*results), "the second call gave other bits than the first"
    return results[1]


def grads_of(problem: Problem, run: Run) -> dict[str, Tensor]:
    call = make_operands(problem, device=DEVICE)
    return gradients(call, *run(problem, call))


def taking_turns(found: Sequence[Any], stored: str, dims: tuple[int, int]) -> Any:
    """One of these: every one with each way that values are stored, and with all dimensions."""
    assert len(found) == 2
    return found[(list(STORED).index(stored) + DIMS.index(dims)) % 2]


@of_dims
@pytest.mark.parametrize("stored", STORED)
def test_decode(stored: str, dims: tuple[int, int]) -> None:
    codec, elements = STORED[stored]
    problem = replace(DECODE, head_dim=dims[0], head_dim_v=dims[1], codec=codec)
    config = taking_turns(by_wgmma(decode_split.configs(problem, HERE)), stored, dims)
    plan = plan_of_config(problem, "decode_split", config)
    with said(label(config)):
        check(problem, device=DEVICE, run=apart(decode(plan=plan), elements))


@of_dims
@pytest.mark.parametrize("stored", STORED)
def test_prefill(stored: str, dims: tuple[int, int]) -> None:
    codec, elements = STORED[stored]
    problem = replace(TRAINING, head_dim=dims[0], head_dim_v=dims[1], codec=codec)
    config = taking_turns(by_wgmma(prefill.configs(problem, HERE)), stored, dims)
    plan = plan_of_config(problem, "prefill", config)
    with said(label(config)):
        check(problem, device=DEVICE, run=apart(partial(twice, plan), elements))


@of_dims
@pytest.mark.parametrize("stored", ["aligned", "odd_rows"])
def test_gradients(stored: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels whose products are all wgmma, by 4 and by 8 warps in turn."""
    _, elements = STORED[stored]
    sizes: dict[str, Any] = {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": "float16"}
    problem = replace(TRAINING, **sizes, needs_grad=True)
    keys = [c for c in key_configs(problem, HERE) if c.tile_n >= 64]
    queries = [c for c in query_configs(problem, HERE) if c.tile_m >= 64]
    warps = taking_turns((4, 8), stored, dims)
    pair = [next(c for c in found if c.num_warps == warps) for found in (keys, queries)]

    def bound(plan: Any, operands: Any) -> Any:
        made = with_row_splits(plan.problem, plan.device, Backward(*pair))
        return BackwardLauncher(plan.problem, plan.device, made)

    monkeypatch.setattr(prefill_launcher, "backward_for", bound)
    with said(f"{warps} warps"):
        check(problem, device=DEVICE, run=apart(called, elements))
        first, second = (grads_of(problem, apart(called, elements)) for _ in range(2))
        assert all(torch.equal(first[n], second[n]) for n in LEAVES[:3]), "other bits"

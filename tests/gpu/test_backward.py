"""Gradients of attention and attention_varlen on the GPU, against those of the reference."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, in_pairs
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training import (
    FUNCTION,
    GRAD_AXES,
    LEAVES,
    SINKS,
    TRAINING,
    any_gpu_backward,
    compare_with_reference,
    fuzz,
    gradients,
    hold_sinks_to_float64,
    problem_of,
    run,
)

import splitkv
from splitkv.kernels import prefill
from splitkv.kernels.hopper.backward import launcher as hopper_backward
from splitkv.kernels.limits import backward as variant
from splitkv.kernels.limits import hopper_backward as limits
from splitkv.kernels.limits.hopper_backward import HEAD_DIMS, variants
from splitkv.planner.policies.backward import with_row_splits
from splitkv.planner.policies.row_splits import row_splits
from splitkv.runtime import dispatch
from splitkv.testing import Mask, Problem, Ragged, Score, check, expected, make_operands

FAMILIES, PLANS, PROBLEMS = 8, 2, 16  # of a family; of a plan
GRAD = replace(TRAINING, needs_grad=True)
EVERYTHING = replace(
    GRAD, mask=Mask(True, 90, -1, 5), score=Score(True, True), sink_logits=True, seqlen_q=800
)


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(GRAD_AXES))))
def test_pairs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(PAIRS[number], needs_grad=True, return_lse=True)
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    strided = number % 3 == 0
    options = {"strided": strided, "zero_length": zero_length}
    check(problem, device=DEVICE, run=run, **options)
    if not limits.unsupported(problem, HERE):
        monkeypatch.setattr(prefill, "backward_for", any_gpu_backward)
        check(problem, device=DEVICE, run=run, **options)


@pytest.mark.long
@pytest.mark.parametrize("n", range(FAMILIES))
def test_fuzz(n: int) -> None:
    fuzz(f"backward-{n}", PLANS, PROBLEMS, needs_grad=True, device=DEVICE)


CONFIGS: cases.Axes = {
    "head_dim": (64, 128, 256),
    "which": ("key_configs", "query_configs"),
    "dtype": ("bfloat16", "float32"),
}


@pytest.mark.long
@pytest.mark.parametrize(tuple(CONFIGS), in_pairs(CONFIGS))
def test_every_config(
    head_dim: int, which: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(GRAD, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    monkeypatch.setattr(prefill, "backward_for", any_gpu_backward)
    for config in list(getattr(variant, which)(problem, HERE)):
        monkeypatch.setattr(variant, which, lambda problem, device, c=config: iter([c]))
        dispatch.calls.clear()  # a launcher keeps what makes its gradients
        check(problem, device=DEVICE, run=run)


HOPPER = HERE.capability == (9, 0)
DIMS = *HEAD_DIMS, (96, 96), (48, 48)


ON_HOPPER: cases.Axes = {
    "dims": DIMS if HOPPER else (),
    "deterministic": (False, True),
    "mask": (Mask(True), Mask()),
    "kind": ("dense", "varlen"),
}


@pytest.mark.long
@pytest.mark.parametrize(tuple(ON_HOPPER), in_pairs(ON_HOPPER))
def test_every_config_on_hopper(
    dims: tuple[int, int],
    deterministic: bool,
    mask: Mask,
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(GRAD, kind=kind, head_dim=dims[0], head_dim_v=dims[1])
    problem = replace(problem, deterministic=deterministic, mask=mask)
    assert limits.unsupported(problem, HERE) == []
    for found in variants(problem, HERE):

        def bound(plan: Any, operands: Any, found: Any = found) -> Any:
            made = with_row_splits(plan.problem, plan.device, found)
            return hopper_backward.HopperBackwardLauncher(plan.problem, plan.device, made)

        monkeypatch.setattr(prefill, "backward_for", bound)
        check(problem, device=DEVICE, run=run)


BITS: cases.Axes = {
    "mask": (Mask(), Mask(True, 300, -1, 5)),
    "dims": DIMS,
    "kind": ("dense", "varlen"),
}


@pytest.mark.parametrize(tuple(BITS), in_pairs(BITS))
def test_deterministic_bits_of_the_preferred_kernels(
    mask: Mask, dims: tuple[int, int], kind: Any
) -> None:
    """On Hopper those for it, which add to dq in any order where this is not asked for."""
    problem = replace(GRAD, kind=kind, deterministic=True, sink_logits=True, mask=mask)
    problem = replace(problem, head_dim=dims[0], head_dim_v=dims[1], seqlen_q=700, seqlen_k=700)
    call = make_operands(problem, device=DEVICE)
    first = gradients(call, *run(problem, call))
    for _ in range(100):
        again = gradients(call, *run(problem, call))
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [1, 2])
def test_everything_at_once(dims: int, dtype: str, kind: Any) -> None:
    """Every mask and score feature, gradients of the LSE and of the slopes."""
    problem = replace(EVERYTHING, kind=kind, dtype=dtype)
    if kind == "varlen":
        problem = replace(problem, place=Ragged(), lengths="device")
    call = make_operands(problem, device=DEVICE)
    call["alibi_slopes"] = (torch.rand((2, 8)[2 - dims :], device=DEVICE) + 0.05).requires_grad_()
    compare_with_reference(problem, call, run(problem, call))


@pytest.mark.parametrize("window", [16, 127])
@pytest.mark.parametrize("sink_tokens", [4, 128, 200])
def test_sink_tokens_in_parts(sink_tokens: int, window: int) -> None:
    """So few keys in a window that the rows that see the first ones are cut into parts."""
    problem = replace(GRAD, seqlen_q=2300, seqlen_k=2400, batch=1, num_heads=4)
    problem = replace(problem, mask=Mask(True, window, -1, sink_tokens))
    config = next(variant.key_configs(problem, HERE))
    assert row_splits(problem, HERE, config.tile_m, config.tile_n).splits > 1
    check(problem, device=DEVICE, run=run)
    check(replace(problem, kind="varlen", batch=3), device=DEVICE, run=run, zero_length=True)


FEW_TILES: cases.Axes = {
    "dims": DIMS,
    "mask": (Mask(), Mask(True), Mask(True, 800, -1, 5)),
    "kind": ("dense", "varlen"),
}


@pytest.mark.long
@pytest.mark.parametrize(tuple(FEW_TILES), in_pairs(FEW_TILES))
def test_few_tiles_in_parts(
    dims: tuple[int, int], mask: Mask, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few tiles of keys that the rows that see each are cut into parts."""
    problem = replace(GRAD, kind=kind, mask=mask, seqlen_q=1100, seqlen_k=1200, sink_logits=True)
    problem = replace(problem, num_heads=4, num_kv_heads=1, head_dim=dims[0], head_dim_v=dims[1])
    config = next(variant.key_configs(problem, HERE))
    found = row_splits(problem, HERE, config.tile_m, config.tile_n)
    near, parts = found.tiles, found.splits
    assert near * config.tile_n >= 1200 and parts > 1
    for deterministic in (False, True):
        options = {"zero_length": kind == "varlen", "strided": deterministic}
        check(replace(problem, deterministic=deterministic), device=DEVICE, run=run, **options)
    monkeypatch.setattr(prefill, "backward_for", any_gpu_backward)
    check(problem, device=DEVICE, run=run, zero_length=kind == "varlen")


OF_SINKS: cases.Axes = {
    "mask": (Mask(), Mask(True), Mask(True, 90, -1, 5)),
    "deterministic": (False, True),
    "dims": DIMS,
}


@pytest.mark.long
@pytest.mark.parametrize(tuple(OF_SINKS), in_pairs(OF_SINKS))
def test_gradient_of_sink_logits(mask: Mask, deterministic: bool, dims: tuple[int, int]) -> None:
    """It is summed up from ds: taken from `out` as rounded it is a third as far off as PyTorch's,
    and further where the same is rounded over and over, as in a model that begins to train."""
    problem = replace(GRAD, dtype="bfloat16", mask=mask, deterministic=deterministic)
    problem = replace(problem, sink_logits=True, return_lse=False)
    problem = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
    errors: dict[str, list[Tensor]] = {"found": [], "working": []}
    for seed in range(3):
        for kind in ("dense", "varlen"):
            problem = replace(problem, kind=kind)
            check(problem, device=DEVICE, run=run, seed=seed, zero_length=kind == "varlen")
            call = make_operands(problem, seed=seed, device=DEVICE)
            outs = [run(problem, call)[0]]
            outs += [expected(problem, call, upcast=upcast)[0] for upcast in (True, False)]
            g = torch.Generator().manual_seed(seed)
            grad = torch.randn(outs[0].shape, generator=g).to(outs[0])
            sinks = call["sink_logits"]
            found, exact, working = (
                torch.autograd.grad(x, sinks, grad.to(x))[0].double() for x in outs
            )
            errors["found"].append(found - exact)
            errors["working"].append(working - exact)
    found, working = (torch.cat(x).square().mean().sqrt() for x in errors.values())
    assert 4 * found < working, f"{found:.2e} rms, the working precision {working:.2e}"


DOMINATED: cases.Axes = {
    "sink": SINKS,
    "of_lse": (False, True),
    "dims": DIMS,
    "mine": ("preferred", "any_gpu"),
}


@pytest.mark.parametrize(tuple(DOMINATED), in_pairs(DOMINATED))
def test_gradients_where_the_sink_dominates(
    sink: float, of_lse: bool, dims: tuple[int, int], mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LSE leaves the sink out, so that its gradient has no part in that of the sink, however
    much larger it is than the rest."""
    if mine == "any_gpu":
        monkeypatch.setattr(prefill, "backward_for", any_gpu_backward)
    problem = replace(GRAD, dtype="bfloat16", sink_logits=True)
    problem = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
    for kind in ("dense", "varlen"):
        problem = replace(problem, kind=kind)
        call = make_operands(problem, device=DEVICE)
        call["sink_logits"] = torch.full((8,), sink, device=DEVICE, requires_grad=True)
        hold_sinks_to_float64(problem, call, run, of_lse)


@pytest.mark.parametrize("mine", ["preferred", "any_gpu"])
@pytest.mark.parametrize("window", [16, 127])
def test_tokens_after_the_last_sequence(
    window: int, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no part in anything: their gradients are zero, also those of keys in parts."""
    if mine == "any_gpu":
        monkeypatch.setattr(prefill, "backward_for", any_gpu_backward)
    problem = replace(GRAD, kind="varlen", batch=2, seqlen_q=2300, seqlen_k=2300)
    problem = replace(problem, mask=Mask(True, window, -1, 200), needs_grad=False)
    call = make_operands(problem, device=DEVICE)
    lengths = {name: len(call[name]) for name in ("q", "k", "v")}
    for name in lengths:
        after = torch.randn(700, *call[name].shape[1:], device=DEVICE).to(call[name])
        call[name] = torch.cat([call[name], after]).requires_grad_()
    found = gradients(call, *run(replace(problem, needs_grad=True), call))
    for name, length in lengths.items():
        assert (found[name][:length] != 0).any() and (found[name][length:] == 0).all(), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_the_same_bits_every_time(kind: Any, deterministic: bool) -> None:
    problem = replace(EVERYTHING, kind=kind, deterministic=deterministic, dropout=True)
    call = make_operands(problem, device=DEVICE)

    def once() -> dict[str, Tensor]:
        torch.manual_seed(7)
        return gradients(call, *run(problem, call))

    first = once()
    for _ in range(100):
        again = once()
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("features", [{}, {"sink_logits": True, "mask": Mask(True, 60, -1, 3)}])
def test_dropout(features: dict[str, Any]) -> None:
    """The backward drops what its forward dropped: dv is the weights times the cotangent."""
    problem = replace(GRAD, dropout=True, return_lse=False, **features)
    problem = replace(problem, seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=256)
    call = make_operands(problem, device=DEVICE)
    eye = torch.eye(256, device=DEVICE, dtype=torch.bfloat16)[None, :, None]
    call["v"] = eye.repeat(2, 1, 2, 1).requires_grad_()
    out = splitkv.attention(**call)
    cotangent = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, call["v"], cotangent)
    p = out.detach().double().unflatten(2, (2, 4))  # [batch, seqlen_q, kv head, group, key]
    g = cotangent.double().unflatten(2, (2, 4))
    wanted = torch.einsum("bqhgk,bqhgd->bkhd", p, g)
    # every weight was rounded to bf16 in `out` and again before its product, dv in the end
    rounding = torch.finfo(torch.bfloat16).eps / 2
    bound = 2 * rounding * torch.einsum("bqhgk,bqhgd->bkhd", p, g.abs()) + rounding * wanted.abs()
    assert ((dv.double() - wanted).abs() <= 1.05 * bound + 1e-4).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
def test_compiled(return_lse: bool, kind: Any, backend: str) -> None:
    """The operators give the bits of eager calls."""
    problem = replace(EVERYTHING, kind=kind, return_lse=return_lse)
    call = make_operands(problem, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTION[kind], fullgraph=True, backend=backend)
    results = [f(**call) for f in (FUNCTION[kind], compiled)]
    eager, traced = (x if return_lse else (x, None) for x in results)
    assert torch.equal(eager[0], traced[0])
    grads = gradients(call, *eager), gradients(call, *traced)
    for name in grads[0]:
        torch.testing.assert_close(grads[1][name], grads[0][name])


def test_checkpointing_recomputes_the_same() -> None:
    problem = replace(GRAD, dropout=True, return_lse=False)
    call = make_operands(problem, device=DEVICE)
    qkv = [call[name] for name in "qkv"]
    rest = {name: x for name, x in call.items() if name not in "qkv"}
    results = []
    for function in (
        splitkv.attention,
        partial(checkpoint, splitkv.attention, use_reentrant=False),
    ):
        torch.manual_seed(3)  # checkpoint keeps the generators of tensors that stand by position
        results.append(gradients(call, function(*qkv, **rest), None))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_nothing_waits_for_the_host(
    no_host_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    problem = replace(EVERYTHING, kind="varlen", dropout=True)
    call = make_operands(problem, device=DEVICE)

    def step() -> None:
        out, lse = splitkv.attention_varlen(**call)
        torch.autograd.grad((out, lse), [call[n] for n in LEAVES], (out, lse))

    step()
    with no_host_sync():
        step()


@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 128, -1, 4)], ids=str)
def test_memory_is_linear(mask: Mask) -> None:
    """Forward and backward take little more than the gradients and one more output, and parts of dk
    and dv in fp32: here for at most 2.5 tiles an SM."""
    parts_bytes = 2.5 * HERE.num_sms * 128 * (GRAD.head_dim + GRAD.head_dim_v) * 4
    problem: Problem = replace(GRAD, batch=1, mask=mask, return_lse=False, sink_logits=True)
    peaks = []
    for length in (8192, 16384):
        longer = replace(problem, seqlen_q=length, seqlen_k=length)
        call = make_operands(longer, device=DEVICE)
        names = [call[n] for n in ("q", "k", "v", "sink_logits")]
        for _ in range(2):  # the first compiles
            gc.collect()  # nothing of before is freed while this is measured
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = splitkv.attention(**call)
            torch.autograd.grad(out, names, torch.ones_like(out))
            peak = torch.cuda.max_memory_allocated() - before
            del out
        peaks.append(peak)
        q_bytes = call["q"].numel() * 2
        assert peak < 6 * q_bytes + parts_bytes, f"{peak / q_bytes:.1f} times q"
    assert peaks[1] < 2.2 * peaks[0]


def test_a_second_derivative_is_refused() -> None:
    call = make_operands(replace(GRAD, return_lse=False), device=DEVICE)
    out = splitkv.attention(**call)
    with pytest.raises(NotImplementedError, match="^create_graph: expected False"):
        torch.autograd.grad(out.float().sum(), call["q"], create_graph=True)

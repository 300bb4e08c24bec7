"""attention and attention_varlen on the GPU against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, each_shape, label, only, plan_of_config, said, same_bits
from torch import Tensor
from training import AXES, FUNCTION, TRAINING, fuzz, paged, problem_of, run

import splitkv
from splitkv import reference
from splitkv.core.plan import Config, Kernel
from splitkv.core.scores import Score
from splitkv.core.variants import Plain
from splitkv.kernels import records
from splitkv.kernels.limits import hopper_backward
from splitkv.runtime import dispatch
from splitkv.testing import (
    Call,
    Contiguous,
    Mask,
    Paged,
    Problem,
    Ragged,
    assert_close,
    assert_lse_close,
    check,
    expected,
    make_operands,
)

BOTH = records.HOPPER_PREFILL, records.PREFILL
FAMILIES, PLANS, PROBLEMS = 8, 2, 16  # of a family; of a plan


def under(plan: splitkv.Plan) -> Callable[[Problem, Call], tuple[Tensor, Tensor | None]]:
    return lambda problem, call: run(problem, call | {"plan": plan})


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES))))
def test_pairs(number: int) -> None:
    problem = problem_of(PAIRS[number])
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    strided = number % 3 == 0
    options = {"strided": strided, "zero_length": zero_length}
    check(problem, device=DEVICE, run=run, **options)
    if splitkv.plan(problem).kernel != "prefill":
        any_gpu = splitkv.plan(problem, policy=only("prefill"))
        check(problem, device=DEVICE, run=under(any_gpu), **options)


# Multiples of 8 columns, which TMA fills up to those of tiles.
COLUMNS = (
    *((40, 40), (56, 56), (72, 72), (88, 88), (104, 104), (120, 120), (136, 136), (248, 248)),
    *((64, 40), (96, 80), (128, 104)),
)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dims", COLUMNS, ids=str)
def test_columns_between_those_of_tiles(dims: tuple[int, int], kind: Any) -> None:
    problem = replace(TRAINING, kind=kind, head_dim=dims[0], head_dim_v=dims[1], needs_grad=True)
    problem = replace(problem, place=Ragged(), lengths="device") if kind == "varlen" else problem
    if HERE.capability == (9, 0):
        assert splitkv.plan(problem).kernel == "hopper_prefill"
        assert (hopper_backward.unsupported(problem, HERE) == []) == (dims[0] <= 128)
    check(problem, device=DEVICE, run=run, strided=True)


PLAIN_AXES: cases.Axes = {
    "head_dim": (64, 128, 256),
    "dtype": ("bfloat16", "float32"),
    "mask": (Mask(True), Mask(True, 60, -1, 5)),
}


def plain(values: cases.Values) -> Problem:
    sink_logits = values["mask"] == Mask(True)
    return replace(TRAINING, head_dim_v=values["head_dim"], sink_logits=sink_logits, **values)


@pytest.mark.parametrize(("values", "kernel", "configs"), each_shape(PLAIN_AXES, plain, *BOTH))
def test_every_config(values: cases.Values, kernel: str, configs: list[Config]) -> None:
    problem = plain(values)
    for config in configs:
        with said(label(config)):
            check(problem, device=DEVICE, run=under(plan_of_config(problem, kernel, config)))


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_nothing_to_attend_to(lengths: tuple[int, int], batch: int, kind: str) -> None:
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
    problem = replace(TRAINING, **heads, batch=max(batch, 1), seqlen_q=lengths[0], sink_logits=True)
    problem = replace(problem, seqlen_k=lengths[1], kind=kind)
    call = make_operands(problem, device=DEVICE)
    if batch == 0 and kind == "dense":
        call |= {name: call[name][:0] for name in ("q", "k", "v")}
    elif batch == 0:
        call |= {n: call[n][:1] for n in ("cu_seqlens_q", "cu_seqlens_k")}
    out, lse = FUNCTION[kind](**call)
    assert out.shape == call["q"].shape and (out == 0).all()
    assert lse.numel() == call["q"].shape[:-1].numel() and (lse == -math.inf).all()


@pytest.mark.parametrize("batch", [64, 300])
@pytest.mark.parametrize("mask", [Mask(), Mask(True), Mask(True, 40, -1, 3)], ids=str)
def test_many_sequences(mask: Mask, batch: int) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
    problem = replace(TRAINING, **sizes, kind="varlen", batch=batch, seqlen_q=90, seqlen_k=120)
    check(replace(problem, mask=mask), device=DEVICE, run=run, zero_length=True)


def test_sequences_of_any_length_in_one_graph(
    no_host_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    """Nothing waits for the host; a replay follows the lengths that it finds."""
    problem = replace(TRAINING, kind="varlen", batch=4, return_lse=False)
    call = make_operands(problem, device=DEVICE)
    total_q, total_k = (int(call[n][-1]) for n in ("cu_seqlens_q", "cu_seqlens_k"))
    FUNCTION["varlen"](**call)
    with no_host_sync():
        FUNCTION["varlen"](**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = FUNCTION["varlen"](**call)
    for share in ((0.1, 0.2, 0.9), (0, 0, 1), (0.5, 0.5, 0.5)):
        for name, total in (("cu_seqlens_q", total_q), ("cu_seqlens_k", total_k)):
            ends = [0, *sorted(int(total * part) for part in share), total]
            call[name].copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        ref, _ = expected(problem, call)
        assert_close(out, ref, expected(problem, call, upcast=False)[0])


@pytest.mark.parametrize("kernel", ["hopper_prefill", "prefill"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_soft_cap_of_scores_of_any_size(size: float, kernel: str) -> None:
    """Near zero the tangent is its argument, far away a sign: no exponential may get in the way."""
    problem = replace(TRAINING, score=Score(softcap=True))
    call = make_operands(problem, device=DEVICE)
    call |= {"q": call["q"] * size, "softcap": 50.0}
    plan = splitkv.plan(problem, device=HERE, policy=only(kernel))
    out, lse = run(problem, call | {"plan": plan})
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert lse is not None and ref_lse is not None
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_the_same_bits_every_time(kind: str) -> None:
    problem = replace(TRAINING, kind=kind, sink_logits=True)
    call = make_operands(problem, device=DEVICE)
    first = run(problem, call)
    assert all(same_bits(run(problem, call), first) for _ in range(100))


@pytest.mark.long
def test_far_tokens() -> None:
    """Operands of more than 2**31 elements: the last rows are those of the last keys alone."""
    heads, dim, window = 64, 128, 128
    tokens = (1 << 31) // (heads * dim) + 300
    shape = 1, tokens, heads, dim
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    assert q.numel() > 1 << 31
    out, lse = splitkv.attention(q, k, v, causal=True, window_size=(window, 0), return_lse=True)
    ends = q[:, -100:], k[:, -400:], v[:, -400:]
    mask = Mask(True, window)
    ref, ref_lse = reference.attention(*ends, mask=mask)
    pt, _ = reference.attention(*ends, mask=mask, upcast=False)
    assert_close(out[:, -100:], ref, pt)
    assert ref_lse is not None
    assert_lse_close(lse[..., -100:], ref_lse)


def in_pages(
    page_size: int, serve: Callable[[Problem, Call], tuple[Tensor, Tensor | None]] = run
) -> Callable[[Problem, Call], tuple[Tensor, Tensor | None]]:
    """`run=` of `check` for a varlen problem, its keys and values put into pages."""
    return lambda problem, call: serve(*paged(problem, call, page_size))


PAGED_AXES: cases.Axes = {
    **AXES,
    "kind": ("varlen",),
    "batch": (1, 4, 9),
    "page_size": (1, 16, 64, 100, 256),
    "parts": (0, 2, 5),  # 0: as the policy has it
}


@pytest.mark.parametrize("number", range(len(PAGED := cases.pairs(PAGED_AXES))))
def test_pages(number: int) -> None:
    values = dict(PAGED[number])
    page_size, parts = values.pop("page_size"), values.pop("parts")
    problem = problem_of(values)
    serve: Any = run
    if parts:
        plan = splitkv.plan(replace(problem, place=Paged(page_size)))
        serve = under(replace(plan, config=replace(plan.config, variant=Plain(), num_splits=parts)))
    zero_length, strided = problem.batch > 1 and number % 2 == 0, number % 3 == 0
    serve = in_pages(page_size, serve)
    check(problem, device=DEVICE, run=serve, strided=strided, zero_length=zero_length)


def kernels_for(problem: Problem) -> list[Kernel]:
    """Those of whole sequences that can run it here."""
    return [kernel for kernel in BOTH if not kernel.unsupported(problem, HERE)]


ON_PAGES: cases.Axes = {
    "head_dim": (64, 96, 128, 192, 256),
    "page_size": (1, cases.Alike((16, 48)), cases.Alike((64, 128))),
    "parts": (1, 3),
}


def on_pages(values: cases.Values) -> Problem:
    head_dim = values["head_dim"]
    dim_v = 256 if head_dim == 256 else min(head_dim, 128)
    problem = replace(TRAINING, kind="varlen", head_dim=head_dim, head_dim_v=dim_v)
    return replace(problem, place=Paged(values["page_size"]), lengths="device")


@pytest.mark.parametrize(
    ("values", "kernel", "configs"), each_shape(ON_PAGES, on_pages, *BOTH, in_turns=True)
)
def test_every_config_on_pages(values: cases.Values, kernel: str, configs: list[Config]) -> None:
    in_cache, parts = on_pages(values), values["parts"]
    merge = "last" if parts > 1 else "combine"
    for config in configs:
        with said(label(config)):
            cut = replace(config, num_splits=parts, merge=merge)
            serve = under(plan_of_config(in_cache, kernel, cut))
            serve = in_pages(values["page_size"], serve)
            check(replace(in_cache, place=Ragged()), device=DEVICE, run=serve)


MIXED_Q = (512, 1, 1, 0, 300, 1, 17, 4, 1, 40)
MIXED_K = (2000, 1, 9000, 0, 300, 4097, 9000, 9000, 0, 8)


def mixed(page_size: int, mask: Mask, **options: Any) -> tuple[Problem, Call, Call]:
    """A batch of chunks of prompts, single tokens, empty sequences and more queries than keys: the
    problem of pages, the call, and the same without pages."""
    problem = replace(TRAINING, kind="varlen", place=Ragged(), lengths="device", mask=mask)
    problem = replace(problem, batch=len(MIXED_Q), seqlen_q=max(MIXED_Q), seqlen_k=max(MIXED_K))
    problem = replace(problem, sink_logits=True)
    call = make_operands(problem, lengths=MIXED_K, device=DEVICE, **options)
    ends = [0, *accumulate(MIXED_Q)]
    call["cu_seqlens_q"] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(ends[-1], problem.num_heads, problem.head_dim, generator=g)
    call["q"] = q.to(call["k"])
    return *paged(problem, call, page_size), call


@pytest.mark.long
@pytest.mark.parametrize("page_size", [16, 64, 100])
@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 700, -1, 5)], ids=str)
def test_prompts_beside_single_tokens(mask: Mask, page_size: int) -> None:
    """The keys of the few tokens are cut into parts, those of prompts are not."""
    problem, call, ragged = mixed(page_size, mask)
    assert splitkv.plan(problem).config.num_splits > 1 or mask.left is not None
    assert problem.cut_tokens < problem.seqlen_q
    ref, ref_lse = expected(problem, ragged)
    working, _ = expected(problem, ragged, upcast=False)
    plan = splitkv.plan(problem)
    made_for = [splitkv.plan(problem, policy=only(k.name)) for k in kernels_for(problem)]
    ways = [(plan.kernel, plan.config)]
    for other, (parts, merge) in product(made_for, ((1, "combine"), (7, "combine"), (7, "last"))):
        ways.append((other.kernel, replace(other.config.shape, num_splits=parts, merge=merge)))
    for kernel, config in ways:
        made = replace(plan, kernel=kernel, config=config)
        first = run(problem, call | {"plan": made})
        assert_close(first[0], ref, working)
        assert ref_lse is not None and first[1] is not None
        assert_lse_close(first[1], ref_lse)
        assert all(same_bits(run(problem, call | {"plan": made}), first) for _ in range(20))


SHORT = replace(TRAINING, seqlen_k=5000)


@pytest.mark.parametrize("seqlen_q", [2, 17, 64, 256])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_few_queries_and_many_keys(kind: str, seqlen_q: int) -> None:
    """The policy cuts the keys, visibly; the same bits every time."""
    problem = replace(SHORT, kind=kind, seqlen_q=seqlen_q, sink_logits=True)
    if kind == "varlen":
        problem = replace(problem, place=Ragged(), lengths="device")
    plan = splitkv.plan(problem)
    assert plan.config.num_splits > 1 and "to merge" in plan.why
    assert "splits" in str(splitkv.explain(problem))
    check(problem, device=DEVICE, run=run)
    call = make_operands(problem, device=DEVICE)
    first = run(problem, call)
    assert all(same_bits(run(problem, call), first) for _ in range(50))


@pytest.mark.long
@pytest.mark.parametrize("seqlen_q", [17, 256])
@pytest.mark.parametrize("place", [Contiguous(), Paged(16), Paged(64), Paged(100)], ids=str)
def test_decode_of_many_tokens(place: Any, seqlen_q: int) -> None:
    problem = replace(SHORT, kind="decode", seqlen_q=seqlen_q, place=place, lengths="device")
    check(problem, device=DEVICE, run=run, zero_length=True)
    for kernel in kernels_for(problem):
        plan = splitkv.plan(problem, policy=only(kernel.name))
        ways = [(1, "combine"), *product((3, 40), kernel.merges)]
        for parts, merge in ways:
            made = replace(
                plan, config=replace(plan.config, variant=Plain(), num_splits=parts, merge=merge)
            )
            check(problem, device=DEVICE, run=under(made), strided=True)


MANY_TOKENS = replace(SHORT, kind="decode", seqlen_q=40, lengths="device")
# Rows of several tiles, windows that leave parts without keys, lengths of the device; with sink
# logits, and without, where some shapes look for no maximum.
IN_PARTS: cases.Axes = {
    "head_dim": (64, 128, 256),
    "sink_logits": (False, True),
    "mask": (Mask(True, 700, -1, 5), Mask()),
    "place": (Contiguous(), cases.Alike((Paged(16), Paged(64)))),
}


def in_parts(values: cases.Values) -> Problem:
    return replace(MANY_TOKENS, head_dim_v=values["head_dim"], **values)


@pytest.mark.parametrize(
    ("values", "kernel", "configs"), each_shape(IN_PARTS, in_parts, *BOTH, in_turns=True)
)
def test_every_config_in_parts(values: cases.Values, kernel: str, configs: list[Config]) -> None:
    problem = in_parts(values)
    merge = "last" if problem.place == Contiguous() else "combine"
    for config in configs:
        with said(label(config)):
            made = plan_of_config(problem, kernel, replace(config, num_splits=9, merge=merge))
            check(problem, device=DEVICE, run=under(made), zero_length=True)


def test_tokens_after_the_last_sequence_beside_parts() -> None:
    """They see no key, and have no slot among the partials."""
    problem, call, _ = mixed(16, Mask(True))
    ends = call["cu_seqlens_q"]
    ends.clamp_(max=int(ends[-1]) - 30)
    for kernel in kernels_for(problem):
        plan = splitkv.plan(problem, policy=only(kernel.name))
        plan = replace(plan, config=replace(plan.config.shape, num_splits=3))
        out, lse = run(problem, call | {"plan": plan})
        assert lse is not None and (out[-30:] == 0).all() and (lse[:, -30:] == -math.inf).all()


def test_decode_of_many_tokens_writes_where_it_is_told() -> None:
    problem = replace(SHORT, kind="decode", seqlen_q=40, return_lse=False)
    call = make_operands(problem, device=DEVICE)
    room = call["q"].new_full((2, 40, 12, 160), math.nan)
    out = room[:, :, 4:, :128]
    assert splitkv.decode(**call, out=out) is out
    assert_close(out, expected(problem, call)[0], expected(problem, call, upcast=False)[0])
    assert room[:, :, :4].isnan().all() and room[..., 128:].isnan().all()


def test_lengths_of_a_mixed_batch_in_one_graph(
    no_host_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    problem, call, ragged = mixed(16, Mask(True))
    run(problem, call)
    with no_host_sync():
        run(problem, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = splitkv.attention_varlen(**call)
    for share in (1.0, 0.3, 0.0):
        # fewer keys of every sequence: the last ones of the pages are no longer looked at
        keys = [int(n * share) for n in MIXED_K]
        call["cache_seqlens"].copy_(torch.tensor(keys, dtype=torch.int32))
        ends = ragged["cu_seqlens_k"].tolist()
        kept = [torch.arange(a, a + n, device=DEVICE) for a, n in zip(ends, keys, strict=False)]
        fewer = dict(ragged)
        for name in ("k", "v"):
            fewer[name] = ragged[name][torch.cat(kept)]
        ends = [0, *accumulate(keys)]
        fewer["cu_seqlens_k"] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        graph.replay()
        ref, ref_lse = expected(problem, fewer)
        assert_close(out, ref, expected(problem, fewer, upcast=False)[0])
        assert ref_lse is not None
        assert_lse_close(lse, ref_lse)


def test_pages_in_a_traced_graph() -> None:
    problem, call, _ = mixed(64, Mask(True))
    torch._dynamo.reset()
    compiled = torch.compile(splitkv.attention_varlen, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**call), run(problem, call))


def test_gradients_of_pages_are_those_of_plain_torch() -> None:
    problem, call, _ = mixed(64, Mask(True))
    for name in ("k", "v"):
        call[name] = call[name].nan_to_num().requires_grad_()
    dispatch._warned.clear()
    text = "attention_varlen runs on .*: gradient: expected inputs that require none"
    with pytest.warns(UserWarning, match=text):
        out, _ = splitkv.attention_varlen(**call)
    grads = torch.autograd.grad(out.float().square().sum(), (call["k"], call["v"]))
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)


def weights(problem: Problem, call: Call) -> Tensor:
    """Attention weights after dropout [batch, seqlen_q, num_heads, keys]: v is the identity."""
    keys = problem.seqlen_k
    eye = torch.eye(keys, device=DEVICE, dtype=call["q"].dtype)[None, :, None]
    v = eye.expand(problem.batch, keys, problem.num_kv_heads, keys).contiguous()
    return splitkv.attention(**call | {"v": v})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dropout(dtype: str) -> None:
    """Weights are dropped independently and the others grow, so that the mean stays."""
    problem = replace(TRAINING, dropout=True, return_lse=False, dtype=dtype)
    problem = replace(problem, seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=256)
    call = make_operands(problem, device=DEVICE)
    torch.manual_seed(1)
    p = weights(problem, call)
    whole = weights(problem, call | {"dropout_p": 0.0})
    kept, seen = p > 0, whole > 0
    share = (kept & seen).sum() / seen.sum()
    assert not (kept & ~seen).any() and abs(share - (1 - call["dropout_p"])) < 0.005
    torch.testing.assert_close(p[kept], whole[kept] / (1 - call["dropout_p"]), rtol=1e-2, atol=1e-4)
    torch.manual_seed(1)
    assert torch.equal(weights(problem, call), p)
    assert not torch.equal(weights(problem, call), p)


def test_a_graph_with_dropout_draws_anew() -> None:
    problem = replace(TRAINING, dropout=True, return_lse=False)
    call = make_operands(problem, device=DEVICE)
    splitkv.attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = splitkv.attention(**call)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("n", range(FAMILIES))
def test_fuzz(n: int) -> None:
    fuzz(f"prefill-{n}", PLANS, PROBLEMS, needs_grad=False, device=DEVICE)

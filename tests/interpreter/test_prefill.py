"""`prefill` in Triton's interpreter, against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from training import few_programs, paged, problem_of

import splitkv
from splitkv import reference
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.kernels import prefill, records
from splitkv.kernels.host import workspace
from splitkv.kernels.host.arguments import specialised
from splitkv.kernels.limits import prefill as limits
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.dropout import kept
from splitkv.kernels.tile.visit import tile_at, tiles_seen, visits
from splitkv.planner.registry import completed
from splitkv.testing import (
    Call,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

# NumPy warns of what the kernels do on purpose: log2 of 0 is -inf for a row without keys, and e^2x
# may overflow in tanh; Philox multiplies modulo 2^32. The interpreter itself uses what NumPy will
# drop.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
H200 = GPUS["h200"]
DENSE = Problem("dense", 2, 6, 2, 32, 32, 37, 50, "float16", return_lse=True)
ONE_GROUP = {"num_heads": 3, "num_kv_heads": 1}  # where heads are not what a test is about
MASKS = (
    *(Mask(), Mask(True), Mask(True, 9), Mask(True, 9, -1, 3), Mask(window_right=4)),
    *(Mask(window_left=5, window_right=20), Mask(True, 0), Mask(True, 18, -1, 40)),
    *(Mask(True, chunk=24), Mask(chunk=20, sink_tokens=3)),
)
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "dtype": ("float16", "bfloat16", "float32"),
    "head_dims": ((16, 16), (32, 64), (24, 40), (64, 32)),
    "group": (1, 3, 4),
    "num_kv_heads": (1, 2),
    "batch": (1, 3),
    "seqlens": ((1, 1), (1, 40), (37, 50), (33, 16), (48, 32), (2, 70)),
    "mask": MASKS,
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "return_lse": (False, True),
    "tiles": ((16, 16), (32, 16), (16, 32)),
}


MERGES = ("combine", "last")


def run(tile_m: int = 16, tile_n: int = 16, **options: Any) -> Any:
    """`run=` of `check`, with tiles so small that a few rows and keys are several."""

    def launch(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        config = Config(tile_m=tile_m, tile_n=tile_n, **options)
        assert limits.unsupported(problem, H200) == []
        plan = completed(Plan(problem, H200, "fixed", "prefill", config, "a test"))
        return records.PREFILL.launch(bind(problem, call), plan)

    return launch


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES))))
def test_pairs(number: int) -> None:
    """Every pair of values of two axes."""
    values = dict(PAIRS[number])
    tiles = values.pop("tiles")
    problem = problem_of(values)
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    check(problem, run=run(*tiles), strided=number % 3 == 0, zero_length=zero_length)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("head_dims", [(16, 40), (48, 16)], ids=str)
def test_tiles_wider_than_heads(head_dims: tuple[int, int], merge: Any) -> None:
    """Of 64 rows, which wgmma multiplies on sm_90; columns past a head's are nobody's."""
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    problem = Problem("dense", 1, 2, 1, **sizes, seqlen_q=40, seqlen_k=70, mask=Mask(True))
    check(problem, run=run(64, num_splits=2, merge=merge), strided=True)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"num_splits": 3, "merge": "last"}])
def test_writes_into_the_buffer_of_the_caller(kind: Any, options: dict[str, Any]) -> None:
    """A slice of a larger one, of which nothing else is written."""
    problem = replace(DENSE, head_dim_v=24, seqlen_q=20, seqlen_k=40, mask=Mask(True))
    if kind == "varlen":
        problem = replace(problem, kind="varlen", place=Ragged(), lengths="device")
    call = make_operands(problem)
    wanted = run(**options)(problem, call)
    shape = wanted[0].shape
    room = torch.full((*shape[:-2], shape[-2] + 1, shape[-1] + 8), math.nan, dtype=torch.float16)
    out = room[..., 1:, :-8]
    results = run(**options)(problem, call | {"out": out})
    assert results[0] is out
    assert torch.equal(out, wanted[0]) and torch.equal(results[1], wanted[1])
    assert room[..., :1, :].isnan().all() and room[..., -8:].isnan().all()


@pytest.mark.parametrize("codec", [Codec(), Codec("int8", "token")], ids=str)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"num_splits": 3, "merge": "last"}])
def test_out_in_8_bits(kind: Any, options: dict[str, Any], codec: Codec) -> None:
    """By the kernel, by `combine`, or by the programs that come last."""
    of_kind = {"kind": kind}
    if kind == "varlen":
        of_kind |= {"place": Ragged(), "lengths": "device"}
    problem = replace(DENSE, codec=codec, out_scale=True, mask=Mask(True), **of_kind)
    check(problem, run=run(**options))


RANGED = Problem(
    *("varlen", 4, 2, 1, 16, 32, 40, 70, "float16"),
    place=Ragged(),
    lengths="device",
    return_lse=True,
    bidirectional_ranges=True,
)


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"num_splits": 2, "merge": "last"}])
@pytest.mark.parametrize("mask", [m for m in MASKS if m != Mask()], ids=str)
def test_bidirectional_ranges(mask: Mask, options: dict[str, Any]) -> None:
    """Rows see keys on both sides of their band, the first sequences by three ranges each."""
    check(replace(RANGED, mask=mask), run=run(**options), seed=len(options))


def test_bidirectional_ranges_beside_all_else() -> None:
    problem = replace(RANGED, mask=Mask(True, 9, -1, 3), score=Score(True, True), num_heads=6)
    problem = replace(problem, num_kv_heads=2, sink_logits=True, out_scale=True)
    check(problem, run=run(32, 16, num_splits=2), strided=True, zero_length=True)


@pytest.mark.parametrize("merge", MERGES)
def test_bidirectional_ranges_of_pages(merge: Any) -> None:
    problem = replace(RANGED, mask=Mask(True, 12))
    check(problem, run=in_pages(16, run(num_splits=2, merge=merge)))


def in_pages(page_size: int, launch: Any) -> Any:
    """`run=` of `check` for a varlen problem, its keys and values put into pages."""
    return lambda problem, call: launch(*paged(problem, call, page_size))


PAGED_AXES: cases.Axes = {
    **AXES,
    "kind": ("varlen",),
    "dtype": ("float16",),
    "head_dims": ((16, 16), (24, 40)),
    "num_kv_heads": (2,),
    "batch": (1, 4),
    "seqlens": ((1, 40), (37, 50), (33, 16), (20, 70)),
    "mask": (
        *(Mask(True), Mask(), Mask(True, 9, -1, 3), Mask(window_left=5, window_right=20)),
        Mask(True, chunk=24),
    ),
    "return_lse": (True,),
    "page_size": (1, 8, 16, 10, 64),
    "parts": (1, 2, 7),
}


@pytest.mark.parametrize("number", range(len(PAGED := cases.pairs(PAGED_AXES, few_programs))))
def test_pages(number: int) -> None:
    """Pages smaller than a tile of keys, larger ones, and such that no tile divides."""
    values = dict(PAGED[number])
    tiles, parts, page_size = (values.pop(name) for name in ("tiles", "parts", "page_size"))
    launch = in_pages(page_size, run(*tiles, num_splits=parts))
    zero_length = number % 2 == 0 and values["batch"] > 1
    check(problem_of(values), run=launch, strided=number % 3 == 0, zero_length=zero_length)


PARTS_AXES: cases.Axes = {
    **{name: values for name, values in PAGED_AXES.items() if name != "page_size"},
    "kind": ("dense", "varlen"),
    "seqlens": ((1, 1), (1, 90), (9, 100), (33, 16)),
    "parts": (2, 3, 6),
    "merge": MERGES,
}


@pytest.mark.parametrize("number", range(len(PARTS := cases.pairs(PARTS_AXES, few_programs))))
def test_parts(number: int) -> None:
    """Keys cut into parts, more of them than some row tiles have tiles of keys."""
    values = dict(PARTS[number])
    tiles, parts, merge = (values.pop(name) for name in ("tiles", "parts", "merge"))
    problem = problem_of(values)
    options = {"zero_length": True} if problem.kind == "varlen" and problem.batch > 1 else {}
    launch = run(*tiles, num_splits=parts, merge=merge)
    check(problem, run=launch, strided=number % 3 == 0, **options)


@pytest.mark.parametrize(("page_size", "merge"), [(None, "combine"), (16, "combine"), (16, "last")])
@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 30, -1, 5)], ids=str)
def test_prompts_beside_single_tokens(
    mask: Mask, page_size: int | None, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the keys of few tokens are cut; prompts are finished in one part."""
    monkeypatch.setattr(splitkv.core.problem, "MAX_CUT_TOKENS", 16)
    problem = replace(DENSE, kind="varlen", batch=6, seqlen_q=40, seqlen_k=100, mask=mask)
    problem = replace(problem, **ONE_GROUP)
    assert problem.cut_tokens == 16 // problem.group == 5
    call = make_operands(problem, lengths=(100, 90, 0, 100, 3, 70))
    call["cu_seqlens_q"] = torch.tensor([0, 40, 41, 43, 48, 54, 54], dtype=torch.int32)
    call["q"] = call["q"][:54]
    whole = run()(problem, call)
    ref, ref_lse = expected(problem, call)
    launch = run(num_splits=4, merge=merge)
    out, lse = (in_pages(page_size, launch) if page_size else launch)(problem, call)
    working, _ = expected(problem, call, upcast=False)
    assert_close(out, ref, working)
    assert_lse_close(lse, ref_lse)
    for sequence, cut in ((slice(0, 40), False), (slice(40, 41), True), (slice(48, 54), False)):
        assert torch.equal(out[sequence], whole[0][sequence]) != cut


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("split_size", [16, 48])
def test_parts_of_a_fixed_size(split_size: int, merge: str) -> None:
    problem = replace(DENSE, seqlen_q=3, seqlen_k=150, mask=Mask(True))
    parts = -(-150 // split_size)
    launch = run(num_splits=parts, schedule="fixed", split_size=split_size, merge=merge)
    check(problem, run=launch)


def test_counters_are_as_before_after_every_launch() -> None:
    """The one for the next launch is 0, and launches take turns; with more parts than a step."""
    problem = replace(DENSE, batch=1, seqlen_q=2, seqlen_k=80, sink_logits=True, **ONE_GROUP)
    call = make_operands(problem)
    ref, _ = expected(problem, call)
    wanted, _ = run(num_splits=5)(problem, call)
    counter = workspace.counter(-1, 0)
    for parts in (5, 2, 5):
        used = int(counter[2])
        assert counter[used] == 0
        out, lse = run(num_splits=parts, merge="last")(problem, call)
        assert int(counter[2]) == 1 - used and counter[1 - used] == 0
        if parts == 5:
            assert_close(out, ref, wanted)


DECODE = replace(DENSE, kind="decode", seqlen_q=40, seqlen_k=90, mask=Mask(True), head_dim=24)
DECODE = replace(DECODE, **ONE_GROUP)


DECODE_AXES: cases.Axes = {
    "lengths": ("host", "device"),
    "place": (Contiguous(), Paged(8), Paged(16), Paged(100)),
    "parts": (1, 3),
    "merge": MERGES,
}


@pytest.mark.parametrize("values", cases.pairs(DECODE_AXES), ids=str)
def test_decode_of_many_tokens(values: cases.Values) -> None:
    parts, lengths = values["parts"], values["lengths"]
    problem = replace(DECODE, lengths=lengths, place=values["place"], sink_logits=parts == 1)
    options = {"lengths": (90, 17)} if lengths == "device" else {}
    launch = run(num_splits=parts, merge=values["merge"])
    check(problem, run=launch, strided=parts > 1, **options)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("merge", MERGES)
def test_a_row_that_is_not_finite_is_written(merge: str) -> None:
    """As NaN, whatever was there; others are as they were."""
    call, launch = make_operands(DECODE), run(num_splits=3, merge=merge)
    clean, _ = launch(DECODE, call)
    call["q"][1, 7, 2, 3], call["out"] = math.nan, torch.zeros_like(clean)
    out, _ = launch(DECODE, call)
    assert out[1, 7, 2].isnan().all()
    out[1, 7, 2] = clean[1, 7, 2]
    assert torch.equal(out, clean)


def test_decode_writes_where_it_is_told() -> None:
    problem = replace(DECODE, head_dim_v=16)
    call = make_operands(problem)
    for parts, merge in ((1, "combine"), (3, "combine"), (3, "last")):
        room = torch.full((2, 40, 6, 24), math.nan, dtype=torch.float16)
        call["out"] = room[:, :, 3:, :16]
        out, _ = run(num_splits=parts, merge=merge)(problem, call)
        assert out is call["out"]
        assert_close(out, expected(problem, call)[0], expected(problem, call, upcast=False)[0])
        assert room[:, :, :3].isnan().all() and room[..., 16:].isnan().all()


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
def test_no_keys_at_all(kind: Any, sink_logits: bool) -> None:
    problem = replace(DENSE, kind=kind, seqlen_k=0, sink_logits=sink_logits, mask=Mask(True))
    out, lse = run()(problem, make_operands(problem))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_tokens_after_the_last_sequence() -> None:
    """They see nothing, and keys after it are seen by nobody."""
    problem = replace(DENSE, kind="varlen", batch=3)
    call = make_operands(problem)
    for name in ("q", "k", "v"):
        padding = torch.full((21, *call[name].shape[1:]), math.nan, dtype=torch.float16)
        call[name] = torch.cat([call[name], padding])
    out, lse = run()(problem, call)
    used = int(call["cu_seqlens_q"][-1])
    assert (out[used:] == 0).all() and (lse[:, used:] == -math.inf).all()
    call |= {name: call[name].nan_to_num(0) for name in ("q", "k", "v")}
    ref, ref_lse = expected(problem, call)
    assert_close(out[:used], ref[:used], expected(problem, call, upcast=False)[0][:used])
    assert_lse_close(lse, ref_lse)


def test_no_sequences() -> None:
    problem = replace(DENSE, kind="varlen", batch=0)
    call = make_operands(replace(problem, batch=1))
    call["cu_seqlens_q"] = call["cu_seqlens_k"] = torch.zeros(1, dtype=torch.int32)
    out, lse = run()(problem, call)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("batch", [130, 300])
def test_many_sequences(batch: int) -> None:
    """More than are looked at in one step."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "head_dim_v": 16}
    problem = replace(DENSE, kind="varlen", batch=batch, seqlen_q=3, seqlen_k=5, **sizes)
    check(problem, run=run(), zero_length=True)


def test_slopes_of_every_sequence() -> None:
    problem = replace(DENSE, score=Score(alibi=True), kind="varlen")
    call = make_operands(problem)
    call["alibi_slopes"] = torch.rand(2, 6) + 0.05
    out, lse = run()(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("group", [1, 3])
def test_every_tile_of_every_lane_has_a_program(group: int) -> None:
    """Whatever fits into the L2: the order of the programs changes no bit."""
    problem = replace(DENSE, batch=3, num_heads=2 * group, mask=Mask(True))
    call = make_operands(problem)
    wanted = run()(problem, call)
    check(problem, run=lambda p, c: wanted)
    for l2_bytes in (0, 50_000, 1 << 30):
        device = replace(H200, l2_bytes=l2_bytes)
        plan = completed(
            Plan(problem, device, "fixed", "prefill", Config(tile_m=16, tile_n=16), "a test")
        )
        out, lse = records.PREFILL.launch(bind(problem, call), plan)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]), l2_bytes


@triton.jit
def visit(out_ptr, left, right, sink_tokens, chunk, seqlen_q, keys, TILE_N: tl.constexpr):
    pos, bounds = keys - seqlen_q, Bounds(left, right, sink_tokens, chunk)
    seen = tiles_seen(bounds, pos, pos + seqlen_q - 1, keys, TILE_N)
    first, last = visits(seen, "edges")
    for i in range(first, last):
        tl.store(out_ptr + i, tile_at(seen, i, "edges"))
    first, last = visits(seen, "middle")
    for i in range(first, last):
        tl.store(out_ptr + 16 + i, tile_at(seen, i, "middle"))


@pytest.mark.parametrize(
    "mask", [*MASKS, Mask(True, 33, -1, 5), Mask(True, 33, -1, 5, 50)], ids=str
)
def test_tiles_are_masked_only_where_a_row_misses_a_key(mask: Mask) -> None:
    tile_n = 16
    for seqlen_q in (1, 3, 16, 40):
        for keys in (0, 1, 15, 16, 17, 48, 70, 128):
            out = torch.full((32,), -1, dtype=torch.int32)
            visit[(1,)](out, *mask.bounds, seqlen_q, keys, tile_n)
            masked, whole = ({n for n in half.tolist() if n >= 0} for half in out.view(2, 16))
            seen = torch.tensor(mask.materialize(seqlen_q, keys)).reshape(seqlen_q, keys)
            padded = torch.nn.functional.pad(seen, (0, -keys % tile_n))
            parts = padded.view(seqlen_q, -1, tile_n)
            everywhere = set(torch.nonzero(parts.all(2).all(0)).flatten().tolist())
            somewhere = set(torch.nonzero(parts.any(2).any(0)).flatten().tolist())
            assert not masked & whole and masked | whole >= somewhere, (seqlen_q, keys)
            assert len(masked | whole) <= len(somewhere) + (not somewhere), (seqlen_q, keys)
            by_sink_tokens = {n for n in everywhere if (n + 1) * tile_n <= mask.sink_tokens}
            assert whole <= everywhere <= whole | by_sink_tokens, (seqlen_q, keys)


@triton.jit
def keep(out_ptr, seed_ptr, drop_below, sequence_head, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t, n = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    ok = kept(seed_ptr, drop_below, n, t, sequence_head)
    tl.store(out_ptr + t * COLUMNS + n, ok.to(tl.int8))


def weights_kept(seed: Tensor, dropout_p: float, sequence_head: int, size: int = 64) -> Tensor:
    """[size, size] of 0 and 1."""
    out = torch.empty(size, size, dtype=torch.int8)
    keep[(1,)](out, seed, dropout_p * 2.0**24, sequence_head, size, size)
    return out


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(dropout_p: float) -> None:
    """In the whole, along rows and columns; differently for another head or seed."""
    seed = torch.tensor(5, dtype=torch.int64)
    drawn = [weights_kept(seed, dropout_p, n, 128).float() for n in range(4)]
    drawn.append(weights_kept(seed + 1, dropout_p, 0, 128).float())
    drawn.append(weights_kept(seed + (1 << 40), dropout_p, 0, 128).float())
    sd = (dropout_p * (1 - dropout_p)) ** 0.5
    for x in drawn:
        assert abs(x.mean() - (1 - dropout_p)) < 5 * sd / 128
        assert (x.mean(0) - (1 - dropout_p)).abs().max() < 5 * sd / 128**0.5
        assert (x.mean(1) - (1 - dropout_p)).abs().max() < 5 * sd / 128**0.5
    correlation = torch.corrcoef(torch.stack(drawn).flatten(1)) - torch.eye(len(drawn))
    assert correlation.abs().max() < 5 / 128


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
def test_dropout(sink_logits: bool, kind: Any) -> None:
    """Against the reference with the very same weights dropped; the LSE knows nothing of it."""
    problem = replace(DENSE, kind=kind, dropout=True, mask=Mask(True), sink_logits=sink_logits)
    problem = replace(problem, **ONE_GROUP)
    call = make_operands(problem, lengths=(50, 50) if kind == "varlen" else None)
    torch.manual_seed(3)
    out, lse = run()(problem, call)
    torch.manual_seed(3)
    again, _ = run(32, 32)(problem, call)
    torch.testing.assert_close(again, out, rtol=1e-2, atol=1e-2)
    torch.manual_seed(3)
    seed = prefill.draw_seed(call["q"])
    for b in range(2):
        q, k, v = (of_sequence(problem, call, n, b).double() for n in ("q", "k", "v"))
        rows, keys = q.shape[0], k.shape[0]
        for head in range(problem.num_heads):
            one = slice(head, head + 1), slice(head // problem.group, head // problem.group + 1)
            heads = {"q": q[None, :, one[0]], "k": k[None, :, one[1]]}
            logit = call["sink_logits"][one[0]] if sink_logits else None
            # With v the identity the output is the weights.
            eye = torch.eye(keys, dtype=torch.float64)[None, :, None]
            weights, ref_lse = reference.attention(
                *heads.values(), eye, mask=problem.mask, sink_logits=logit
            )
            drop = weights_kept(seed, call["dropout_p"], b * problem.num_heads + head)
            weights = weights[0, :, 0] * drop[:rows, :keys] / (1 - call["dropout_p"])
            wanted = (weights @ v[:, one[1].start]).half()
            actual = of_sequence(problem, call | {"q": out}, "q", b)[:, head]
            torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=4e-3)
            if kind == "dense":
                assert_lse_close(lse[b, head], ref_lse[0, 0])


def of_sequence(problem: Problem, call: Call, name: str, b: int) -> Tensor:
    """Sequence b of an operand: [tokens, heads, dim]."""
    if problem.kind == "dense":
        return call[name][b]
    ends = call["cu_seqlens_q" if name == "q" else "cu_seqlens_k"]
    return call[name][ends[b] : ends[b + 1]]


def test_a_variant_of_an_interpreted_kernel() -> None:
    """Calls of every length ask for it, and nothing is compiled."""
    named = [("left", 3), ("k_strides", (4, 2, 1))]
    assert specialised(prefill.prefill, named, alike=("k_strides",)) == (3, False)

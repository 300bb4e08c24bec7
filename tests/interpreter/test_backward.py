"""`backward` in Triton's interpreter: every gradient, against those of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training import (
    LEAVES,
    SINKS,
    Outputs,
    compare,
    compare_with_reference,
    gradients,
    hold_sinks_to_float64,
    problem_of,
)

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.kv import Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.core.variants import RowSplits
from splitkv.kernels import records
from splitkv.kernels.backward.rows import statistics
from splitkv.kernels.limits import backward as variant
from splitkv.kernels.limits import prefill
from splitkv.planner import registry
from splitkv.planner.policies.row_splits import row_splits
from splitkv.planner.registry import completed
from splitkv.runtime import autograd, dispatch
from splitkv.testing import DRAWS, Call, assert_close, bind, check, expected, make_operands

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
DENSE = Problem("dense", 2, 6, 2, 16, 16, 19, 37, "float16", return_lse=True, needs_grad=True)
EVERYTHING = replace(
    DENSE, mask=Mask(True, 9, -1, 3), score=Score(True, True), sink_logits=True, seqlen_q=40
)
ONE_GROUP = {"num_heads": 3, "num_kv_heads": 1}  # where heads are not what a test is about
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "dtype": ("float16", "bfloat16", "float32"),
    "head_dims": ((16, 16), (16, 32), (24, 16)),
    "group": (1, 3, 4),
    "num_kv_heads": (1, 2),
    "batch": (1, 3),
    "seqlens": ((1, 40), (19, 37), (33, 16), (5, 3)),
    "mask": (
        *(Mask(), Mask(True), Mask(True, 9), Mask(True, 9, -1, 3), Mask(window_right=4)),
        *(Mask(window_left=5, window_right=20), Mask(True, 1), Mask(True, 4, -1, 20)),
        *(Mask(True, chunk=12), Mask(chunk=10, sink_tokens=3)),
    ),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "tiles": ((16, 16), (32, 16), (16, 32)),
}


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Tiles of the backward so small that a few rows and keys are several."""

    def choose(tile_m: int, tile_n: int) -> None:
        for name in ("key_configs", "query_configs"):
            config = Config(tile_m=tile_m, tile_n=tile_n)
            monkeypatch.setattr(variant, name, lambda problem, device, c=config: iter([c]))

    choose(16, 16)
    return choose


def run(problem: Problem, call: Call) -> Outputs:
    """`run=` of `check`."""
    assert prefill.unsupported(problem, H200) == []
    plan = completed(
        Plan(problem, H200, "fixed", "prefill", Config(tile_m=32, tile_n=32), "a test")
    )
    return records.PREFILL.launch(bind(problem, call), plan)


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES))))
def test_pairs(number: int, tiles: Callable[[int, int], None]) -> None:
    """Every pair of values of two axes."""
    values = dict(PAIRS[number])
    tiles(*values.pop("tiles"))
    problem = problem_of(values, return_lse=True, needs_grad=True)
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    check(problem, run=run, strided=number % 3 == 0, zero_length=zero_length)


@pytest.mark.parametrize("head_dims", [(16, 40), (48, 16)], ids=str)
def test_tiles_wider_than_heads(
    head_dims: tuple[int, int], tiles: Callable[[int, int], None]
) -> None:
    """Of 64 rows, which wgmma multiplies on sm_90; columns past a head's are nobody's."""
    tiles(64, 64)
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    problem = Problem("dense", 1, 2, 1, **sizes, seqlen_q=40, seqlen_k=70, mask=Mask(True))
    check(replace(problem, needs_grad=True), run=run, strided=True)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
@pytest.mark.parametrize("mask", [Mask(), Mask(True)], ids=str)
def test_gradient_of_the_lse(mask: Mask, sink_logits: bool, kind: Any) -> None:
    """Beside that of the output, and alone; rows without a key have none."""
    problem = replace(DENSE, kind=kind, seqlen_q=40, mask=mask, sink_logits=sink_logits)
    problem = replace(problem, **ONE_GROUP)
    call = make_operands(problem, zero_length=kind == "varlen")
    compare_with_reference(problem, call, run(problem, call))
    lse = run(problem, call)[1]
    (dq,) = torch.autograd.grad(lse[lse > -math.inf].sum(), call["q"])
    ref = expected(problem, call)[1]
    (wanted,) = torch.autograd.grad(ref[ref > -math.inf].sum(), call["q"])
    pt = expected(problem, call, upcast=False)[1]
    (working,) = torch.autograd.grad(pt[pt > -math.inf].sum(), call["q"])
    assert_close(dq, wanted, working, factor=3.0, name="dq")


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_gradient_of_sink_logits_by_row_tiles(kind: Any) -> None:
    """What `backward_rows` adds to the sums of ds that other kernels make: the two do not depend on
    the rounding of out. Some rows see no key."""
    problem = replace(DENSE, kind=kind, num_kv_heads=6, sink_logits=True, mask=Mask(True))
    problem = replace(problem, seqlen_q=150, return_lse=True)
    call = make_operands(problem)
    out, lse = (x.detach() for x in run(problem, call))
    (wanted,) = torch.autograd.grad(expected(problem, call)[0].sum(), call["sink_logits"])
    rounded = (out * (1 + 0.1 * torch.randn(out.shape))).to(out.dtype)
    given = rounded, lse, torch.ones_like(out)
    stats = statistics(problem, bind(problem, call), *given, None, False, sink_columns=7)
    assert stats.sink is None and stats.sink_sums.shape[0] == 6
    rows = stats.sink_sums[:, :-7].sum(1)
    total, delta = stats.total.squeeze(3), stats.delta.squeeze(3)  # [sequences, 6, tokens]
    p_sink = torch.exp2(call["sink_logits"].detach()[:, None] * math.log2(math.e) - total)
    exact = out.float().sum(-1).view(len(total), -1, 6).transpose(1, 2)
    ds = torch.where(p_sink > 0, exact - delta * (1 - p_sink), 0.0)  # summed up over keys
    torch.testing.assert_close(rows - (p_sink * ds).sum((0, 2)), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("of_lse", [False, True], ids=["", "of_lse"])
def test_gradients_where_the_sink_dominates(
    of_lse: bool, alibi: bool, dtype: str, kind: Any
) -> None:
    """The LSE leaves the sink out, so that its gradient has no part in that of the sink, however
    much larger it is than the rest."""
    problem = replace(DENSE, kind=kind, dtype=dtype, sink_logits=True, mask=Mask(True))
    problem = replace(problem, score=Score(False, alibi), seqlen_q=40, **ONE_GROUP)
    for sink in SINKS:
        call = make_operands(problem) | {"sink_logits": torch.full((3,), sink, requires_grad=True)}
        hold_sinks_to_float64(problem, call, run, of_lse)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("of_lse", [False, True], ids=["", "of_lse"])
def test_all_of_dsink_by_row_tiles_beside_a_gradient_of_the_lse(of_lse: bool, kind: Any) -> None:
    """What `backward_rows` makes for kernels that sum up ds by columns of keys: all of it beside
    dlse, and what their sums leave without."""
    problem = replace(DENSE, kind=kind, num_kv_heads=6, sink_logits=True, mask=Mask(True))
    problem = replace(problem, seqlen_q=150, dtype="bfloat16")
    for sink in SINKS:
        call = make_operands(problem) | {"sink_logits": torch.full((6,), sink, requires_grad=True)}
        out, lse = (x.detach() for x in run(problem, call))
        exact, exact_lse = expected(problem, call, upcast=torch.float64)
        (wanted,) = torch.autograd.grad(exact.sum(), call["sink_logits"], retain_graph=True)
        working = [expected(problem, call, upcast=False, draw=n)[0] for n in range(DRAWS)]
        rounded = [torch.autograd.grad(x.sum(), call["sink_logits"])[0] for x in working]
        worst = max(rounded, key=lambda x: (x - wanted).abs().max())
        given = out, lse, torch.ones_like(out), torch.ones_like(lse) if of_lse else None
        stats = statistics(problem, bind(problem, call), *given, False, sink_columns=7)
        found = stats.sink_sums[:, :-7].double().sum(1)
        weight, delta = stats.weight.squeeze(3).double(), stats.delta.squeeze(3).double()
        # the sums of ds, as a kernel makes them
        product = exact.detach().sum(-1).view(len(delta), -1, 6).transpose(1, 2)
        keys = torch.sigmoid(exact_lse.detach() - sink).view(delta.shape)  # what p adds up to
        found = found - (weight * (product - delta * keys)).sum((0, 2))
        assert_close(found.float(), wanted, worst, factor=3.0, name="dsink")


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 1), (9, 9)], ids=str)
def test_rows_that_see_one_key(lengths: tuple[int, int], dtype: str, kind: Any) -> None:
    """Their weight is 1 whatever q and k are: gradients of q and k are what rounding leaves."""
    problem = replace(DENSE, kind=kind, dtype=dtype, mask=Mask(True, 0), return_lse=False)
    problem = replace(problem, seqlen_q=lengths[0], seqlen_k=lengths[1])
    call = make_operands(problem, lengths=(lengths[1],) * 2 if kind == "varlen" else None)
    out, _ = run(problem, call)
    grads, ref, pt = (
        gradients(call, x[0], None)
        for x in ((out,), expected(problem, call), expected(problem, call, upcast=False))
    )
    assert_close(grads["v"], ref["v"], pt["v"], factor=3.0, name="dv")
    size = call["q"].abs().max() * call["v"].abs().max() * problem.head_dim * problem.group
    for name in ("q", "k"):
        assert (ref[name] == 0).all()
        assert grads[name].abs().max() < 8 * torch.finfo(torch.float32).eps * size


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dims", [1, 2])
def test_everything_at_once(dims: int, kind: Any) -> None:
    """Every mask and score feature; the gradient of a slope a head, and a sequence and head."""
    problem = replace(EVERYTHING, kind=kind, **ONE_GROUP)
    call = make_operands(problem)
    call["alibi_slopes"] = (torch.rand((2, 3)[2 - dims :]) + 0.05).requires_grad_()
    compare_with_reference(problem, call, run(problem, call))


@pytest.mark.parametrize(
    "sink_tokens, kind", [(3, "dense"), (16, "varlen"), (21, "dense"), (21, "varlen")]
)
def test_sink_tokens_in_parts(sink_tokens: int, kind: Any) -> None:
    """Windows so short that the rows that see the first keys are cut into parts."""
    mask = Mask(True, 18, -1, sink_tokens)
    problem = replace(DENSE, kind=kind, seqlen_q=104, seqlen_k=114, mask=mask)
    problem = replace(problem, num_heads=2, num_kv_heads=1)
    found = row_splits(problem, H200, tile_m=16, tile_n=16)
    assert found == RowSplits(-(-sink_tokens // 16), 7)
    check(problem, run=run, zero_length=kind == "varlen")


@pytest.mark.parametrize(
    "mask, kind", [(Mask(), "varlen"), (Mask(True), "dense"), (Mask(True, 120, -1, 5), "varlen")]
)
def test_few_tiles_in_parts(mask: Mask, kind: Any) -> None:
    """So few tiles of keys that the rows that see each are cut into parts."""
    problem = replace(DENSE, kind=kind, mask=mask, seqlen_q=66, seqlen_k=133)
    problem = replace(problem, num_heads=6, num_kv_heads=1)
    config = next(variant.key_configs(problem, H200))
    found = row_splits(problem, H200, config.tile_m, config.tile_n)
    assert found.tiles * config.tile_n >= 133 and found.splits == 3
    check(problem, run=run, zero_length=kind == "varlen")


def test_which_tiles_come_first_in_how_many_parts() -> None:
    """No more parts than keep a tile of sink tokens from being the last to end, and SMs busy."""
    shape = 64, 128  # rows a step, keys a program
    sinks, all_keys = [(left, -1, 4) for left in (127, 4095)], (-1, -1, 0)
    for given, length, heads, wanted in (
        *((sinks[0], 131072, 8, (1, 64)), (sinks[0], 16384, 8, (1, 17))),
        *((sinks[1], 16384, 8, (1, 1)), (sinks[1], 8192, 8, (1, 1)), (sinks[1], 16384, 1, (1, 8))),
        *((sinks[1], 4096, 1, (32, 4)), (sinks[1], 1024, 8, (8, 2)), (all_keys, 1024, 8, (8, 4))),
        *((all_keys, 2048, 8, (16, 2)), (all_keys, 4096, 8, (0, 1)), (all_keys, 256, 1, (2, 2))),
    ):
        problem = replace(DENSE, mask=Mask(True, *given), seqlen_q=length, seqlen_k=length)
        problem = replace(problem, batch=1, num_heads=4 * heads, num_kv_heads=heads)
        assert row_splits(problem, H200, *shape) == RowSplits(*wanted), (given, length, heads)
        none = replace(problem, seqlen_q=0)
        assert row_splits(none, H200, *shape).splits == 1
    for mask, length, wanted in (
        *((Mask(), 1024, (8, 2)), (Mask(), 2048, (0, 1)), (Mask(), 0, (0, 1))),
        *((Mask(True, 5), 131072, (0, 1)), (Mask(window_left=5, sink_tokens=3), 131072, (0, 1))),
    ):
        problem = replace(DENSE, batch=1, mask=mask, seqlen_q=length, seqlen_k=length)
        problem = replace(problem, num_heads=32, num_kv_heads=8)
        assert row_splits(problem, H200, *shape) == RowSplits(*wanted), (mask, length)


def test_tokens_after_the_last_sequence() -> None:
    problem = replace(EVERYTHING, kind="varlen", batch=3, **ONE_GROUP)
    call = make_operands(replace(problem, needs_grad=False))
    padded = dict(call)
    for name in ("q", "k", "v"):
        padded[name] = torch.cat([call[name], torch.randn(9, *call[name].shape[1:]).half()])
    results = []
    for given in (call, padded):
        for name in LEAVES:
            given[name].requires_grad_()
        out, lse = run(problem, given)
        loss = (out.float() ** 2).sum() + lse[lse > -math.inf].sum()
        names = [given[n] for n in LEAVES]
        results.append(torch.autograd.grad(loss, names))
    for name, alone, beside in zip(LEAVES, *results, strict=True):
        torch.testing.assert_close(beside[: len(alone)], alone, msg=name)
        assert (beside[len(alone) :] == 0).all()


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_no_keys_at_all(kind: Any) -> None:
    problem = replace(EVERYTHING, kind=kind, seqlen_k=0)
    call = make_operands(problem)
    out, lse = run(problem, call)
    assert (lse == -math.inf).all()
    for name, grad in gradients(call, out, lse).items():
        assert grad.shape == call[name].shape and (grad == 0).all()


def weights_of(problem: Problem, call: Call, seed: int) -> Tensor:
    """kept / (1 - dropout_p) [batch, num_heads, seqlen_q, seqlen_k]: v the identity, and q zero."""
    eye = torch.eye(problem.seqlen_k)[None, :, None].expand(problem.batch, -1, 2, -1)
    asked = {"q": torch.zeros_like(call["q"]), "v": eye.half(), "sink_logits": None}
    dim = problem.seqlen_k
    plain = replace(
        problem, head_dim_v=dim, mask=Mask(), sink_logits=False, score=Score(), needs_grad=False
    )
    torch.manual_seed(seed)
    out, _ = run(plain, call | asked | {"softcap": 0.0, "alibi_slopes": None})
    return out.detach().transpose(1, 2).double() * dim


@pytest.mark.parametrize("features", [{}, {"sink_logits": True, "mask": Mask(True)}], ids=str)
def test_dropout(features: dict[str, Any]) -> None:
    """The backward drops what its forward dropped: the reference with the same weights dropped."""
    problem = replace(DENSE, seqlen_q=24, seqlen_k=32, dropout=True, **features)
    call = make_operands(problem)
    drop = weights_of(problem, call, 5)
    kept = drop > 0
    assert 0.7 < kept.double().mean() < 0.9
    torch.manual_seed(5)
    found = run(problem, call)

    def reference(dtype: torch.dtype, draw: int = 0) -> Outputs:
        order = torch.randperm(problem.head_dim, generator=torch.Generator().manual_seed(draw))
        q, k, v = (call[n].to(dtype).transpose(1, 2) for n in ("q", "k", "v"))
        q, k = q[..., order], k[..., order]
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        s = (q @ k.transpose(-1, -2)).double() * problem.head_dim**-0.5
        visible = torch.tensor(problem.mask.materialize(24, 32))
        s = s.masked_fill(~visible, -math.inf)
        lse = s.logsumexp(-1)
        total = lse
        if problem.sink_logits:
            total = torch.logaddexp(lse, call["sink_logits"].double()[:, None])
        p = (s - total[..., None]).exp() * kept / (1 - call["dropout_p"])
        return (p.to(dtype) @ v).transpose(1, 2), lse

    working = [reference(torch.float16, n) for n in range(DRAWS)]
    compare(call, found, reference(torch.float64), working)


def test_the_same_bits_every_time() -> None:
    problem = replace(EVERYTHING, **ONE_GROUP)
    call = make_operands(problem)
    results = [gradients(call, *run(problem, call)) for _ in range(2)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_gradients_of_any_layout() -> None:
    """Of a sum: a gradient of the output that is one number everywhere, without strides."""
    call = make_operands(DENSE)
    out, _ = run(DENSE, call)
    ref, _ = expected(DENSE, call)
    pt, _ = expected(DENSE, call, upcast=False)
    found, exact, working = (torch.autograd.grad(x.sum(), call["v"])[0] for x in (out, ref, pt))
    assert_close(found, exact, working, factor=3.0)


def test_a_second_derivative_is_refused() -> None:
    call = make_operands(DENSE)
    out, _ = run(DENSE, call)
    with pytest.raises(NotImplementedError, match="^create_graph: expected False"):
        torch.autograd.grad(out.float().sum(), call["q"], create_graph=True)


@pytest.fixture
def served_by_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public calls on the CPU go the way that they go on a GPU."""
    monkeypatch.setattr(registry, "KERNELS", (records.PREFILL,))
    monkeypatch.setattr(dispatch, "device_of", lambda tensor: H200)
    monkeypatch.setattr(autograd, "_on_gpu", lambda q: True)


CALLS = {
    "plain": replace(DENSE, **ONE_GROUP),
    "no_lse": replace(DENSE, return_lse=False, **ONE_GROUP),
    "everything": replace(EVERYTHING, dtype="float32", **ONE_GROUP),
    "varlen": replace(EVERYTHING, kind="varlen", place=Ragged(), dtype="float32", **ONE_GROUP),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("served_by_prefill")
def test_compiled_calls_give_what_eager_ones_do(name: str) -> None:
    """The operator keeps the output and the LSE, whether or not the LSE was asked for."""
    problem = CALLS[name]
    function = {"dense": splitkv.attention, "varlen": splitkv.attention_varlen}[problem.kind]
    call = make_operands(problem)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = [f(**call) for f in (function, compiled)]
    eager, traced = (x if problem.return_lse else (x, None) for x in results)
    assert torch.equal(eager[0], traced[0])
    grads = gradients(call, *eager), gradients(call, *traced)
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.usefixtures("served_by_prefill")
def test_a_compiled_backward_drops_what_its_forward_dropped() -> None:
    """With v the identity, the output is the weights and dv its transpose times the cotangent."""
    keys = 16
    problem = replace(DENSE, seqlen_q=keys, seqlen_k=keys, num_heads=2, head_dim_v=keys)
    problem = replace(problem, dropout=True, return_lse=False, mask=Mask(True), dtype="float32")
    call = make_operands(problem) | {"dropout_p": 0.5}
    call["v"] = torch.eye(keys)[None, :, None].repeat(2, 1, 2, 1).requires_grad_()
    cotangent = torch.eye(keys)[None, :, None].expand(2, -1, 2, -1)
    torch._dynamo.reset()
    compiled = torch.compile(splitkv.attention, fullgraph=True, backend="aot_eager")
    drawn = []
    for function in (splitkv.attention, compiled, compiled):
        out = function(**call)
        (dv,) = torch.autograd.grad(out, call["v"], cotangent)
        torch.testing.assert_close(dv.permute(0, 2, 3, 1), out.permute(0, 2, 1, 3))
        drawn.append(out.detach() > 0)
    assert not torch.equal(drawn[1], drawn[2])
    share = drawn[0].sum() / (2 * 2 * keys * (keys + 1) / 2)
    assert 0.35 < share < 0.65


@pytest.mark.usefixtures("served_by_prefill")
def test_checkpointing_recomputes_the_same() -> None:
    """With dropout, too: the state of the generator is restored."""
    problem = replace(DENSE, dropout=True, mask=Mask(True), return_lse=False, **ONE_GROUP)
    call = make_operands(problem)
    results = []
    for call_it in (splitkv.attention, partial(checkpoint, splitkv.attention, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(gradients(call, call_it(**call), None))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

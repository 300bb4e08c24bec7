"""The torch.library operators: registered right, traced whole, and the same as eager calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import run_by
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from training import paged

import splitkv
from splitkv.core.masks import FAR
from splitkv.kernels import torch_math, torch_sdpa
from splitkv.reference import WORKING
from splitkv.runtime.autograd import attention_op
from splitkv.runtime.decode import decode_op
from splitkv.runtime.dispatch import apart
from splitkv.testing import Call, Codec, Mask, Paged, Problem, Ragged, Score, make_operands

DECODE = Problem("decode", 2, 8, 2, 32, 32, 2, 24, "float32", mask=Mask(True), lengths="device")
DENSE = Problem("dense", 2, 4, 2, 16, 16, 5, 7, "float32")
WINDOW = Mask(True, 6, -1, 2)
PAST = 1 << 70  # an integer that no operator can take
EVERY_SCORE = Score(softcap=True, alibi=True)

DECODE_PROBLEMS = {
    "plain": DECODE,
    "host_lengths": replace(DECODE, lengths="host"),
    "lse": replace(DECODE, return_lse=True),
    "everything": replace(
        DECODE, mask=WINDOW, score=EVERY_SCORE, sink_logits=True, return_lse=True, head_dim_v=16
    ),
    "own_sinks": replace(DECODE, mask=WINDOW, sequence_sink_tokens=True),
    "paged": replace(DECODE, place=Paged(5), dtype="bfloat16", return_lse=True),
    "int8": replace(DECODE, place=Paged(8), codec=Codec("int8", "token"), dtype="float16"),
    "fp8": replace(DECODE, codec=Codec("fp8", "head"), dtype="bfloat16"),
}
ATTENTION_PROBLEMS = {
    "plain": DENSE,
    "causal": replace(DENSE, seqlen_q=7, mask=Mask(True)),
    "lse": replace(DENSE, mask=Mask(True), return_lse=True),
    "one_kv_head": replace(DENSE, num_kv_heads=1, return_lse=True),
    "everything": replace(
        DENSE, mask=WINDOW, score=EVERY_SCORE, sink_logits=True, return_lse=True, head_dim_v=24
    ),
    "own_sinks": replace(DENSE, mask=replace(WINDOW, sink_tokens=FAR), sequence_sink_tokens=True),
    "sink_logits": replace(DENSE, sink_logits=True),
    "bf16": replace(DENSE, dtype="bfloat16", sink_logits=True),
    "int8": replace(DENSE, codec=Codec("int8", "token"), products="half", return_lse=True),
}
ATTENTION_PROBLEMS |= {
    f"varlen_{name}": replace(problem, kind="varlen", place=Ragged())
    for name, problem in ATTENTION_PROBLEMS.items()
}
PAGES = replace(DENSE, kind="varlen", place=Ragged(), mask=WINDOW, return_lse=True)
FUNCTION: dict[str, Callable[..., Any]] = {
    "decode": splitkv.decode,
    "dense": splitkv.attention,
    "varlen": splitkv.attention_varlen,
}
OTHER_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
LEAVES = ("q", "k", "v", "sink_logits", "alibi_slopes")


def decode_arguments(call: Call) -> tuple[Any, ...]:
    """A call of `decode` as the arguments of the operator."""
    defaults = {"cache_seqlens": None, "page_table": None, "q_scale": None, "num_splits": 0}
    defaults |= {"early_kv": False, "schedule": None, "out_scale": None}
    given = apart({**defaults, "max_sink_tokens": None, "plan": "", **call})
    given["window_left"], given["window_right"] = given["window_size"]
    return tuple(given[argument.name] for argument in decode_op._opoverload._schema.arguments)


def attention_arguments(call: Call, **changes: Any) -> tuple[Any, ...]:
    """A call of `attention` or `attention_varlen` as the arguments of the operator."""
    schema = attention_op._opoverload._schema
    names = dict.fromkeys(a.name for a in schema.arguments)
    given = {**names, "plan": "", **apart(call), **changes}
    given["window_left"], given["window_right"] = given["window_size"]
    return tuple(given[argument.name] for argument in schema.arguments)


def leaves(call: Call) -> dict[str, Tensor]:
    """The differentiable arguments, asked for a gradient."""
    tensors = {name: call[name] for name in LEAVES if isinstance(call.get(name), Tensor)}
    return {name: x.requires_grad_() for name, x in tensors.items() if x.dtype in WORKING}


def run(function: Callable[..., Any], call: Call) -> tuple[Tensor, ...]:
    result = function(**call)
    return result if isinstance(result, tuple) else (result,)


def traced(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def assert_same(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(wanted)
    for a, b in zip(actual, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


# torch's own check looks at gradients of tensors that are no leaves, from 2.14 on.
NO_LEAVES = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize("name", DECODE_PROBLEMS)
def test_decode_is_registered_right(name: str) -> None:
    call = make_operands(DECODE_PROBLEMS[name], poison=False)
    # torch compares inputs before and after by arithmetic that 8-bit floats do not have.
    checks = (*(["test_schema"] if name != "fp8" else []), *OTHER_CHECKS)
    opcheck(decode_op, decode_arguments(call), test_utils=checks)


@NO_LEAVES
@pytest.mark.parametrize("name", ATTENTION_PROBLEMS)
def test_attention_is_registered_right(name: str) -> None:
    call = make_operands(ATTENTION_PROBLEMS[name])
    leaves(call)
    opcheck(attention_op, attention_arguments(call))


@NO_LEAVES
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_attention_of_pages_is_registered_right(grad: bool) -> None:
    _, call = paged(PAGES, make_operands(PAGES), 4)
    call |= {n: call[n].nan_to_num() for n in ("k", "v")}  # opcheck compares inputs with themselves
    if grad:
        leaves(call)
    opcheck(attention_op, attention_arguments(call))


def test_compiled_attention_of_pages() -> None:
    _, call = paged(PAGES, make_operands(PAGES), 4)
    compiled = traced(splitkv.attention_varlen)
    assert_same(run(compiled, call), run(splitkv.attention_varlen, call))
    call["cache_seqlens"] = call["cache_seqlens"] // 2
    assert_same(run(compiled, call), run(splitkv.attention_varlen, call))


@NO_LEAVES
def test_attention_with_strided_operands_is_registered_right() -> None:
    call = make_operands(DENSE, strided=True)
    leaves(call)
    opcheck(attention_op, attention_arguments(call))


@NO_LEAVES
def test_attention_with_dropout_is_registered_right() -> None:
    call = make_operands(replace(DENSE, dropout=True))
    leaves(call)
    opcheck(attention_op, attention_arguments(call, seed=torch.tensor(7)))


@pytest.mark.parametrize("name", DECODE_PROBLEMS)
def test_compiled_decode(name: str) -> None:
    call = make_operands(DECODE_PROBLEMS[name])
    assert_same(run(traced(splitkv.decode), call), run(splitkv.decode, call))


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("kind", FUNCTION)
def test_compiled_with_output_in_8_bits(kind: str, given: bool) -> None:
    packed = replace(DENSE, kind="varlen", place=Ragged(), lengths="device")
    problem = {"decode": DECODE, "dense": DENSE, "varlen": packed}[kind]
    problem = replace(problem, needs_grad=False, out_scale=True, return_lse=False)
    call = make_operands(problem)
    wanted = FUNCTION[kind](**call)
    assert wanted.dtype == torch.float8_e4m3fn
    if given:
        call["out"] = torch.empty_like(wanted)
    made = traced(FUNCTION[kind])(**call)
    assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
    if given:
        assert torch.equal(call["out"].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", ATTENTION_PROBLEMS)
def test_compiled_attention_and_its_gradients(name: str) -> None:
    problem = ATTENTION_PROBLEMS[name]
    function = FUNCTION[problem.kind]
    call = make_operands(problem)
    wanted_of = list(leaves(call).values())
    results = run(function, call), run(traced(function), call)
    assert_same(results[1], results[0])
    # The LSE has a gradient of its own; -inf of an empty row has none.
    losses = [
        sum((x.float().masked_fill(x == -torch.inf, 0) ** 2).sum() for x in r) for r in results
    ]
    eager, compiled = (torch.autograd.grad(loss, wanted_of) for loss in losses)
    assert_same(compiled, eager)
    assert all(g.abs().max() > 0 for g in eager)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_compiled_attention_of_quantised_queries(kind: Any) -> None:
    codec = Codec("fp8", "head")
    problem = replace(DENSE, kind=kind, codec=codec, q_granularity="token", dtype="bfloat16")
    place, lengths = (Ragged(), "device") if kind == "varlen" else (problem.place, "host")
    call = make_operands(replace(problem, place=place, lengths=lengths))
    assert call["q"].dtype == torch.float8_e4m3fn
    result = run(traced(FUNCTION[kind]), call)
    assert result[0].dtype == torch.bfloat16
    assert_same(result, run(FUNCTION[kind], call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor() -> None:
    call = make_operands(replace(DENSE, mask=Mask(True), sink_logits=True))
    wanted_of = list(leaves(call).values())
    results = splitkv.attention(**call), traced(splitkv.attention, "inductor")(**call)
    eager, compiled = (torch.autograd.grad(x, wanted_of, torch.ones_like(x)) for x in results)
    assert_same(results[1:], results[:1])
    assert_same(compiled, eager)


def test_one_graph_for_any_batch_and_length() -> None:
    graphs = CompileCounter()
    compiled = traced(splitkv.decode, graphs, dynamic=True)
    for batch, seqlen_k in ((2, 24), (3, 40), (5, 8)):
        problem = replace(DECODE, batch=batch, seqlen_k=seqlen_k)
        call = make_operands(problem) | {"max_seqlen_k": None}
        assert_same(run(compiled, call), run(splitkv.decode, call))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("name", ATTENTION_PROBLEMS)
def test_attention_in_one_graph_for_any_batch_and_length(name: str) -> None:
    problem, graphs = ATTENTION_PROBLEMS[name], CompileCounter()
    function = FUNCTION[problem.kind]
    compiled = traced(function, graphs, dynamic=True)
    for batch, seqlen in ((2, 7), (3, 9), (5, 12)):
        call = make_operands(replace(problem, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen))
        assert_same(run(compiled, call), run(function, call))
    assert graphs.frame_count <= 2


def test_lengths_are_not_baked_into_a_graph() -> None:
    call = make_operands(DECODE, poison=False)
    compiled = traced(splitkv.decode)
    for lengths in ((24, 3), (1, 24), (0, 7)):
        call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
        assert_same(run(compiled, call), run(splitkv.decode, call))


def test_compiled_with_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_operands(DECODE)
    qkv = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    made = splitkv.plan(*qkv, **call)
    # torch_math where the policy would take torch_sdpa, so that a plan left out shows.
    chosen = replace(made, kernel="torch_math")
    assert made.kernel == "torch_sdpa"

    def function(*qkv: Tensor) -> Any:
        return splitkv.decode(*qkv, **call, plan=chosen)

    ran = run_by((torch_sdpa, torch_math), monkeypatch)
    out = traced(function)(*qkv)
    assert torch.equal(out, splitkv.decode(*qkv, **call, plan=chosen))
    assert ran == ["torch_math", "torch_math"]


def test_compiled_with_the_plan_of_another_problem() -> None:
    call = make_operands(DENSE)
    other = splitkv.plan(replace(DENSE, num_heads=2))
    with pytest.raises(ValueError, match="^plan: expected one for "):
        traced(splitkv.attention)(**call, plan=other)


def test_compiled_with_out() -> None:
    call = make_operands(DECODE)
    out = torch.full((2, 2, 8, 32), torch.nan)
    assert traced(splitkv.decode)(**call, out=out) is out
    assert torch.equal(out, splitkv.decode(**call))


def test_compiled_with_a_list_for_the_window() -> None:
    call = make_operands(replace(DENSE, mask=Mask(window_left=2, window_right=1)))
    wanted = run(splitkv.attention, call)
    assert_same(run(traced(splitkv.attention), call | {"window_size": [2, 1]}), wanted)


@pytest.mark.parametrize(
    ("problem", "wrong", "message"),
    [
        (DECODE, {"window_size": (1, 2, 3)}, r"window_size: expected \(left, right\)"),
        (DECODE, {"softcap": -1.0}, "softcap: expected at least 0, got -1.0"),
        (DECODE, {"out": torch.zeros(4, 2, 8, 32)}, r"out: expected \[batch=2, .* got \[4, 2"),
        (DECODE, {"plan": "waves"}, "plan: expected a splitkv.Plan, got 'waves'"),
        (DENSE, {"window_size": 3}, r"window_size: expected \(left, right\), got 3"),
        (DENSE, {"dropout_p": 1.5}, "dropout_p: expected from 0 to less than 1, got 1.5"),
        (DECODE, {"num_splits": PAST}, f"num_splits: expected 0 to 1024, got {PAST}"),
        (DECODE, {"max_seqlen_k": PAST}, f"max_seqlen_k: expected 0 to .*, got {PAST}"),
        (DENSE, {"window_size": (-PAST, 0)}, f"left: expected at least -1, got -{PAST}"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("mode", ["compiled", "operator"])
def test_a_malformed_call_is_refused(
    problem: Problem, wrong: dict[str, Any], message: str, mode: str
) -> None:
    """While tracing or when the graph runs, whichever knows first."""
    function = FUNCTION[problem.kind]
    call = make_operands(problem) | wrong
    if mode == "operator":
        call["q"] = Subclass(call["q"])
    with pytest.raises(Exception, match=message):
        (traced(function) if mode == "compiled" else function)(**call)


class Subclass(Tensor):
    """A tensor that is not plain."""


@pytest.mark.parametrize("problem", [DECODE, DENSE], ids=["decode", "dense"])
@pytest.mark.parametrize(
    "far",
    [
        {"window_size": (PAST, PAST)},
        {"sink_tokens": PAST},
        {"attention_chunk": PAST},
        {"sink_tokens": torch.tensor([1, 4], dtype=torch.int32), "max_sink_tokens": PAST},
    ],
    ids=str,
)
def test_edges_past_64_bits_are_as_good_as_all_keys(problem: Problem, far: dict[str, Any]) -> None:
    call = make_operands(problem) | {"window_size": (3, -1)} | far
    wanted = run(FUNCTION[problem.kind], call)
    call["q"] = Subclass(call["q"])
    assert_same(tuple(x.as_subclass(Tensor) for x in run(FUNCTION[problem.kind], call)), wanted)


@pytest.mark.parametrize("problem", [DECODE, DENSE], ids=["decode", "dense"])
def test_tensor_subclasses_go_through_the_operator(problem: Problem) -> None:
    call = make_operands(problem)
    wanted = run(FUNCTION[problem.kind], call)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        actual = run(FUNCTION[problem.kind], call)
    assert any(name.startswith("splitkv.") for name in seen)
    assert_same(actual, wanted)
    call["q"] = Subclass(call["q"])
    assert_same(tuple(x.as_subclass(Tensor) for x in run(FUNCTION[problem.kind], call)), wanted)


@pytest.mark.parametrize("name", [*DECODE_PROBLEMS, *ATTENTION_PROBLEMS])
def test_fake_tensors_have_the_shapes_and_types_of_real_ones(name: str) -> None:
    for problem in (DECODE_PROBLEMS.get(name), ATTENTION_PROBLEMS.get(name)):
        if problem is None:
            continue
        call = make_operands(problem, poison=False)
        wanted = run(FUNCTION[problem.kind], call)
        with FakeTensorMode() as mode:
            fake_call = {
                n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in call.items()
            }
            actual = run(FUNCTION[problem.kind], fake_call)
        assert all(isinstance(x, FakeTensor) for x in actual)
        described = [[(x.shape, x.dtype, x.device) for x in xs] for xs in (actual, wanted)]
        assert described[0] == described[1]


class Decoder(torch.nn.Module):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        return splitkv.decode(q, k_cache, v_cache, cache_seqlens=lengths, window_size=(8, -1))


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return splitkv.attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export(strict: bool) -> None:
    call = make_operands(DECODE)
    qkv = tuple(call[name] for name in ("q", "k_cache", "v_cache"))
    exported = torch.export.export(Decoder(), (*qkv, call["cache_seqlens"]), strict=strict)
    assert "splitkv.decode" in exported.graph_module.code
    for lengths in ((24, 5), (3, 1)):
        arguments = (*qkv, torch.tensor(lengths, dtype=torch.int32))
        assert torch.equal(exported.module()(*arguments), Decoder()(*arguments))
    call = make_operands(DENSE)
    qkv = call["q"], call["k"], call["v"]
    exported = torch.export.export(Attention(), qkv, strict=strict)
    assert_same(exported.module()(*qkv), Attention()(*qkv))


def test_export_with_any_length() -> None:
    call = make_operands(DENSE)
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {"q": None, "k": {1: length}, "v": {1: length}}
    qkv = call["q"], call["k"], call["v"]
    exported = torch.export.export(Attention(), qkv, dynamic_shapes=shapes)
    longer = make_operands(replace(DENSE, seqlen_k=19))
    longer_qkv = longer["q"], longer["k"], longer["v"]
    assert_same(exported.module()(*longer_qkv), Attention()(*longer_qkv))


@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])  # torch_sdpa, torch_math
@pytest.mark.parametrize("mask", [Mask(), Mask(True), WINDOW], ids=str)
def test_compiled_backward_drops_what_its_forward_dropped(mask: Mask, return_lse: bool) -> None:
    """With v the identity, out is p after dropout and dv its transpose times the cotangent."""
    keys = 16
    problem = replace(
        DENSE,
        seqlen_q=keys,
        seqlen_k=keys,
        num_heads=2,
        head_dim_v=keys,
        mask=mask,
        dropout=True,
        return_lse=return_lse,
    )
    call = make_operands(problem) | {"dropout_p": 0.5}
    call["v"] = torch.eye(keys)[None, :, None].repeat(2, 1, 2, 1).requires_grad_()
    compiled = traced(splitkv.attention)
    kept = []
    for _ in range(2):
        out = run(compiled, call)[0]
        (dv,) = torch.autograd.grad(
            out, call["v"], torch.eye(keys)[None, :, None].expand(2, -1, 2, -1)
        )
        torch.testing.assert_close(dv.permute(0, 2, 3, 1), out.permute(0, 2, 1, 3))
        kept.append(out > 0)
    whole = splitkv.attention(**call | {"dropout_p": 0.0, "return_lse": False}) > 0
    assert 0.35 < kept[0].sum() / whole.sum() < 0.65
    assert not torch.equal(*kept)


def test_compiled_dropout_follows_the_seed() -> None:
    call = make_operands(replace(DENSE, dropout=True))
    compiled = traced(splitkv.attention)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(**call))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


class Passing(TorchDispatchMode):
    """Sees every operator and lets it pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_seed_of_dropout_in_a_graph_is_drawn_on_the_host() -> None:
    """Whatever the default device is, as drawing it there would have the host wait."""
    call = make_operands(replace(DENSE, dropout=True))
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device), Passing():
            results.append(splitkv.attention(**call))
    assert torch.equal(*results)


def test_dropout_in_a_graph_leaves_the_random_state_alone() -> None:
    """The operator draws from its own seed, not from what the rest of the program draws from."""
    call = make_operands(replace(DENSE, dropout=True))
    torch.manual_seed(0)
    attention_op(*attention_arguments(call, seed=torch.tensor(5)))
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_decode_in_a_graph_has_no_gradient_and_says_so() -> None:
    call = make_operands(DECODE)
    call["q"].requires_grad_()
    with pytest.raises(Exception, match=r"splitkv\.decode.* no autograd formula"):
        traced(splitkv.decode)(**call).sum().backward()

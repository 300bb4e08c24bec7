"""Problems of attention and attention_varlen, what is asked of every kernel that serves them."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import cases
import torch
from running import HERE, plan_with
from torch import Tensor

import splitkv
from splitkv.core.plan import Kernel, Plan
from splitkv.kernels.backward.launcher import BackwardLauncher
from splitkv.kernels.limits import backward
from splitkv.planner.legality import is_legal
from splitkv.planner.policies.backward import with_row_splits
from splitkv.planner.policies.shared import WHOLE_SEQUENCES
from splitkv.planner.registry import kernel_named
from splitkv.testing import (
    DRAWS,
    Call,
    Contiguous,
    Mask,
    Paged,
    Problem,
    Ragged,
    Score,
    assert_close,
    check,
    expected,
)

SEED = int(os.environ.get("SPLITKV_FUZZ_SEED", "0"))
SINKS = (0.0, 12.0, 15.0, 18.0)  # logits, the last of which dominate
LEAVES = ("q", "k", "v", "sink_logits", "alibi_slopes")
FUNCTION = {
    "dense": splitkv.attention,
    "varlen": splitkv.attention_varlen,
    "decode": splitkv.decode,
}
# A kernel is compiled for the bounds that there are, whatever they are.
WINDOWS = cases.Alike((Mask(True, 130), Mask(True, 0)))
MASKS = (
    *(Mask(), Mask(True), WINDOWS, Mask(window_right=9), Mask(window_left=70, window_right=200)),
    cases.Alike((Mask(True, 60, -1, 5), Mask(True, 40, -1, 150))),
    Mask(True, chunk=150),
)
# Of a power of two, what tiles are padded to one for, and what they are small for.
HEAD_DIMS = (
    *((64, 64), (128, 128), (256, 256), (192, 128)),
    cases.Alike((d, d) for d in (80, 96, 112, 192)),
    cases.Alike(((16, 40), (64, 32))),
)
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": HEAD_DIMS,
    "group": (1, cases.Alike((2, 4)), 7, 8, 16),
    "num_kv_heads": (1, 2, 3),
    "batch": (1, 2, 5),
    "seqlens": (
        *((1, 1), (200, 333), (300, 120)),
        cases.Alike(((1, 300), (3, 700))),
        cases.Alike(((128, 128), (513, 513))),
    ),
    "mask": MASKS,
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "return_lse": (False, True),
}
# Gradients of rows that see one key are what rounding leaves: there is nothing to hold them to.
GRAD_AXES: cases.Axes = {
    **{name: values for name, values in AXES.items() if name != "return_lse"},
    "seqlens": tuple(lengths for lengths in AXES["seqlens"] if lengths != (1, 1)),
    "mask": tuple(Mask(True, 130) if mask == WINDOWS else mask for mask in MASKS),
    "deterministic": (False, True),
}
QUANTISED_AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "codec": cases.CODECS_ALIKE,
    "products": ("widened", "half", "full"),
    "q_granularity": ("none", "tensor", "head", "token"),
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128)),
    "group": (1, 7, 16),
    "num_kv_heads": (1, 2),
    "batch": (1, 3),
    "seqlens": ((1, 300), (200, 333), (513, 513), (300, 120), (3, 700)),
    "mask": MASKS,
    "softcap": (False, True),
    "alibi": (False,),
    "sink_logits": (False, True),
    "return_lse": (False, True),
}
TRAINING = Problem("dense", 2, 8, 2, 128, 128, 700, 700, mask=Mask(True), return_lse=True)

Outputs = tuple[Tensor, Tensor | None]


def problem_of(values: cases.Values, **more: Any) -> Problem:
    """The problem of one combination of values of AXES."""
    values = {**values, **more}
    kind = values.pop("kind")
    values["seqlen_q"], values["seqlen_k"] = values.pop("seqlens")
    varlen = kind == "varlen"
    values |= {"place": Ragged(), "lengths": "device"} if varlen else {"place": Contiguous()}
    return replace(cases.decode_problem(values), kind=kind)


def rows_of_parts(values: cases.Values) -> int:
    """Of cases for the interpreter, where a row of a head and part takes milliseconds."""
    rows, _ = values.get("seqlens", (1, 1))
    sizes = (values.get(n, 1) for n in ("batch", "num_kv_heads", "group", "parts"))
    return rows * math.prod(sizes)


def few_programs(values: cases.Values) -> bool:
    return rows_of_parts(values) <= 540


def has_units(values: cases.Values) -> bool:
    """Of QUANTISED_AXES: q in 8 bits works in bf16."""
    return values.get("q_granularity", "none") == "none" or values.get("dtype") != "float16"


def paged(problem: Problem, call: Call, page_size: int, seed: int = 0) -> tuple[Problem, Call]:
    """The same keys and values of a varlen problem in pages: what is unused is NaN or garbage."""
    g = torch.Generator().manual_seed(seed)
    ends = call["cu_seqlens_k"].tolist()
    keys = torch.tensor([b - a for a, b in pairwise(ends)], dtype=torch.int32)
    max_pages = -(-problem.seqlen_k // page_size) + 2
    pages = torch.randperm(len(keys) * max_pages + 3, generator=g)
    table = pages[: len(keys) * max_pages].view(len(keys), max_pages).int()
    call = dict(call)
    of_tokens = [n for n in ("k_scale", "v_scale") if getattr(call.get(n), "ndim", 0) == 2]
    for name in ("k", "v", *of_tokens):
        x = call[name]
        bits = x.view(torch.uint8) if x.element_size() == 1 else x
        nothing = 0x7F if bits.dtype == torch.uint8 else math.nan  # NaN in e4m3, 127 in int8
        cache = torch.full((len(pages), page_size, *x.shape[1:]), nothing, dtype=bits.dtype)
        for row, a, b in zip(table.tolist(), ends, ends[1:], strict=False):
            at = torch.arange(b - a)
            page = torch.tensor(row)[at // page_size]
            cache[page, at % page_size] = bits[a:b].detach().cpu()
        if not x.is_contiguous():
            cache = torch.nn.functional.pad(cache.transpose(1, 2), (0, 8), value=nothing)
            cache = cache.contiguous().transpose(1, 2)[..., : x.shape[-1]]
        call[name] = cache.to(x.device).view(x.dtype)
    first = torch.arange(max_pages) * page_size
    garbage = torch.tensor([-1, len(pages), 2**31 - 1, -(2**31)], dtype=torch.int32)
    garbage = garbage[torch.randint(4, table.shape, generator=g)]
    table = torch.where(first < keys[:, None], table, garbage)
    device = call["q"].device
    call |= {"cu_seqlens_k": None, "page_table": table.to(device), "cache_seqlens": keys.to(device)}
    return replace(problem, place=Paged(page_size)), call


def run(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
    """`run=` of `check`: the public function, which has to take `prefill` or one for Hopper."""
    taken = splitkv.plan(problem).kernel
    assert taken in WHOLE_SEQUENCES, splitkv.explain(problem)
    return called(problem, call)


def called(problem: Problem, call: Call, **options: Any) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of the public function."""
    result = FUNCTION[problem.kind](**call, **options)
    return result if problem.return_lse else (result, None)


def plan_on(kernel: Kernel, problem: Problem) -> Plan:
    """The kernel's plan, however few the rows; on other GPUs of whatever serves."""
    if kernel.unsupported(problem, HERE):
        return splitkv.plan(problem, device=HERE)
    return plan_with(kernel.name, problem)


def gradients(call: Call, out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """Of everything, from cotangents of the output and the LSE of rows that have one."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(out.shape, generator=g).to(call["q"])
    loss = (out * weight.to(out)).sum()
    if lse is not None:
        weight = torch.randn(lse.shape, generator=g).to(call["q"])
        loss = loss + torch.where(lse > -math.inf, lse * weight.to(lse), 0).sum()
    names = [n for n in LEAVES if isinstance(call.get(n), Tensor)]
    found = torch.autograd.grad(loss, [call[n] for n in names])
    return dict(zip(names, found, strict=True))


def hold_sinks_to_float64(
    problem: Problem,
    call: Call,
    serve: Callable[[Problem, Call], Outputs],
    of_lse: bool,
) -> None:
    """Every gradient, with that of the LSE 1 in each row or none, held to the tolerance rule with
    float64 as the reference: what is left of the gradient of a sink that dominates is less than the
    rounding of what is added up beside a gradient of the LSE. Of fp32 only that of the sinks: the
    others have the rounding of exponents of such sinks, as they are in base 2."""
    names = [n for n in LEAVES if isinstance(call.get(n), Tensor)]
    if problem.dtype == "float32":
        names = ["sink_logits"]
    leaves = [call[n] for n in names]

    def found(outputs: Outputs) -> tuple[Tensor, ...]:
        out, lse = outputs
        g = torch.Generator().manual_seed(0)
        loss = (out * torch.randn(out.shape, generator=g).to(call["q"]).to(out)).sum()
        if of_lse:
            assert lse is not None
            loss = loss + lse[lse > -math.inf].sum()
        return torch.autograd.grad(loss, leaves)

    exact = found(expected(problem, call, upcast=torch.float64))
    working = [found(expected(problem, call, upcast=False, draw=n)) for n in range(DRAWS)]
    for i, grad in enumerate(found(serve(problem, call))):
        worst = max((run[i] for run in working), key=lambda x: (x - exact[i]).abs().max())
        assert_close(grad, exact[i], worst, factor=3.0, name=f"d{names[i]}")


def compare(call: Call, found: Outputs, exact: Outputs, working: Sequence[Outputs]) -> None:
    """Every gradient held to the tolerance rule, with the worst of the runs as `check` does."""
    grads, ref = gradients(call, *found), gradients(call, *exact)
    runs = [gradients(call, *outputs) for outputs in working]
    for name, grad in grads.items():
        assert grad.dtype == call[name].dtype and grad.shape == call[name].shape
        worst = max((run[name] for run in runs), key=lambda x: (x - ref[name]).abs().max())
        assert_close(grad, ref[name], worst, factor=3.0, name=f"d{name}")


def compare_with_reference(problem: Problem, call: Call, found: Outputs) -> None:
    working = [expected(problem, call, upcast=False, draw=n) for n in range(DRAWS)]
    compare(call, found, expected(problem, call), working)


@dataclass(frozen=True)
class Family:
    """What a kernel is compiled for."""

    kind: str
    dtype: str
    head_dims: tuple[int, int]
    group: int
    mask: str
    score: Score
    sink_logits: bool
    return_lse: bool


def family(rng: random.Random) -> Family:
    head_dim = rng.choice((64, 128, rng.choice(tuple(range(16, 257, 8)))))
    return Family(
        kind=rng.choice(("dense", "varlen")),
        dtype=rng.choice(("bfloat16", "bfloat16", "float16", "float32")),
        head_dims=(head_dim, rng.choice((head_dim, head_dim, 64, 128))),
        group=rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 64)),
        mask=rng.choice(("causal", "full", "window", "both_sides", "sink_tokens")),
        score=Score(softcap=rng.random() < 0.3, alibi=rng.random() < 0.3),
        sink_logits=rng.random() < 0.4,
        return_lse=rng.random() < 0.6,
    )


def mask_of(kind: str, rng: random.Random) -> Mask:
    """A window of more than a row's own key: gradients of that are rounding alone."""
    left = rng.choice((rng.randint(1, 20), rng.randint(1, 600)))
    return {
        "causal": Mask(causal=True),
        "full": Mask(),
        "window": Mask(True, left),
        "both_sides": Mask(False, left, rng.randint(0, 90)),
        "sink_tokens": Mask(True, left, -1, rng.randint(1, 150)),
    }[kind]


def drawn_problem(of: Family, rng: random.Random, needs_grad: bool = False) -> Problem:
    seqlen_k = rng.choice((rng.randint(2, 70), rng.randint(2, 400), rng.randint(2, 1200)))
    seqlen_q = rng.choice((seqlen_k, seqlen_k, rng.randint(1, 300), rng.randint(1, seqlen_k)))
    num_kv_heads = rng.randint(1, 3 if of.group < 16 else 1)
    varlen = of.kind == "varlen"
    return Problem(
        of.kind,  # type: ignore[arg-type]
        batch=rng.choice((1, rng.randint(1, 3), rng.randint(1, 7) if varlen else 2)),
        num_heads=num_kv_heads * of.group,
        num_kv_heads=num_kv_heads,
        head_dim=of.head_dims[0],
        head_dim_v=of.head_dims[1],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dtype=of.dtype,
        mask=mask_of(of.mask, rng),
        place=Ragged() if varlen else Contiguous(),
        score=of.score,
        sink_logits=of.sink_logits,
        lengths="device" if varlen else "host",
        return_lse=of.return_lse,
        needs_grad=needs_grad,
    )


def fuzz(name: str, plans: int, problems: int, needs_grad: bool, device: str) -> None:
    """Random problems of a family; a failure ends with one line that repeats it.

    Nearly all of the time would go into compiling. So a problem runs under the policy's plan, and
    then others under its config, drawn to be alike in what the kernel is compiled for.
    """
    rng = random.Random(f"{SEED}-{name}")
    of = family(rng)
    for _ in range(plans):
        first = drawn_problem(of, rng, needs_grad)
        strided: dict[str, Any] = {"strided": True} if rng.random() < 0.2 else {}
        plan = splitkv.plan(first)
        for number in range(problems):
            problem, given = first, dict[str, Any]()
            if number:
                problem = alike(first, plan, partial(drawn_problem, of, rng, needs_grad))
                made = splitkv.plan(problem)
                given["plan"] = replace(made, kernel=plan.kernel, config=plan.config)
            options = dict(strided)
            if of.kind == "varlen" and problem.batch > 1 and rng.random() < 0.4:
                options["zero_length"] = True
            seed = rng.randrange(1 << 30)
            serve = partial(run_with, given)
            try:
                check(problem, seed=seed, device=device, run=serve, **options)
            except Exception as error:
                message = f"SPLITKV_FUZZ_SEED={SEED}, family {name}, under {plan.config}"
                raise AssertionError(f"{error}\n  {message}") from error


def alike(first: Problem, plan: splitkv.Plan, draw: Callable[[], Problem]) -> Problem:
    """A drawn problem that the kernel of a plan of another is compiled for alike, and for which it
    has the plan's config."""
    kernel = kernel_named(plan.kernel)
    while True:
        problem = replace(draw(), num_heads=first.num_heads, num_kv_heads=first.num_kv_heads)
        same = traits(problem) == traits(first)
        if same and is_legal(kernel, problem, plan.device, plan.config):
            return problem


def traits(problem: Problem) -> tuple[Any, ...]:
    """What a kernel is compiled for of lengths and mask: which bounds there are within the lengths,
    and of slices of larger tensors how odd the distance between heads is."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    bounds = problem.mask.within(rows, keys).bounds
    return *(bound is None for bound in bounds), rows % 2, keys % 2


def run_with(given: dict[str, Any], problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
    return run(problem, call | given)


def any_gpu_backward(plan: Plan, operands: Any) -> BackwardLauncher:
    """In place of `backward_for`: the kernels for any GPU, wherever it is."""
    best = next(backward.variants(plan.problem, plan.device))
    made = with_row_splits(plan.problem, plan.device, best)
    return BackwardLauncher(plan.problem, plan.device, made)

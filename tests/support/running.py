"""How the GPU tests call decode: twice, into poisoned memory, under a plan that they know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from cases import Axes, Case, Values, as_alike, pairs
from torch import Tensor

import splitkv
from splitkv import Plan
from splitkv.core.device import GPUS, Device, current
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.variants import Plain
from splitkv.planner.policies import Policy, fixed, waves
from splitkv.planner.policies.shared import clusters
from splitkv.planner.registry import KERNELS, kernel_named
from splitkv.runtime import dispatch
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import Call, Mask, Problem

DEVICE = "cuda"
HERE = current() if torch.cuda.is_available() else GPUS["h200"]  # without a GPU tests still collect
MAX_CACHE_ELEMENTS = 1 << 23  # keeps the making of operands on the host short
LENGTHS = {17: 77, 130: 1030, 301: 4096}
BATCHES = {1: 1, 2: 3, 3: 8}

Result = tuple[Tensor, Tensor | None]


def realistic(case: Case) -> Problem:
    """The problem of a case at the lengths and batches of serving; windows are widened along.

    A case with lengths of its own stays as it is.
    """
    problem = case.problem
    if "lengths" in case.options:
        return problem
    seqlen_k = LENGTHS.get(problem.seqlen_k, problem.seqlen_k)
    batch = BATCHES.get(problem.batch, problem.batch)
    a_sequence = seqlen_k * problem.num_kv_heads * max(problem.head_dim, problem.head_dim_v)
    mask = problem.mask
    if mask.left and seqlen_k >= 1024:
        mask = replace(mask, window_left=16 * mask.left)
    batch = max(1, min(batch, MAX_CACHE_ELEMENTS // a_sequence))
    return replace(problem, seqlen_k=seqlen_k, batch=batch, mask=mask)


def plan_of(problem: Problem, call: Call, num_splits: int = 0) -> Plan:
    """The policy's plan for a call."""
    by_position = ("q", "k_cache", "v_cache")
    rest = {name: x for name, x in call.items() if name not in by_position}
    made = splitkv.plan(*(call[name] for name in by_position), num_splits=num_splits, **rest)
    assert made.problem == problem
    return made


def kernels(problem: Problem) -> list[str]:
    """The kernels that split keys and can run a problem here, the preferred one first."""
    split = (kernel for kernel in KERNELS if len(kernel.schedules) > 1)
    return [kernel.name for kernel in split if not kernel.unsupported(problem, HERE)]


def each_kernel(cases: Iterable[Case], *names: str) -> list[Any]:
    """`pytest.param`s (case, kernel), for every kernel, or these, that can run the case."""
    return [
        pytest.param(case, kernel, id=f"{case}-{kernel}")
        for case in cases
        for kernel in kernels(realistic(case))
        if not names or kernel in names
    ]


def each_config(problems: Mapping[str, Problem], *kernels: Kernel) -> list[Any]:
    """`pytest.param`s (problem, kernel, config), for every config of those kernels that can run it.

    A config a test, so that processes share out what has to be compiled.
    """
    return [
        pytest.param(problem, kernel.name, config, id=f"{name}-{kernel.name}-{label(config)}")
        for name, problem in problems.items()
        for kernel in kernels
        if not kernel.unsupported(problem, HERE)
        for config in kernel.configs(problem, HERE)
    ]


def in_pairs(axes: Axes) -> list[Any]:
    """`pytest.param`s of the values of every axis: every pair of values of two axes."""
    return [
        pytest.param(*values.values(), id="-".join(map(str, values.values())))
        for values in pairs(axes)
    ]


def each_shape(
    axes: Axes,
    problem_of: Callable[[Values], Problem],
    *kernels: Kernel,
    in_turns: bool = False,
) -> list[Any]:
    """`pytest.param`s (values, kernel, configs): every config of those kernels with every value of
    the first axis, every shape of tile with every value of the others, and every pair of values of
    two axes, unless no problem has it.

    Configs of one shape differ in their number of programs and in whether heads share a tile: they
    are in one test, or take turns; `in_turns`: everywhere, whatever has each with the first axis.
    """
    flat = [chain.from_iterable(map(as_alike, values)) for values in axes.values()]
    combinations = [dict(zip(axes, each, strict=True)) for each in product(*flat)]
    legal: list[dict[Any, list[Config]]] = []
    for problem in map(problem_of, combinations):
        found: dict[Any, list[Config]] = {}
        for kernel in kernels:
            if not kernel.unsupported(problem, HERE):
                for config in kernel.configs(problem, HERE):
                    shape = replace(config, programs=0, pack_gqa=True)
                    found.setdefault((kernel.name, shape), []).append(config)
        legal.append(found)

    def valid(values: Values) -> bool:
        rest = dict(values)
        shape = rest.pop("shape", None)
        return any(
            rest.items() <= each.items() and (shape is None or shape in found)
            for each, found in zip(combinations, legal, strict=True)
            if found
        )

    params, met, turn = [], set[Any](), Counter[Any]()
    for values in pairs({"shape": list(dict.fromkeys(chain(*legal))), **axes}, valid):
        kernel, shape = values.pop("shape")
        configs = legal[combinations.index(values)][kernel, shape]
        of_first = kernel, shape, next(iter(values.values()))
        if in_turns or of_first in met:
            configs = [configs[turn[kernel, shape] % len(configs)]]
            turn[kernel, shape] += 1
        met.add(of_first)
        name = "-".join(map(str, values.values()))
        params.append(pytest.param(values, kernel, configs, id=f"{name}-{kernel}-{label(shape)}"))
    return params


@contextmanager
def said(way: str) -> Iterator[None]:
    """A failure says which of several ways of running it was."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{error}\n  under {way}") from error


def label(config: Config) -> str:
    """A shape of tile: `128x64_w8_s3`, and what it has besides."""
    name = f"{config.tile_m}x{config.tile_n}_w{config.num_warps}_s{config.num_stages}"
    name += f"_p{config.programs}" if config.programs else ""
    name += f"_{config.merge}{config.num_splits}" if config.num_splits > 1 else ""
    return name if config.pack_gqa else name + "_apart"


def plan_of_config(problem: Problem, kernel: str, config: Config) -> Plan:
    """As the policy would have it with this kernel alone, but for the config."""
    return replace(splitkv.plan(problem, device=HERE, policy=only(kernel)), config=config)


def only(kernel: str, choose: Policy = waves.choose) -> Policy:
    """A policy that knows of no other kernel."""

    def choose_among_one(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        return choose(problem, device, [k for k in candidates if k.name == kernel])

    return choose_among_one


def plan_with(kernel: str, problem: Problem, num_splits: int = 0) -> Plan:
    """A kernel's plan for a problem; num_splits: 0 leaves them to the default policy."""
    choose = fixed.with_splits(num_splits) if num_splits else waves.choose
    return splitkv.plan(problem, device=HERE, policy=only(kernel, choose))


def decode(
    kernel: str | None = None, num_splits: int = 0, plan: Plan | None = None
) -> Callable[[Problem, Call], Result]:
    """`run=` of `check`: decode under this plan, or with this kernel and number of splits.

    The kernel that a call without a plan runs on is not asked for. Every call runs twice, as the
    first goes through Triton's dispatch and later ones launch the compiled kernel directly; both
    write over NaN and have to give the same bits.
    """

    def run(problem: Problem, call: Call) -> Result:
        how: dict[str, Any] = {"num_splits": num_splits, "plan": plan}
        if plan is None and kernel not in (None, plan_of(problem, call, num_splits).kernel):
            how = {"plan": plan_with(kernel, problem, num_splits)}
        results = [into_poison(problem, call, **how) for _ in range(2)]
        assert same_bits(*results), "the second call gave other bits than the first"
        return results[1]

    return run


def into_poison(problem: Problem, call: Call, **how: Any) -> Result:
    """decode into an `out` that is full of NaN."""
    shape = problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v
    dtype = getattr(torch, problem.dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=call["q"].device)
    result = splitkv.decode(**call, out=out, **how)
    written, lse = result if problem.return_lse else (result, None)
    assert written is out
    return out, lse


def run_by(kernels: Sequence[Any], patch: pytest.MonkeyPatch) -> list[str]:
    """The names, in order, of those of these modules of kernels that run from now on."""
    ran: list[str] = []

    def spy(module: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            ran.append(module.__name__.rpartition(".")[2])
            return run(*args)

        return told

    for module in kernels:
        patch.setattr(module, "launch", spy(module, module.launch))
    patch.setattr(dispatch, "calls", CallCache())
    return ran


def same_bits(a: Result, b: Result) -> bool:
    """NaN is a value like any other here; the comparison with the reference refuses it."""
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(x.nan_to_num(1e4), y.nan_to_num(1e4))
        for x, y in pairs
        if x is not None and y is not None
    )


def batch_plan(problem: Problem, programs: int, kernel: str = "decode_split") -> Plan:
    """The whole batch shared out over so many programs a KV head and row tile."""
    assert problem.lengths == "device" and programs > problem.batch
    made = plan_with(kernel, problem, num_splits=2)
    config = replace(
        made.config,
        schedule="batch",
        programs=programs,
        num_splits=programs - problem.batch,
    )
    return replace(made, config=config)


def fixed_plan(problem: Problem, split_size: int, kernel: str | None = None) -> Plan:
    """Parts of so many keys, by the preferred kernel or another."""
    choose = fixed.with_split_size(split_size)
    policy = choose if kernel is None else only(kernel, choose)
    return splitkv.plan(problem, device=HERE, policy=policy)


def plans(problem: Problem, kernel: str) -> dict[str, Plan]:
    """A plan of every schedule that the kernel has and the problem allows."""
    made = {
        "even": plan_with(kernel, problem, num_splits=5),
        "fixed": fixed_plan(problem, max(64, -(-problem.seqlen_k // 6)), kernel),
    }
    even = made["even"]
    for config in clusters(kernel_named(kernel), problem, HERE):
        if config.shape == even.config.shape:
            made[f"cluster_of_{config.num_splits}"] = replace(even, config=config)
    if "last" in kernel_named(kernel).merges:
        made["last"] = replace(even, config=replace(even.config, variant=Plain(), merge="last"))
    if problem.lengths == "device" and "batch" in kernel_named(kernel).schedules:
        made["batch"] = batch_plan(problem, problem.batch + 1, kernel)
        made["batch_of_many"] = batch_plan(problem, problem.batch + 37, kernel)
    return made


SERVING = Problem(
    "decode",
    batch=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    seqlen_q=1,
    seqlen_k=4096,
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)
"""A model being served: what the tests of graphs, streams and time start from."""

EVERY_PLAN = tuple((kernel, name) for kernel in kernels(SERVING) for name in plans(SERVING, kernel))
"""(kernel, name in `plans`) for SERVING."""

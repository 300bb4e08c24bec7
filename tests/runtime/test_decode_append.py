"""Who writes new tokens: what the policy decides, how it is said, and how such a call is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import cases
import pytest
import torch
from appending import AXES, Step, separately, step, valid
from runtime.test_direct import Launched, at, gpu, repeat_of, tensors
from torch import Tensor

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.flash_attn import get_scheduler_metadata
from splitkv.flash_attn.scheduler import fitted
from splitkv.kernels.host.append_call import Append, Rotary, append_in_torch
from splitkv.planner.policies import POLICIES
from splitkv.planner.policies.appending import decide
from splitkv.planner.registry import BY_TIME, kernel_named
from splitkv.runtime import append_decode
from splitkv.runtime.append_decode import append_and_decode
from splitkv.runtime.call_cache import CallCache

__all__ = ["gpu"]  # a fixture

H200, A100 = GPUS["h200"], GPUS["a100"]
DECODE = Problem(
    *("decode", 2, 8, 2, 128, 128, 1, 4096),
    mask=Mask(causal=True),
    lengths="device",
    seqlen_new=1,
    rotary=True,
)


# --- the decision ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", [H200, A100], ids=str)
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_a_kernel_that_can_writes_them_itself(policy: str, device: Any, num_splits: int) -> None:
    plan = splitkv.plan(DECODE, device=device, policy=policy, num_splits=num_splits)
    assert plan.config.appends and plan.kernel.endswith("decode_split")
    assert "; it writes the new tokens itself" in plan.why
    without = replace(DECODE, seqlen_new=0, rotary=False)
    alone = splitkv.plan(without, device=device, policy=policy, num_splits=num_splits)
    assert not alone.config.appends and "new tokens" not in alone.why
    assert replace(plan.config, appends=False) == alone.config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": Codec("int8", "token")}, "scales of the cache: expected none a token"),
        ({"early_kv": True}, "early_kv: expected False"),
        ({"lengths": "host"}, "lengths host: expected device"),
        ({"seqlen_q": 17}, "it writes no new tokens"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_left_to_append_and_why(changes: dict[str, Any], reason: str) -> None:
    plan = splitkv.plan(replace(DECODE, **changes), device=H200)
    assert not plan.config.appends
    assert f"; append runs before it: {reason}" in plan.why


def launches(config: Config) -> int:
    """Of a step that appends: the kernel, `append` where it is apart, `combine`."""
    by_combine = config.num_splits > 1 and config.merge == "combine"
    return 1 + (not config.appends) + by_combine


@pytest.mark.parametrize(("num_splits", "merge"), [(1, "combine"), (4, "cluster"), (4, "combine")])
@pytest.mark.parametrize("new", [4, 5, 16, 17, 500])
def test_never_three_launches(num_splits: int, merge: Any, new: int) -> None:
    """Of more than a few the kernel writes them only where that saves the third."""
    kernel = kernel_named("hopper_decode_split")
    problem = replace(DECODE, seqlen_new=new)
    config, why = decide(problem, kernel, Config(num_splits, merge=merge))
    three = num_splits > 1 and merge == "combine"
    assert config.appends == (new <= 4 or three)
    assert config.appends or why.startswith(f"append runs before it: new keys {new}: more than 4")
    assert launches(config) == (1 if config.appends and not three else 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", [H200, A100], ids=str)
@pytest.mark.parametrize("place", [Contiguous(), Paged(16), Paged(64)], ids=str)
@pytest.mark.parametrize("batch", [1, 8])
def test_prompts_take_two_launches(policy: str, device: Any, place: Any, batch: int) -> None:
    """Keys in parts are merged where they are made, by whoever made them last."""
    merges = []
    for seqlen_q, seqlen_k, kv_heads in product((17, 64, 256), (4096, 32768), (1, 8)):
        sizes = {"batch": batch, "num_heads": 8 * kv_heads, "num_kv_heads": kv_heads}
        sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "seqlen_new": seqlen_q}
        problem = replace(DECODE, place=place, **sizes)
        packed = replace(problem, kind="varlen", place=Paged(64), seqlen_new=0, rotary=False)
        for asked in (problem, packed):
            plan = splitkv.plan(asked, device=device, policy=policy)
            assert launches(plan.config) == 2, asked
            merges.append(plan.config.merge)
    assert "last" in merges or policy not in BY_TIME


def test_explain_says_who_writes_them() -> None:
    told = str(splitkv.explain(DECODE, device=H200))
    assert "1 new key, rotary" in told
    assert "new tokens         written by the kernel" in told
    prompt = replace(DECODE, seqlen_q=100, seqlen_new=100)
    told = str(splitkv.explain(prompt, device=H200))
    assert "new tokens         append runs before" in told
    assert "merged by the programs that come last" in told
    alone = replace(DECODE, seqlen_new=0, rotary=False)
    assert "new tokens" not in str(splitkv.explain(alone, device=H200))


def test_metadata_leaves_it_to_the_call() -> None:
    """Nobody says beforehand whether there is a rotation, or scales a token."""
    lengths = torch.zeros(2, dtype=torch.int32)
    made = get_scheduler_metadata(2, 1, 4096, 8, 2, 128, lengths, causal=True)
    on_gpu = splitkv.plan(replace(made.problem, seqlen_k=4096), device=H200)
    call = fitted(on_gpu, DECODE)
    assert call.config.appends and call.problem.rotary
    in_one = replace(on_gpu, config=replace(on_gpu.config, num_splits=1, merge="combine"))
    many = fitted(in_one, replace(DECODE, seqlen_new=100))
    assert not many.config.appends
    assert not fitted(call, replace(DECODE, seqlen_new=0, rotary=False)).config.appends


# --- the call ----------------------------------------------------------------------------------


def problem_of(**changes: Any) -> Problem:
    shape = ("decode", 3, 4, 2, 32, 48, 2, 70)
    return Problem(*shape, dtype="float32", mask=Mask(causal=True), lengths="device", **changes)


def arguments(made: Step) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "cache_seqlens")
    return {name: x for name, x in made.call.items() if name not in names}


def caches(call: dict[str, Any]) -> list[Tensor]:
    return [call[name].nan_to_num(9) for name in ("k_cache", "v_cache")]


VALUES = [v for v in cases.pairs(AXES, valid) if not v["leftpad"]]


@pytest.mark.parametrize("values", VALUES, ids=lambda v: v["new"])
@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_without_a_kernel_that_can_it_is_two_calls(values: cases.Values, place: Any) -> None:
    made = step(problem_of(place=place), values)
    alone, call, _ = separately(made)
    q, after = append_in_torch(alone)
    call |= {"q": call["q"] if q is None else q, "cache_seqlens": after}
    wanted = splitkv.decode(**call)
    q, k, v = (made.call[name] for name in ("q", "k_cache", "v_cache"))
    out, lse = append_and_decode(made.new, q, k, v, **arguments(made))
    assert torch.equal(out, wanted) and lse is None
    assert all(map(torch.equal, caches(made.call), caches(call)))


class Appending:
    """A kernel's launcher, which keeps what it is given and attends to nothing."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.plan, self.bound_to = plan, operands
        self.calls: list[Operands] = []

    def __call__(self, operands: Operands) -> tuple[Tensor, None]:
        self.calls.append(operands)
        return operands.q.new_empty(self.bound_to.q.shape), None


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Appending]]:
    """Every plan says that its kernel appends; the launchers that were bound."""
    made: list[Appending] = []

    class Kernel:
        def bind(self, plan: Plan, operands: Operands) -> Appending:
            made.append(Appending(plan, operands))
            return made[-1]

    def plan_for(problem: Problem, operands: Operands, *rest: Any) -> Plan:
        return Plan(problem, H200, "test", "a_kernel", Config(appends=True), "")

    monkeypatch.setattr(append_decode, "plan_for", plan_for)
    monkeypatch.setattr(append_decode, "kernel_named", lambda name: Kernel())
    monkeypatch.setattr(append_decode, "calls", CallCache())
    yield made


PLAIN: cases.Values = {name: options[0] for name, options in AXES.items()}
TURNED = PLAIN | {"rotary": "halves", "rotary_dim": 32, "start": True}


def test_a_call_is_bound_once(bound: list[Appending]) -> None:
    made = step(problem_of(), TURNED)
    tensors = tuple(made.call[name] for name in ("q", "k_cache", "v_cache"))
    for _ in range(3):
        append_and_decode(made.new, *tensors, **arguments(made))
    (launcher,) = bound
    assert launcher.plan.problem == made.problem
    assert len(launcher.calls) == 3
    given = launcher.calls[-1]
    assert given.new is made.new and given.cache_seqlens is made.new.before
    assert (given.q, given.k, given.v) == tensors


def without_rotation(call: Append) -> Append:
    return call._replace(rotary=None, q=None)


def with_rotary(**changes: Any) -> Any:
    def change(call: Append) -> Append:
        assert isinstance(call.rotary, Rotary)
        return call._replace(rotary=call.rotary._replace(**changes))

    return change


CHANGES = {
    "no_rotation": without_rotation,
    "pairs": with_rotary(interleaved=True),
    "queries": with_rotary(q_step=0),
    "no_start": with_rotary(start=None),
    "padding": lambda call: call._replace(leftpad=torch.zeros_like(call.before)),
    "strides": lambda call: call._replace(k=call.k.repeat(1, 1, 2, 1)[:, :, ::2]),
    "tokens": lambda call: call._replace(k=call.k.repeat(1, 2, 1, 1), v=call.v.repeat(1, 2, 1, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_call_is_bound_anew(name: str, bound: list[Appending]) -> None:
    made = step(problem_of(), TURNED)
    tensors = tuple(made.call[n] for n in ("q", "k_cache", "v_cache"))
    append_and_decode(made.new, *tensors, **arguments(made))
    append_and_decode(CHANGES[name](made.new), *tensors, **arguments(made))
    assert len(bound) == 2 and [len(x.calls) for x in bound] == [1, 1]


def test_options_of_decode_are_bound_anew(bound: list[Appending]) -> None:
    made = step(problem_of(), TURNED)
    tensors = tuple(made.call[n] for n in ("q", "k_cache", "v_cache"))
    for changes in ({}, {"causal": False}, {"softcap": 2.0}, {"num_splits": 3}):
        append_and_decode(made.new, *tensors, **arguments(made) | changes)
    assert [len(x.calls) for x in bound] == [1] * 4


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [("causal", True, 1), ("window_size", (1, -1), (True, -1)), ("softcap", 0.0, False)],
)
def test_equal_options_of_another_type_are_checked(
    name: str, good: Any, wrong: Any, bound: list[Appending]
) -> None:
    made = step(problem_of(), TURNED)
    tensors = tuple(made.call[n] for n in ("q", "k_cache", "v_cache"))
    append_and_decode(made.new, *tensors, **arguments(made) | {name: good})
    with pytest.raises(ValueError, match=f"{name}.*: expected"):
        append_and_decode(made.new, *tensors, **arguments(made) | {name: wrong})


def test_what_is_decided_of_the_whole_call_holds_for_decode_after_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of a prompt are merged where they are made, though decode by itself has a `combine`."""
    prompt = replace(problem_of(), seqlen_q=20, seqlen_k=70, mask=Mask(causal=True))
    planned = replace(DECODE, batch=1, seqlen_q=20, seqlen_k=32768, seqlen_new=20)
    on_gpu = splitkv.plan(planned, device=H200)
    assert on_gpu.config.merge == "last"
    asked: list[Problem] = []

    def plan_for(problem: Problem, *rest: Any) -> Plan:
        asked.append(problem)
        return replace(on_gpu, problem=problem)

    given: list[Appending] = []

    def bind(problem: Problem, operands: Operands, plan: Plan) -> Appending:
        assert plan.problem == problem
        given.append(Appending(plan, operands))
        return given[-1]

    monkeypatch.setattr(append_decode, "calls", CallCache())
    monkeypatch.setattr(append_decode, "plan_for", plan_for)
    monkeypatch.setattr(append_decode, "bind", bind)
    made = step(prompt, {**PLAIN, "new": "several"})
    q, k, v = (made.call[name] for name in ("q", "k_cache", "v_cache"))
    append_and_decode(made.new, q, k, v, num_splits=3, **arguments(made))
    (launcher,), (operands,) = given, given[0].calls
    assert asked[0].appends and not launcher.plan.problem.appends
    assert launcher.plan.config == on_gpu.config
    assert made.new.before is not None and operands.new is None
    assert torch.equal(operands.cache_seqlens, made.new.before + 6)


# --- a call again ------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("values", VALUES[:6], ids=lambda v: v["new"])
def test_a_call_again(gpu: Any, merged: bool, values: cases.Values) -> None:
    """The addresses of what is new follow those of decode; `combine` has what lengths grow by."""
    new = step(problem_of(), values).new
    launched, given = Launched(), tensors() | {"lens": torch.zeros(2)}
    repeat_of(launched, merged=merged).call(*given.values(), 0.5, 0.0, new)
    split, *merges = launched.calls
    growth = at(new.cu_seqlens_new), at(new.leftpad)
    turn = (None, None, None) if new.rotary is None else tuple(map(at, new.rotary[:3]))
    to = at(given["k"]), at(given["v"])
    assert split[11:] == (growth, (at(new.k), at(new.v), *to, None, None), turn)
    assert [merge[5:] for merge in merges] == ([(growth,)] if merged else [])


@pytest.mark.parametrize("name", ["k", "v", "leftpad", "cu_seqlens_new", "k_scale"])
def test_a_new_address_off_by_a_few_bytes_is_another_kernel(gpu: Any, name: str) -> None:
    launched, given = Launched(), tensors()
    new = step(problem_of(), PLAIN).new._replace(**{name: torch.zeros(1000)[1:]})
    assert repeat_of(launched).call(*given.values(), 0.5, 0.0, new) is None
    assert launched.calls == []

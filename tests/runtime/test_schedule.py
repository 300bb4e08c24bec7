"""`make_schedule` and decode with a schedule, without a GPU: checks, launches, operators."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import splitkv
from splitkv.core.device import CPU, GPUS
from splitkv.core.errors import UnsupportedProblem
from splitkv.core.kv import Codec
from splitkv.core.options import options_of
from splitkv.core.plan import SCHEDULED, Plain, Plan
from splitkv.flash_attn import scheduler
from splitkv.kernels.host import workspace
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.kernels.host.step import CallResults, StepLaunches, StepRepeat, step_partial_rows
from splitkv.kernels.schedule import ScheduleLauncher, buffer_shape
from splitkv.planner import registry
from splitkv.planner.policies import persistent
from splitkv.runtime import append_decode, dispatch
from splitkv.runtime import schedule as schedules
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import Mask, Paged, Problem, make_operands

DECODE = Problem("decode", 2, 8, 2, 64, 64, 1, 256, mask=Mask(causal=True), lengths="device")
LENGTHS = torch.tensor([256, 3], dtype=torch.int32)


def plan_of(schedule: Any = "ranges", problem: Problem = DECODE) -> Plan:
    policy = persistent.with_schedule(schedule)
    return registry.make_plan(problem, GPUS["h200"], policy=policy)


def on_cpu(plan: Plan) -> Plan:
    """The plan as if it were for the device that tests have."""
    return replace(plan, device=CPU)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What schedules are made of, in order: nothing is launched."""
    found: list[tuple[Any, Any]] = []

    def launch(self: Any, starts: Any, lens: Any) -> None:
        found.append((starts.fill_(7), lens))

    monkeypatch.setattr(ScheduleLauncher, "__call__", launch)
    monkeypatch.setattr(schedules, "_launchers", {})
    return found


# --- make_schedule -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_a_schedule_has_a_start_for_every_program(schedule: str, launched: list[Any]) -> None:
    plan = on_cpu(plan_of(schedule))
    made = splitkv.make_schedule(plan, LENGTHS)
    assert made.plan is plan and made.starts.shape == (plan.config.programs, 8)
    assert made.starts.dtype == torch.int32 and launched[0][1] is LENGTHS
    again = splitkv.make_schedule(plan, LENGTHS, out=made)
    assert again is made and launched[1][0] is made.starts


def test_each_device_has_a_launcher_of_its_own(launched: list[Any]) -> None:
    """One plan serves GPUs of a kind; a kernel is loaded on one of them."""
    plan = on_cpu(plan_of())
    for lengths in (LENGTHS, LENGTHS.to("meta"), LENGTHS):
        splitkv.make_schedule(plan, lengths)
    assert len(launched) == 3 and len(set(schedules._launchers.values())) == 2


BAD = {
    "plan": ({"plan": None}, "plan: expected a splitkv.Plan"),
    "schedule": (
        {"plan": on_cpu(replace(plan_of(), config=replace(plan_of().config, schedule="even")))},
        "plan.config.schedule: expected",
    ),
    "device": ({"plan": plan_of()}, "plan: expected one for cpu"),
    "batch": ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, "cache_seqlens: expected"),
    "dtype": ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens: expected"),
    "gaps": ({"cache_seqlens": torch.zeros(4, dtype=torch.int32)[::2]}, "cache_seqlens: expected"),
    "out": ({"out": splitkv.Schedule(plan_of(), LENGTHS)}, "out: expected a Schedule of this plan"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_refused(name: str, launched: list[Any]) -> None:
    changed, said = BAD[name]
    given = {"plan": on_cpu(plan_of()), "cache_seqlens": LENGTHS} | changed
    with pytest.raises(ValueError, match=f"^{said}"):
        splitkv.make_schedule(given.pop("plan"), given.pop("cache_seqlens"), **given)
    assert launched == []


def test_the_operator_under_fake_tensors(launched: list[Any]) -> None:
    plan = on_cpu(plan_of())
    with FakeTensorMode() as mode:
        made = splitkv.make_schedule(plan, mode.from_tensor(LENGTHS))
    assert made.starts.shape == buffer_shape(plan) and launched == []


def test_the_operator_is_registered_right(launched: list[Any]) -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = LENGTHS, on_cpu(plan_of()).handle
    torch.library.opcheck(schedules.schedule_op, given, test_utils=checks)


def test_a_plan_s_second_schedule_is_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With addresses; where one is off by a few bytes, through Triton."""
    launches, direct = Launches(), torch.zeros(8, dtype=torch.int32)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    launcher = ScheduleLauncher(plan_of())
    launcher.kernel = SimpleNamespace(  # type: ignore[assignment]
        launch=lambda starts, lens: launches.record("triton")(starts, lens) or "compiled",
        relaunch=lambda compiled: launches.record(compiled),
    )
    starts = torch.zeros(buffer_shape(plan_of()), dtype=torch.int32)
    for lens in (LENGTHS, LENGTHS, direct[1:3], direct[:2]):
        launcher(starts, lens)
    assert [call[0] for call in launches.calls] == ["triton", "compiled", "triton", "compiled"]
    assert launches.calls[1][1:] == (5, starts.data_ptr(), LENGTHS.data_ptr())


# --- decode ------------------------------------------------------------------------------------


class Recording:
    """A launcher that keeps what it is called with."""

    def __init__(self, plan: Plan, operands: Any) -> None:
        self.plan, self.slow, self.fast = plan, [], []  # type: ignore[var-annotated]
        self.bound_to = operands.starts
        self.repeat: Any = None
        LAUNCHERS.append(self)

    def __call__(self, operands: Any) -> Any:
        self.slow.append(operands)
        self.repeat = self.call
        return operands.q.clone(), None

    def call(self, *args: Any, **more: Any) -> Any:
        self.fast.append((args, more))
        return args[0].clone(), None


LAUNCHERS: list[Recording] = []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> Iterator[list[Recording]]:
    kernel = registry.kernel_named("decode_split")
    kernel = replace(kernel, unsupported=lambda problem, device: [], bind=Recording)
    monkeypatch.setattr(registry, "KERNELS", (kernel,))
    monkeypatch.setattr(dispatch, "calls", CallCache())
    LAUNCHERS.clear()
    yield LAUNCHERS


def call_and_plan() -> tuple[dict[str, Any], Plan]:
    call = make_operands(DECODE, poison=False, lengths=(256, 3))
    config = replace(plan_of().config, tile_m=16, tile_n=64, num_warps=4, num_stages=2)
    config = replace(config, variant=Plain())
    problem = dispatch.describe(
        call["q"],
        call["k_cache"],
        call["v_cache"],
        cache_seqlens=call["cache_seqlens"],
        max_seqlen_k=256,
    )
    return call, Plan(problem, CPU, "fixed", "decode_split", config, "a test")


def test_a_call_is_given_where_programs_start(
    recorded: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "fit_plan", lambda plan, problem, device: plan)
    call, plan = call_and_plan()
    made = splitkv.make_schedule(plan, call["cache_seqlens"])
    assert torch.equal(splitkv.decode(**call, schedule=made), call["q"])
    (launcher,) = recorded
    assert launcher.plan is plan and launcher.slow[0].starts is made.starts
    assert launcher.bound_to is made.starts, "kernels are others where none is given"
    splitkv.decode(**call, schedule=made)
    other = splitkv.make_schedule(plan, call["cache_seqlens"])
    splitkv.decode(**call, schedule=other, plan=plan)
    assert [more["starts"] for _, more in launcher.fast] == [made.starts, other.starts]
    splitkv.decode(**call, plan=plan)
    assert len(recorded) == 2 and recorded[1].slow[0].starts is recorded[1].bound_to is None


def test_under_torch_compile(
    recorded: list[Recording], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph of the schedule and the layers, by the operators."""
    monkeypatch.setattr(dispatch, "fit_plan", lambda plan, problem, device: plan)
    call, plan = call_and_plan()
    lens, q = call.pop("cache_seqlens"), call.pop("q")

    def step(q: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        made = splitkv.make_schedule(plan, lens)
        out = splitkv.decode(q, cache_seqlens=lens, schedule=made, **call)
        return splitkv.decode(out, cache_seqlens=lens, schedule=made, **call)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, lens), q)
    (launcher,) = recorded
    assert launcher.plan == plan and len(launched) == 1
    starts = [operands.starts for operands in launcher.slow]
    starts += [more["starts"] for _, more in launcher.fast]
    assert len(starts) == 2
    assert all((x == 7).all() and x.shape == buffer_shape(plan) for x in starts)


@pytest.fixture
def appending(
    recorded: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> tuple[Append, dict[str, Any], splitkv.Schedule]:
    """What a call appends, its other arguments, and a schedule of the lengths after it."""
    fit = lambda plan, problem, device: replace(plan, problem=problem)  # noqa: E731
    monkeypatch.setattr(dispatch, "fit_plan", fit)
    monkeypatch.setattr(append_decode, "calls", CallCache())
    call, plan = call_and_plan()
    lens = call.pop("cache_seqlens")
    k, v = (torch.randn(2, 1, 2, 64).bfloat16() for _ in range(2))
    new = Append(k, v, call["k_cache"], call["v_cache"], lens - 1, page_table=call["page_table"])
    schedule = splitkv.make_schedule(plan, lens)
    return new, {n: x for n, x in call.items() if n in WITH_APPEND or n in CACHES}, schedule


WITH_APPEND, CACHES = options_of("append_and_decode"), ("q", "k_cache", "v_cache")


def test_new_tokens_are_appended_before_programs_follow_a_schedule(
    recorded: list[Recording], appending: tuple[Append, dict[str, Any], splitkv.Schedule]
) -> None:
    new, call, made = appending
    other = replace(made, starts=made.starts.clone())
    for schedule in (made, other):
        assert new.before is not None
        new.k_cache[:, 2].zero_()
        out, lse = append_decode.append_and_decode(new, **call, schedule=schedule)
        assert torch.equal(out, call["q"]) and lse is None
        assert torch.equal(new.k_cache[1, 2], new.k[1, 0])
    (launcher,) = recorded
    assert not launcher.plan.problem.appends and launcher.plan.config == made.plan.config
    assert launcher.bound_to is made.starts
    for operands, schedule in zip(launcher.slow, (made, other), strict=True):
        assert operands.starts is schedule.starts and operands.new is None
        assert operands.cache_seqlens.tolist() == [256, 3]
    append_decode.append_and_decode(new, **call, plan=made.plan)
    assert len(recorded) == 2 and recorded[1].slow[0].starts is None


def test_new_tokens_under_torch_compile(
    recorded: list[Recording], appending: tuple[Append, dict[str, Any], splitkv.Schedule]
) -> None:
    """One operator, which is given where programs start."""
    new, call, made = appending
    plan, found = made.plan, list[str]()

    def step(q: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        schedule = splitkv.make_schedule(plan, before + 1)
        arguments = call | {"q": q, "schedule": schedule}
        return append_decode.append_and_decode(new._replace(before=before), **arguments)[0]

    def look(graph: Any, inputs: Any) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.extend(target for target in targets if target.startswith("splitkv"))
        return graph

    torch.compiler.reset()
    assert new.before is not None
    compiled = torch.compile(step, backend=look, fullgraph=True)
    assert torch.equal(compiled(call["q"], new.before), call["q"])
    assert found == ["splitkv.make_schedule.default", "splitkv.append_decode.default"]
    (launcher,) = recorded
    (operands,) = launcher.slow
    assert (operands.starts == 7).all() and operands.cache_seqlens.tolist() == [256, 3]


def test_a_schedule_of_another_plan_is_refused(recorded: list[Recording]) -> None:
    call, plan = call_and_plan()
    made = splitkv.make_schedule(plan, call["cache_seqlens"])
    with pytest.raises(ValueError, match="^schedule: expected one that was made for the plan"):
        splitkv.decode(**call, schedule=made, plan=replace(plan, why="another"))
    with pytest.raises(ValueError, match=r"^schedule: expected a splitkv\.Schedule"):
        splitkv.decode(**call, schedule=plan)
    other = replace(plan, problem=replace(plan.problem, batch=3))
    of_other = splitkv.make_schedule(other, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="^plan: expected one for"):
        splitkv.decode(**call, schedule=of_other)
    with pytest.raises(ValueError, match="^num_splits: expected 0 with a plan"):
        splitkv.decode(**call, schedule=made, num_splits=2)
    assert recorded == []


# --- a call again ------------------------------------------------------------------------------


class Launches:
    """The launches of a call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def record(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of a GPU as a repeated call asks for: a stream, whether it is captured, memory."""
    state = SimpleNamespace(stream=5, captured=False)
    functions = {
        "_cuda_getCurrentRawStream": lambda device: state.stream,
        "_cuda_isCurrentStreamCapturing": lambda: state.captured,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)

    def make_buffer(device: int, numel: int, captured: bool = False) -> workspace.Buffer:
        memory = torch.zeros(numel if captured else 1 << (numel - 1).bit_length())
        return memory.data_ptr(), memory.numel(), memory

    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    monkeypatch.setattr(workspace, "make_buffer", make_buffer)
    monkeypatch.setattr(workspace, "_buffers", {})
    return state


def repeat_of(launches: Launches, plan: Plan) -> StepRepeat:
    two = StepLaunches(launches.record("split"), launches.record("merge"))
    results = CallResults(torch.device("cuda", 0), torch.bfloat16, (2, 1, 8, 64), (2, 8, 1))
    return StepRepeat(two, plan, results, step_partial_rows(plan))


def tensors() -> list[Any]:
    """q, k, v, out, lens, table, sink, slopes, scales."""
    q, k, v = torch.zeros(2, 1, 8, 64), torch.zeros(2, 9, 2, 64), torch.zeros(2, 9, 2, 64)
    return [q, k, v, None, torch.zeros(2, dtype=torch.int32), *[None] * 6]


def test_a_call_that_is_given_no_schedule_makes_none(gpu: SimpleNamespace) -> None:
    """Programs find their shares from the lengths, and `combine_slots` does."""
    launches, plan, given = Launches(), plan_of(), tensors()
    out, lse = repeat_of(launches, plan).call(*given, 0.5, 0.0)  # type: ignore[misc]
    assert out.shape == (2, 1, 8, 64) and lse.shape == (2, 8, 1)  # type: ignore[union-attr]
    split, merge = launches.calls
    lens = given[4].data_ptr()
    assert split[:5] == ("split", 5, given[0].data_ptr(), split[3], lens) and split[12] is None
    assert split[6] == merge[2] and merge[4:] == (None, lens, None)
    (first, numel, _), (acc, _, l) = workspace.buffers(0)[5], split[6]
    assert acc == first and l + 4 * step_partial_rows(plan) <= first + 4 * numel


def test_a_call_that_is_given_a_schedule_reads_it(gpu: SimpleNamespace) -> None:
    launches, plan = Launches(), plan_of()
    starts = torch.zeros(buffer_shape(plan), dtype=torch.int32)
    repeat_of(launches, plan).call(*tensors(), 0.5, 3.0, starts=starts)
    split, merge = launches.calls
    assert split[10:] == (0.5 / 3.0, 3.0, starts.data_ptr()) and merge[4] == starts.data_ptr()


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_that_appends_says_where_new_tokens_are(gpu: SimpleNamespace, packed: bool) -> None:
    """Behind the schedule; `combine_slots` has what lengths grow by."""
    launches, plan, given = Launches(), plan_of(), tensors()
    k, v, table = torch.zeros(2, 1, 2, 64), torch.zeros(2, 1, 2, 64), torch.zeros(300, 32)
    ends = torch.zeros(3, dtype=torch.int32) if packed else None
    rotary = Rotary(table, table.clone(), torch.zeros(2, dtype=torch.int32))
    new = Append(k, v, *given[1:3], given[4], cu_seqlens_new=ends, q=given[0], rotary=rotary)
    starts = torch.zeros(buffer_shape(plan), dtype=torch.int32)
    done = repeat_of(launches, plan).call(*given, 0.5, 0.0, new, starts=starts)
    assert done is not None
    split, merge = launches.calls
    growth = None if ends is None else ends.data_ptr(), None
    k_new, v_new, cos, sin, start = (x.data_ptr() for x in (k, v, *rotary[:3]))  # type: ignore[union-attr]
    caches = given[1].data_ptr(), given[2].data_ptr()
    of_new = (k_new, v_new, *caches, None, None)
    assert split[12:] == (starts.data_ptr(), growth, of_new, (cos, sin, start))
    assert merge[4:] == (starts.data_ptr(), given[4].data_ptr(), None, growth)
    moved = new._replace(k=torch.zeros(257)[1:].view(2, 1, 2, 64))
    assert repeat_of(launches, plan).call(*given, 0.5, 0.0, moved, starts=starts) is None


@pytest.mark.parametrize("index", [0, 4])
def test_an_address_off_by_a_few_bytes_is_another_kernel(gpu: SimpleNamespace, index: int) -> None:
    launches, given = Launches(), tensors()
    given[index] = torch.zeros(64, dtype=torch.int32)[1:3]
    repeat = repeat_of(launches, plan_of())
    assert repeat.call(*given, 0.5, 0.0) is None and launches.calls == []


def test_a_graph_has_memory_of_its_own(gpu: SimpleNamespace) -> None:
    launches = Launches()
    repeat = repeat_of(launches, plan_of())
    call = functools.partial(repeat.call, *tensors(), 0.5, 0.0)
    call()
    gpu.captured = True
    call()
    gpu.captured = False
    call()
    places = [merge[2] for merge in launches.calls[1::2]]
    assert places[0] == places[2] != places[1]


# --- the policy --------------------------------------------------------------------------------


def test_the_policy_says_why_not() -> None:
    for changed in ({"lengths": "host"}, {"early_kv": True}, {"kind": "dense", "lengths": "host"}):
        with pytest.raises(UnsupportedProblem, match="expected"):
            plan_of(problem=replace(DECODE, **changed))


def test_programs_of_the_policy() -> None:
    problem = replace(DECODE, num_heads=64, num_kv_heads=8)
    assert plan_of("ranges", problem).config.programs == 132
    assert plan_of("head_ranges", problem).config.programs == 132 // 8
    assert plan_of("proportional", problem).config.programs == 2 + 2 * (132 // 8)
    wide = replace(DECODE, num_heads=128)  # 64 rows: the kernel for Hopper has no narrow tile
    assert plan_of("ranges", wide).kernel == "decode_split"


# --- scheduler metadata ------------------------------------------------------------------------


KEYS = 1 << 16  # a bound, with which a schedule may be worth what it costs


def test_metadata_is_a_schedule_where_programs_follow_one(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no policy is named it is a Plan of `balanced`, whose calls find their shares: one made
    once serves all steps."""
    sizes, padding = (2, 1, KEYS, 8, 2, 64), torch.tensor([1, 2], dtype=torch.int32)
    monkeypatch.setattr(scheduler, "device_of", lambda x: GPUS["h200"])
    monkeypatch.setattr(schedules, "device_of", lambda x: GPUS["h200"])
    small = scheduler.get_scheduler_metadata(*sizes, LENGTHS, causal=True)
    assert isinstance(small, Plan) and small.policy == "balanced"
    assert small.config.schedule in SCHEDULED
    policy = persistent.with_schedule()
    large = scheduler.get_scheduler_metadata(*(2, 1, 1 << 22, 8, 2, 64), LENGTHS, causal=True)
    assert isinstance(large, Plan) and large.config.schedule == "head_ranges"
    in_e4m3 = replace(large.problem, codec=Codec("fp8", "tensor"))
    balanced = registry.make_plan(in_e4m3, GPUS["h200"], policy="balanced")
    assert scheduler.fitted(large, in_e4m3).config == balanced.config != large.config
    own = scheduler.get_scheduler_metadata(*sizes, LENGTHS, causal=True, policy=policy)
    assert isinstance(own, splitkv.Schedule)
    in_e4m3 = replace(own.plan.problem, codec=Codec("fp8", "tensor"))
    assert scheduler.fitted(own.plan, in_e4m3).config == own.plan.config
    launched.clear()
    appending = scheduler.fitted(large, replace(large.problem, seqlen_new=1, rotary=True))
    assert appending.config == replace(large.config, appends=True) and appending.problem.appends
    named = scheduler.get_scheduler_metadata(*sizes, LENGTHS, causal=True, policy="balanced")
    assert isinstance(named, splitkv.Schedule) and launched.pop()[1] is LENGTHS
    made = scheduler.get_scheduler_metadata(
        *sizes,
        LENGTHS,
        cache_leftpad=padding,
        page_size=16,
        causal=True,
        policy=policy,
        sm_margin=4,
    )
    assert isinstance(made, splitkv.Schedule) and made.plan.config.programs == 128
    assert launched[0][1].tolist() == [255, 1]
    of_call = replace(made.plan.problem, return_lse=True, sink_logits=True)
    fitted = scheduler.fitted_schedule(made, of_call)
    assert fitted.starts is made.starts and fitted.plan.problem == of_call
    assert fitted.plan.config == made.plan.config


def test_metadata_is_of_the_keys_with_new_ones(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As decode reads them: without padding, and with as many new ones as each sequence has."""
    monkeypatch.setattr(scheduler, "device_of", lambda x: GPUS["h200"])
    monkeypatch.setattr(schedules, "device_of", lambda x: GPUS["h200"])
    sizes, padding = (2, 1, KEYS, 8, 2, 64), torch.tensor([1, 2], dtype=torch.int32)
    ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    how = {"causal": True, "policy": "balanced"}
    for given, keys in (
        ({"max_seqlen_k_new": 2}, [258, 5]),
        ({"max_seqlen_k_new": 3, "cu_seqlens_k_new": ends}, [259, 4]),
        ({"max_seqlen_k_new": 2, "cache_leftpad": padding}, [257, 3]),
    ):
        made = scheduler.get_scheduler_metadata(*sizes, LENGTHS, **given, **how)  # type: ignore[arg-type]
        assert isinstance(made, splitkv.Schedule)
        lens = launched.pop()[1]
        assert lens.tolist() == keys and lens.dtype == torch.int32
        assert made.plan.problem.seqlen_new == given["max_seqlen_k_new"]
        assert made.plan.problem.seqlen_k == KEYS + given["max_seqlen_k_new"]


@pytest.mark.parametrize(
    ("made_for", "new", "packed", "fits"),
    [
        *((2, 2, False, True), (2, 1, False, False), (0, 1, False, False), (2, 0, False, False)),
        *((3, 2, True, True), (3, 0, True, False), (2, 3, True, False), (0, 0, True, True)),
    ],
)
def test_metadata_is_for_as_many_new_tokens(
    made_for: int, new: int, packed: bool, fits: bool
) -> None:
    """Of packed ones the average, rounded up, is known of a call, and their bound of a schedule."""
    problem = replace(DECODE, seqlen_new=made_for)
    made = splitkv.Schedule(plan_of(problem=problem), LENGTHS)
    asked = replace(DECODE, seqlen_new=new, rotary=True)
    if fits:
        fitted = scheduler.fitted_schedule(made, asked, packed)
        assert fitted.plan.problem == asked
        assert fitted.plan.config == replace(made.plan.config, appends=True)
        return
    said = (
        f"^scheduler_metadata: expected one for {new} new keys .* got 'one for {made_for}'; say max"
    )
    with pytest.raises(ValueError, match=said):
        scheduler.fitted_schedule(made, asked, packed)


@pytest.mark.parametrize(
    "changed", [{"seqlen_new": 1}, {"codec": Codec("int8", "head"), "place": Paged(7)}], ids=str
)
def test_metadata_that_is_not_for_a_call(changed: dict[str, Any]) -> None:
    """New tokens make other lengths; pages of 7 keys another kernel."""
    made = splitkv.Schedule(plan_of(), LENGTHS)
    with pytest.raises(ValueError, match="^scheduler_metadata: expected"):
        scheduler.fitted_schedule(made, replace(DECODE, **changed))

"""The search for policies without a GPU: the sandbox, the grammar, islands, resuming, distilling.

The timer is fake: plans take what the cost model says, but one tile is twice as fast.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ending import ending
from rich.console import Console
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core import device
from splitkv.core.device import GPUS
from splitkv.core.plan import Config
from splitkv.core.variants import Plain
from splitkv.kernels import records as kernel_records
from splitkv.lab.evolve import candidate, guided, run, sandbox, search, setup, timers, workload
from splitkv.lab.evolve.candidate import Answer, Option, answer_of, ask, policy_of
from splitkv.lab.evolve.evaluate import Evaluation, Evaluator
from splitkv.lab.evolve.timers import Kept, Simulated
from splitkv.lab.evolve.workload import Workload, chat, shape, workload_named
from splitkv.lab.harness import timing
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.lines import Lines
from splitkv.lab.reproduce import model
from splitkv.lab.reproduce.model import Rest
from splitkv.lab.tune import studies
from splitkv.planner import registry
from splitkv.planner.legality import is_legal
from splitkv.planner.policies import tuned_tables
from splitkv.planner.registry import make_plan

grammar = pytest.importorskip("splitkv.lab.evolve.grammar")
from splitkv.lab.evolve.distil import distil, smaller_ones  # noqa: E402
from splitkv.lab.evolve.search import STARTS, Search, Settings, by_length  # noqa: E402

H200 = GPUS["h200"]
SMALL = Workload("small", (shape(seqlen_k=256), shape(seqlen_k=512)), (shape(seqlen_k=4096),))
HEAD = f"def policy({', '.join(sandbox.ARGUMENTS)}):\n"
RULE = (
    HEAD + "    if seqlen_k > 512:\n        return None\n    return seqlen_k // 64, True, 0, None\n"
)

WRITTEN = (
    grammar.HELPER
    + HEAD
    + """    if not (seqlen_k < 513):
        return None
    num_splits = max(1, min(ceil_div(seqlen_k, 64), 1024))
    pack_gqa = True
    sm_margin = 0
    tile = (64, 4, 3)
    return num_splits, pack_gqa, sm_margin, tile
"""
)


class FakeTimer(Simulated):
    """The cost model; up to 512 keys, tiles of 64 keys in 3 stages take half of what it says."""

    broken: str = ""

    def times(self, case: Case, options: Sequence[Option], rounds: int) -> dict[str, Any]:
        self.asked = getattr(self, "asked", 0) + len(options)
        found: dict[str, Any] = dict(super().times(case, options, rounds))
        for option in options:
            assert option.plan is not None
            config = option.plan.config
            if (config.tile_n, config.num_stages) == (64, 3) and case.problem.seqlen_k <= 512:
                found[option.label] *= 0.5
            if self.broken and self.broken in option.label:
                found[option.label] = "AssertionError: out: expected an error of 0.1"
        return found


def evaluator(lines: Lines | None = None, work: Workload = SMALL) -> Evaluator:
    kept = Kept(FakeTimer(H200), lines or Lines(None), {"gpu": H200.name})
    return Evaluator(work, kept, 5)


def evaluated(source: str, judge: Evaluator | None = None) -> Evaluation:
    judge = judge or evaluator()
    try:
        return judge.evaluate(*judge.options(source))
    except ValueError as error:
        return Evaluation(reason=str(error))


def slots(judge: Evaluator) -> Any:
    timer = judge.kept.timer
    assert isinstance(timer, Simulated)
    return grammar.Slots(timer.tiles(judge.workload.counted)[:4])


# --- the sandbox -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    import os\n    return None", "line 2: import os: expected math"),
        ("    from os import path\n    return None", "line 2: import os: expected math"),
        ("    return (1).__class__", "line 2: attribute __class__: expected a public one"),
        ("    return __import__('os')", "line 2: name __import__: expected one without __"),
        ("    return '{}'.format(1)", "line 2: attribute format: expected a public one"),
        ("    while True: pass", "line 2: expected no while"),
        ("    try:\n        return None\n    except: pass", "line 2: expected no try"),
        ("    return f'{batch}'", "line 2: expected no an f-string"),
        ("    return (", "no Python: '(' was never closed"),
    ],
)
def test_what_a_policy_may_not_have(body: str, reason: str) -> None:
    found = sandbox.objections(HEAD + body + "\n")
    assert any(objection.startswith(reason) for objection in found), found
    with pytest.raises(ValueError, match=r".") as error:
        ask(HEAD + body + "\n", [SMALL.counted[0].problem], 132)
    assert reason.split(" (")[0] in str(error.value)


def test_a_policy_has_the_arguments_that_it_is_given() -> None:
    assert sandbox.objections("x = 1") == ["expected one function `policy`, got 0"]
    (found,) = sandbox.objections("def policy(a, b):\n    return None")
    assert found.startswith("policy(a, b): expected policy(batch, seqlen_q, seqlen_k, ")
    assert sandbox.objections("x = 1" * 20_000)[0].endswith("expected at most 20000")


def test_builtins_that_are_not_on_the_list_are_not_there() -> None:
    for name in ("open", "eval", "exec", "getattr", "print", "input", "globals"):
        with pytest.raises(ValueError, match=f"NameError: name '{name}' is not defined"):
            ask(HEAD + f"    return {name}('x')\n", [SMALL.counted[0].problem], 132)


def test_answers_come_from_a_process_of_their_own() -> None:
    source = HEAD + "    import math\n    return math.isqrt(seqlen_k), True, num_sms - 132, None\n"
    told = ask(source, [case.problem for case in SMALL.counted], 132)
    assert told.answers == [Answer(16, True, 0, None), Answer(22, True, 0, None)]
    assert 0 < told.us < candidate.SLOW_US
    paged = shape(seqlen_k=64, page_size=16, batch=3).problem
    seen = HEAD + "    return batch + page_size, True, 0, (seqlen_k, num_heads, head_dim)\n"
    assert ask(seen, [paged], 132).answers == [Answer(19, True, 0, (64, 8, 128))]


def test_slow_policies_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [SMALL.counted[0].problem]
    busy = HEAD + "    return sum(range(100000)) // 10**9 + 1, True, 0, None\n"
    with pytest.raises(ValueError, match=r"^slow to answer: \d+ us a call, expected 50$"):
        ask(busy, problems, 132)
    monkeypatch.setattr(candidate, "SECONDS", 1)
    forever = HEAD + "    return max(i for i in range(10**18)), True, 0, None\n"
    with pytest.raises(ValueError, match="^slow to answer: more than 1 s of processor time$"):
        ask(forever, problems, 132)
    huge = HEAD + "    return len(list(range(10**10))), True, 0, None\n"
    with pytest.raises(ValueError, match="^MemoryError"):
        ask(huge, problems, 132)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (7, r"policy: expected \(num_splits, pack_gqa, sm_margin, tile\) or None, got 7"),
        ([0, True, 0, None], "num_splits: expected 1 to 1024, got 0"),
        ([True, True, 0, None], "num_splits: expected an integer, got True"),
        ([1, 1, 0, None], "pack_gqa: expected a bool, got 1"),
        ([1, True, -1, None], "sm_margin: expected at least 0, got -1"),
        ([1, True, 0, [64]], r"tile: expected \(tile_n, num_warps, num_stages\) or None"),
    ],
)
def test_answers_are_checked(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        answer_of(returned)


# --- options -----------------------------------------------------------------------------------


def test_an_answer_is_a_plan_of_the_first_kernel_with_the_tile() -> None:
    timer, p = Simulated(H200), SMALL.counted[1].problem
    option = timer.option(Answer(5, True, 0, (64, 4, 3)), p)
    assert option.plan is not None and option.plan.kernel == "hopper_decode_split"
    assert replace(option.plan.config, variant=Plain()) == Config(5, 16, 64, 4, 3)
    most = timer.option(Answer(1000, True, 0, (64, 4, 3)), p).plan
    assert most is not None and most.config.num_splits == 8
    triton = timer.option(Answer(2, True, 0, (16, 2, 2)), p).plan
    assert triton is not None and triton.kernel == "decode_split"
    default = timer.option(None, p)
    made = make_plan(p, H200)
    assert default.plan is not None and default.plan.config == made.config
    for answer, reason in (
        (Answer(1, False, 0, (64, 4, 3)), "tile: expected "),
        (Answer(1, True, 2, None), "sm_margin: expected 0 on our kernels, got 2"),
        (Answer(1, True, 0, (65, 4, 3)), r"tile: expected \(64, 4, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}"):
            timer.option(answer, p)


def test_heads_apart_are_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cases = timers.Ours(H200), SMALL.counted
    together, apart = timer.tiles(cases), timer.tiles(cases, packed=False)
    for tile in apart:
        plan = timer.option(Answer(2, False, 0, tile), cases[0].problem).plan
        assert plan is not None and not plan.config.pack_gqa
        kernel = registry.kernel_named(plan.kernel)
        assert is_legal(kernel, plan.problem, H200, plan.config)
    made = grammar.Slots(together, apart)
    assert apart and made.types.keys() == {"applies", "num_splits", "tile", "pack_gqa"}
    source = WRITTEN.replace("pack_gqa = True", "pack_gqa = (seqlen_k < 100)")
    source = source.replace("(64, 4, 3)", str(apart[0]))
    policy = grammar.policy_of(source, made)
    assert "pack_gqa = seqlen_k < 100" in grammar.source_of(policy, "about")
    assert grammar.policy_of(grammar.source_of(policy, "about"), made) == policy
    text = guided.instructions(evaluator(), made)
    assert "or not, which only the tiles" in text and str(apart[0]) in text
    monkeypatch.setattr(registry, "KERNELS", (kernel_records.DECODE_SPLIT,))
    only_one = timers.Ours(H200)
    assert only_one.tiles(cases, packed=False) == []
    with pytest.raises(ValueError, match="^pack_gqa: expected True, as no kernel here has heads"):
        only_one.option(Answer(1, False, 0, None), cases[0].problem)


def test_flash_attention_3_takes_packing_and_a_margin() -> None:
    timer, p = timers.FlashAttention3(H200), SMALL.counted[0].problem
    way = timer.option(Answer(3, False, 8, None), p).way
    assert way is not None and way[1:4] == (3, False, 8)
    assert timer.option(None, p).label == "default"
    with pytest.raises(ValueError, match="^tile: expected None with FlashAttention-3"):
        timer.option(Answer(3, True, 0, (64, 4, 2)), p)
    assert grammar.Slots().types.keys() == {"applies", "num_splits", "pack_gqa", "sm_margin"}


def test_a_file_is_a_policy_of_plans(tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(RULE)
    choose = policy_of(path)
    plan = make_plan(SMALL.counted[1].problem, H200, policy=choose)
    assert plan.config.num_splits == 8 and plan.why == "rule.py: evolved: 8 splits"
    left = make_plan(SMALL.held_out[0].problem, H200, policy=choose)
    default = make_plan(SMALL.held_out[0].problem, H200)
    assert left.config == default.config and left.why.startswith("rule.py: left to the default; ")
    path.write_text("import os")
    with pytest.raises(ValueError, match=r"rule.py: expected a policy, got 'line 1: import os"):
        policy_of(path)
    said = CliRunner().invoke(app, ["regret", "--policy", str(tmp_path / "none.py")])
    assert said.exit_code == 2 and "policy: expected a file that is there" in said.output


class Session:
    """Captures nothing and takes as many microseconds as a plan has splits; of 3 there is none, and
    one of 4 is wrong after its rounds."""

    def __init__(self, case: Case, protocol: Any) -> None:
        pass

    def capture(self, variant: Any) -> tuple[int, dict[str, Any]]:
        splits = variant.decision["plan"].config.num_splits
        assert splits != 3, "out: expected an error of 0.1"
        return splits, {}

    def time(
        self, replays: dict[str, int], rounds: int
    ) -> tuple[dict[str, timing.Timing], dict[str, str]]:
        wrong = {
            name: "after its rounds: AssertionError: out" for name, n in replays.items() if n == 4
        }
        right = {name: n for name, n in replays.items() if name not in wrong}
        return {name: timing.Timing(float(us), 0.0) for name, us in right.items()}, wrong


def test_our_plans_are_captured_and_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "Session", Session)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer, case = timers.Ours(H200), SMALL.counted[1]
    options = [timer.option(Answer(n, True, 0, (64, 4, 3)), case.problem) for n in (2, 3, 4, 5)]
    two, three, four, five = (option.label for option in options)
    unstable, later = "AssertionError: out: expected an error of 0.1", "after its rounds: Asser"
    times = timer.times(case, options, 5)
    assert str(times.pop(four)).startswith(later)
    assert times == {two: 2.0, three: unstable, five: 5.0}
    assert timer.times(case, options[3:], 5) == {five: 5.0}
    kept = Kept(timer, Lines(None), {})
    default = kept.default(case).plan
    assert default is not None
    assert kept.ratios(case, options, 5)[two] == 2 / default.config.num_splits
    assert kept.ratios(case, options, 5)[three] == unstable
    timer.stop()
    assert not timer.contests


# --- figures -----------------------------------------------------------------------------------


def test_a_candidate_is_as_good_as_the_mean_of_its_ratios() -> None:
    found = evaluated(RULE)
    assert found.reason is None and found.ratio is not None and 0 < found.ratio < 1
    assert found.worst == 1.0 and found.case == SMALL.held_out[0].name
    assert evaluated(HEAD + "    return None\n").ratio == 1.0


def test_what_is_timed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    with Lines(path) as lines:
        first = evaluator(lines)
        once = evaluated(RULE, first)
        assert first.kept.taken == len(path.read_text().splitlines()) == 2
        evaluated(RULE, first)
        assert first.kept.taken == 2
    again = evaluator(Lines(path))
    assert evaluated(RULE, again).ratio == once.ratio and again.kept.taken == 0
    other = Evaluator(SMALL, Kept(FakeTimer(H200), Lines(path), {"gpu": "another"}), 5)
    evaluated(RULE, other)
    assert other.kept.taken == 2


def test_why_candidates_are_rejected() -> None:
    slow = HEAD + "    return 1, True, 0, None\n"
    assert evaluated(slow).reason is not None
    assert str(evaluated(slow).reason).startswith("regression: b1_h8x1_d128_q1_k4096: +")
    illegal = HEAD + "    return 1, True, 0, (seqlen_k, 4, 2)\n"
    reason = "invalid: b1_h8x1_d128_q1_k256: tile: expected (64, 4, 3)"
    assert str(evaluated(illegal).reason).startswith(reason)
    judge = evaluator()
    FakeTimer.broken = "x 64, 4 warps, 3 stages"
    try:
        unstable = evaluated(RULE, judge).reason
    finally:
        FakeTimer.broken = ""
    assert str(unstable).startswith("numerically unstable: b1_h8x1_d128_q1_k256: hopper_decode")
    assert "ZeroDivisionError" in str(evaluated(HEAD + "    return 1 // (batch - 1)\n").reason)


def test_a_regression_has_a_second_chance_with_more_rounds() -> None:
    asked: list[int] = []

    class Chance(FakeTimer):
        def times(self, case: Case, options: Sequence[Option], rounds: int) -> dict[str, Any]:
            found = super().times(case, options, rounds)
            if case in SMALL.held_out:
                asked.append(rounds)
                found[options[-1].label] = found[options[0].label] * (1.02 if rounds == 5 else 1.0)
            return found

    judge = Evaluator(SMALL, Kept(Chance(H200), Lines(None), {}), 5)
    plan = judge.kept.default(SMALL.held_out[0]).plan
    assert plan is not None
    other = plan.config.num_splits + 1
    found = evaluated(HEAD + f"    return {other}, True, 0, None\n", judge)
    assert asked == [5, 15] and found.reason is None and found.worst == 1.0


def test_a_token_s_time_counts_the_rest_of_a_step() -> None:
    rest = Rest(50.0, 60.0)
    alone, judge = evaluator(), evaluator()
    judge.rest = rest
    ratio, of_token = (evaluated(RULE, j).ratio for j in (alone, judge))
    assert ratio is not None and of_token is not None and ratio < of_token < 1
    counted, steps = SMALL.counted, []
    options = alone.options(RULE)[0]
    for case, option in zip(counted, options, strict=False):
        default = alone.kept.default(case)
        us = alone.kept.timer.times(case, [default, option], 5)
        slow, fast = (80 * (float(us[x.label]) + 50) + 60 for x in (default, option))
        steps.append(fast / slow)
    assert of_token == pytest.approx(math.prod(steps) ** (1 / len(steps)))
    assert judge.evaluate(*judge.options(HEAD + "    return None\n")).ratio == 1.0


def test_the_rest_of_a_step_is_measured_once_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def measure(rounds: int) -> list[dict[str, Any]]:
        taken.append(rounds)
        return [{"kernel": part, "us": us} for part, us in zip(model.PARTS, (5, 6), strict=True)]

    monkeypatch.setattr(model, "measure", measure)
    path = tmp_path / "times.jsonl"
    for commit, times in (("a", 1), ("a", 1), ("b", 2)):
        with Lines(path) as lines:
            machine = {"gpu": "H", "commit": commit}
            assert setup.rest_of_step(lines, machine, 9) == Rest(5, 6)
            assert Kept(FakeTimer(H200), lines, machine).known == {}
        assert taken == [9] * times
    with pytest.raises(ValueError, match="^fitness: expected attention with simulate, as the rest"):
        setup.Setup(simulate="h200", fitness="token")
    with pytest.raises(ValueError, match="^fitness: expected 'attention' or 'token', got 'x'$"):
        setup.Setup(fitness="x")
    assert "80 layers of 5.0 us besides attention" in run.what_counts(Rest(5, 6))


def test_another_fitness_does_not_go_on_with_a_search(tmp_path: Path) -> None:
    searched(tmp_path, 0)
    settings = replace(Settings(6, 2, 3), fitness="token")
    judge = evaluator()
    with pytest.raises(ValueError, match="^fitness: expected attention, as the run in "):
        Search(tmp_path, judge, slots(judge), settings).run(1)


def test_workloads_are_named_or_files(tmp_path: Path) -> None:
    named = chat()
    assert max(c.problem.seqlen_k for c in named.counted) == 512
    assert not {c.name for c in named.counted} & {c.name for c in named.held_out}
    path = tmp_path / "own.json"
    path.write_text('{"counted": [{"seqlen_k": 64, "batch": 2}], "held_out": []}')
    own = workload_named(str(path))
    assert own.name == "own" and own.counted[0].name == "b2_h8x1_d128_q1_k64"
    for text, message in (
        ("{", "workload: expected JSON"),
        ("[]", "workload: expected an object with name, counted and held_out"),
        ('{"counted": [{"keys": 1}], "held_out": []}', "shape: expected 'batch'"),
        ('{"counted": [{"batch": 0}], "held_out": []}', "batch: expected more than 0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{message}"):
            workload_named(str(path))
    with pytest.raises(ValueError, match="^workload: expected chat, long_context or a JSON file"):
        workload_named("nothing")
    assert workload.WORKLOADS["long_context"]().held_out


# --- the grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [(), ((64, 4, 3), (32, 4, 1))], ids=["fa3", "ours"])
def test_policies_are_written_and_read_back(tiles: Any) -> None:
    random.seed(1)
    made = grammar.Slots(tiles)
    calls = [candidate.arguments(case.problem, 132) for case in chat().counted]
    policies = [grammar.Policy((n, made.random(n)) for n in made.types) for _ in range(60)]
    for _ in range(3):
        children = [grammar.mutated(p, made)[0] for p in policies]
        policies = children + [grammar.crossed(*random.sample(children, 2))[0] for _ in range(20)]
    assert len({grammar.source_of(p, "") for p in policies}) > 40
    for policy in policies:
        source = grammar.source_of(policy, "about")
        assert not sandbox.objections(source), source
        again = grammar.policy_of(source, made)
        assert search.trees_of(again) == search.trees_of(policy)
        answers, _ = sandbox.answers(source, calls, 1)
        for answer in answers:
            assert answer is None or answer_of(list(answer))


def test_children_stay_small() -> None:
    random.seed(2)
    made = grammar.Slots(((64, 4, 3),))
    policy = grammar.Policy((name, made.random(name)) for name in made.types)
    for _ in range(300):
        policy, _ = grammar.mutated(policy, made)
        assert policy.fits() and policy.size <= grammar.MAX_NODES


def test_what_is_not_of_the_grammar_is_not_bred() -> None:
    made = grammar.Slots(((64, 4, 3),))
    for body in (
        "    return 1, True, 0, (64, 4, 3)",
        "    num_splits = 1 // 2\n    tile = (64, 4, 3)",
        "    num_splits = 1\n    tile = (63, 4, 3)",
        "    num_splits = 1 < 2\n    tile = (64, 4, 3)",
        "    for i in range(3):\n        num_splits = 1",
    ):
        with pytest.raises(ValueError, match=r"^(policy|tile): expected "):
            grammar.policy_of(HEAD + body + "\n", made)


def test_a_table_by_length_is_a_conditional_expression() -> None:
    table = by_length({64: "1", 128: "2", 256: "2", 512: "8"})
    assert (
        table == "((1 if seqlen_k < 65 else 2) if seqlen_k < 129 else (2 if seqlen_k < 257 else 8))"
    )
    for keys, value in ((64, 1), (128, 2), (256, 2), (512, 8)):
        assert eval(table, {"seqlen_k": keys}) == value
    assert by_length({64: "3", 128: "3"}) == "3"


# --- the search --------------------------------------------------------------------------------


def searched(folder: Path, generations: int, **more: Any) -> Search:
    judge = evaluator()
    made = Search(folder, judge, slots(judge), more.pop("settings", Settings(6, 2, 3)))
    made.run(generations, **more)
    return made


def told(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "candidates.jsonl").read_text().splitlines()]
    return [{n: x for n, x in r.items() if n not in ("date", "host_us")} for r in records]


def test_a_search_finds_what_is_faster_and_passes(tmp_path: Path) -> None:
    found = searched(tmp_path, 4).found
    assert found.best is not None and found.generation == 4
    assert found.best["ratio"] < 0.7 and found.best["worst"] <= 1.01
    source = (tmp_path / "best.py").read_text()
    assert source == found.best["source"] and evaluated(source).ratio == found.best["ratio"]
    records = told(tmp_path)
    assert [r["number"] for r in records] == list(range(len(records)))
    assert {r["island"] for r in records} == {0, 1}
    assert {r["how"] for r in records} >= STARTS.keys()
    for r in records:
        assert all(parent < r["number"] for parent in r["parents"])
        file = tmp_path / "candidates" / f"{r['number']:05d}.py"
        assert file.read_text() == r["source"]
    assert any(r["parents"] for r in records)


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    searched(tmp_path / "whole", 4)
    searched(tmp_path / "parts", 2)
    checkpoint = tmp_path / "parts" / "checkpoint.json"
    at_two = checkpoint.read_text()
    assert json.loads(at_two)["generation"] == 2
    searched(tmp_path / "parts", 3)
    checkpoint.write_text(at_two)  # as if the third generation had not been finished
    file = tmp_path / "parts" / "candidates.jsonl"
    file.write_text(file.read_text()[:-40])  # and its last line was cut short
    searched(tmp_path / "parts", 4)
    assert told(tmp_path / "parts") == told(tmp_path / "whole")
    best = [(tmp_path / name / "best.py").read_text() for name in ("parts", "whole")]
    assert best[0] == best[1]
    file.write_text("")
    with pytest.raises(ValueError, match=r"^candidates: expected \d+, got 0$"):
        searched(tmp_path / "parts", 6)


def test_a_search_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    searched(tmp_path, 0)
    with pytest.raises(ValueError, match=r"^seed: expected 3, as the run in .* has, got 4$"):
        searched(tmp_path, 1, settings=Settings(6, 2, 4))


def test_candidates_of_equal_behaviour_are_timed_once(tmp_path: Path) -> None:
    judge = evaluator()
    made = Search(tmp_path, judge, slots(judge), Settings(6, 1, 0))
    with made.lines:
        made.add(RULE, "first", (), 0)
        taken = judge.kept.taken
        same = RULE.replace("seqlen_k // 64", "-(-seqlen_k // 64)")
        number, found = made.add(same, "second", (0,), 0)
        assert number == 1 and found.ratio == made.found.candidates[0]["ratio"]
        assert judge.kept.taken == taken
        assert made.add(RULE, "third", (), 0)[0] == 0


def test_candidates_that_are_given_are_evaluated_and_bred(tmp_path: Path) -> None:
    made = searched(tmp_path, 1, starts=[("mine.py", RULE)])
    first = made.found.candidates[0]
    assert first["how"] == "given: mine.py" and first["ratio"] < 1


def test_a_lost_gpu_loses_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(FakeTimer):
        def times(self, case: Case, options: Sequence[Option], rounds: int) -> dict[str, Any]:
            found = super().times(case, options, rounds)
            if self.asked > 20:
                raise RuntimeError("CUDA error: an illegal memory access")
            return found

    monkeypatch.setattr(setup, "workload_named", lambda name: SMALL)
    monkeypatch.setattr(setup, "Simulated", Dies)
    status, text = evolved(tmp_path)
    assert status == 1 and "stopped: RuntimeError: CUDA error" in text
    assert len(told(tmp_path)) >= 3


@pytest.mark.parametrize("kind", ["ctrl-c", "disk"])
def test_whatever_ends_a_search_loses_no_candidate(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on to what it had found without an end."""
    searched(tmp_path / "whole", 2)
    folder = tmp_path / "ended"
    with monkeypatch.context() as patch:
        ended = ending(kind, folder / "candidates.jsonl", "", patch)
        add = Search.add

        def taken(self: Search, source: str, how: str, *args: Any) -> Any:
            if kind == "ctrl-c" and len(ended.taken) == 5:
                raise KeyboardInterrupt
            ended.taken.append(how)
            return add(self, source, how, *args)

        patch.setattr(Search, "add", taken)
        with ended.raised():
            searched(folder, 2)
        assert [r["how"] for r in ended.kept(capsys)] == ended.taken
    searched(folder, 2)
    assert told(folder) == told(tmp_path / "whole")


# --- from end to end ---------------------------------------------------------------------------


def evolved(folder: Path, **more: Any) -> tuple[int, str]:
    screen = io.StringIO()
    options: dict[str, Any] = {"generations": 1, "time_limit": None, "jobs": 0}
    start = folder.parent / f"{folder.name}_start.py"
    start.write_text(WRITTEN)
    options["starts"] = [start]
    options |= {"proposer": run.Proposer(), **more}
    searched_for = setup.Setup(simulate="h200", rounds=5)
    console = Console(file=screen, width=200)
    status = run.evolve(folder, searched_for, Settings(6, 2, 3), **options, console=console)
    return status, screen.getvalue()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "workload_named", lambda name: SMALL)
    monkeypatch.setattr(setup, "Simulated", FakeTimer)


@pytest.mark.usefixtures("fake")
def test_a_run_ends_with_a_report_and_a_picture(tmp_path: Path) -> None:
    status, text = evolved(tmp_path)
    assert status == 0
    written = (tmp_path / "report.md").read_text()
    rows = [line.split("|")[1].strip() for line in written.splitlines() if line.startswith("| ")]
    assert {"the best candidate", "waves", "flash_attention_3", "sequence_aware"} <= set(rows)
    assert "```python" in written and "| candidate |" in written
    assert "<svg" in (tmp_path / "lineage.svg").read_text()
    assert "the best candidate" in text
    before = len(told(tmp_path))
    evolved(tmp_path)
    assert len(told(tmp_path)) == before


def test_the_nearest_candidate_decides_otherwise_where_it_counts() -> None:
    judge, count = evaluator(), len(SMALL.counted)
    default = [judge.kept.default(case).label for case in judge.cases]
    elsewhere = [*default[:count], *["other"] * (len(default) - count)]
    behaviours = [(default, 1.0), (elsewhere, 0.9), (["other"] * len(default), 1.2)]
    candidates = [
        {"number": i, "behaviour": labels, "ratio": ratio}
        for i, (labels, ratio) in enumerate(behaviours)
    ]
    rejected = {"number": 3, "behaviour": [], "ratio": None}
    found = run.nearest(judge, search.Found([*candidates, rejected]))
    assert found is not None and found["number"] == 2
    assert run.nearest(judge, search.Found(candidates[:2])) is None


@pytest.mark.usefixtures("fake")
def test_the_best_is_distilled_to_a_rule(tmp_path: Path) -> None:
    evolved(tmp_path)
    screen = io.StringIO()
    setup = run.Setup(simulate="h200", rounds=5)
    assert run.distil(tmp_path, setup, None, Console(file=screen, width=200)) == 0
    source = (tmp_path / "distilled.py").read_text()
    best = (tmp_path / "best.py").read_text()
    rule, whole = evaluated(source), evaluated(best)
    assert rule.ratio is not None and whole.ratio is not None
    assert rule.ratio <= 1.01 * whole.ratio and rule.reason is None
    assert len(source.splitlines()) <= len(best.splitlines()) + 4
    assert "workload small" in source and "of the default's time" in screen.getvalue()
    with pytest.raises(ValueError, match="^folder: expected one in which `splitkv evolve` found"):
        run.distil(tmp_path / "none", setup, None, Console(file=screen))


def test_distilling_takes_away_what_does_nothing() -> None:
    judge = evaluator()
    made = slots(judge)
    tile = made.tiles[0]
    source = HEAD + (
        "    if not ((seqlen_k < 513 and batch < 9) if True else batch < 3):\n        return None\n"
        "    num_splits = max(1, min(6 + (0 * 7), 1024))\n"
        f"    tile = ({tile} if batch < 5 else {tile})\n"
        "    return num_splits, True, 0, tile\n"
    )
    whole, _ = distil(source, judge, made, "about", end=0.0)
    assert grammar.policy_of(whole, made) == grammar.policy_of(source, made), "past its time"
    rule, found = distil(source, judge, made, "about")
    policy = grammar.policy_of(rule, made)
    assert search.trees_of(policy)["applies"] == "seqlen_k < 513"
    assert search.trees_of(policy)["tile"] == str(tile)
    assert policy.size < grammar.policy_of(source, made).size - 8
    assert found.ratio is not None and found.ratio <= 1.01 * (evaluated(source).ratio or 0)
    assert all(p.size < policy.size for p in smaller_ones(policy, made))
    slow = source.replace("seqlen_k < 513", "seqlen_k < 5000").replace("6 +", "1 +")
    with pytest.raises(
        ValueError, match="^best: expected a candidate that passes, got .*regression"
    ):
        distil(slow, judge, made, "about")


def test_a_distilled_rule_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"gpu": H200.name, "driver": "580", "versions": {}, "commit": "abc"}
    monkeypatch.setattr(run, "facts", lambda: machine)
    judge = evaluator()
    made = run.table_of(tmp_path, RULE, judge)
    path = tmp_path / "table.json"
    path.write_text(tuned_tables.dump(made))
    again = tuned_tables.load(path)
    assert again.gpu == H200.name and "splitkv distil" in again.made["command"]
    assert [m.problem for m in again.measured] == [case.problem for case in SMALL.counted]
    assert again.measured[1].plans[0].config.num_splits == 8


def test_the_command_runs_on_the_cost_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["--simulate", "h200", "--out", str(out), "--generations", "0", "--population", "7"]
    done = CliRunner().invoke(app, ["evolve", *args, "--islands", "1"])
    assert done.exit_code in (0, 1), done.output
    assert (out / "report.md").exists() and (out / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backend", "x"], "backend: expected 'splitkv' or 'fa3', got 'x'"),
        (["--simulate", "h200", "--backend", "fa3"], "simulate: expected None with fa3"),
        (["--simulate", "x"], "gpu: expected one of"),
        (["--proposer", "x"], "proposer: expected 'offline' or 'openevolve', got 'x'"),
        (["--start", "/none.py"], "start: expected a Python file, got '/none.py'"),
        ([], "device: expected a CUDA GPU, or simulate, got 'CPU'"),
        (["--simulate", "h200", "--proposer", "openevolve"], "model: expected a name"),
        (["--population", "2"], "population: expected at least 4, got 2"),
    ],
)
def test_malformed_commands(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "current", device.cpu)
    done = CliRunner().invoke(app, ["evolve", "--out", str(tmp_path), *args])
    assert done.exit_code == 2 and message in done.output, done.output


# --- a language model --------------------------------------------------------------------------


def test_a_proposal_is_judged_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = evaluator()
    monkeypatch.setattr(guided, "made_again", lambda about: (judge, slots(judge)))
    (tmp_path / "guided.json").write_text("{}")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(RULE)
    bad.write_text(HEAD + "    import os\n    return None\n")
    metrics = guided.judge(str(tmp_path), str(good))
    assert metrics == {"combined_score": pytest.approx(1 / (evaluated(RULE).ratio or 0))}
    metrics = guided.judge(str(tmp_path), str(bad))
    assert metrics["combined_score"] == 0.0 and "import os" in metrics["error"]
    assert [r["how"] for r in told(tmp_path)] == ["proposed by a model"] * 2
    assert (tmp_path / "best.py").read_text() == RULE
    assert guided.judge(str(tmp_path), str(good))["combined_score"] > 1
    assert len(told(tmp_path)) == 2
    text = guided.instructions(judge, slots(judge))
    assert str(slots(judge).tiles[0]) in text and "pack_gqa has to be True" in text
    assert not sandbox.objections(guided.START)

"""Questions to a candidate, its answers, and these as options that can be timed.

A candidate is a Python file with one function,

    policy(batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, page_size, num_sms)

that returns `(num_splits, pack_gqa, sm_margin, tile)` or None, which leaves the problem to the
default policy. page_size is 0 for a contiguous cache; tile is (tile_n, num_warps, num_stages), or
None for the kernel's own first. Our kernels have no sm_margin: it is 0; and where heads share no
tile, pack_gqa False, few of them have tiles. FlashAttention-3 takes both and chooses its tiles
itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from splitkv.core.device import Device
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Config, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.lab.evolve import sandbox
from splitkv.lab.harness import space
from splitkv.lab.harness.work import Way
from splitkv.lab.tune.studies import label
from splitkv.planner.policies import DEFAULT, POLICIES, Policy
from splitkv.planner.policies.shared import MAX_SPLITS, max_splits, shapes

SECONDS, WALL_SECONDS = 2, 10  # of the sandbox: processor time, and time
ROUNDS = 5
SLOW_US = 50.0  # a call may take

Tile = tuple[int, int, int]  # tile_n, num_warps, num_stages


class Answer(NamedTuple):
    """The answer of a candidate's policy."""

    num_splits: int
    pack_gqa: bool
    sm_margin: int
    tile: Tile | None


@dataclass(frozen=True)
class Option:
    """A way to run a problem, known by its label: a plan of ours or a way of FlashAttention-3's."""

    label: str
    plan: Plan | None = None
    way: Way | None = None


class Answered(NamedTuple):
    """The answers, a problem each, and what a call took on this machine's processor."""

    answers: list[Answer | None]
    us: float


def arguments(p: Problem, num_sms: int) -> dict[str, int]:
    """The arguments of a candidate's policy."""
    page_size = p.place.page_size if isinstance(p.place, Paged) else 0
    fields = sandbox.ARGUMENTS[:6]
    told = {name: getattr(p, name) for name in fields}
    return {**told, "page_size": page_size, "num_sms": num_sms}


def ask(source: str, problems: Sequence[Problem], num_sms: int) -> Answered:
    """A candidate's answers, from a process of its own. ValueError says why it is rejected."""
    asked = {"source": source, "calls": [arguments(p, num_sms) for p in problems]}
    question = json.dumps({**asked, "seconds": SECONDS, "rounds": ROUNDS})
    command = [sys.executable, "-I", sandbox.__file__]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=WALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"slow to answer: more than {WALL_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        slow = done.returncode in (-9, -24)  # killed, or out of processor time
        what = f"slow to answer: more than {SECONDS} s of processor time" if slow else said[0]
        raise ValueError(what[:300])
    told = json.loads(done.stdout)
    if "reason" in told:
        raise ValueError(told["reason"])
    if told["us"] > SLOW_US:
        raise ValueError(f"slow to answer: {told['us']:.0f} us a call, expected {SLOW_US:g}")
    return Answered([answer_of(x) for x in told["answers"]], told["us"])


def answer_of(returned: Any) -> Answer | None:
    """Checks what a policy returned, and makes an Answer of it."""
    if returned is None:
        return None
    ok = isinstance(returned, list | tuple) and len(returned) == 4
    expect(ok, "policy", "(num_splits, pack_gqa, sm_margin, tile) or None", returned)
    splits, pack = returned[:2]
    margin, tile = returned[2:]
    for name, value in (("num_splits", splits), ("sm_margin", margin)):
        expect(isinstance(value, int) and not isinstance(value, bool), name, "an integer", value)
    expect(1 <= splits <= MAX_SPLITS, "num_splits", f"1 to {MAX_SPLITS}", splits)
    expect(isinstance(pack, bool), "pack_gqa", "a bool", pack)
    expect(margin >= 0, "sm_margin", "at least 0", margin)
    if tile is None:
        return Answer(splits, pack, margin, None)
    three = isinstance(tile, list | tuple) and len(tile) == 3
    three = three and all(isinstance(x, int) for x in tile)
    expect(three, "tile", "(tile_n, num_warps, num_stages) or None", tile)
    return Answer(splits, pack, margin, (tile[0], tile[1], tile[2]))


def our_option(plan: Plan) -> Option:
    """A plan, known by its kernel and config."""
    return Option(label((plan.kernel, plan.config)), plan=plan)


class Tiles:
    """The tile shapes of a problem: of each the first kernel that has it, and its most splits.

    known   those whose rows the query heads of a KV head share
    apart   those of one head each
    """

    def __init__(self, p: Problem, device: Device, kernels: Sequence[Kernel]) -> None:
        self.known: dict[Tile, tuple[str, Config, int]] = {}
        self.apart: dict[Tile, tuple[str, Config, int]] = {}
        for kernel in kernels:
            found = shapes(kernel, p, device)
            for shape in found:
                tile = (shape.tile_n, shape.num_warps, shape.num_stages)
                most = max_splits(p, found, shape)
                of_these = self.known if shape.pack_gqa else self.apart
                of_these.setdefault(tile, (kernel.name, shape, most))

    def choice(self, answer: Answer) -> Choice:
        """More splits than tiles of keys are as many as tiles. ValueError: it is not legal here."""
        expect(answer.sm_margin == 0, "sm_margin", "0 on our kernels", answer.sm_margin)
        known = self.known if answer.pack_gqa else self.apart
        told = "True, as no kernel here has heads apart"
        expect(known, "pack_gqa", told, answer.pack_gqa)
        tile = answer.tile or next(iter(known))
        expect_one_of("tile", tile, known)
        kernel, shape, most = known[tile]
        config = replace(shape, num_splits=min(answer.num_splits, most))
        return Choice(kernel, config, f"evolved: {answer.num_splits} splits")


def their_answer(answer: Answer | None) -> Option:
    """The answer as FlashAttention-3 is asked for it."""
    if answer is None:
        return Option("default", way=Way("default"))
    expect(answer.tile is None, "tile", "None with FlashAttention-3", answer.tile)
    splits, pack, margin = answer[:3]
    name = f"s={splits} pack={pack} margin={margin}"
    return Option(name, way=Way(name, splits, pack, margin))


def policy_of(path: Path) -> Policy:
    """A candidate's file as a policy for `splitkv.plan`, run in this process: read it first.

    What it leaves, and what it cannot run, the default policy decides, and `why` says so.
    """
    source = path.read_text()
    against = sandbox.objections(source)
    expect(not against, str(path), "a policy", "; ".join(against))
    policy = sandbox.load(source)

    def choose(p: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        try:
            answer = answer_of(policy(**arguments(p, device.num_sms)))
            if answer is not None:
                splitting = {kernel.name for kernel in space.splitting(p, device)}
                able = [kernel for kernel in candidates if kernel.name in splitting]
                choice = Tiles(p, device, able).choice(answer)
                return replace(choice, why=f"{path.name}: {choice.why}")
            why = "left to the default"
        except ValueError as error:
            why = str(error)
        default = POLICIES[DEFAULT](p, device, candidates)
        return replace(default, why=f"{path.name}: {why}; {default.why}")

    return choose

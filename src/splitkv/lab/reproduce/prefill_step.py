"""A prefill of a model on one of its GPUs: a prompt with int8 keys through a layer.

The model is that of the decode step, `model.LLAMA`, and its rest the same products, norms and
additions, of all tokens of the prompt at once; the vocabulary is asked of the last token alone, and
left out. Attention is timed in turns on the portable Triton kernel and by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from splitkv.core.device import current
from splitkv.core.plan import Plan
from splitkv.lab.bench.sequences.check import Reference
from splitkv.lab.bench.sequences.run import forced
from splitkv.lab.bench.sequences.suites import SUITES
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.sequence_cases import Inputs
from splitkv.lab.harness.timing import Replay, interleave, one_line, summarize
from splitkv.lab.reproduce.model import LLAMA, Share, bodies

PORTABLE = "prefill"  # our kernel that any GPU runs
TOKENS = (8192, 32768)  # of a prompt; the last is the longest of the source's tables
WAYS = ("triton", "default")
LAYER = "layer without attention"


def case_of_prompt(tokens: int, share: Share = LLAMA) -> Case:
    """The source's shape of so many tokens, causal and in int8, with the heads of the model."""
    name = f"mqa16_b{32768 // tokens}_{tokens}_causal_int8"
    found = next(case for case in SUITES["prefill"]["quant"] if case.name == name)
    p = replace(found.problem, batch=1, num_heads=share.heads, num_kv_heads=share.kv_heads)
    return Case(f"{share.name}_{tokens}_causal_int8", p)


def row_of(part: str, tokens: int) -> str:
    """The name of a row."""
    return f"{part}, {tokens} tokens"


def parts_of_prompt(us: Mapping[str, float], tokens: int) -> list[float | None]:
    """The times of a prompt by its rows: the rest of a layer, and attention each way."""
    return [us.get(row_of(part, tokens)) for part in (LAYER, *WAYS)]


def measure(rounds: int, share: Share = LLAMA) -> list[Record]:
    """Rows of the rest of a layer, and of attention each way, of each prompt."""
    return [row for tokens in TOKENS for row in rows_of(tokens, rounds, share)]


def attended(inputs: Inputs, plan: Plan | None, buffer: int) -> Tensor:
    """Attention of the prompt, of which there is one buffer."""
    return inputs.attend(plan)


def rows_of(tokens: int, rounds: int, share: Share) -> list[Record]:
    """The rows of a prompt; attention that is wrong has a reason and no time."""
    case = case_of_prompt(tokens, share)
    inputs = Inputs(case)
    plans: dict[str, Plan | None] = {
        "triton": forced(PORTABLE, case.problem, current()),
        "default": None,
    }
    expected = Reference(inputs, case)
    layer = bodies(share, tokens=tokens)[LAYER]
    replays = {LAYER: Replay(layer, 1, 1)}
    errors: dict[str, float | None] = {LAYER: None}
    wrong: dict[str, list[str]] = {}
    for way, plan in plans.items():
        try:
            errors[way] = expected.check(inputs.attend(plan))["out"]
        except AssertionError as error:
            wrong[way] = [one_line(error)]
            continue
        replays[way] = Replay(partial(attended, inputs, plan), 1, 1)
    timed = {
        way: summarize(us).as_row() | {"err": errors[way], "reasons": []}
        for way, us in interleave(replays, rounds).items()
    }
    untimed = {way: {"us": None, "err": None, "reasons": why} for way, why in wrong.items()}
    named = partial(row_of, tokens=tokens)
    return [
        {"kernel": named(way), "repeats": None, **row} for way, row in (timed | untimed).items()
    ]

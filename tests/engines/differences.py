"""Where two runs of an engine first choose other tokens, and how near these choices were.

A run is a list of requests, each with the lists `ids`, its tokens, `logprobs`, of these, and
`gaps`, how far the most probable token of each place is ahead of the next, in logits. Runs whose
results differ by rounding alone part where the gap is about as large as what rounds, and their
log-probabilities of the tokens that they share differ by as much, to either side.
"""

from __future__ import annotations

from typing import Any

import torch
from small_models import logprobs_of
from transformers import AutoModelForCausalLM

Run = list[dict[str, list[Any]]]


def first_difference(x: list[int], y: list[int]) -> int:
    """The first place at which two lists of as many tokens differ, or their length."""
    pairs = enumerate(zip(x, y, strict=True))
    return next((n for n, (one, other) in pairs if one != other), len(x))


def compare_runs(found: Run, reference: Run) -> dict[str, float]:
    """What share of the tokens come before the first of their request that is another; of the
    reference's gaps there and everywhere the quantiles; of the log-probabilities before there the
    differences."""
    same, there, apart = 0, [], []
    for x, y in zip(found, reference, strict=True):
        place = first_difference(x["ids"], y["ids"])
        same += place
        there += y["gaps"][place : place + 1]
        pairs = zip(x["logprobs"][:place], y["logprobs"][:place], strict=True)
        apart += [one - other for one, other in pairs]
    everywhere = [gap for y in reference for gap in y["gaps"]]
    row = {"share": round(same / len(everywhere), 4), "differences": len(there)}
    row |= {f"gap_{n}": at(there, n) for n in (50, 90, 100)}
    row |= {f"gap_{n}_of_all": at(everywhere, n) for n in (1, 10, 50)}
    return row | spread("apart", apart)


def compare_with_fp32(model: str, asked: list[list[int]], run: Run) -> dict[str, float]:
    """How far the log-probabilities of the first requests of a run are from those of transformers
    in fp32, and how many tokens that would choose."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    off, right = list[float](), 0
    for prompt, x in zip(asked, run[: len(asked)], strict=True):
        wanted, best = logprobs_of(loaded, prompt, x["ids"])
        off += (torch.tensor(x["logprobs"]) - wanted).tolist()
        right += int((best == torch.tensor(x["ids"])).sum())
    return {"right": right, "tokens": len(off)} | spread("off", off)


def at(values: list[float], percent: int) -> float:
    """A quantile of values; nan of none."""
    made = torch.tensor(values or [torch.nan], dtype=torch.float64)
    return round(made.quantile(percent / 100).item(), 5)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The mean of values, the root of the mean of their squares, and the largest size."""
    x = torch.tensor(values or [torch.nan], dtype=torch.float64)
    told = {"mean": x.mean(), "rms": x.square().mean().sqrt(), "most": x.abs().max()}
    return {f"{name}_{how}": round(value.item(), 6) for how, value in told.items()}

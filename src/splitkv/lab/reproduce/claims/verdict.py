"""A claim of a source, and what the results of a run say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

FAIL, NOT_RUN = "FAIL", "NOT RUN"
SOURCES = {
    "heuristic": "Llopart Font et al., Sequence-Aware Split Heuristic, arXiv 2604.00028",
    "sink": "sink attention kernel, architecture notes, 2026",
    "dispatch": "FlashAttention-2's dispatch, from Hugging Face's Qwen2 to the kernels",
    "paged": "vLLM's Paged Attention V2 in Triton, lesson 12, 2026",
    "int8": "Optimizing AI Inference at Character.AI (Part Deux), 2024",
    "ours": "splitkv",
}


class Claim(NamedTuple):
    """A claim of a source, as a value that is at least or at most a bound.

    text      in words, without whose figure it is
    source    a key of `SOURCES`
    where     the table, figure or section of the source
    relation  of the value to the bound
    bound     the source's figure, or what follows from it
    figure    the source's figure in its own words, where the bound is another number
    """

    text: str
    source: str
    where: str
    relation: Literal[">=", "<="]
    bound: float
    figure: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and what the results say of it: PASS, FAIL or NOT RUN, and why.

    checked   what else was looked at where it failed
    """

    claim: str
    text: str
    source: str
    where: str
    figure: str
    backend: str
    value: float | None
    relation: str
    bound: float
    verdict: str
    why: str
    checked: str = ""


def judge(claim: Claim, backend: str, value: float | None, why: str) -> Verdict:
    """PASS where the value is on the right side of the bound; NOT RUN without a value."""
    if value is None:
        word = NOT_RUN
    else:
        holds = value >= claim.bound if claim.relation == ">=" else value <= claim.bound
        word = "PASS" if holds else FAIL
        why = f"{value:.4g} {'is' if holds else 'is not'} {claim.relation} {claim.bound:g}: {why}"
    figure = claim.figure or f"{claim.relation} {claim.bound:g}"
    about = (f"{claim.text} ({backend})", claim.text, SOURCES[claim.source], claim.where, figure)
    return Verdict(*about, backend, value, claim.relation, claim.bound, word, why)


def not_run(claims: Iterator[Claim] | tuple[Claim, ...], backend: str, why: str) -> list[Verdict]:
    """Claims whose results are missing."""
    return [judge(claim, backend, None, why) for claim in claims]


def missing(step: str, backend: str) -> str:
    """Why a claim on a step has no value."""
    return f"no results of the step `{step}` on {backend}"

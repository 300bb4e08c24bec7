"""The shapes of calls that serving and training a model make, as far as plans tell them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from splitkv.planner.registry import decided_lengths

Kind = Literal["step", "prompt", "dense", "packed", "slots"]

ENGINE_BATCHES = (*range(1, 33), *range(40, 257, 8))
"""Batch sizes of an engine: few sequences by one, many by eight, as graphs are captured for."""
PROMPTS_TOGETHER = (1, 2, 3, 4, 8, 16, 32, 64)
TRAINED_TOGETHER = (1, 2, 4, 8, 16)
NEW_TOKENS = (1, 2, 16, 300, 304)  # of a step: few and many, and multiples of 16 or not
STEPS_AN_OCTAVE = 4


class Shape(NamedTuple):
    """A call of a model.

    kind       step: of `decode`; prompt: of `attention_varlen` in the model's cache; dense: of
               `attention`; packed: of `attention_varlen` without a cache; slots: of `append`
    seqlen_q   new tokens of the longest sequence; packed: of all; seqlen_k: its keys
    """

    kind: Kind
    batch: int
    seqlen_q: int
    seqlen_k: int
    trains: bool = False

    @property
    def packed(self) -> bool:
        return self.kind == "packed"


def lengths_up_to(longest: int) -> list[int]:
    """Lengths in STEPS_AN_OCTAVE steps an octave, the longest first."""
    lengths = [longest]
    while lengths[-1] > 1:
        lengths.append(min(int(lengths[-1] / 2 ** (1 / STEPS_AN_OCTAVE)), lengths[-1] - 1))
    return lengths


def decode_shapes(batches: Sequence[int], longest: int) -> Iterator[Shape]:
    """Steps of one token for every length that is decided by itself."""
    for batch in batches:
        for keys in decided_lengths(longest):
            if keys:
                yield Shape("step", batch, 1, keys)


def prompt_shapes(kind: Kind, longest_prompt: int, longest: int) -> Iterator[Shape]:
    """Prompts, whole and behind keys that are there already."""
    for batch in PROMPTS_TOGETHER:
        for tokens in lengths_up_to(longest_prompt):
            yield Shape(kind, batch, tokens, tokens)
            if kind == "prompt":
                for keys in lengths_up_to(longest)[:: 2 * STEPS_AN_OCTAVE]:
                    if keys > tokens:
                        yield Shape(kind, batch, tokens, keys)


def training_shapes(longest: int) -> Iterator[Shape]:
    """Forward and backward of dense and of packed sequences."""
    for kind in ("dense", "packed"):
        for batch in TRAINED_TOGETHER:
            for tokens in lengths_up_to(longest):
                yield Shape(kind, batch, tokens, tokens, trains=True)


def append_shapes() -> Iterator[Shape]:
    """Tokens that a step appends by slots."""
    for tokens in NEW_TOKENS:
        yield Shape("slots", 1, tokens, tokens)

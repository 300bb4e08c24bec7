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
EVERY_LENGTH = 128  # up to which a token more may be another tile
FEW_NEW = 16  # tokens, up to which plans follow the number of keys closely


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
    """Prompt lengths: each up to EVERY_LENGTH, then in steps of a sixteenth octave, and one more
    each, as tiles and waves end there."""
    steps = {n + more for n in decided_lengths(longest) for more in (0, 1)}
    every = {*range(1, EVERY_LENGTH + 1), *steps}
    return sorted((n for n in every if 0 < n <= longest), reverse=True)


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
                for keys in _keys_behind(tokens, longest):
                    yield Shape(kind, batch, tokens, keys)


def _keys_behind(tokens: int, longest: int) -> list[int]:
    """Numbers of keys for chunks of so many tokens: more where these are few, as the keys are split
    then."""
    step = 1 if tokens <= FEW_NEW else 8
    return [keys for keys in decided_lengths(longest)[::step] if keys > tokens]


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

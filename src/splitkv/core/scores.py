"""Modifiers of a scaled score before the softmax: none, a soft cap, ALiBi.

    s = softmax_scale * q . k
    s = softcap * tanh(s / softcap)                      where softcap > 0
    s = s - slope[head] * |i + seqlen_k - seqlen_q - j|  where ALiBi slopes are given

The mask comes after these.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitkv.core.values import Value


@dataclass(frozen=True, slots=True)
class Score(Value):
    """The score modifiers of a problem; values are run-time arguments, presence is not."""

    softcap: bool = False
    alibi: bool = False

    def __str__(self) -> str:
        parts = [n for n, on in (("softcap", self.softcap), ("alibi", self.alibi)) if on]
        return " ".join(parts) or "none"


PLAIN = Score()

"""What is measured: named problems, and their operands in buffers to rotate.

Names say the situation: `mqa8_b1_512` is one KV head under 8 query heads (Llama-3.1-70B on 8 GPUs),
`gqa32x8_b8_4096` 8 KV heads under 32 query heads (Llama-3.1-8B), then batch and keys a sequence.
`_page16` is the same with keys in pages of 16, scattered over the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from splitkv.errors import expect, expect_one_of
from splitkv.kv import Contiguous, Paged, Place
from splitkv.masks import Mask
from splitkv.problem import Problem
from splitkv.testing import expected

SITUATIONS = {"mqa8": (8, 1), "gqa32x8": (32, 8)}  # heads, KV heads
PLACES: dict[str, Place] = {"contiguous": Contiguous(), "page16": Paged(16)}
DECODE = {  # (batch, keys a sequence)
    "mqa8": [
        *((1, 512), (1, 2048), (1, 8192), (1, 32768), (1, 131072)),
        *((8, 4096), (64, 4096), (128, 8192)),
    ],
    "gqa32x8": [
        *((1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 32768)),
        *((8, 1024), (8, 4096), (8, 32768), (32, 4096)),
    ],
}
REFERENCE_BYTES = (
    256 << 20
)  # keys and values that the reference takes at once; it needs ten times that


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with a name."""

    name: str
    problem: Problem

    @property
    def place(self) -> str:
        return next(name for name, place in PLACES.items() if place == self.problem.place)


def decode_cases() -> Iterator[Case]:
    """Every situation, contiguous and paged; the lengths are known to the device alone."""
    for situation, shapes in DECODE.items():
        heads, kv_heads = SITUATIONS[situation]
        for batch, keys in shapes:
            for label, place in PLACES.items():
                suffix = "" if label == "contiguous" else f"_{label}"
                yield Case(
                    f"{situation}_b{batch}_{keys}{suffix}",
                    Problem(
                        *("decode", batch, heads, kv_heads, 128, 128, 1, keys),
                        mask=Mask(causal=True),
                        place=place,
                        lengths="device",
                    ),
                )


CASES: dict[str, Case] = {case.name: case for case in decode_cases()}


def select(globs: Sequence[str], place: str = "all") -> list[Case]:
    """The cases whose name matches one of the globs (none: every case), in one place or `all`.

    A glob may leave the suffix of the place out.
    """
    expect_one_of("place", place, ("all", *PLACES))
    found = [
        case
        for case in CASES.values()
        if place in ("all", case.place)
        and (not globs or any(fnmatchcase(name, g) for name in _names(case) for g in globs))
    ]
    expect(found, "case", f"a glob that matches one of {', '.join(CASES)}", " ".join(globs))
    return found


def _names(case: Case) -> tuple[str, str]:
    return case.name, case.name.removesuffix(f"_{case.place}")


class Inputs:
    """Operands of a case: as many buffers of q, K and V as are to be rotated, from a seed.

    x        [batch, 1, num_heads, head_dim]: what every q holds
    q        [buffers, *x.shape]
    k, v     [buffers, batch, seqlen_k, num_kv_heads, head_dim], or pages in the place of batch and
             seqlen_k, in an order drawn at random
    lengths  [batch] int32
    table    [batch, pages a sequence] int32, or None. One for all buffers, as are the lengths: the
             layers of a model share them
    """

    def __init__(self, case: Case, buffers: int, device: str = "cuda", seed: int = 0) -> None:
        p = self.problem = case.problem
        self.buffers = buffers
        g = torch.Generator(device).manual_seed(seed)
        options = {"device": device, "dtype": getattr(torch, p.dtype), "generator": g}
        self.x = torch.randn(p.batch, 1, p.num_heads, p.head_dim, **options)
        self.q = self.x.repeat(buffers, 1, 1, 1, 1)
        rows, self.table, self.page_size = (p.batch, p.seqlen_k), None, None
        if isinstance(p.place, Paged):
            self.page_size = p.place.page_size
            per_sequence = -(-p.seqlen_k // self.page_size)
            rows = (p.batch * per_sequence, self.page_size)
            order = torch.randperm(rows[0], generator=g, device=device)
            self.table = order.int().view(p.batch, per_sequence)
        shape = (buffers, *rows, p.num_kv_heads, p.head_dim)
        self.k, self.v = (torch.randn(shape, **options) for _ in range(2))
        self.lengths = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=device)

    def arguments(self, i: int) -> dict[str, Tensor]:
        """Keyword arguments of `splitkv.decode` on buffer i."""
        given = {"q": self.q[i], "k_cache": self.k[i], "v_cache": self.v[i]}
        given["cache_seqlens"] = self.lengths
        return given if self.table is None else {**given, "page_table": self.table}

    def references(self) -> tuple[Tensor, Tensor]:
        """Buffer 0 by definition, in fp32 and in the working precision, a few sequences a time."""
        step = max(1, REFERENCE_BYTES * self.problem.batch // self.problem.kv_bytes)
        absent = ("q_scale", "k_scale", "v_scale", "softmax_scale", "alibi_slopes", "sink_logits")
        call: dict[str, Any] = {**dict.fromkeys(absent), "softcap": 0.0, "page_table": None}
        call |= {**self.arguments(0), "q": self.x, "max_seqlen_k": self.problem.seqlen_k}
        per_sequence = ["q", "cache_seqlens"]
        per_sequence += ["k_cache", "v_cache"] if self.table is None else ["page_table"]
        refs, pts = [], []
        for first in range(0, self.problem.batch, step):
            part = {name: call[name][first : first + step] for name in per_sequence}
            refs.append(expected(self.problem, call | part)[0])
            pts.append(expected(self.problem, call | part, upcast=False)[0])
        return torch.cat(refs), torch.cat(pts)

"""Cases that are measured: a problem with a name, and its operands in buffers to rotate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from splitkv.cache.quantize import quantize_kv
from splitkv.core.errors import expect
from splitkv.core.kv import AS_IS, Codec, Paged
from splitkv.core.problem import Problem
from splitkv.core.scores import PLAIN
from splitkv.testing import STORED, expected

REFERENCE_BYTES = (
    256 << 20
)  # keys and values that the reference takes at once; it needs ten times that


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with a name.

    lengths   keys of each sequence, the longest of them problem.seqlen_k; None: all as long
    beside    the case that a report compares it with
    queries   query tokens of each sequence, the most of them problem.seqlen_q; None: all as many
    """

    name: str
    problem: Problem
    lengths: tuple[int, ...] | None = None
    beside: str | None = None
    queries: tuple[int, ...] | None = None

    @property
    def place(self) -> str:
        """`contiguous`, or `page16` for pages of 16."""
        place = self.problem.place
        return f"page{place.page_size}" if isinstance(place, Paged) else "contiguous"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read, every sequence at its own length."""
        if self.lengths is None:
            return self.problem.kv_bytes
        alone = replace(self.problem, batch=1)
        return sum(replace(alone, seqlen_k=keys).kv_bytes for keys in self.lengths)


def flops(case: Case) -> int:
    """Operations of decode: two products of each query with every key that some query sees."""
    p = case.problem
    lengths = case.lengths or (p.seqlen_k,) * p.batch
    visible = sum(p.mask.num_keys(p.seqlen_q, keys) for keys in lengths)
    return 2 * p.num_heads * p.seqlen_q * visible * (p.head_dim + p.head_dim_v)


def unfilled(codec: Codec, shape: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    """Room for keys or values [.., heads, dim] as a codec stores them, and for their scales."""
    scale = {"tensor": (1,), "head": shape[-2:-1], "token": shape[:-1]}[codec.granularity]
    stored = torch.empty(shape, dtype=STORED[codec.name], device=device)
    return stored, torch.empty(scale, dtype=torch.float32, device=device)


class Inputs:
    """Operands of a case: as many buffers of q, K and V as are to be rotated, from a seed.

    x        [batch, seqlen_q, num_heads, head_dim]: what every q holds
    q        [buffers, *x.shape]
    k, v     [buffers, batch, seqlen_k, num_kv_heads, head_dim], or pages in the place of batch and
             seqlen_k, in an order drawn at random; no sequence has more pages than its keys need
    lengths  [batch] int32
    table    [batch, pages of a longest sequence] int32, or None. One for all buffers, as are the
             lengths: the layers of a model share them
    sink     [num_heads] sink logits, or None
    k_scale, v_scale   of quantised keys and values [buffers, ..], or None; each buffer holds the
             same ones

    `blank` leaves them unfilled, with no keys in any sequence: enough to compile for.
    """

    def __init__(
        self, case: Case, buffers: int, device: str = "cuda", seed: int = 0, blank: bool = False
    ) -> None:
        p = self.problem = case.problem
        plain = p.kind == "decode" and p.score == PLAIN and not p.return_lse
        expect(plain, "problem", "decode without score modifiers or lse", str(p))
        self.buffers, self.keys = buffers, case.lengths or (p.seqlen_k,) * p.batch
        g = torch.Generator(device).manual_seed(seed)

        def tensor(*shape: int) -> Tensor:
            options = {"device": device, "dtype": getattr(torch, p.dtype)}
            return (
                torch.empty(shape, **options)
                if blank
                else torch.randn(shape, generator=g, **options)
            )

        self.x = tensor(p.batch, p.seqlen_q, p.num_heads, p.head_dim)
        self.q = self.x.repeat(buffers, 1, 1, 1, 1)
        rows, self.table, self.page_size = (p.batch, p.seqlen_k), None, None
        if isinstance(p.place, Paged):
            self.page_size = p.place.page_size
            pages = [-(-keys // self.page_size) for keys in self.keys]
            rows = (sum(pages), self.page_size)
            self.table = torch.zeros(p.batch, max(pages), dtype=torch.int32, device=device)
            if not blank:
                order = torch.randperm(rows[0], generator=g, device=device).int()
                for entries, own in zip(self.table, order.split(pages), strict=True):
                    entries[: len(own)] = own
        self.k_scale: Any = None
        self.v_scale: Any = None
        if p.codec == AS_IS:
            shape = (buffers, *rows, p.num_kv_heads)
            self.k, self.v = tensor(*shape, p.head_dim), tensor(*shape, p.head_dim_v)
        else:
            shapes = [(*rows, p.num_kv_heads, dim) for dim in (p.head_dim, p.head_dim_v)]
            if blank:
                (k, k_scale), (v, v_scale) = (unfilled(p.codec, x, device) for x in shapes)
                of_one = k, v, k_scale, v_scale
            else:
                k, v = (tensor(*shape) for shape in shapes)
                of_one = quantize_kv(k, v, p.codec.name, p.codec.granularity)[:4]
            repeated = (x.repeat(buffers, *(1,) * x.dim()) for x in of_one)
            self.k, self.v = next(repeated), next(repeated)
            self.k_scale, self.v_scale = next(repeated), next(repeated)
        self.sink = tensor(p.num_heads) if p.sink_logits else None
        keys = (0,) * p.batch if blank else self.keys
        self.lengths = torch.tensor(keys, dtype=torch.int32, device=device)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keyword arguments of `splitkv.decode` on buffer i."""
        p, mask = self.problem, self.problem.mask
        given = {"q": self.q[i], "k_cache": self.k[i], "v_cache": self.v[i]}
        if self.k_scale is not None and self.v_scale is not None:
            given |= {"k_scale": self.k_scale[i], "v_scale": self.v_scale[i]}
        if p.lengths == "device":
            given["cache_seqlens"] = self.lengths
        if self.table is not None:
            given |= {"page_table": self.table, "max_seqlen_k": p.seqlen_k}
        if self.sink is not None:
            given["sink_logits"] = self.sink
        window = (mask.window_left, mask.window_right)
        return {
            **given,
            "causal": mask.causal,
            "window_size": window,
            "sink_tokens": mask.sink_tokens,
            "attention_chunk": mask.chunk,
        }

    def references(self) -> tuple[Tensor, Tensor]:
        """Buffer 0 by definition, in fp32 and in the working precision, a few sequences a time."""
        p = self.problem
        a_key = p.num_kv_heads * (p.head_dim + p.head_dim_v) * p.kv_element_bytes
        step = max(1, REFERENCE_BYTES // max(1, p.seqlen_k * a_key))
        absent = ("q_scale", "k_scale", "v_scale", "softmax_scale", "alibi_slopes", "sink_logits")
        call: dict[str, Any] = {**dict.fromkeys(absent), "softcap": 0.0, "cache_seqlens": None}
        call |= {"page_table": None, **self.arguments(0), "q": self.x}
        per_sequence = ["q", *(n for n in ("cache_seqlens", "page_table") if call[n] is not None)]
        if self.table is None:
            per_sequence += ["k_cache", "v_cache"]
            beside = p.codec.granularity == "token"
            per_sequence += ["k_scale", "v_scale"] if beside else []
        refs, pts = [], []
        for first in range(0, p.batch, step):
            part = {name: call[name][first : first + step] for name in per_sequence}
            part["max_seqlen_k"] = max(self.keys[first : first + step])
            refs.append(expected(p, call | part)[0])
            pts.append(expected(p, call | part, upcast=False)[0])
        return torch.cat(refs), torch.cat(pts)

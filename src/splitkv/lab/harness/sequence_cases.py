"""Cases of whole sequences: their operations and their operands.

The direction of a case is that of its problem: with `needs_grad` its gradients are what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

import splitkv
from splitkv.core.errors import expect
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import PLAIN
from splitkv.lab.harness.cases import Case, unfilled
from splitkv.testing import quantize

Direction = Literal["forward", "backward"]


def direction(case: Case) -> Direction:
    return "backward" if case.problem.needs_grad else "forward"


def pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees, of one query head and all sequences."""
    p = case.problem
    if case.lengths is None:
        return p.batch * p.visible_pairs
    both = zip(case.queries or case.lengths, case.lengths, strict=True)
    return sum(replace(p, seqlen_q=q, seqlen_k=keys).visible_pairs for q, keys in both)


def flops(case: Case) -> int:
    """Multiplications and additions of the products, of visible pairs alone: two, of the backward
    five, three of them as wide as the keys."""
    p = case.problem
    wide = 3 * p.head_dim + 2 * p.head_dim_v if p.needs_grad else p.head_dim + p.head_dim_v
    return 2 * p.num_heads * pairs(case) * wide


class Inputs:
    """Operands of a case, from a seed.

    q           [batch, seqlen_q, num_heads, head_dim], or packed [total, num_heads, head_dim]; k, v
                k, v of a paged problem: [num_pages, page_size, num_kv_heads, ..] in an order drawn
                at random; q is packed, and sequences have `case.queries` and `case.lengths`, or all
                of them seqlen_q queries and seqlen_k keys
    k_scale     of stored keys, by the granularity of the problem's codec, or None; v_scale
    sink        [num_heads] sink logits, or None
    grad        the gradient of the output, in its shape; None where none is asked
    cu_seqlens  [batch + 1] int32, of queries, and of keys that are packed; None: dense
    table       [batch, pages of a sequence] int32, or None; lengths [batch] int32 beside it

    Packed keys have `case.lengths`, as many queries as keys. `blank` leaves all unfilled.
    """

    def __init__(
        self, case: Case, device: str = "cuda", seed: int = 0, blank: bool = False
    ) -> None:
        p = self.problem = case.problem
        plain = p.kind != "decode" and p.score == PLAIN and p.q_granularity == "none"
        plain = plain and not (p.return_lse or p.dropout)
        expect(plain, "problem", "dense or varlen without score modifiers, lse, dropout", str(p))
        paged = isinstance(p.place, Paged)
        plain = p.codec.granularity != "token" and not p.needs_grad
        said = "pages without scales of tokens or gradients"
        expect(plain or not paged, "problem", said, str(p))
        packed = p.kind == "varlen" and not paged
        own = packed or (paged and case.queries is not None)
        expect(own == (case.lengths is not None), "lengths", "as packed keys have", case.lengths)
        expect(paged or case.queries is None, "queries", "None without pages", case.queries)
        g = torch.Generator(device).manual_seed(seed)

        def tensor(*shape: int) -> Tensor:
            options = {"device": device, "dtype": getattr(torch, p.dtype)}
            return (
                torch.empty(shape, **options)
                if blank
                else torch.randn(shape, generator=g, **options)
            )

        self.bounds, self.cu_seqlens = [0], None
        of_all = (p.seqlen_q,) * p.batch if paged else ()
        for length in case.queries or case.lengths or of_all:
            self.bounds.append(self.bounds[-1] + length)
        if p.kind == "varlen":
            self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        of_q = self.bounds[-1:] if p.kind == "varlen" else [p.batch, p.seqlen_q]
        of_k = self.bounds[-1:] if packed else [p.batch, p.seqlen_k]
        self.table = self.lengths = None
        if isinstance(p.place, Paged):
            self.keys = case.lengths or (p.seqlen_k,) * p.batch
            pages = [-(-keys // p.place.page_size) for keys in self.keys]
            of_k = [sum(pages), p.place.page_size]
            order = torch.randperm(of_k[0], generator=g, device=device).int()
            self.table = torch.zeros(p.batch, max(pages), dtype=torch.int32, device=device)
            for entries, own_pages in zip(self.table, order.split(pages), strict=True):
                entries[: len(own_pages)] = own_pages
            self.lengths = torch.tensor(self.keys, dtype=torch.int32, device=device)

        def stored(dim: int) -> tuple[Tensor, Tensor | None]:
            shape = *of_k, p.num_kv_heads, dim
            if p.codec == AS_IS:
                return tensor(*shape), None
            return unfilled(p.codec, shape, device) if blank else quantize(tensor(*shape), p.codec)

        self.q = tensor(*of_q, p.num_heads, p.head_dim)
        self.k, self.k_scale = stored(p.head_dim)
        self.v, self.v_scale = stored(p.head_dim_v)
        self.sink = tensor(p.num_heads) if p.sink_logits else None
        self.grad = tensor(*of_q, p.num_heads, p.head_dim_v) if p.needs_grad else None
        for leaf in self.leaves.values() if p.needs_grad else ():
            leaf.requires_grad_()

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that gradients are of."""
        found = {"q": self.q, "k": self.k, "v": self.v, "sink_logits": self.sink}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def window_size(self) -> tuple[int, int]:
        return self.problem.mask.window_left, self.problem.mask.window_right

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `splitkv.attention`, or of `attention_varlen`: by position, and by name."""
        p = self.problem
        by_position: tuple[Any, ...] = (self.q, self.k, self.v)
        if self.cu_seqlens is not None:
            of_keys = self.cu_seqlens if self.table is None else None
            by_position += (self.cu_seqlens, of_keys, p.seqlen_q, p.seqlen_k)
        pages = {"page_table": self.table, "cache_seqlens": self.lengths}
        return by_position, {
            **({} if self.table is None else pages),
            "causal": p.mask.causal,
            "window_size": self.window_size,
            "sink_tokens": p.mask.sink_tokens,
            "attention_chunk": p.mask.chunk,
            "sink_logits": self.sink,
            "deterministic": p.deterministic,
            **({} if self.k_scale is None else self.stored),
        }

    @property
    def stored(self) -> dict[str, Any]:
        """The arguments that say how keys and values are stored, and what of it may be
        multiplied."""
        return {
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "products": self.problem.products,
        }

    def plan(self) -> Plan:
        """The plan that `splitkv.plan` makes for the call."""
        by_position, by_name = self.arguments()
        if self.cu_seqlens is None:
            by_name["dense"] = True
        return splitkv.plan(*by_position, **by_name)

    def attend(self, plan: Plan | None = None) -> Tensor:
        """The call itself."""
        by_position, by_name = self.arguments()
        packed = self.cu_seqlens is not None
        function = splitkv.attention_varlen if packed else splitkv.attention
        out = function(*by_position, plan=plan, **by_name)
        assert isinstance(out, Tensor)
        return out

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the leaves; may be asked again."""
        leaves = list(self.leaves.values())
        return torch.autograd.grad(out, leaves, self.grad, retain_graph=True)

    def sequences(self, x: Tensor) -> Iterator[Tensor]:
        """[sequences, tokens, heads, dim] of equal lengths of an operand or its like: views, but
        copies of pages."""
        if self.table is not None:
            yield from self._of_pages(x)
            return
        if self.cu_seqlens is None:
            yield x
        for first, last in pairwise(self.bounds):
            yield x[None, first:last]

    def _of_pages(self, x: Tensor) -> Iterator[Tensor]:
        """All sequences at once where they are equally long; else one after the other."""
        assert self.table is not None
        p, of_pages = self.problem, x.dim() == 4
        equal = len(set(self.keys)) == len({b - a for a, b in pairwise(self.bounds)}) == 1
        if equal and of_pages:
            yield x[self.table].flatten(1, 2)[:, : p.seqlen_k]
        elif equal:
            yield x.unflatten(0, (p.batch, p.seqlen_q))
        elif of_pages:
            for entries, keys in zip(self.table, self.keys, strict=True):
                yield x[entries].flatten(0, 1)[None, :keys]
        else:
            for first, last in pairwise(self.bounds):
                yield x[None, first:last]


def blank(problem: Problem) -> Inputs:
    """Operands to compile for; packed, one sequence is as long as any and the others short."""
    packed = problem.kind == "varlen" and not isinstance(problem.place, Paged)
    lengths = (problem.seqlen_q, *[1] * (problem.batch - 1)) if packed else None
    return Inputs(Case("blank", problem, lengths), blank=True)

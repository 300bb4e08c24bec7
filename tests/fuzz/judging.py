"""From the tensors of a call to its definition, and from its result to an outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.oracle import (
    DRAWS,
    LARGEST,
    Asked,
    Sequence,
    Wrong,
    attend,
    expect_close,
    expect_lse,
    in_e4m3,
    numbers,
)

E4M3 = torch.float8_e4m3fn
Leaves = dict[str, Tensor]
Parts = list[tuple[Tensor, Tensor]]  # out [L_q, H, D_v] and lse [H, L_q] of each sequence


def stacked(parts: Parts) -> tuple[Tensor, Tensor]:
    """Of dense batches: [B, L_q, H, D_v] and [B, H, L_q]."""
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def packed(total: int, starts: list[int]) -> Callable[[Parts], tuple[Tensor, Tensor]]:
    """Of packed sequences that start there: [total, H, D_v] and [H, total]. Tokens that belong to
    none, or to the unused rest of one, see nothing."""

    def assemble(parts: Parts) -> tuple[Tensor, Tensor]:
        out, lse = parts[0]
        outs, lses, end = [], [], 0
        for start, (o, l) in zip([*starts, total], [*parts, (out[:0], lse[:, :0])], strict=True):
            if start > end:
                outs.append(o.new_zeros(start - end, *o.shape[1:]))
                lses.append(l.new_full((l.shape[0], start - end), float("-inf")))
            outs.append(o)
            lses.append(l)
            end = start + o.shape[0]
        return torch.cat(outs), torch.cat(lses, 1)

    return assemble


@dataclass
class Question:
    """A call in terms of the definition.

    leaves    tensors that it depends on, by the names of its arguments
    sequences sequences of such leaves, in whatever type these are
    assemble  the result of the call from those of the sequences
    dtype     of the output
    with_sink the LSE of the call includes the sink, and is its logit in a row that sees no key
    no_key    the LSE of a row that sees no key
    rounds_q  q is rounded once more before it is multiplied, which the LSE shows
    out_scale of an output in e4m3, or None
    """

    asked: Asked
    leaves: Leaves
    sequences: Callable[[Leaves], list[Sequence]]
    assemble: Callable[[Parts], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    return_lse: bool = False
    with_sink: bool = False
    no_key: float = float("-inf")
    rounds_q: bool = False
    out_scale: Tensor | None = None
    gradients: tuple[str, ...] = ()
    seed: int = 0
    empty: tuple[Tensor, Tensor] | None = None  # the result where there are no sequences
    checks: list[Callable[[Any], None]] = field(default_factory=list)

    def run(self, dtype: torch.dtype, draw: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse and the leaves that gradients are taken to."""
        exact = dtype == torch.float64
        leaves = {}
        for name, x in self.leaves.items():
            x = x.detach()
            if exact and x.is_floating_point() and x.element_size() > 1:
                x = x.double()
            elif name in self.gradients:
                x = x.clone()
            leaves[name] = x.requires_grad_() if name in self.gradients else x
        sequences = self.sequences(leaves)
        parts = []
        for x in sequences:
            out, lse = attend(x, self.asked, dtype, draw)
            parts.append((out, lse))
        if parts:
            out, lse = self.assemble(parts)
            sink = sequences[0].sink  # of all of them
            if self.with_sink and sink is not None:
                sink = sink.to(lse.dtype)[:, None].expand_as(lse)
                lse = torch.where(lse == float("-inf"), sink, torch.logaddexp(lse, sink))
            if self.no_key != float("-inf"):
                lse = torch.where(lse == float("-inf"), self.no_key, lse)
        else:
            assert self.empty is not None
            out, lse = self.empty
        return out, lse, [leaves[name] for name in self.gradients]

    def judge(self, result: Any) -> None:
        out, lse = result[:2] if self.return_lse else (result, None)
        if not isinstance(out, Tensor):
            raise Wrong(f"out: expected a tensor, got {type(out)}")
        ref, ref_lse, ref_leaves = self.run(torch.float64)
        runs = [self.run(self.dtype, draw) for draw in range(DRAWS)]
        stored = self.dtype if self.out_scale is None else E4M3
        if out.dtype != stored:
            raise Wrong(f"out: expected {stored}, got {out.dtype}")
        outs = [x for x, _, _ in runs]
        if self.out_scale is None:
            expect_close("out", out, ref, outs)
        else:
            scale = self.out_scale
            most = LARGEST[E4M3] * scale.double().reshape(())
            outs = [in_e4m3(x, scale) for x in outs]
            expect_close("out", numbers(out, scale), ref.clamp(-most, most), outs)
        if self.return_lse:
            if lse is None or lse.dtype != torch.float32 and self.dtype != torch.float64:
                raise Wrong(f"lse: expected float32, got {None if lse is None else lse.dtype}")
            rounds = self.rounds_q or self.asked.products != "widened"
            rounded = [x for _, x, _ in runs] if rounds else []
            expect_lse(lse, ref_lse, rounded)
        for check in self.checks:
            check(result)
        if self.gradients:
            self.judge_gradients(out, lse, (ref, ref_lse, ref_leaves), runs)

    def judge_gradients(self, out: Tensor, lse: Any, exact: Any, runs: list[Any]) -> None:
        if not out.requires_grad:
            raise Wrong("out: expected one that requires a gradient")
        g = torch.Generator().manual_seed(self.seed)
        of_out = torch.randn(out.shape, generator=g).to(out)
        of_lse = None
        if lse is not None and self.seed % 4:  # a loss of out alone, or of both
            of_lse = torch.randn(lse.shape, generator=g).to(lse)
            of_lse = torch.where(lse.detach().isfinite(), of_lse, 0.0)

        def gradients(a: Tensor, b: Any, leaves: list[Tensor]) -> list[Tensor]:
            outputs, weights = [a], [of_out.to(a)]
            if of_lse is not None and b.requires_grad:
                outputs.append(b)
                weights.append(of_lse.to(b))
            made = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
            pairs = zip(leaves, made, strict=True)
            return [torch.zeros_like(x) if y is None else y for x, y in pairs]

        given = [self.leaves[name] for name in self.gradients]
        if of_lse is not None and exact[1].requires_grad and not lse.requires_grad:
            raise Wrong("lse: expected one that requires a gradient")
        made = gradients(out, lse, given)
        wanted = gradients(*exact)
        drawn = [gradients(*run) for run in runs]
        for i, name in enumerate(self.gradients):
            runs_of = [x[i] for x in drawn]
            expect_close(f"d{name}", made[i], wanted[i], runs_of, 3.0, self.cancelled(of_out))

    def cancelled(self, of_out: Tensor) -> float:
        """What fp32 may leave of sums that cancel: a weight's gradient less the mean of all, times
        q or k."""

        def most(x: Tensor) -> float:
            x = x.detach().float().nan_to_num(0.0)
            return x.abs().max().item() if x.numel() else 0.0

        scale = 1.0 if self.asked.scale is None else self.asked.scale
        values = max((most(x) for x in self.leaves.values() if x.is_floating_point()), default=0.0)
        eps = torch.finfo(torch.float32).eps
        return eps * scale * of_out.shape[-1] * most(of_out) * max(values, 1.0) ** 2

"""The check of a library's results before it is timed, by the definition in `reference`.

The reference needs the whole matrix of scores, so of long sequences it is taken in parts:

    out, dq          of every sequence and head, at rows drawn from a seed, the first and last row
                     among them: a row of either needs no other row
    dk, dv, dsink    of the first and last KV head and of as many between as `PAIRS` allows (all, up
                     to about 4K tokens a sequence), whole: rows go through autograd in strips, each
                     against the keys that it sees, and the strips are added up in fp32

Both in fp32 and in the working precision, and compared by `testing.assert_close`, gradients by
factor 3 as in `testing.check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.sequence_cases import Inputs, pairs
from splitkv.rounding import Rounding, dequantize, is_of_tokens
from splitkv.testing import assert_close

ROWS = (8, 64)  # of a sequence, fewest and most
SCORES = 1 << 26  # that the reference holds at once; autograd keeps several copies of them
PAIRS = 1 << 31  # of queries and keys whose dk and dv are checked
STRIP = 1024  # rows of a strip under a window, at most
FACTOR, GRADIENT_FACTOR = 2.0, 3.0  # times the working precision's error


def drawn_rows(tokens: int, count: int, seed: int = 0) -> Tensor:
    """[count] rows of a sequence in order, the first and the last among them; all, if so few."""
    if tokens <= count:
        return torch.arange(tokens)
    g = torch.Generator().manual_seed(seed)
    between = 1 + torch.randperm(tokens - 2, generator=g)[: count - 2].sort().values
    return torch.cat([torch.tensor([0]), between, torch.tensor([tokens - 1])])


def drawn_heads(num_heads: int, pairs_a_head: int) -> list[int]:
    """KV heads spread evenly from the first to the last, two at least where there are two."""
    count = min(num_heads, max(2, PAIRS // max(1, pairs_a_head)))
    return [i * (num_heads - 1) // max(1, count - 1) for i in range(count)]


def keys_seen(mask: Mask, first: int, last: int, keys: int) -> list[tuple[int, int]]:
    """Intervals of the keys that queries at positions `first` to `last` see."""
    hi = keys if mask.right is None else max(0, min(keys, last + mask.right + 1))
    lo = 0 if mask.left is None else min(max(0, first - mask.left), hi)
    near = min(mask.sink_tokens, lo) if mask.num_bands == 2 else 0
    return [(a, b) for a, b in ((0, near), (lo, hi)) if a < b]


class Reference:
    """The expected results of inputs, where they are looked at."""

    def __init__(self, inputs: Inputs, case: Case) -> None:
        self.inputs, p = inputs, inputs.problem
        q, k = (list(inputs.sequences(x.detach())) for x in (inputs.q, inputs.k))
        self.rows = []
        for x, y in zip(q, k, strict=True):
            room = 2 * SCORES // (x.shape[0] * p.num_heads * y.shape[1])
            count = min(max(room, ROWS[0]), ROWS[1])
            self.rows.append(drawn_rows(x.shape[1], count).to(x.device))
        self.heads = drawn_heads(p.num_kv_heads, pairs(case) * p.group)
        self.exact = self._values(True)
        self.working = self._values(False)

    def check(self, out: Tensor, grads: Sequence[Tensor] = ()) -> dict[str, float]:
        """The largest error of each; raises AssertionError where one is too large."""
        leaves = [f"d{name}" for name in self.inputs.leaves]
        found = self.looked_at(out, dict(zip(leaves, grads, strict=bool(grads))))
        assert found.keys() == self.exact.keys()
        errors = {}
        for name, x in found.items():
            ref = self.exact[name]
            factor = FACTOR if name == "out" else GRADIENT_FACTOR
            assert_close(x, ref, self.working[name], factor=factor, name=name)
            errors[name] = (x.double() - ref.double()).abs().max().item()
        return errors

    def looked_at(self, out: Tensor, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of an output and of gradients that are compared, in the form of `_values`."""
        p, heads = self.inputs.problem, self.heads

        def rows_of(x: Tensor) -> Tensor:
            views = self.inputs.sequences(x.detach())
            parts = [v[:, rows].flatten() for v, rows in zip(views, self.rows, strict=True)]
            return torch.cat(parts)

        found = {"out": rows_of(out)}
        if grads:
            found["dq"] = rows_of(grads["dq"])
            for name in ("dk", "dv"):
                views = self.inputs.sequences(grads[name].detach())
                found[name] = torch.cat([v[:, :, heads].movedim(2, 0).flatten() for v in views])
            if "dsink_logits" in grads:
                of_heads = grads["dsink_logits"].view(p.num_kv_heads, p.group)[heads]
                found["dsink_logits"] = of_heads.flatten()
        return found

    def _values(self, upcast: bool) -> dict[str, Tensor]:
        x, p = self.inputs, self.inputs.problem
        working = getattr(torch, p.dtype)
        dtype = reference.compute_dtype(working, upcast)
        sink = None if x.sink is None else x.sink.detach().to(dtype)
        found: dict[str, list[Tensor]] = {"out": [], "dq": [], "dk": [], "dv": []}
        of_sink = torch.zeros(p.num_heads, device=x.q.device)
        k, v = (dequantize(*t, dtype) for t in ((x.k, x.k_scale), (x.v, x.v_scale)))
        scale = x.v_scale if is_of_tokens(x.v_scale, x.v) else None
        rounding = Rounding("widened" if upcast else p.products, x.k.dtype, scale)
        tensors = [x.q, k, v, x.q if x.grad is None else x.grad]
        views = zip(*(x.sequences(t.detach()) for t in tensors), strict=True)
        for (q, k, v, grad), rows in zip(views, self.rows, strict=True):
            out, dq = self._at_rows(q, k, v, grad, rows, sink, rounding)
            found["out"].append(out.flatten())
            found["dq"].append(dq.flatten())
            for h in self.heads if p.needs_grad else ():
                group = slice(h * p.group, (h + 1) * p.group)
                one = (q[:, :, group], k[:, :, h : h + 1], v[:, :, h : h + 1], grad[:, :, group])
                own = None if sink is None else sink[group]
                dk, dv, dsink = self._of_head(*(t.to(dtype) for t in one), sink=own)
                found["dk"].append(dk.flatten())
                found["dv"].append(dv.flatten())
                of_sink[group] += dsink
        wanted = ("out", "dq", "dk", "dv") if p.needs_grad else ("out",)
        values = {name: torch.cat(found[name]).to(dtype) for name in wanted}
        if p.needs_grad and sink is not None:
            of_heads = of_sink.view(p.num_kv_heads, p.group)[self.heads]
            values["dsink_logits"] = of_heads.flatten().to(dtype)
        return values

    def visible(self, pos: Tensor, keys: Tensor) -> Tensor | None:
        """[1, rows, keys] of positions [rows, 1]; None: all."""
        mask = self.inputs.problem.mask
        return None if mask.is_full else mask.visible(pos, keys)[None]

    def _at_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad: Tensor,
        rows: Tensor,
        sink: Tensor | None,
        rounding: Rounding,
    ) -> tuple[Tensor, Tensor]:
        """(out, dq) of some rows of equally long sequences."""
        needs_grad = self.inputs.problem.needs_grad
        pos = (k.shape[1] - q.shape[1] + rows)[:, None]
        visible = self.visible(pos, torch.arange(k.shape[1], device=q.device))
        q = rounding.of_queries(q, q[:, rows].to(k.dtype)).requires_grad_(needs_grad)
        options: dict[str, Any] = {"sink_logits": sink, "return_lse": False}
        options |= {"products": rounding.of_products, "weights": rounding.of_weights}
        out = reference.attend(q, k, v, visible, **options)[0]
        if not needs_grad:
            return out, out
        (dq,) = torch.autograd.grad(out, q, grad[:, rows].to(out.dtype))
        return out.detach(), dq

    def _of_head(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, sink: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """(dk, dv, dsink) of one KV head and its group, summed over strips of rows in fp32."""
        mask = self.inputs.problem.mask
        tokens, keys = q.shape[1], k.shape[1]
        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        dsink: Tensor | float = 0.0
        width, most = keys, tokens
        if mask.left is not None:
            width, most = min(keys, mask.left + mask.sink_tokens + STRIP), min(tokens, STRIP)
        step = min(most, max(16, SCORES // (q.shape[0] * q.shape[2] * width)))
        for first in range(0, tokens, step):
            last = min(tokens, first + step) - 1
            pos = keys - tokens + torch.arange(first, last + 1, device=q.device)[:, None]
            seen = keys_seen(mask, keys - tokens + first, keys - tokens + last, keys)
            if not seen:
                continue
            index = torch.cat([torch.arange(a, b, device=q.device) for a, b in seen])
            leaves = [t.index_select(1, index).requires_grad_() for t in (k, v)]
            if sink is not None:
                leaves.append(sink.detach().requires_grad_())
            out = reference.attend(
                q[:, first : last + 1],
                leaves[0],
                leaves[1],
                self.visible(pos, index),
                sink_logits=None if sink is None else leaves[2],
                return_lse=False,
            )[0]
            found = torch.autograd.grad(out, leaves, grad[:, first : last + 1].to(out.dtype))
            dk.index_add_(1, index, found[0].float())
            dv.index_add_(1, index, found[1].float())
            if sink is not None:
                dsink = dsink + found[2].float()
        return dk, dv, dsink

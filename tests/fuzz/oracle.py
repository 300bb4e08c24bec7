"""Attention by its definition, one sequence at a time, and the tolerance rule.

Written from the statements of the semantics alone: nothing here knows how the package computes, and
nothing of it is imported. A sequence is q [L_q, H, D], k [L_k, H_kv, D] and v [L_k, H_kv, D_v].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LSE_ATOL = 1e-3
LOG2_E = math.log2(math.e)
DRAWS = 4  # runs in the working precision, of which the worst counts: one is a poor measure


class Wrong(AssertionError):
    """A result that is not what was asked for."""


@dataclass(frozen=True)
class Asked:
    """Everything about a call but its tensors.

    stored    the type of quantised keys, None: they are as q
    products  what may be rounded to that type: "widened": nothing, "half": q, "full": the weights
              too
    q_stored  q is of that type already
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sink_tokens: int = 0
    chunk: int = 0
    scale: float | None = None
    softcap: float = 0.0
    stored: torch.dtype | None = None
    products: str = "widened"
    q_stored: bool = False


@dataclass
class Sequence:
    """Tensors of one sequence; slopes and sink are [H], the scale of values [L_k, H_kv] or None.

    sink_tokens  in the place of those that are asked for of all
    ranges       (first, end) of keys that see each other, whatever is asked for
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None = None
    sink: Tensor | None = None
    v_scale: Tensor | None = None
    sink_tokens: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()


def visible(
    asked: Asked,
    seqlen_q: int,
    seqlen_k: int,
    device: Any,
    sink_tokens: int | None = None,
    ranges: tuple[tuple[int, int], ...] = (),
) -> Tensor:
    """[L_q, L_k] booleans; sink_tokens and ranges of the sequence."""
    pos = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None]
    left, right = asked.window
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if asked.causal:
        right = 0
    if right >= 0:
        seen &= key <= pos + right
    near = torch.ones_like(seen)
    if left >= 0:
        near &= key >= pos - left
    if asked.chunk > 0:
        number = torch.div(pos, asked.chunk, rounding_mode="floor")
        first = number * asked.chunk
        seen &= key < first + asked.chunk
        near &= key >= first
    seen &= near | (key < (asked.sink_tokens if sink_tokens is None else sink_tokens))
    for first, end in ranges:
        seen |= (pos >= max(first, 0)) & (pos < end) & (key >= first) & (key < end)
    return seen


def attend(x: Sequence, asked: Asked, dtype: torch.dtype, draw: int = 0) -> tuple[Tensor, Tensor]:
    """out [L_q, H, D_v] and lse [H, L_q], without the sink, of inputs in this type.

    float64 is the definition, which rounds nothing. Another type is a run in that precision: its
    products are rounded to it, softmax is in fp32. `draw` sums in another order, and from the third
    on takes exponentials in base 2, as kernels do: of a row of one key there is no order.

    Odd draws have the gradient of the softmax's denominator from the rounded output, sum(dO * out),
    and not from the weights: so has FlashAttention's own backward pass, and any other that keeps no
    weights. It matters where a row sees one key beside a sink: by the weights dq and dk cancel but
    for the sink's share, by the rounded output what rounding it left stays in them.
    """
    exact = dtype == torch.float64
    stat = torch.promote_types(dtype, torch.float32)
    q, k, v = (t.to(dtype) for t in (x.q, x.k, x.v))
    seqlen_q, heads, dim = q.shape
    seqlen_k, kv_heads, dim_v = v.shape
    scale = dim**-0.5 if asked.scale is None else asked.scale
    if not exact and asked.products != "widened" and not asked.q_stored:
        q = rounded_rows(q, asked.stored)
    if draw:
        order = torch.randperm(dim, generator=torch.Generator().manual_seed(draw)).to(q.device)
        q, k = q[..., order], k[..., order]
    rows = (q * scale).view(seqlen_q, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    columns = k.permute(1, 2, 0)[:, None]
    if not exact and asked.products != "widened" and asked.stored == torch.float8_e4m3fn:
        s = product_of_few_bits(rows.to(stat), columns.to(stat))
    else:
        s = torch.matmul(rows, columns).to(stat)
    s = s.reshape(heads, seqlen_q, seqlen_k)
    if asked.softcap > 0:
        s = asked.softcap * torch.tanh(s / asked.softcap)
    if x.slopes is not None:
        pos = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = (pos - torch.arange(seqlen_k, device=q.device)).abs()
        s = s - x.slopes.to(stat)[:, None, None] * distance
    seen = visible(asked, seqlen_q, seqlen_k, q.device, x.sink_tokens, x.ranges)
    sees_any = seen.any(-1)  # [L_q]
    s = s.masked_fill(~seen, float("-inf"))
    finite = torch.where(sees_any[None, :, None], s, 0.0)  # rows that see nothing: cleared below
    lse = finite.logsumexp(-1) if seqlen_k else finite.new_zeros(heads, seqlen_q)
    below = lse
    if x.sink is not None:
        below = torch.logaddexp(lse, x.sink.to(stat)[:, None].expand_as(lse))
    through_out = not exact and draw % 2 == 1
    norm = below.detach() if through_out else below
    if not exact and draw >= 2:
        p = (LOG2_E * finite - LOG2_E * norm[..., None]).exp2()
    else:
        p = (finite - norm[..., None]).exp()
    p = torch.where(seen, p, 0.0)
    if not exact and asked.products == "full":
        p = rounded_weights(p, asked.stored, x.v_scale, kv_heads)
    p = p.to(dtype).view(kv_heads, heads // kv_heads, seqlen_q, seqlen_k)
    out = torch.matmul(p, v.transpose(0, 1)[:, None]).permute(2, 0, 1, 3)
    out = out.reshape(seqlen_q, heads, dim_v)
    if through_out:  # a sum that is 0, whose gradient is that of `below`
        of_below = out.detach().to(stat) * (below - below.detach()).T[..., None]
        out = out - of_below.to(dtype)
    return out, torch.where(sees_any, lse, float("-inf"))


# What 8-bit units round


def over(x: Tensor, most: float) -> Tensor:
    """x / most, rounded once: where `most` is no tensor, CUDA multiplies with its reciprocal."""
    return x / torch.full_like(x, most)


def to_stored(x: Tensor, scale: Tensor, stored: torch.dtype | None) -> Tensor:
    """The nearest multiples of scale that the type has."""
    assert stored is not None
    y = (x / scale).clamp(-LARGEST[stored], LARGEST[stored])
    y = y.round() if stored == torch.int8 else y.to(torch.float32).to(stored)
    return y.to(scale.dtype) * scale


def numbers(out: Tensor, scale: Tensor) -> Tensor:
    """What an output in e4m3 with a scale stands for."""
    return out.float() * scale.float().reshape(())


def in_e4m3(out: Tensor, scale: Tensor) -> Tensor:
    """Rounded to what such an output can stand for."""
    return to_stored(out.float(), scale.float().reshape(()), torch.float8_e4m3fn)


def rounded_rows(q: Tensor, stored: torch.dtype | None) -> Tensor:
    """With a scale a row; a gradient passes as if nothing were rounded."""
    assert stored is not None
    wide = q.detach().float()
    scale = over(wide.abs().amax(-1, keepdim=True), LARGEST[stored]).clamp(min=2.0**-100)
    return q + (to_stored(wide, scale, stored).to(q.dtype) - q).detach()


def rounded_weights(
    p: Tensor, stored: torch.dtype | None, v_scale: Tensor | None, kv_heads: int
) -> Tensor:
    """Weights [H, L_q, L_k] times the scales of their values, with a scale a row: in int8 a row of
    64 keys."""
    assert stored is not None
    factor = torch.ones((), dtype=p.dtype, device=p.device)
    if v_scale is not None:
        factor = v_scale.to(p.dtype).T.repeat_interleave(p.shape[0] // kv_heads, 0)[:, None]
    parts = []
    for part in (p * factor).split(64 if stored == torch.int8 else max(p.shape[-1], 1), -1):
        most = part.amax(-1, keepdim=True) if part.shape[-1] else part.sum(-1, keepdim=True)
        parts.append(to_stored(part, over(most, LARGEST[stored]).clamp(min=2.0**-100), stored))
    return torch.where(p > 0, torch.cat(parts, -1) / factor, 0.0)


def product_of_few_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Sums of products in e4m3, of which matrix units keep about 14 bits after every 32."""
    total = rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
    for first in range(0, rows.shape[-1], 32):
        step = torch.matmul(rows[..., first : first + 32], columns[..., first : first + 32, :])
        larger = torch.maximum((total + step).abs(), total.abs()).clamp(min=1e-30)
        unit = torch.exp2(torch.floor(torch.log2(larger)) - 13)
        total = ((total + step) / unit).trunc() * unit
    return total


# The rule


def expect_close(
    name: str,
    out: Tensor,
    ref: Tensor,
    pts: list[Tensor],
    factor: float = 2.0,
    cancelled: float = 0.0,
) -> None:
    """max|out - ref| <= factor * max|pt - ref| + 2 * max|(ref + 0.3 - 0.3) - ref|, the latter in
    the type of out.

    Numbers that are 0 because two sums cancel, as gradients of scores are where a row sees one key,
    may be off by fp32's rounding of those sums, `cancelled`: the terms above say nothing of them.
    """
    if out.shape != ref.shape:
        raise Wrong(f"{name}: expected shape {list(ref.shape)}, got {list(out.shape)}")
    if out.numel() == 0:
        return
    near = ref.detach().to(out.dtype)
    rounding = ((near + 0.3 - 0.3) - near).double().abs().max().item()
    pt = max((pt.detach().double() - ref.double()).abs().max().item() for pt in pts)
    bound = factor * pt + 2 * rounding
    if not bound < float("inf"):
        raise RuntimeError(f"{name}: the bound is {bound}: the draw is not a question")
    error = (out.detach().double() - ref.detach().double()).abs()
    error = torch.where(error.isnan(), float("inf"), error)
    error = torch.where((ref == 0) & (error <= cancelled), 0.0, error)
    if error.max().item() > bound:
        at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        got, want = out[tuple(at)].item(), ref[tuple(at)].item()
        raise Wrong(
            f"{name}: error {error.max().item():.3e} past {bound:.3e} (working precision {pt:.3e}) "
            f"at {at}: {got:.6g} for {want:.6g}; {int((error > bound).sum())} of {error.numel()} "
            f"past it, {int(out.isnan().sum())} NaN"
        )


def expect_lse(lse: Tensor, ref: Tensor, rounded: list[Tensor], name: str = "lse") -> None:
    """Infinities equal, the rest to 1e-3, and twice what rounding to 8 bits does where it may."""
    if lse.shape != ref.shape:
        raise Wrong(f"{name}: expected shape {list(ref.shape)}, got {list(lse.shape)}")
    if lse.numel() == 0:
        return
    a, b = lse.detach().double(), ref.detach().double()
    bound = LSE_ATOL
    for c in rounded:
        c = c.detach().double()
        bound = max(bound, LSE_ATOL + 2 * torch.where(c == b, 0.0, (c - b).abs()).max().item())
    error = torch.where(a == b, 0.0, (a - b).abs())
    error = torch.where(error.isnan(), float("inf"), error)
    if error.max().item() > bound:
        at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        raise Wrong(
            f"{name}: error {error.max().item():.3e} past {bound:.3e} at {at}: "
            f"{a[tuple(at)].item():.6g} for {b[tuple(at)].item():.6g}"
        )

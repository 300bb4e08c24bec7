"""Quantised tensors in plain PyTorch, and what kernels that multiply 8 bits round besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.core.kv import CODECS

STORED: dict[str, torch.dtype] = {name: getattr(torch, x.dtype) for name, x in CODECS.items()}
LARGEST = {STORED[name]: x.largest for name, x in CODECS.items()}  # what stored values go up to
MIN_SCALE = 2.0**-100  # of a row of zeros; its reciprocal is finite
WEIGHT_KEYS = 64  # keys whose weights in int8 share a scale
UNIT_DIMS, UNIT_BITS = 32, 13  # of e4m3 units: products of a step, bits kept below a sum's first


def is_of_tokens(scale: Tensor | None, x: Tensor) -> bool:
    """Whether a scale of x [.., heads, dim] is one a token and head."""
    return scale is not None and scale.shape == x.shape[:-1]


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x * scale` in `dtype`, rounded once.

    x       [B, S, heads, D] or [total, heads, D]
    scale   of one element, [heads], [B, heads] beside the former, or x's shape but the last
    """
    if scale is None:
        return x.to(dtype)
    if scale.numel() == 1:
        scale = scale.reshape(())
    elif scale.dim() == 2 and x.dim() == 4:
        scale = scale[:, None, :, None]
    else:
        scale = scale[..., None]
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(dtype)


def scale_of(x: Tensor, dims: tuple[int, ...], stored: torch.dtype) -> Tensor:
    """Computes the fp32 scale by which the largest of x becomes the largest stored value.

    dims   those that share a scale; they are kept, as ones

    It is inf where an element is not finite.
    """
    largest = x.detach().float().abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    if any(x.shape[dim] == 0 for dim in dims):
        shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
        return torch.full(shape, MIN_SCALE, device=x.device)
    largest = largest.amax(dims, keepdim=True)
    most = torch.full_like(largest, LARGEST[stored])  # by a number CUDA divides less exactly
    return (largest / most).clamp(min=MIN_SCALE)


def quantize(x: Tensor, scale: Tensor, stored: torch.dtype) -> Tensor:
    """Rounds `x / scale` to the nearest stored values, past the largest to that; scale broadcasts.

    Ties go to even. NaN, also of an infinite x and scale, is 0 in integers, which have none.
    """
    most = LARGEST[stored]
    y = (x.float() * (1 / scale)).clamp(-most, most)
    rounded = y if stored.is_floating_point else y.round()
    nan = float("nan") if stored.is_floating_point else 0.0  # without a sign
    return torch.where(y.isnan(), nan, rounded).to(stored)


class Rounding(NamedTuple):
    """The operands that `products` rounds.

    stored    the type of the keys
    v_scale   the scale of each value [B, S_k, H_kv] or [S_k, H_kv] where it has one: the weights
              are rounded with it, as a kernel that multiplies stored values has it there
    """

    products: str
    stored: torch.dtype
    v_scale: Tensor | None

    def of_queries(self, given: Tensor, q: Tensor) -> Tensor:
        """Rounds q [.., D] with a scale a row, where the keys are quantised and q was not.

        given   what q was made of
        """
        if self.products == "widened" or self.stored not in LARGEST or given.dtype in LARGEST:
            return q
        scale = scale_of(q, (q.dim() - 1,), self.stored)
        rounded = quantize(q, scale, self.stored).to(scale.dtype) * scale
        return q + (rounded.to(q.dtype) - q).detach()

    @property
    def of_products(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The products of `attend`: for e4m3, sums as the units keep them; None: exact ones.

        Measured for Hopper in section 3.3.2 of the DeepSeek-V3 report (arXiv:2412.19437): about 14
        bits of each sum remain, the rest is cut off.
        """
        if self.products == "widened" or self.stored != torch.float8_e4m3fn:
            return None
        return _sum_in_steps

    @property
    def of_weights(self) -> Callable[[Tensor], Tensor] | None:
        """The rounding of weights in `attend`; None: they stay."""
        if self.products != "full" or self.stored not in LARGEST:
            return None
        return self._round_weights

    def _round_weights(self, p: Tensor) -> Tensor:
        """Rounds p [B, H_kv, G, S_q, S_k], in int8 by a scale a row and `WEIGHT_KEYS` keys.

        In e4m3 a scale is that of a whole row. Rows of zeros stay.
        """
        factor = torch.ones((), dtype=p.dtype, device=p.device)
        if self.v_scale is not None:
            by_head = self.v_scale.to(p.dtype).transpose(-1, -2)  # [.., H_kv, S_k]
            factor = by_head.reshape(-1, p.shape[1], 1, 1, p.shape[-1])
        seen = p != 0  # of other keys the factor may be anything
        weight = torch.where(seen, p * factor, 0.0)
        keys = WEIGHT_KEYS if self.stored == torch.int8 else max(p.shape[-1], 1)
        groups = F.pad(weight, (0, -p.shape[-1] % keys)).unflatten(-1, (-1, keys))
        scale = scale_of(groups, (groups.dim() - 1,), self.stored)
        rounded = quantize(groups, scale, self.stored).to(p.dtype) * scale.to(p.dtype)
        return torch.where(seen, rounded.flatten(-2)[..., : p.shape[-1]] / factor, 0.0)


def _sum_in_steps(rows: Tensor, keys: Tensor) -> Tensor:
    """Computes rows @ keys.T by `UNIT_DIMS` products, each sum cut off past `UNIT_BITS` bits."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    steps = (x.to(dtype).split(UNIT_DIMS, -1) for x in (rows, keys))
    total = rows.new_zeros(*rows.shape[:-1], keys.shape[-2], dtype=dtype)
    for a, b in zip(*steps, strict=True):
        added = total + a @ b.transpose(-1, -2)
        exponent = torch.maximum(added.abs(), total.abs()).detach().frexp().exponent
        last = torch.ldexp(torch.ones_like(added), exponent - UNIT_BITS - 1)
        total = added + ((added / last).trunc() * last - added).detach()
    return total.to(rows.dtype)

"""Arguments, refusals and results that FlashAttention's functions have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv.core.errors import (
    UnsupportedProblem,
    expect,
    expect_bool,
    expect_in_range,
    expect_none_with,
    expect_number,
    expect_size,
    renamed,
)
from splitkv.planner.policies.shared import MAX_SPLITS
from splitkv.runtime.dispatch import device_of


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments besides q, k, v, lengths and places, as FlashAttention names them.

    num_splits, pack_gqa and sm_margin only change how fast a result comes: they are checked, and
    the policy decides. flash_attn_with_kvcache passes num_splits on.
    """

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_attn_probs: bool = False
    return_softmax_lse: bool = False
    s_aux: Tensor | None = None
    learnable_sink: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    attention_chunk: int = 0
    num_splits: int = 0
    pack_gqa: bool | None = None
    sm_margin: int = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """The options among the arguments of a call, by name."""
        return cls(**{name: arguments[name] for name in cls.__slots__ if name in arguments})

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_size", window_of(self.window_size))

    @property
    def sink_logits(self) -> Tensor | None:
        return self.s_aux if self.learnable_sink is None else self.learnable_sink

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of arguments that this package names otherwise."""
        sink = "s_aux" if self.learnable_sink is None else "learnable_sink"
        return {"sink_logits": sink, **{f"{x}_scale": f"{x}_descale" for x in "qkv"}}

    @property
    def descales(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("q_descale", "k_descale", "v_descale")}

    @property
    def return_lse(self) -> bool:
        return self.return_attn_probs or self.return_softmax_lse

    def check(self, q: Tensor) -> None:
        """Raise for what is malformed, or what no kernel here computes."""
        expect_hints(self.num_splits, self.pack_gqa, self.sm_margin)
        expect_number("dropout_p", self.dropout_p)
        by_name = "by position, arguments are those of FlashAttention 2"
        scale_ok = not isinstance(self.softmax_scale, bool)
        expect(scale_ok, "softmax_scale", "a number or None", self.softmax_scale, by_name)
        for name in ("return_attn_probs", "return_softmax_lse"):
            expect_bool(name, getattr(self, name))
        other = "return_attn_probs"
        both = self.return_attn_probs and self.return_softmax_lse
        expect(not both, "return_softmax_lse", f"False with {other}, which includes it", True)
        if self.s_aux is not None:
            expect_none_with("learnable_sink", self.learnable_sink, "s_aux, another name for it")
        refuse_qv(q, self.qv)
        if self.return_attn_probs and self.dropout_p > 0:
            raise unsupported(
                q,
                "return_attn_probs: expected False with dropout, as no kernel stores the weights "
                "(S_dmask); return_softmax_lse=True returns (out, softmax_lse)",
            )

    def for_attention(self) -> dict[str, Any]:
        """Arguments of `splitkv.attention` and `attention_varlen`."""
        return {
            **self.for_decode(),
            "dropout_p": self.dropout_p,
            "deterministic": self.deterministic,
        }

    def for_decode(self) -> dict[str, Any]:
        """Arguments of `splitkv.decode`."""
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "attention_chunk": self.attention_chunk,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sink_logits": self.sink_logits,
            "return_lse": self.return_lse,
        }

    def finish(self, result: Any) -> Any:
        """out, (out, softmax_lse) or FlashAttention 2's (out, softmax_lse, S_dmask).

        With a sink the LSE includes it, and is the sink's logit in a row that sees no key. Without
        one it is -inf there, in the triple +inf.
        """
        if not self.return_lse:
            return result
        out, lse = result
        sink = self.sink_logits
        if sink is not None:
            lse = _with_sink(lse, sink.to(lse.dtype)[:, None])
        if not self.return_attn_probs:
            return out, lse
        lse = torch.where(lse == float("-inf"), float("inf"), lse)
        return out, lse, out.new_empty(0)


def _with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """log(exp(lse) + exp(sink)). Where either is -inf it is the other, and so are its gradients:
    those of two such numbers would be NaN."""
    empty = lse == float("-inf")
    alone = torch.where(sink == float("-inf"), float("-inf"), sink)
    return torch.where(empty, alone, torch.logaddexp(torch.where(empty, 0.0, lse), sink))


def expect_hints(num_splits: int, pack_gqa: bool | None, sm_margin: int) -> None:
    """The arguments that only say how."""
    for name, value in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        expect_size(name, value, empty=True)
    expect_in_range("num_splits", num_splits, 0, MAX_SPLITS)
    expect(pack_gqa is None or isinstance(pack_gqa, bool), "pack_gqa", "a bool or None", pack_gqa)


def window_of(window_size: Any) -> Any:
    """(left, right), which may also come as a tensor of two integers on the host."""
    if not isinstance(window_size, Tensor):
        return window_size
    requirement = "(left, right), or two integers in a tensor on the CPU"
    pair = window_size.shape == (2,) and not window_size.is_floating_point()
    expect(pair and window_size.device.type == "cpu", "window_size", requirement, window_size)
    return tuple(window_size.tolist())


def refuse_qv(q: Any, qv: Tensor | None) -> None:
    if qv is not None:
        raise unsupported(q, "qv: expected None, as no kernel adds a second product to the scores")


def unsupported(q: Any, reason: str) -> UnsupportedProblem:
    """Well-formed for FlashAttention, but nothing here computes it."""
    device = device_of(q) if isinstance(q, Tensor) else "any device"
    return UnsupportedProblem("a FlashAttention call", device, [("splitkv", [reason])])


@contextmanager
def named(names: dict[str, str]) -> Iterator[None]:
    """ValueErrors say the caller's name of an argument."""
    try:
        yield
    except ValueError as error:
        raise renamed(error, names) from None


def bound_of(length: Any) -> Any:
    """A bound of lengths, which may also come as a tensor of one integer; the host reads that."""
    one = isinstance(length, Tensor) and length.numel() == 1 and not length.is_meta
    return int(length) if one and length.dtype in (torch.int32, torch.int64) else length


def rows_contiguous(x: Any) -> Any:
    """x, copied if neighbours along its last dimension are not neighbours in memory."""
    strided = isinstance(x, Tensor) and x.layout == torch.strided and x.dim() > 0
    return x.contiguous() if strided and x.stride(-1) != 1 else x

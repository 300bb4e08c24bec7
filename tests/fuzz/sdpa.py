"""torch's scaled_dot_product_attention with the package's kernels in it; needs a GPU."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

from fuzz.draw import Draw, Drawn, shape
from fuzz.judging import Leaves, Question, stacked
from fuzz.oracle import Asked, Sequence


@cache
def activated() -> None:
    from torch.nn.attention import activate_flash_attention_impl

    from splitkv.integrations import torch_sdpa

    torch_sdpa.register()
    activate_flash_attention_impl("splitkv")


def sdpa(d: Draw) -> Drawn:
    activated()
    v = d.variant
    grad, causal = v.random() < 0.6, v.random() < 0.6
    of = shape(d, (torch.bfloat16, torch.float16, torch.float32))
    batch = d.rng.randint(1, 4)
    seqlen_k = max(1, d.length())
    seqlen_q = seqlen_k if causal else max(1, d.length())
    scale = d.rng.choice((None, 0.3))
    turned = d.chance(0.5)
    kwargs: dict[str, Any] = {}
    sizes = {"query": (seqlen_q, of.heads, of.dim), "key": (seqlen_k, of.kv_heads, of.dim)}
    sizes["value"] = (seqlen_k, of.kv_heads, of.dim_v)
    for name, (tokens, heads, dim) in sizes.items():
        x = d.randn(batch, tokens, heads, dim, dtype=of.dtype).transpose(1, 2)
        kwargs[name] = x if turned else x.contiguous()
        if grad:
            kwargs[name].requires_grad_()
    kwargs |= {"is_causal": causal, "scale": scale, "enable_gqa": of.group > 1}

    def run(**kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = torch.nn.functional.scaled_dot_product_attention(**kwargs)
        return out.transpose(1, 2)

    def sequences(x: Leaves) -> list[Sequence]:
        q, k, y = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
        return [Sequence(q[b], k[b], y[b]) for b in range(batch)]

    leaves = {name: kwargs[name] for name in ("query", "key", "value")}
    question = Question(
        Asked(causal, scale=scale),
        leaves,
        sequences,
        stacked,
        of.dtype,
        gradients=tuple(leaves) if grad else (),
        seed=d.index,
    )
    return Drawn("torch_sdpa", run, kwargs, question.judge, again=not grad)

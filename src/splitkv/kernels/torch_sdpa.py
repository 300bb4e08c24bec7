"""Attention by torch.nn.functional.scaled_dot_product_attention.

Computes    softmax(scale * q k^T + mask) v. A sink logit is one more key and value of zeros whose
            entry in the additive mask is the logit. A row that sees no key is shown all of them and
            then cleared, so that neither it nor its gradients are ever NaN
Shapes      q [batch, seqlen_q, heads, head_dim], k, v [batch, seqlen_k, kv_heads, head_dim]; caches
            are first gathered and dequantised, packed sequences padded to their planned maximum
Grid        SDPA's own
Traffic     keys+values  batch * kv_heads * seqlen_k * (head_dim + head_dim_v) * kv_bytes
            copies       the same elements, written and read, where moved or given a sink
            mask         a byte an entry and query row, or a number for every head with sink logits
            flops        2 * batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v)
            every key is read, whatever the mask; scores stay on chip where SDPA is fused
Numerics    those of SDPA; quantised caches are rounded to the working type after scaling; on the
            CPU fp32 with gradients takes SDPA's unfused path
Limits      no soft cap; no ALiBi; no LSE; no out_scale; no dropout; sink logits beside fp32 and
            fp64 only, as SDPA rounds an additive mask to the type of q; a deterministic backward on
            the CPU only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from splitkv.core.device import Device
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.torch_math import dense_traffic, finish_out, kv_elements, moved, padded_inputs

if TYPE_CHECKING:
    from torch import Tensor


def unsupported(problem: Problem, device: Device) -> list[str]:
    wide = ("float32", "float64")
    limits = (
        (problem.score.softcap, "softcap: expected 0, got a soft cap"),
        (problem.score.alibi, "alibi_slopes: expected None, got slopes"),
        (problem.return_lse, "return_lse: expected False, got True"),
        (
            problem.out_scale,
            "out_scale: expected None, as the output is rounded to the working type",
        ),
        (problem.dropout, "dropout_p: expected 0, got dropout"),  # drawn by torch's own generator
        (
            problem.sink_logits and problem.dtype not in wide,
            f"sink_logits: expected dtype float32 or float64 beside them, got {problem.dtype}",
        ),
        (
            problem.deterministic and problem.needs_grad and device.kind == "cuda",
            "deterministic: expected False with gradients on cuda, got True",
        ),
    )
    return [reason for hit, reason in limits if hit]


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    yield Config()


def mask_form(problem: Problem) -> str:
    """The mask as SDPA is given it: not at all, as its own causal flag, or as a tensor."""
    # SDPA's flag aligns top-left, which is ours only where there are as many queries as keys.
    if problem.kind == "dense" and not problem.sink_logits:
        if problem.mask.is_full and problem.seqlen_k > 0:
            return "none"
        if problem.mask == Mask(causal=True) and problem.seqlen_q == problem.seqlen_k:
            return "causal"
    return "tensor"


def traffic(problem: Problem, config: Config) -> Traffic:
    mask_bytes = 0
    if mask_form(problem) == "tensor":
        alike = problem.kind == "dense" and not problem.sequence_sink_tokens
        per_head = 1 if alike else problem.batch
        entries = per_head * problem.group * problem.seqlen_q
        mask_bytes = 2 * entries * problem.seqlen_k
        if problem.sink_logits:
            width = problem.num_kv_heads * (problem.seqlen_k + 1) * problem.element_bytes
            mask_bytes = 2 * entries * width
    return dense_traffic(
        problem,
        copies=kv_elements(problem) if problem.sink_logits else moved(problem),
        copy_bytes=problem.element_bytes,
        workspace_bytes=mask_bytes,
    )


def bind(plan: Plan, operands: Operands) -> Callable[[Operands], tuple[Tensor, Tensor | None]]:
    return partial(launch, plan.problem)


def launch(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    import torch

    out = _attend(problem, operands, getattr(torch, problem.dtype))
    return finish_out(operands, problem, out, None)


def _sdpa(problem: Problem, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA, or its unfused path: called by name, as `sdpa_kernel` switches the others off for every
    thread of the process."""
    import torch
    from torch.nn import functional as F

    # With AVX-512 the fused CPU kernel takes exponentials to 20 ulp, which its float32 backward
    # turns into errors past our tolerance.
    unfused = q.device.type == "cpu" and problem.dtype == "float32" and problem.needs_grad
    if not unfused:
        return F.scaled_dot_product_attention(q, k, v, **options)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        options["attn_mask"] = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, **options)[0]
    return out


def _attend(problem: Problem, operands: Operands, dtype: Any) -> Tensor:
    """[batch, seqlen_q, heads, head_dim_v], packed sequences padded."""
    import torch
    from torch.nn import functional as F

    from splitkv import reference

    x = operands
    form = mask_form(problem)
    padded = padded_inputs(operands, problem, dtype)
    q, k, v = padded.q, padded.k, padded.v
    seqlens_k = padded.seqlens_k
    if form != "tensor":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        causal, gqa = form == "causal", problem.group > 1
        out = _sdpa(problem, q, k, v, is_causal=causal, enable_gqa=gqa, scale=x.softmax_scale)
        return out.transpose(1, 2)
    if k.shape[1] == 0:  # one key that nobody sees
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        seqlens_k = torch.zeros(problem.batch, dtype=torch.int32, device=k.device)
    masking = reference.Masking(problem.mask, x.sequence_sink_tokens, x.bidirectional_ranges)
    visible = reference.padded_mask(q, k, padded.seqlens_q, seqlens_k, masking)[2]
    if problem.kind == "dense":
        visible = visible if problem.sequence_sink_tokens else visible[:1]
    else:  # cache entries that no query sees may hold anything
        unread = ~visible.any(-2)[:, :, None, None]
        k, v = k.masked_fill(unread, 0), v.masked_fill(unread, 0)
    return _masked(problem, q, k, v, visible, x)


def _masked(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, x: Operands
) -> Tensor:
    """SDPA under a mask [B or 1, S_q, S_k], the heads of a group packed as rows of one head."""
    import torch
    from torch.nn import functional as F

    from splitkv import reference

    seqlen_q, num_heads, num_kv_heads = q.shape[1], q.shape[2], k.shape[2]
    group = num_heads // num_kv_heads
    visible = visible[:, None, None]  # [B or 1, 1, 1, S_q, S_k]
    sees_any = visible.any(-1, keepdim=True)
    mask = (visible | ~sees_any).expand(-1, -1, group, -1, -1)
    if x.sink_logits is not None:
        bias = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        bias = bias.expand(-1, num_kv_heads, -1, -1, -1)
        sink = x.sink_logits.to(q.dtype).view(1, num_kv_heads, group, 1, 1)
        mask = torch.cat([bias, sink.expand(*bias.shape[:-1], 1)], -1)
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
    out = _sdpa(
        problem,
        reference.pack_heads(q, num_kv_heads),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.flatten(2, 3),
        scale=x.softmax_scale,
    )
    out = torch.where(sees_any, out.unflatten(2, (group, seqlen_q)), 0.0)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

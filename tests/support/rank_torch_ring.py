"""torch's own ring attention around this package's forward and backward, on a CPU.

torch runs its ring around the FlashAttention operators of CUDA, which
`splitkv.integrations.torch_sdpa` replaces; a CPU has none. Here they are made of the same public
functions, so that what the ring hands from one to the other, and merges, is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _context_parallel
from torch.library import Library

import splitkv
from splitkv.distributed import attention_backward, shard
from splitkv.runtime.autograd import _recording

ring: Any = _context_parallel._attention


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As aten::_scaled_dot_product_flash_attention, [batch, heads, tokens, dim]."""
    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = splitkv.attention(
        *heads_last, causal=is_causal, softmax_scale=scale, return_lse=True
    )
    seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    none = torch.empty(0, dtype=torch.int32)
    lengths = q.shape[2], k.shape[2]
    return out.transpose(1, 2), lse, none, none, *lengths, seed, unused, q.new_empty(0)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    **scale: Any,
) -> tuple[Tensor, ...]:
    """As aten::_scaled_dot_product_flash_attention_backward."""
    of_rows = grad, q, k, v, out
    is_causal = rest[5]
    with _recording():  # which an operator leaves out, and the CPU's backward is made by
        found = attention_backward(
            *(x.transpose(1, 2) for x in of_rows),
            lse,
            causal=is_causal,
            softmax_scale=scale.get("scale"),
        )
    return found.q.transpose(1, 2), found.k.transpose(1, 2), found.v.transpose(1, 2)


def torch_ring(group: Any, tensors: list[Tensor], causal: bool, layout: Any) -> list[Tensor]:
    """out and the gradients of q, k and v of this rank's tokens; tensors: q, k, v, grad_out.

    layout   "zigzag": what torch calls its load balance
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    ring._cp_options.enable_load_balance = layout == "zigzag"
    q, k, v, grad = (shard(x, group, dim=2, layout=layout) for x in tensors)
    library = Library("aten", "IMPL", "CPU")
    try:
        library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
        made = ring._scaled_dot_product_ring_flash_attention(mesh, q, k, v, 0.0, causal)
        out, lse, *others = made[:8]
        found = ring._scaled_dot_product_ring_flash_attention_backward(
            mesh, grad, q, k, v, out, lse, *others[:4], 0.0, causal, *others[4:6]
        )
    finally:
        library._destroy()
    return [out, *found[:3]]

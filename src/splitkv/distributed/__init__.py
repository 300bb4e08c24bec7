"""Attention over tokens, or cached keys, that several ranks hold; on torch.distributed as it is.

    from splitkv import distributed

    group = device_mesh["cp"].get_group()
    x = distributed.shard(tokens, group, dim=1)                     # this rank's part of a sequence
    out = distributed.attention(q, k, v, group=group, exchange="heads", causal=True)
    out = distributed.decode(q, k_cache, v_cache, lengths, group=group)

`torchrun` starts the ranks, `torch.distributed.init_process_group` connects them; gloo on a CPU and
NCCL on GPUs. Who computes partial results by other means merges them with `combine`, and who has a
ring of their own makes a block's gradients with `attention_backward`.
"""

from __future__ import annotations

from splitkv.distributed.attention import attention, attention_varlen
from splitkv.distributed.decode import combine, decode
from splitkv.distributed.layout import shard, unshard
from splitkv.runtime.backward import AttentionGradients, attention_backward

__all__ = [
    "AttentionGradients",
    "attention",
    "attention_backward",
    "attention_varlen",
    "combine",
    "decode",
    "shard",
    "unshard",
]

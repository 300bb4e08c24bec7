"""A model of transformers whose sequence is spread over ranks as verl's Ulysses does it.

`exchanged` stands in for verl's function of the same place and job where verl is not installed:
written for these tests, by the same hook, `transformers.integrations.flash_attention`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

LENGTHS = 7, 11, 6


def verl_of(group: Any) -> tuple[Any, Any]:
    """verl's module of the group, and the function that it puts in FlashAttention's place; or what
    stands in for them."""
    try:
        from verl.models.transformers.monkey_patch import _ulysses_flash_attention_forward
        from verl.utils import ulysses
    except ImportError:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        module = SimpleNamespace(
            get_ulysses_sequence_parallel_world_size=lambda: size,
            get_ulysses_sequence_parallel_rank=lambda: rank,
        )
        return module, exchanged(group)
    ulysses.set_ulysses_sequence_parallel_group(group)
    return ulysses, _ulysses_flash_attention_forward


def exchanged(group: Any) -> Any:
    """transformers' `_flash_attention_forward` between two exchanges of heads and tokens."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    size = dist.get_world_size(group)

    def swap(x: Tensor, scatter: int, gather: int) -> Tensor:
        parts = torch.stack(x.chunk(size, scatter)).contiguous()
        got = all_to_all_single(torch.empty_like(parts), parts, group=group)
        return torch.cat(got.unbind(0), gather)

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Any,
        query_length: int,
        *args: Any,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        repeats = max(size // k.shape[2], 1)
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        q, k, v = (swap(x, 2, 1) for x in (q, k, v))
        every = [torch.empty_like(position_ids) for _ in range(size)]
        dist.all_gather(every, position_ids, group=group)
        positions = torch.cat(every, -1)
        out = _flash_attention_forward(
            q, k, v, attention_mask, q.shape[1], *args, position_ids=positions, **kwargs
        )
        return swap(out, 1, 2)

    return forward


def gpt_oss(implementation: str, kv_heads: int) -> Any:
    """A small model with a window in every other layer, and sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=64,
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._attn_implementation = implementation
    model = GptOssForCausalLM(config)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, actions and advantages of packed sequences."""
    g = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    ids, actions = (torch.randint(0, 64, (1, total), generator=g) for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions, actions, torch.randn(1, total, generator=g)


def policy_loss(logits: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """The sum over tokens of minus the advantage times the log-probability of an action."""
    chosen = logits.log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    return -(advantages * chosen).sum()


def step(
    group: Any, kv_heads: int, implementation: str, hooked: bool = True, device: str = "cpu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """A rank's loss, and its gradients, of its part of the batch; both on the host.

    hooked   whether verl's function is where transformers looks for FlashAttention's
    """
    from transformers.integrations import flash_attention

    from splitkv.integrations import transformers as plain
    from splitkv.integrations import verl as integration

    integration.register()
    plain.register()
    model = gpt_oss(implementation, kv_heads).to(device)
    module, hook = verl_of(group)
    before, known = flash_attention._flash_attention_forward, sys.modules.get("verl.utils.ulysses")
    flash_attention._flash_attention_forward = hook if hooked else before
    sys.modules["verl.utils.ulysses"] = module
    try:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = (x.chunk(size, 1)[rank].to(device) for x in batch())
        ids, positions, actions, advantages = own
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = policy_loss(logits, actions, advantages)
        loss.backward()
    finally:
        flash_attention._flash_attention_forward = before
        del sys.modules["verl.utils.ulysses"]
        if known is not None:
            sys.modules["verl.utils.ulysses"] = known
    grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach().cpu(), grads


def in_one_process(kv_heads: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, one sequence after the other, by eager attention."""
    model = gpt_oss("eager", kv_heads)
    ids, _, actions, advantages = batch()
    parts = [model(input_ids=x, use_cache=False).logits for x in ids.split(LENGTHS, 1)]
    loss = policy_loss(torch.cat(parts, 1), actions, advantages)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_step(found: list[Any], kv_heads: int, tolerance: float) -> None:
    """Hold what ranks made of `step` to one process, gradients relative to their largest."""
    loss, grads = in_one_process(kv_heads)
    total_loss = sum(part for part, _ in found)
    torch.testing.assert_close(total_loss, loss, rtol=tolerance, atol=tolerance)
    assert any(name.endswith("sinks") for name in grads)
    for name, grad in grads.items():
        total = sum(part[name] for _, part in found if name in part)
        size = grad.abs().max().item()
        torch.testing.assert_close(total / size, grad / size, rtol=0, atol=tolerance, msg=name)

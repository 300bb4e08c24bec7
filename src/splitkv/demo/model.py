"""A character model in the shape of gpt-oss, small enough to train on two CPU cores in a minute.

Grouped-query attention with a learnable sink logit a head, sliding-window and full layers in turn,
rotary positions, RMSNorm, SwiGLU. Attention itself is an argument of `forward`, so that the same
weights run through splitkv, through a cache, and through plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitkv
from splitkv.demo.text import VOCABULARY


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; `context` is the longest text it is trained on."""

    vocabulary: int = VOCABULARY
    width: int = 128
    hidden: int = 320
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = 32
    context: int = 128


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = shape.head_dim
        self.window_size = (shape.window - 1, 0) if index % 2 == 0 else (-1, -1)
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.norm_attention = nn.RMSNorm(shape.width)
        self.norm_feed_forward = nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, queries)
        self.k = nn.Linear(shape.width, keys)
        self.v = nn.Linear(shape.width, keys)
        self.o = nn.Linear(queries, shape.width)
        self.sink_logits = nn.Parameter(torch.zeros(shape.num_heads))
        self.gate = nn.Linear(shape.width, shape.hidden)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        y = self.norm_attention(x)
        # [B, S, H, D]
        q, k, v = (f(y).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        x = x + self.o(attend(self, rotate(q, positions), rotate(k, positions), v).flatten(-2))
        y = self.norm_feed_forward(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Tokens `[B, S]` at positions `[B, S]` or `[S]` to logits `[B, S, vocabulary]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        with torch.no_grad():
            self.embedding.weight.mul_(0.02)
            self.head.weight.mul_(0.1)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


Attend = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary positions on `[B, S, H, D]`, the first half of D paired with the second."""
    half = x.shape[-1] // 2
    frequency = base ** (torch.arange(half, device=x.device) / -half)
    angle = (positions[..., None] * frequency)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def splitkv_attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over the tokens at hand, for training and prefill."""
    return splitkv.attention(
        q, k, v, causal=True, window_size=layer.window_size, sink_logits=layer.sink_logits
    )


def eager_attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in plain PyTorch, the sink as one more column: what splitkv is held to."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    visible = j <= i
    if layer.window_size[0] >= 0:
        visible = visible & (j >= i - layer.window_size[0])
    scores = scores.masked_fill(~visible, float("-inf"))
    sinks = layer.sink_logits[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", p, v)


class Cache:
    """Keys and values of a batch: attention that remembers. `lengths` `[B]` stay on the device."""

    def __init__(self, shape: Shape, batch: int, capacity: int, device: torch.device) -> None:
        size = (shape.num_layers, batch, capacity, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, device=device)
        self.values = torch.zeros(size, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def prefill(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer.index, :, : k.shape[1]] = k
        self.values[layer.index, :, : v.shape[1]] = v
        return splitkv_attend(layer, q, k, v)

    def decode(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token a sequence, behind those already there."""
        keys, values = self.keys[layer.index], self.values[layer.index]
        sequence = torch.arange(q.shape[0], device=q.device)
        keys[sequence, self.lengths] = k[:, 0]
        values[sequence, self.lengths] = v[:, 0]
        return splitkv.decode(
            q,
            keys,
            values,
            cache_seqlens=self.lengths + 1,
            window_size=layer.window_size,
            sink_logits=layer.sink_logits,
        )


@torch.no_grad()
def generate(model: Model, prompts: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Greedy continuations `[B, num_tokens]` through splitkv: one prefill, then cached decode.

    prompts `[B, S]` are padded on the right, lengths `[B]` int32 are their own lengths.
    """
    batch, seqlen = prompts.shape
    cache = Cache(model.shape, batch, seqlen + num_tokens, prompts.device)
    positions = torch.arange(seqlen, device=prompts.device)
    logits = model(prompts, positions, cache.prefill)
    token = logits[torch.arange(batch, device=prompts.device), lengths - 1].argmax(-1)
    cache.lengths.copy_(lengths)
    tokens = [token]
    for _ in range(num_tokens - 1):
        logits = model(token[:, None], cache.lengths[:, None], cache.decode)
        cache.lengths += 1
        token = logits[:, 0].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, 1)


@torch.no_grad()
def generate_eager(model: Model, prompts: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Continuations without splitkv and without a cache: every token anew at each step."""
    batch, seqlen = prompts.shape
    text = F.pad(prompts, (0, num_tokens))
    sequence = torch.arange(batch, device=prompts.device)
    tokens = []
    for step in range(num_tokens):
        window = text[:, : seqlen + step]
        positions = torch.arange(window.shape[1], device=text.device)
        logits = model(window, positions, eager_attend)
        token = logits[sequence, lengths - 1 + step].argmax(-1)
        text[sequence, lengths + step] = token
        tokens.append(token)
    return torch.stack(tokens, 1)

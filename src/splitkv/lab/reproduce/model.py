"""A decode step of a model on one of its GPUs: 80 layers of measured kernels.

Llama-3.1-70B shared out over 8 GPUs: hidden size 8192, 8 query heads on one KV head, 3584 of 28672
columns of the feed-forward net, 16032 of 128256 of the vocabulary. Timed without attention are the
products with the weights, the norms, the activation and the additions of a layer, and the last norm
with the vocabulary. Not in the sum: what the 8 GPUs tell each other, rotary embedding, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.timing import Replay, interleave, summarize

CALLS = 8  # layers in a graph


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a model that one GPU holds."""

    name: str = "llama3_70b_tp8"
    layers: int = 80
    hidden: int = 8192
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    feed_forward: int = 3584
    vocabulary: int = 16032


LLAMA = Share()
PARTS = ("layer without attention", "vocabulary")


def step_us(share: Share, attention_us: float, layer_us: float, vocabulary_us: float) -> float:
    """Microseconds of a token."""
    return share.layers * (attention_us + layer_us) + vocabulary_us


@dataclass(frozen=True, slots=True)
class Rest:
    """The time of a step of a model besides attention: microseconds of a layer, and of the
    vocabulary."""

    layer_us: float
    vocabulary_us: float
    share: Share = LLAMA

    def step_us(self, attention_us: float) -> float:
        """Microseconds of a token whose layers attend in so many each."""
        return step_us(self.share, attention_us, self.layer_us, self.vocabulary_us)


def bodies(
    share: Share, device: str = "cuda", tokens: int = 1
) -> dict[str, Callable[[int], Tensor]]:
    """The parts of a step besides attention, of so many tokens at once, in bf16, weights larger
    than the L2."""

    def weight(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        return made / columns**0.5

    s = share
    width = s.heads * s.head_dim
    of_qkv = weight(width + 2 * s.kv_heads * s.head_dim, s.hidden)
    of_out, of_down = weight(s.hidden, width), weight(s.hidden, s.feed_forward)
    of_gate_and_up, of_words = weight(2 * s.feed_forward, s.hidden), weight(s.vocabulary, s.hidden)
    x = torch.randn(tokens, s.hidden, device=device, dtype=torch.bfloat16)
    norm = torch.ones(s.hidden, device=device, dtype=torch.bfloat16)

    def layer(i: int) -> Tensor:
        q = linear(rms_norm(x, (s.hidden,), norm), of_qkv)[:, :width]  # attention goes here
        y = x + linear(q, of_out)
        gate, up = linear(rms_norm(y, (s.hidden,), norm), of_gate_and_up).chunk(2, -1)
        return y + linear(silu(gate) * up, of_down)

    def vocabulary(i: int) -> Tensor:
        return linear(rms_norm(x, (s.hidden,), norm), of_words)

    return dict(zip(PARTS, (layer, vocabulary), strict=True))


def measure(rounds: int, share: Share = LLAMA) -> list[Record]:
    """A row of each part, as a backend gives them."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(l2_bytes // 2, device="cuda").sum  # of 4 bytes each: twice the L2
    replays = {name: Replay(body, 1, CALLS, before=flush) for name, body in bodies(share).items()}
    samples = interleave(replays, rounds)
    return [
        {"kernel": name, **summarize(us).as_row(), "err": None, "repeats": None, "reasons": []}
        for name, us in samples.items()
    ]


def rows_named(rows: Iterable[Record]) -> dict[str, float]:
    return {row["kernel"]: row["us"] for row in rows if row["us"] is not None}

"""Which kernel runs what, as the kernels themselves say it: docs/support.md.

    python -m splitkv.lab.report.support > docs/support.md

Each feature is added to an everyday problem, and every kernel that is made for such calls is asked
for its reasons against it, for an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from splitkv.core.device import GPUS, Device
from splitkv.core.kv import Codec, Paged, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.kernels.limits import (
    decode_split,
    hopper_backward,
    hopper_decode_split,
    hopper_prefill,
    hopper_prefill_half,
    hopper_prefill_quantised,
    hopper_prefill_widened,
    prefill,
)

H200 = GPUS["h200"]
DECODE = Problem("decode", 8, 32, 8, 128, 128, 1, 4096, mask=Mask(True), lengths="device")
DENSE = Problem("dense", 2, 32, 8, 128, 128, 4096, 4096, mask=Mask(True))
INT8 = replace(DENSE, codec=Codec("int8", "head"), products="half")
Reasons = Callable[[Problem, Device], list[str]]
Features = dict[str, dict[str, Any]]

SHARED: Features = {
    "causal": {},
    "no mask": {"mask": Mask()},
    "window": {"mask": Mask(True, 1023)},
    "window and sink tokens": {"mask": Mask(True, 1023, -1, 4)},
    "window and sink tokens of each sequence": {
        "mask": Mask(True, 1023, -1, FAR),
        "sequence_sink_tokens": True,
    },
    "attention_chunk": {"mask": Mask(True, chunk=2048)},
    "softcap": {"score": Score(softcap=True)},
    "ALiBi": {"score": Score(alibi=True)},
    "sink_logits": {"sink_logits": True},
    "LSE": {"return_lse": True},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    **{f"head_dim {a}/{b}": {"head_dim": a, "head_dim_v": b} for a, b in ((64, 64), (80, 80))},
    **{f"head_dim {a}/{b}": {"head_dim": a, "head_dim_v": b} for a, b in ((192, 128), (256, 256))},
    "head_dim 64/512": {"head_dim": 64, "head_dim_v": 512},
}
CACHES: Features = {
    **{f"pages of {n}": {"place": Paged(n)} for n in (1, 16, 256)},
    "int8 a token": {"codec": Codec("int8", "token"), "products": "half"},
    "fp8 a head": {"codec": Codec("fp8", "head")},
    "16 query tokens": {"seqlen_q": 16},
    "gradient": {"needs_grad": True},
}
FORWARD: Features = {"out_scale": {"out_scale": True}}
PACKED: Features = {
    "packed": {"kind": "varlen", "place": Ragged(), "lengths": "device"},
    "packed, bidirectional_ranges": {
        "kind": "varlen",
        "place": Ragged(),
        "lengths": "device",
        "bidirectional_ranges": True,
    },
    "packed, keys in pages of 16": {"kind": "varlen", "place": Paged(16), "lengths": "device"},
}
EIGHT_BITS: Features = {
    "int8 a token, full": {"codec": Codec("int8", "token"), "products": "full"},
    "int8, q too": {"q_granularity": "token"},
    "e4m3 a head, widened": {"codec": Codec("fp8", "head"), "products": "widened"},
    "e4m3 a head, q too, full": {
        "codec": Codec("fp8", "head"),
        "products": "full",
        "q_granularity": "head",
    },
}
TABLES: tuple[tuple[str, Problem, Features, dict[str, Reasons]], ...] = (
    (
        "Decode",
        DECODE,
        SHARED | CACHES | FORWARD,
        {
            "hopper_decode_split": hopper_decode_split.unsupported,
            "decode_split": decode_split.unsupported,
        },
    ),
    (
        "Attention, forward",
        DENSE,
        SHARED | PACKED | FORWARD | {"dropout": {"dropout": True}},
        {"hopper_prefill": hopper_prefill.unsupported, "prefill": prefill.unsupported},
    ),
    (
        "Attention in 8 bits, forward",
        INT8,
        EIGHT_BITS | SHARED | PACKED | FORWARD | {"gradient": {"needs_grad": True}},
        {
            "hopper_prefill_quantised": hopper_prefill_quantised.unsupported,
            "hopper_prefill_half": hopper_prefill_half.unsupported,
            "hopper_prefill_widened": hopper_prefill_widened.unsupported,
            "prefill": prefill.unsupported,
        },
    ),
    (
        "Attention, gradients",
        replace(DENSE, needs_grad=True),
        SHARED | PACKED | {"dropout": {"dropout": True}, "deterministic": {"deterministic": True}},
        {"hopper_backward": hopper_backward.unsupported, "backward": prefill.unsupported},
    ),
)
OPENING = """# What runs where

Written by `python -m splitkv.lab.report.support` from what the kernels say against each call on an
H200. Elsewhere those whose names begin with `hopper` step aside. What no kernel here takes runs in
PyTorch operations, with a warning where that is a surprise; `splitkv.explain` says it of any call.
"""
CLOSING = """## Not computed

FlashAttention-3's `qv`, which adds `qv . v` to the scores (absorbed MLA: `head_dim` 64,
`head_dim_v` 512), raises. It takes a second product with each tile of values ahead of the softmax,
and rows of 512 values, where the kernels end at 256.
"""


def tables() -> Iterator[str]:
    """The lines of the page."""
    yield from OPENING.splitlines()
    for title, everyday, features, kernels in TABLES:
        yield from ("", f"## {title}", "", f"Beside `{everyday}`:", "")
        yield from table(everyday, features, kernels)
    yield from ("", *CLOSING.splitlines())


def table(everyday: Problem, features: Features, kernels: dict[str, Reasons]) -> Iterator[str]:
    yield row(["", *(f"`{name}`" for name in kernels)])
    yield row(["---"] * (1 + len(kernels)))
    for feature, changes in features.items():
        problem = replace(everyday, **changes)
        found = (unsupported(problem, H200) for unsupported in kernels.values())
        yield row([feature, *("; ".join(against) or "yes" for against in found)])


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(tables()))

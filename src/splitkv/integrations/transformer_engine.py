"""TransformerEngine's core attention, by its call shape, on this package; over ranks too.

    from splitkv.integrations.transformer_engine import DotProductAttention

    attend = DotProductAttention(32, 128, num_gqa_groups=8, cp_group=group, cp_comm_type="p2p")
    context = attend(q, k, v)                     # [tokens, batch, 32 * 128], of this rank's tokens

A module that calls `transformer_engine.pytorch.DotProductAttention` can take this one; it imports
nothing of TransformerEngine. `cp_comm_type` names the exchange: "p2p" is the ring, "all_gather" the
keys, "a2a" the heads, and tokens lie as there, in zigzag. What this package has no answer for (fp8,
biases, padding that is not packed, an arbitrary mask, packed sequences over ranks, of which each is
cut by itself there) raises, with the name of the argument.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from splitkv import distributed
from splitkv.api import attention, attention_varlen
from splitkv.core.errors import expect, expect_divides, expect_one_of

EXCHANGES = {"p2p": "ring", "all_gather": "keys", "a2a": "heads"}
FORMATS = ("sbhd", "bshd", "thd")
MASKS = (
    *("no_mask", "causal", "causal_bottom_right"),
    *("padding", "padding_causal", "padding_causal_bottom_right"),
)
SOFTMAXES = ("vanilla", "off-by-one", "learnable")

OF_MODULE: dict[str, Any] = {
    **{"num_gqa_groups": None, "attention_dropout": 0.0, "qkv_format": "sbhd"},
    **{"attn_mask_type": "causal", "window_size": None, "bottom_right_diagonal": None},
    **{"softmax_scale": None, "softmax_type": "vanilla", "get_rng_state_tracker": None},
    **{"tp_size": 1, "tp_group": None, "cp_group": None, "cp_comm_type": "p2p"},
}
"""Arguments of the module besides its heads, and what they are where they are not given."""
OF_CALL: dict[str, Any] = {
    **dict.fromkeys(("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded")),
    **dict.fromkeys(("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "alibi_slopes")),
    **{"checkpoint_core_attention": False, "core_attention_bias_type": "no_bias"},
}
"""Arguments of a call; None: those of the module."""
SAME_RESULT = {"sequence_parallel", "layer_number", "attention_type", "cp_global_ranks"}
SAME_RESULT |= {"cp_stream", "name", "fast_zero_fill", "num_splits"}
"""Arguments that say how, or for whom, and not what: they are taken, and change nothing."""
UNUSED = {"attention_mask", "core_attention_bias", "inference_params", "pad_between_seqs"}
UNUSED |= {"fp8_output", "bf16_backward", "score_mod", "return_max_logit"}
"""Arguments that may be None or False."""


class DotProductAttention(torch.nn.Module):
    """Core attention of a layer: no projections, no caches.

    num_attention_heads   of all tensor-parallel ranks
    kv_channels           head dimension, or (that of queries and keys, that of values)
    options               those of OF_MODULE, by TransformerEngine's names
    parameter_gradients   of a learnable softmax offset over ranks: "own", this rank's part, which
                          is summed with those of all parameters; or "summed" over `cp_group`

    With softmax_type "learnable" it has the parameter `softmax_offset` [heads of this rank] fp32,
    a sink logit a head; "off-by-one" is a sink logit of 0. Raises ValueError for what is malformed
    or not supported.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        parameter_gradients: Any = "own",
        **options: Any,
    ) -> None:
        super().__init__()
        given = _known(options, OF_MODULE)
        expect_one_of("softmax_type", given["softmax_type"], SOFTMAXES)
        tp_group = given["tp_group"]
        tp_size = given["tp_size"] if tp_group is None else dist.get_world_size(tp_group)
        expect_divides("num_attention_heads", num_attention_heads, tp_size=tp_size)
        groups = given["num_gqa_groups"] or num_attention_heads
        expect_divides("num_gqa_groups", groups, tp_size=tp_size)
        self.num_heads, self.num_kv_heads = num_attention_heads // tp_size, groups // tp_size
        one = isinstance(kv_channels, int)
        self.head_dims: Any = (kv_channels, kv_channels) if one else kv_channels
        self.options = given
        self.parameter_gradients = parameter_gradients
        self.softmax_offset: Tensor | None = None
        if given["softmax_type"] == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(self.num_heads))
        elif given["softmax_type"] == "off-by-one":
            self.register_buffer("zero_offset", torch.zeros(self.num_heads), persistent=False)
        self.set_context_parallel_group(given["cp_group"], None, None, given["cp_comm_type"])

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Whose ranks share each sequence, None: nobody's; the stream and the ranks' global numbers
        are not needed."""
        if cp_group is not None:
            expect_one_of("cp_comm_type", cp_comm_type, EXCHANGES)
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> Tensor:
        """Attention of query_layer, key_layer and value_layer, in the qkv_format: "sbhd"
        [seqlen, batch, heads, head_dim], "bshd" or "thd" [total, heads, head_dim].

        attention_mask   of anything but padding, which "thd" has in cu_seqlens, it says nothing
                         that attn_mask_type does not say, and is not looked at
        options          those of OF_CALL, by TransformerEngine's names

        Returns [.., heads * head_dim_v], the other dimensions as those of query_layer.
        """
        given = _known(options, OF_CALL)
        for name in ("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal"):
            given[name] = self.options[name] if given[name] is None else given[name]
        expect_one_of("qkv_format", given["qkv_format"], FORMATS)
        layers = {"query": query_layer, "key": key_layer, "value": value_layer}
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        dims = self.head_dims[0], *self.head_dims
        for (name, x), *wanted in zip(layers.items(), counts, dims, strict=True):
            heads, dim = wanted
            fits = list(x.shape[-2:]) == wanted
            expect(fits, f"{name}_layer", f"[.., heads={heads}, head_dim={dim}]", x)
        run = checkpoint if given["checkpoint_core_attention"] else _called
        more = {} if run is _called else {"use_reentrant": False}
        out: Tensor = run(self._attend, query_layer, key_layer, value_layer, given, **more)
        return out.flatten(-2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        """Attention in the format that it is given in."""
        packed = given["qkv_format"] == "thd"
        lengths = _lengths(given) if packed else {}
        kind = mask_of(given, q, k)
        options: dict[str, Any] = {
            **{"causal": kind.causal, "window_size": kind.window_size},
            **{"softmax_scale": self.options["softmax_scale"], "sink_logits": self._sinks()},
            **{"alibi_slopes": _slopes(given), "dropout_p": self._dropout()},
        }
        over = self.cp_group is not None and dist.get_world_size(self.cp_group) > 1
        if packed:
            expect(not over, "qkv_format", "'sbhd' or 'bshd' over ranks", "thd", _CUT)
            with self._random():
                return attention_varlen(q, k, v, **lengths, **options)
        if given["qkv_format"] == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if over:
            exchange: Any = EXCHANGES[self.cp_comm_type]
            options |= {"parameter_gradients": self.parameter_gradients, "group": self.cp_group}
            out = distributed.attention(q, k, v, exchange=exchange, layout="zigzag", **options)
        else:
            with self._random():
                out = attention(q, k, v, **options)
        return out.transpose(0, 1).contiguous() if given["qkv_format"] == "sbhd" else out

    def _sinks(self) -> Tensor | None:
        if self.options["softmax_type"] == "off-by-one":
            zeros: Tensor = self.zero_offset
            return zeros
        return self.softmax_offset

    def _dropout(self) -> float:
        return float(self.options["attention_dropout"]) if self.training else 0.0

    def _random(self) -> Any:
        """Where dropout draws from: the tensor-parallel ranks' own generators, if there are any."""
        tracker = self.options["get_rng_state_tracker"]
        return nullcontext() if tracker is None or not self._dropout() else tracker().fork()


_CUT = "TransformerEngine cuts every packed sequence by itself; splitkv.distributed cuts them all"


class MaskKind(NamedTuple):
    """The mask that attn_mask_type and the window come to."""

    causal: bool
    window_size: tuple[int, int]


def mask_of(given: dict[str, Any], q: Tensor, k: Tensor) -> MaskKind:
    """The MaskKind of a call; ValueError for a mask that there is none for."""
    name = given["attn_mask_type"].replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    expect_one_of("attn_mask_type", name, MASKS)
    packed = given["qkv_format"] == "thd"
    padded = name.startswith("padding")
    hint = "" if packed else "pack sequences of other lengths as 'thd'"
    requirement = f"{'a' if packed else 'no'} padding mask with {given['qkv_format']!r}"
    expect(padded == packed, "attn_mask_type", requirement, name, hint)
    causal = "causal" in name
    window = (-1, -1) if given["window_size"] is None else tuple(given["window_size"])
    aligned_last = given["bottom_right_diagonal"]
    if aligned_last is None:
        aligned_last = name not in ("causal", "padding_causal")
    bounded = causal or window != (-1, -1) or given["core_attention_bias_type"] == "alibi"
    if bounded and not aligned_last and not _of_one_length(given, q, k):
        requirement = "one that aligns at the last query and key, with keys of other lengths"
        expect(False, "attn_mask_type", requirement, name, "pass causal_bottom_right")
    return MaskKind(causal, (window[0], 0 if causal else window[1]))


def _of_one_length(given: dict[str, Any], q: Tensor, k: Tensor) -> bool:
    """Whether every sequence has as many keys as queries, without looking at lengths."""
    if given["qkv_format"] != "thd":
        return q.shape[:2] == k.shape[:2]
    of_q, of_k = given["cu_seqlens_q"], given["cu_seqlens_kv"]
    return of_q is of_k or of_q.data_ptr() == of_k.data_ptr()


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    """The lengths of packed sequences, between which nothing may lie, as `attention_varlen` takes
    them."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    for name in names:
        expect(given[name] is not None, name, "a value with qkv_format 'thd'", None)
    for name in names[:2]:
        padded = given[f"{name}_padded"]
        same = padded is None or padded.data_ptr() == given[name].data_ptr()
        expect(same, f"{name}_padded", f"None or {name}", padded, "padding goes to the end")
    return {name.replace("_kv", "_k"): given[name] for name in names}


def _slopes(given: dict[str, Any]) -> Tensor | None:
    """ALiBi slopes, which have to be given."""
    kind, slopes = given["core_attention_bias_type"], given["alibi_slopes"]
    expect_one_of("core_attention_bias_type", kind, ("no_bias", "alibi"))
    both = (kind == "alibi") == (slopes is not None)
    expect(both, "alibi_slopes", f"{'slopes' if slopes is None else None} with {kind}", slopes)
    return slopes


def _known(options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options with defaults; ValueError for those that are unknown, or known and not there."""
    for name, value in options.items():
        if name in UNUSED:
            expect(value is None or value is False, name, "None", value)
        elif name not in SAME_RESULT:
            expect_one_of("argument of DotProductAttention", name, tuple(defaults))
    return {**defaults, **{name: x for name, x in options.items() if name in defaults}}


def _called(run: Any, *arguments: Any) -> Any:
    return run(*arguments)

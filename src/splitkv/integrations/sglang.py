"""splitkv as an attention backend of SGLang, out of tree.

    python -m sglang.launch_server --model-path MODEL --attention-backend splitkv

SGLang finds `register` by the entry point `splitkv` of the group `sglang.srt.plugins`. Written for
the releases in READ, against the classes that these have; not run in the engine yet.

A layer's keys and values are written by SGLang's own pool, before it attends. Batches that decode
go to `splitkv.decode`, all others, prompts behind a cached prefix and mixed ones, to
`splitkv.attention_varlen`. Batches that decode can be captured in a CUDA graph.

Not served, and refused when the backend is made or a layer attends: MLA, encoder-decoder models,
speculative decoding, pools of their own for layers with a window (`--disable-hybrid-swa-memory` has
one pool for all), attention in chunks, caches in 4 bits or with heads before keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.server_args import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
)
from torch import Tensor

from splitkv.integrations.serving import Pages, Plans, Step, attend, bound_of

READ = ("0.5.17",)
"""Releases of SGLang whose classes this was written for."""

NAME = "splitkv"
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = (torch.float16, torch.bfloat16, torch.float32, *SCALED)


def register() -> None:
    """Makes the backend known to SGLang as `splitkv`. May be called more than once."""
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
        add_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(SplitKVAttnBackend)


def refused(runner: Any) -> str:
    """Why a model cannot be served, as `<argument>: expected .., got ..`; empty: it can."""
    arguments, config, pool = runner.server_args, runner.model_config, runner.token_to_kv_pool
    checks = {
        "use_mla_backend": getattr(runner, "use_mla_backend", False),
        "is_encoder_decoder": config.is_encoder_decoder,
        "is_local_attention_model": getattr(config, "is_local_attention_model", False),
        "hybrid SWA memory": getattr(pool, "swa_layer_nums", 0) > 0,
        "use_hnd": getattr(pool, "use_hnd", False),
    }
    for name, on in checks.items():
        if on:
            return f"{name}: expected False, got True"
    if arguments.speculative_algorithm is not None:
        return f"speculative_algorithm: expected None, got {arguments.speculative_algorithm}"
    if arguments.enable_deterministic_inference:
        # where a prompt is cut would follow from what else is served, or was before
        if not arguments.disable_radix_cache:
            return "disable_radix_cache: expected True with deterministic inference, got False"
        if arguments.chunked_prefill_size not in (None, -1):
            size = arguments.chunked_prefill_size
            return f"chunked_prefill_size: expected -1 with deterministic inference, got {size}"
    if pool.dtype not in STORED:
        return f"kv_cache_dtype: expected auto, fp8_e4m3 or fp8_e5m2, got {pool.dtype}"
    return ""


class SplitKVAttnBackend(AttentionBackend):
    """Attention of all layers; the metadata of a batch is made once for them."""

    needs_cpu_seq_lens: bool = True  # for a bound of the lengths; the device reads its own

    def __init__(self, runner: Any) -> None:
        super().__init__()
        against = refused(runner)
        if against:
            raise NotImplementedError(against)
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.device = runner.device
        self.page_size = runner.page_size
        self.max_context_len = runner.model_config.context_len
        self.max_pages = -(-self.max_context_len // self.page_size)
        same_bits = runner.server_args.enable_deterministic_inference
        self.plans: dict[Any, Plans] = {}
        self.policy = "batch_invariant" if same_bits else ""
        self.step: Step | None = None
        self._ones = torch.ones(1, dtype=torch.float32, device=runner.device)
        self._graph_lens: Tensor | None = None
        self._graph_table: Tensor | None = None

    # The metadata of a batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step of a batch that no graph runs."""
        x, bs = forward_batch, forward_batch.batch_size
        if x.forward_mode.is_idle():
            self.step = None
            return
        longest = self.max_context_len if x.seq_lens_cpu is None else int(x.seq_lens_cpu.max())
        bound = self.max_context_len if self.policy else bound_of(longest, self.max_context_len)
        lengths = x.seq_lens[:bs].int()
        table = self.table_of(x.req_pool_indices[:bs], -(-bound // self.page_size))
        if x.forward_mode.is_decode():
            self.step = self.decode_step(lengths, table, bound)
            return
        counts = x.extend_seq_lens[:bs]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        tokens = [int(n) for n in x.extend_seq_lens_cpu[:bs]]
        self.step = Step.of(
            starts,
            lengths,
            table,
            num_decodes=0,
            decode_len=1,
            num_tokens=sum(tokens),
            max_seqlen_q=self.max_context_len if self.policy else max(tokens),
            max_seqlen_k=min(bound, table.shape[1] * self.page_size),
        )

    def decode_step(self, lengths: Tensor, table: Tensor, bound: int) -> Step:
        """A step of one token a sequence."""
        bs = lengths.shape[0]
        most = min(bound, table.shape[1] * self.page_size)
        return Step(bs, 1, bs, 1, most, True, lengths, table, None)

    def table_of(self, requests: Tensor, pages: int) -> Tensor:
        """[batch, pages] int32: the pages of these requests, in the order of their keys."""
        first = self.req_to_token[requests, : pages * self.page_size : self.page_size]
        return (first // self.page_size).int()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Lengths and tables at addresses that graphs keep."""
        self._graph_lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        shape = max_bs, self.max_pages
        self._graph_table = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The step of a batch that a graph runs: its numbers are those of the longest."""
        x, bs = forward_batch, forward_batch.batch_size
        if not x.forward_mode.is_decode():
            raise NotImplementedError(f"forward_mode: expected DECODE, got {x.forward_mode.name}")
        assert self._graph_lens is not None and self._graph_table is not None
        lengths, table = self._graph_lens[:bs], self._graph_table[:bs]
        lengths.copy_(x.seq_lens[:bs])
        pages = self.max_pages
        if not in_capture and x.seq_lens_cpu is not None:
            pages = -(-int(x.seq_lens_cpu[:bs].max()) // self.page_size)
        table[:, :pages].copy_(self.table_of(x.req_pool_indices[:bs], pages))
        self.step = self.decode_step(lengths, table, self.max_context_len)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padded sequence."""
        return 1

    # A layer

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Attention of one token a sequence: q [tokens, heads * head_dim], as is what returns."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Attention of any tokens; the keys and values of these are written first.

        more   sinks: [heads], a logit each; others have to be None
        """
        sinks = more.pop("sinks", None)
        for name, value in more.items():
            if value is not None:
                raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}")
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            scales = layer.k_scale, layer.v_scale
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if self.step is None:
            return out
        causal = layer.attn_type == AttentionType.DECODER
        step = self.step if causal else replace(self.step, causal=False)
        options = self.options_of(layer, causal) | {"sink_logits": sinks}
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        into = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        plans = self.plans.setdefault(layer.layer_id, Plans(self.policy))
        attend(rows, self.pages_of(layer), step, into, options, plans)
        return out

    def options_of(self, layer: Any, causal: bool) -> dict[str, Any]:
        """The arguments of a call that a layer adds."""
        capped = bool(layer.logit_cap) and layer.logit_cap > 0
        if layer.is_cross_attention:
            raise NotImplementedError("is_cross_attention: expected False, got True")
        if capped and layer.logit_capping_method != "tanh":
            method = layer.logit_capping_method
            raise NotImplementedError(f"logit_capping_method: expected tanh, got {method}")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            raise NotImplementedError("xai_temperature_len: expected none, got a length")
        left = layer.sliding_window_size if layer.sliding_window_size > -1 else -1
        return {
            "softmax_scale": float(layer.scaling),
            "softcap": float(layer.logit_cap) if capped else 0.0,
            "window_size": (left, -1 if causal else left),
        }

    def pages_of(self, layer: Any) -> Pages:
        """The keys and values of a layer: [size, heads, dim] of the pool, by pages."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        k, v = (x.view(-1, self.page_size, *x.shape[1:]) for x in (k, v))
        if k.dtype not in SCALED:
            return Pages(k, v)
        scales = (self._ones if x is None else x.view(-1) for x in (layer.k_scale, layer.v_scale))
        return Pages(k, v, *scales)

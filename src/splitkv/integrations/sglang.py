"""splitkv as an attention backend of SGLang, out of tree.

    python -m sglang.launch_server --model-path MODEL --attention-backend splitkv

SGLang finds `register` by the entry point `splitkv` of the group `sglang.srt.plugins`. Written for
the releases in READ, against the classes that these have, and run in their engines. What releases
do not share is in `sglang_contract_0_5_17` and `sglang_contract_0_5_19`, named by the first release
that has it.

A layer's keys and values are written by SGLang's own pool, before it attends. Batches that decode,
and those in which the target model verifies a chain of drafted tokens, go to `splitkv.decode`, all
others, prompts behind a cached prefix and mixed ones, to `splitkv.attention_varlen`. Both of the
former can be captured in a CUDA graph. Layers with a window may have a pool of their own. Kernels
are compiled when the backend is made, unless SPLITKV_ENGINE_WARMUP is 0.

Not served, and refused when the backend is made or a layer attends: MLA, encoder-decoder models,
drafts that are trees, attention in chunks, caches in 4 bits or with heads before keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import (
    ATTENTION_BACKEND_CHOICES,
    ServerArgs,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
)
from torch import Tensor

from splitkv.core.kv import AS_IS, Codec
from splitkv.core.scales import QUANTISED
from splitkv.integrations import engine_warmup
from splitkv.integrations.serving import (
    MAX_DECODE_LEN,
    Pages,
    Plans,
    Step,
    attend,
    bound_of,
    bound_of_new,
    plans_of_engine,
)

READ = ("0.5.17", "0.5.23")
"""Releases of SGLang whose classes this was written for."""

CONTRACT = "0_5_17" if hasattr(ServerArgs, "_handle_model_specific_adjustments") else "0_5_19"
contract: Any = import_module(f"splitkv.integrations.sglang_contract_{CONTRACT}")

NAME = "splitkv"
SINKS = "GptOssForCausalLM"  # the models that SGLang has for backends of a list alone
LISTED = "triton"  # a backend of that list, which nothing extends
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = (torch.float16, torch.bfloat16, torch.float32, *SCALED)
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def register() -> None:
    """Makes the backend known to SGLang as `splitkv`. May be called more than once."""
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
        add_deterministic_attention_backend_choices([NAME])
        HookRegistry.register(contract.ADJUSTMENTS, admit_for_sinks, HookType.AROUND)
    register_attention_backend(NAME)(SplitKVAttnBackend)


def admit_for_sinks(adjust: Callable[[Any], None], arguments: Any) -> None:
    """SGLang's adjustments of a server's arguments to its model, around which this is hooked: for
    gpt-oss they look for the backend in a list of those that have sinks, and see LISTED there."""

    def name(given: str) -> str:
        listed = given == NAME and SINKS in contract.config_of(arguments).architectures
        return LISTED if listed else given

    with contract.backends_named(arguments, name):
        adjust(arguments)


def refused(runner: Any) -> str:
    """Why a model cannot be served, as `<argument>: expected .., got ..`; empty: it can."""
    arguments, config = contract.resolved(runner.server_args), runner.model_config
    pool = runner.token_to_kv_pool
    checks = {
        "use_mla_backend": getattr(runner, "use_mla_backend", False),
        "is_encoder_decoder": config.is_encoder_decoder,
        "is_local_attention_model": getattr(config, "is_local_attention_model", False),
        "prefill_aware_swa": getattr(runner, "prefill_aware_swa", False),
        "enable_unified_memory": arguments.enable_unified_memory,
        "use_hnd": getattr(pool, "use_hnd", False),
    }
    for name, on in checks.items():
        if on:
            return f"{name}: expected False, got True"
    if arguments.dcp_size > 1:
        return f"dcp_size: expected 1, got {arguments.dcp_size}"
    drafted = refused_drafts(arguments)
    if drafted:
        return drafted
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


def refused_drafts(arguments: Any) -> str:
    """Why drafted tokens cannot be verified; empty: they can. A chain is causal; the nodes of a
    tree see their ancestors alone, as do those that NGRAM pads its drafts with."""
    name = arguments.speculative_algorithm
    if name is None:
        return ""
    if name not in CHAINS:
        return f"speculative_algorithm: expected None, {', '.join(CHAINS)}, got {name}"
    if arguments.speculative_eagle_topk != 1:
        return f"speculative_eagle_topk: expected 1, got {arguments.speculative_eagle_topk}"
    tokens = arguments.speculative_num_draft_tokens
    if tokens > MAX_DECODE_LEN:
        return f"speculative_num_draft_tokens: expected at most {MAX_DECODE_LEN}, got {tokens}"
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
        arguments = contract.resolved(runner.server_args)
        self.drafted: int = arguments.speculative_num_draft_tokens or 0
        longest = runner.model_config.context_len + self.drafted
        self.max_context_len = min(longest, self.req_to_token.shape[1])
        self.max_pages = -(-self.max_context_len // self.page_size)
        chunk = arguments.chunked_prefill_size or -1
        self.max_new = self.max_context_len if chunk < 0 else min(chunk, self.max_context_len)
        self.same_bits: bool = arguments.enable_deterministic_inference
        self.plans: dict[int, Plans] = {}  # by layers
        self.step: Step | None = None
        # of layers whose pool is their own: the step over its pages, and where new keys go
        self.two_pools = getattr(runner.token_to_kv_pool, "swa_layer_nums", 0) > 0
        self.window_step: Step | None = None
        self.window_slots: Tensor | None = None
        self._ones = torch.ones(1, dtype=torch.float32, device=runner.device)
        self._graph_lens: Tensor | None = None
        self._graph_table: Tensor | None = None
        self._graph_window_table: Tensor | None = None
        self._graph_window_slots: Tensor | None = None
        if torch.device(self.device).type == "cuda":
            self.warm_up(runner)

    def warm_up(self, runner: Any) -> None:
        """Compiles and loads what steps of the model launch, for each kind of layer once."""
        arguments = contract.resolved(runner.server_args)
        sizes = engine_warmup.Sizes.of(
            arguments.cuda_graph_config.decode.bs or (),
            max_sequences=runner.req_to_token_pool.size,
            decode_len=self.drafted or 1,
            max_tokens=self.max_new,
            max_seqlen_k=self.max_context_len,
            appends=False,
        )
        sinks = any(name.endswith("sinks") for name, _ in runner.model.named_parameters())
        described = [
            self.described(layer, runner.dtype, sinks)
            for layer in runner.model.modules()
            if isinstance(layer, RadixAttention) and layer.attn_type == AttentionType.DECODER
        ]
        engine_warmup.warm_layers(described, sizes, arguments.tp_size)

    def described(self, layer: Any, dtype: torch.dtype, sinks: bool) -> engine_warmup.Layer:
        """A layer as warming up describes it."""
        options = self.options_of(layer, causal=True)
        return engine_warmup.Layer(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            dtype=dtype,
            codec=codec_of(self.token_to_kv_pool.dtype),
            page_size=self.page_size,
            longest=self.max_context_len,
            sink_logits=sinks,
            device=torch.device(self.device),
            arguments={name: options[name] for name in ("window_size", "softcap")},
            apart=True,
            policy=plans_of_engine(self.same_bits).policy,
        )

    # The metadata of a batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step of a batch that no graph runs."""
        x, bs = forward_batch, forward_batch.batch_size
        if x.forward_mode.is_idle():
            self.step = self.window_step = None
            return
        new = new_tokens(x)
        most = self.max_context_len
        longest = most if x.seq_lens_cpu is None else int(x.seq_lens_cpu.max()) + drafts_of(x)
        bound = most if self.same_bits else bound_of(longest, most)
        slots = self.first_slots(x.req_pool_indices[:bs], -(-bound // self.page_size))
        lengths = (x.seq_lens[:bs] + drafts_of(x)).int()
        table = self.pages_at(slots)
        if new:
            self.step = self.decode_step(lengths, table, bound, new)
        else:
            self.step = self.extend_step(x, lengths, table, bound)
        if self.two_pools:
            self.window_step = self.step.with_pages(self.pages_at(self.in_window_pool(slots)))
            self.window_slots = self.in_window_pool(x.out_cache_loc)

    def decode_step(self, lengths: Tensor, table: Tensor, bound: int, new: int) -> Step:
        """A step of `new` tokens a sequence."""
        bs = lengths.shape[0]
        return Step(
            num_decodes=bs,
            decode_len=new,
            num_tokens=bs * new,
            max_seqlen_q=new,
            max_seqlen_k=min(bound, table.shape[1] * self.page_size),
            causal=True,
            cache_seqlens=lengths,
            page_table=table,
            rest=None,
        )

    def extend_step(self, x: Any, lengths: Tensor, table: Tensor, bound: int) -> Step:
        """A step of any tokens of each sequence."""
        counts = x.extend_seq_lens[: x.batch_size]
        tokens = [int(n) for n in x.extend_seq_lens_cpu[: x.batch_size]]
        return Step.of(
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            lengths,
            table,
            num_decodes=0,
            decode_len=1,
            num_tokens=sum(tokens),
            max_seqlen_q=self.max_context_len if self.same_bits else self.bound_of_new(max(tokens)),
            max_seqlen_k=min(bound, table.shape[1] * self.page_size),
        )

    def bound_of_new(self, tokens: int) -> int:
        """An upper bound of the new tokens of a sequence that changes seldom."""
        return bound_of_new(tokens, max(tokens, self.max_new))

    def first_slots(self, requests: Tensor, pages: int) -> Tensor:
        """[batch, pages]: the first slot of each page of these requests, in the order of keys."""
        return self.req_to_token[requests, : pages * self.page_size : self.page_size]

    def pages_at(self, slots: Tensor) -> Tensor:
        """int32: the pages of these slots."""
        return (slots // self.page_size).int()

    def in_window_pool(self, slots: Tensor) -> Tensor:
        """The slots of the same tokens in the pool of layers with a window; of tokens that have
        left all windows, any."""
        found: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return found

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Lengths and tables at addresses that graphs keep."""
        self._graph_lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        shape = max_bs, self.max_pages
        self._graph_table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if self.two_pools:
            self._graph_window_table = torch.zeros_like(self._graph_table)
            slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
            self._graph_window_slots = slots

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The step of a batch that a graph runs: its numbers are those of the longest."""
        x, bs = forward_batch, forward_batch.batch_size
        new = new_tokens(x)
        if not new:
            name = x.forward_mode.name
            raise NotImplementedError(f"forward_mode: expected DECODE or TARGET_VERIFY, got {name}")
        assert self._graph_lens is not None and self._graph_table is not None
        lengths, table = self._graph_lens[:bs], self._graph_table[:bs]
        lengths.copy_(x.seq_lens[:bs] + drafts_of(x))
        pages = self.max_pages
        if not in_capture and x.seq_lens_cpu is not None:
            longest = int(x.seq_lens_cpu[:bs].max()) + drafts_of(x)
            pages = -(-longest // self.page_size)
        slots = self.first_slots(x.req_pool_indices[:bs], pages)
        table[:, :pages].copy_(self.pages_at(slots))
        self.step = self.decode_step(lengths, table, self.max_context_len, new)
        if not self.two_pools:
            return
        assert self._graph_window_table is not None and self._graph_window_slots is not None
        window_table, n = self._graph_window_table[:bs], x.out_cache_loc.shape[0]
        window_table[:, :pages].copy_(self.pages_at(self.in_window_pool(slots)))
        self.window_step = self.step.with_pages(window_table)
        self.window_slots = self._graph_window_slots[:n]
        self.window_slots.copy_(self.in_window_pool(x.out_cache_loc))
        self._graph_window_slots[n:].zero_()

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
            where = KVWriteLoc(forward_batch.out_cache_loc, self.window_slots)
            scales = layer.k_scale, layer.v_scale
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        step = self.window_step if self.has_window_pool(layer) else self.step
        if step is None:
            return out
        causal = layer.attn_type == AttentionType.DECODER
        step = step if causal else replace(step, causal=False)
        options = self.options_of(layer, causal) | {"sink_logits": sinks}
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        into = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        plans = self.plans.get(layer.layer_id)
        if plans is None:
            plans = self.plans[layer.layer_id] = plans_of_engine(self.same_bits)
        attend(rows, self.pages_of(layer), step, into, options, plans)
        return out

    def has_window_pool(self, layer: Any) -> bool:
        """Whether the keys of a layer are in the pool of those with a window."""
        return self.two_pools and bool(self.token_to_kv_pool.layers_mapping[layer.layer_id][1])

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


def codec_of(stored: torch.dtype) -> Codec:
    """How a pool of this type has keys and values."""
    name = QUANTISED.get(str(stored).removeprefix("torch."))
    return AS_IS if name is None else Codec(name, "tensor")


def drafts_of(x: Any) -> int:
    """Tokens of a sequence that a batch verifies, which its lengths are without; 0: none."""
    return int(x.spec_info.draft_token_num) if x.forward_mode.is_target_verify() else 0


def new_tokens(x: Any) -> int:
    """Tokens of each sequence of a batch, where all have as many as kernels of decode take; else
    0."""
    return 1 if x.forward_mode.is_decode() else drafts_of(x)

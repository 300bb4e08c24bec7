"""splitkv as an attention backend of vLLM, out of tree.

    pip install "splitkv[vllm]"
    vllm serve MODEL --attention-backend CUSTOM

vLLM finds `register` by the entry point `splitkv` of the group `vllm.general_plugins`, in each of
its processes. Tested with the releases in TESTED.

A step's keys and values are written before the layer attends (`do_kv_cache_update`), as with prefix
caching a request may read a page that another one writes in the same step. Its requests come sorted
by the number of their new tokens: those that decode go to `splitkv.decode`, the rest, in one
launch, to `splitkv.attention_varlen`. A step of requests that all decode can be captured in a full
CUDA graph, speculative tokens included.

The cache is vLLM's own, [blocks, heads, keys, 2 * head_dim] in any layout, read through strides.
Caches with a scale a token and head (`int8_per_token_head`, `fp8_per_token_head`) are laid out
within a block as all keys, all values, then their scales, so that rows begin at multiples of 16
bytes.

What releases of vLLM do not share is in `vllm_contract_0_26` and `vllm_contract_0_29`, named by the
first release that has it.

Images whose tokens see each other (`mm_req_doc_ranges`) and a causal flag a request become
`bidirectional_ranges` of `attention_varlen`.

Not served, and refused where vLLM asks: MLA and sparse attention, prefill context parallelism,
windows, chunks, ALiBi and ranges beside decode context parallelism, a causal flag a request beside
windows, ranges that a window cuts (Gemma 4), R-SWA, 4-bit caches, output with scales of blocks,
drafts that are trimmed on the device.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from splitkv.api import append
from splitkv.core.device import current
from splitkv.integrations import engine_warmup
from splitkv.integrations.serving import (
    MAX_DECODE_LEN,
    Pages,
    Ranks,
    SharedPrefix,
    Step,
    attend,
    attend_over_ranks,
    attend_packed,
    attend_with_prefix,
    bound_of,
    bound_of_new,
    plans_of_engine,
)
from splitkv.integrations.vllm_caches import (
    AS_THEY_ARE,
    SCALE_BYTES,
    SCALED,
    SCALED_BY_TOKEN,
    codec_of,
    planes,
    strided,
)
from splitkv.planner.policies.widening import MOST_BYTES

TESTED = ("0.26.0", "0.32.0", "0.33.0")
"""Releases of vLLM that the tests were run with."""

CONTRACT = "0_26" if hasattr(AttentionBackend, "get_kv_cache_shape") else "0_29"
contract: Any = import_module(f"splitkv.integrations.vllm_contract_{CONTRACT}")

NAME = "CUSTOM"  # the member of AttentionBackendEnum that vLLM keeps for others
WITHOUT_CACHE = AttentionType.ENCODER, AttentionType.ENCODER_ONLY
SERVED = AttentionType.DECODER, AttentionType.ENCODER_DECODER, *WITHOUT_CACHE
WHOLE = 1 << 30  # an end past the keys of any sequence
LEAST_SHARERS = 8  # requests from which on a shared prefix is read apart; no measurement behind it


def register() -> None:
    """Makes the backend known to vLLM as CUSTOM. Called in every process, more than once, too."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.SplitKVBackend")


class SplitKVBackend(contract.CachesOfBackend):
    """The backend as vLLM asks for it before it makes a layer: names, shapes, what is supported."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", *AS_THEY_ARE, *SCALED, *SCALED_BY_TOKEN)
    ]
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = False  # `append` alone writes caches

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[SplitKVImpl]:
        return SplitKVImpl

    @staticmethod
    def get_builder_cls() -> type[SplitKVMetadataBuilder]:
        return SplitKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The specification of a layer's cache with room for a scale a token and head."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        row = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        return replace(spec, state_content_bytes=row + 2 * SCALE_BYTES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 16 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in SERVED

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: which requests decode, and how many tokens each, is read on the host."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        *others: Any,
        **by_name: Any,
    ) -> str | None:
        """Why not, of what each for itself is supported."""
        stored = AS_THEY_ARE.get(kv_cache_dtype, dtype)
        if stored != dtype:
            return f"kv_cache_dtype: expected auto, fp8 or {dtype}, got {kv_cache_dtype}"
        return None


@dataclass
class SplitKVMetadata:
    """A step, as every layer of a group of caches reads it.

    vLLM's builders of chunked and of cross attention, which derive from the one below, note more in
    it: so it is not frozen.

    num_actual_tokens  tokens that are not padding
    max_query_len      upper bound of the new tokens of a request
    query_start_loc    [requests + 1] int32 on the device
    step               which requests decode, and their lengths and blocks; of a context parallel
                       rank, as `attend_over_ranks` takes it
    causal             whether a token sees no later one
    whole              nobody has keys from before the step; asked of context parallel ranks alone
    shared             the prefix that all requests share, read apart; None: no such
    ranged             some tokens see later ones: "images", or "requests" by a flag of each; ""
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    step: Step
    causal: bool = True
    whole: bool = False
    shared: SharedPrefix | None = None
    ranged: str = ""


class SplitKVMetadataBuilder(AttentionMetadataBuilder[SplitKVMetadata]):
    """Makes a step's SplitKVMetadata, once for all layers that share a block table."""

    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if vllm_config.cache_config.kv_sharing_fast_prefill:  # gives starts that are not there yet
            raise NotImplementedError("kv_sharing_fast_prefill: expected False, got True")
        parallel = vllm_config.parallel_config
        apart = getattr(kv_cache_spec, "dcp_sharded", True)  # else each rank has all, as of drafts
        self.ranks: int = parallel.decode_context_parallel_size if apart else 1
        chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
        if self.ranks > 1 and chunk is not None:  # chunks are found in the tables of one rank
            what = f"attention_chunk_size: expected None with ranks that share keys, got {chunk}"
            raise NotImplementedError(what)
        self.rank = get_dcp_group().rank_in_group if self.ranks > 1 else 0
        self.interleave: int = parallel.cp_kv_cache_interleave_size
        if self.ranks > 1 or type(self) is not SplitKVMetadataBuilder:  # whose lengths are derived
            self.supports_draft_decode_metadata_update = False
        self.rswa = getattr(vllm_config.model_config, "rswa_window", None) is not None
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self.batch_invariant:
            expect_whole_prompts(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most: int = self.reorder_batch_threshold or 1
        self.reorder_batch_threshold: int | None = min(most, MAX_DECODE_LEN)
        if device.type == "cuda" and self.ranks == 1:
            self.warm_up(layer_names, vllm_config, device)

    def warm_up(self, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Compiles and loads what steps of these layers launch, for each kind of layer once."""
        graphs, dtype = vllm_config.compilation_config, vllm_config.model_config.dtype
        sizes = engine_warmup.Sizes.of(
            graphs.cudagraph_capture_sizes or (),
            max_sequences=vllm_config.scheduler_config.max_num_seqs,
            decode_len=self.reorder_batch_threshold or 1,
            max_tokens=self.max_tokens,
            max_seqlen_k=self.bound(self.max_model_len, self.max_model_len),
        )
        layers = graphs.static_forward_context
        impls = [getattr(layers[name], "impl", None) for name in layer_names if name in layers]
        described = [
            self.described(impl, dtype, device)
            for impl in impls
            if isinstance(impl, SplitKVImpl) and impl.attn_type == AttentionType.DECODER
        ]
        engine_warmup.warm_layers(described, sizes, vllm_config.parallel_config.world_size)

    def described(
        self, impl: SplitKVImpl, dtype: torch.dtype, device: torch.device
    ) -> engine_warmup.Layer:
        """A layer as warming up describes it."""
        window, softcap = impl.window_size(causal=True), impl.options["softcap"]
        return engine_warmup.Layer(
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            head_dim_v=impl.head_size,
            dtype=dtype,
            codec=codec_of(impl.kv_cache_dtype),
            page_size=self.block_size,
            longest=self.max_model_len,
            sink_logits=impl.sinks is not None,
            alibi_slopes=impl.alibi_slopes is not None,
            device=device,
            arguments={"window_size": window, "softcap": softcap},
            heads_first=contract.heads_first(self.vllm_config),
            policy=impl.plans.policy,
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs of steps in which all requests have as many new tokens, if decode takes so
        many; of one where several ranks hold the keys, or where tokens may see later ones."""
        speculative = vllm_config.speculative_config
        drafted = 0 if speculative is None else speculative.num_speculative_tokens or 0
        alone = vllm_config.parallel_config.decode_context_parallel_size == 1
        ranged = getattr(vllm_config.model_config, "is_mm_prefix_lm", False)
        if drafted < MAX_DECODE_LEN and alone and not ranged:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SplitKVMetadata:
        x = common_attn_metadata
        if self.rswa and x.rswa_prefix_lens is not None:
            raise NotImplementedError("rswa_prefix_lens: expected none, got some")
        lengths = query_lens(x)
        num_decodes, decode_len = decodes_in_front(lengths, self.reorder_batch_threshold or 0)
        ranged, ranges = ranges_of(x)
        if ranges is not None and decode_len > 1:  # drafts, or tokens of an image
            num_decodes, decode_len = 0, 1
        causal, seq_lens, most = ranged == "requests" or x.causal, x.seq_lens, x.max_seq_len
        if self.ranks > 1:
            if ranges is not None:
                raise NotImplementedError("ranges: expected none with ranks that share keys")
            causal, most = False, self.most_of_a_rank(most)
            seq_lens = self.keys_of_rank(x, num_decodes)
        numbers = {
            "num_tokens": min(x.num_actual_tokens, sum(lengths)),
            "max_seqlen_q": self.bound_of_new(int(x.max_query_len)),
            "max_seqlen_k": self.bound_of_step(most, x.block_table_tensor),
        }
        requests = x.query_start_loc, seq_lens, x.block_table_tensor
        step = Step.of(
            *requests,
            num_decodes=num_decodes,
            decode_len=decode_len,
            causal=causal,
            **numbers,
        )
        if ranges is not None:
            step = step.with_ranges(ranges)
        shared = None
        if common_prefix_len and causal and ranges is None:
            shared = SharedPrefix.of(*requests, common_prefix_len, self.block_size, **numbers)
        return SplitKVMetadata(
            num_actual_tokens=x.num_actual_tokens,
            max_query_len=x.max_query_len,
            query_start_loc=x.query_start_loc,
            step=step,
            causal=ranged == "requests" or x.causal,
            ranged=ranged,
            whole=self.ranks > 1 and whole_prompts(x, lengths),
            shared=shared,
        )

    def keys_of_rank(self, x: Any, num_decodes: int) -> Tensor:
        """How many keys of each request this rank holds: of the first `num_decodes`, which have a
        token each, with that, of the others without the tokens of the step."""
        if num_decodes == x.num_reqs and x.dcp_local_seq_lens is not None:
            held: Tensor = x.dcp_local_seq_lens
            return held
        before = x.seq_lens - x.query_start_loc.diff()
        before[:num_decodes] = x.seq_lens[:num_decodes]
        held = get_dcp_local_seq_lens(before, self.ranks, self.rank, self.interleave)
        return held

    def most_of_a_rank(self, length: int) -> int:
        """An upper bound of the keys that a rank holds of so many."""
        return -(-length // (self.ranks * self.interleave)) * self.interleave

    def bound_of_new(self, tokens: int) -> int:
        """The max_seqlen_q of a step; the most there is where bits may not follow the batch. Drafts
        in parallel add tokens to those that vLLM has scheduled."""
        most = max(self.max_tokens, tokens)
        return most if self.batch_invariant else bound_of_new(tokens, most)

    def bound_of_step(self, length: int, table: Tensor) -> int:
        """The max_seqlen_k of a step with a block table."""
        return self.bound(length, table.shape[1] * self.block_size)

    def bound(self, length: int, most: int) -> int:
        """The max_seqlen_k of a step; the most there is where bits may not follow the batch: not
        the tokens of a model, as cross attention may have more keys."""
        return most if self.batch_invariant else bound_of(max(int(length), 1), most)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SplitKVMetadata:
        """A step for a graph that is replayed with requests of any length; keys of cross attention
        may be more than the tokens of a model, and vLLM asks with their number."""
        made = self.build(0, common_attn_metadata)
        most = self.most_of_a_rank(self.max_model_len)
        longest = self.bound_of_step(most, common_attn_metadata.block_table_tensor)
        made.step = replace(made.step, max_seqlen_k=max(made.step.max_seqlen_k, longest))
        made.whole = False
        return made

    def update_draft_decode_metadata(self, metadata: SplitKVMetadata) -> None:
        """Lets a step be attended again after its lengths have grown where they lie, as those of a
        draft model do, also within a CUDA graph: its schedule is made anew."""
        step = metadata.step
        if step.num_decodes and step.rest is not None:
            raise NotImplementedError("draft step: expected as many new tokens of every request")
        step.schedules.clear()

    def update_block_table(
        self, metadata: SplitKVMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> SplitKVMetadata:
        """The step over another group's caches, of the same block size; slots come to
        `do_kv_cache_update` by themselves."""
        made = copy(metadata)  # with what vLLM has noted in it
        made.step, made.shared = metadata.step.with_pages(blk_table), None
        return made

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether a shared prefix is read apart; vLLM up to 0.31 asks where `disable_cascade_attn`
        is off."""
        positions = use_alibi or use_sliding_window or use_local_attention
        enough = common_prefix_len >= self.block_size and len(query_lens) >= LEAST_SHARERS
        return enough and not positions and dcp_world_size == 1 and not self.batch_invariant


def expect_whole_prompts(vllm_config: Any) -> None:
    """Settings by which a prompt is computed in one piece: where it is cut would follow from what
    else is in the batch, or was before."""
    chunked = getattr(vllm_config.scheduler_config, "enable_chunked_prefill", False)
    cached = vllm_config.cache_config.enable_prefix_caching
    for name, on in (("enable_chunked_prefill", chunked), ("enable_prefix_caching", cached)):
        if on:
            raise ValueError(f"{name}: expected False with VLLM_BATCH_INVARIANT, got True")


def ranges_of(x: Any) -> tuple[str, Tensor | None]:
    """(`ranged` of SplitKVMetadata, `bidirectional_ranges` of all requests or None) of a step."""
    if not isinstance(x.causal, bool):
        if x.mm_req_doc_ranges is not None:
            raise NotImplementedError("causal: expected one flag beside images, got one of each")
        ends = torch.where(x.causal.to(x.seq_lens.device, torch.bool), 0, WHOLE).int()
        return "requests", torch.stack([torch.zeros_like(ends), ends], 1)[:, None].contiguous()
    given = x.mm_req_doc_ranges or {}
    most = max((len(ranges) for ranges in given.values()), default=0)
    if not most:
        return "", None
    table = [[(0, 0)] * most for _ in range(x.query_start_loc.numel() - 1)]
    for request, ranges in given.items():
        table[request][: len(ranges)] = [(first, last + 1) for first, last in ranges]
    made = torch.tensor(table, dtype=torch.int32)
    if x.seq_lens.is_cuda:
        made = made.pin_memory().to(x.seq_lens.device, non_blocking=True)
    return "images", made


def query_lens(x: Any) -> list[int]:
    """New tokens of each request, on the host; padded requests at the end are left out."""
    starts = x.query_start_loc_cpu[: x.num_reqs + 1].tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    while lengths and not lengths[-1]:
        lengths.pop()
    return lengths


def whole_prompts(x: Any, lengths: list[int]) -> bool:
    """Whether all tokens of all requests are of this step: what ranks know without asking."""
    if x.seq_lens_cpu_upper_bound is None:
        return False
    seqlens: list[int] = x.seq_lens_cpu_upper_bound[: len(lengths)].tolist()
    return seqlens == lengths


def decodes_in_front(lengths: list[int], threshold: int) -> tuple[int, int]:
    """(how many, new tokens of each) of the requests in front that have as many, up to a number."""
    if not lengths or not 0 < lengths[0] <= threshold:
        return 0, 1
    first = lengths[0]
    others = (n for n, length in enumerate(lengths) if length != first)
    return next(others, len(lengths)), first


@dataclass(frozen=True)
class LayerArguments:
    """The arguments, in their order, by which vLLM makes the SplitKVImpl of a layer."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    sinks: Tensor | None = None


class SplitKVImpl(AttentionImpl[SplitKVMetadata]):
    """Attention of one layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_quant_query_input: bool = False  # q stays in 16 bits: decode waits for keys, not for q

    def __init__(self, *arguments: Any, **by_name: Any) -> None:
        """Takes the fields of LayerArguments, by position or by name."""
        given = LayerArguments(*arguments, **by_name)
        if not SplitKVBackend.supports_attn_type(given.attn_type):
            known, kind = ", ".join(SERVED), given.attn_type
            raise NotImplementedError(f"attn_type: expected {known}, got {kind}")
        if not SplitKVBackend.supports_kv_cache_dtype(given.kv_cache_dtype):
            known, kind = ", ".join(SplitKVBackend.supported_kv_cache_dtypes), given.kv_cache_dtype
            raise NotImplementedError(f"kv_cache_dtype: expected {known}, got {kind}")
        self.num_heads, self.head_size = given.num_heads, given.head_size
        self.scale = float(given.scale)
        self.num_kv_heads = given.num_kv_heads or given.num_heads
        self.kv_cache_dtype = given.kv_cache_dtype
        self.attn_type = given.attn_type
        self.kv_sharing_target_layer_name = given.kv_sharing_target_layer_name
        self.sinks = given.sinks
        self.left = -1 if given.sliding_window is None else given.sliding_window - 1
        slopes = given.alibi_slopes
        self.alibi_slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": float(given.logits_soft_cap or 0.0),
            "alibi_slopes": None,
            "sink_logits": given.sinks,
        }
        self.ranks = self.context_parallel() if self.dcp_world_size > 1 else None
        self.plans = plans_of_engine(envs.VLLM_BATCH_INVARIANT)
        self._bound_to: tuple[Tensor, Tensor] | None = None  # the cache and scale of these pages
        self._pages: Pages | None = None

    def context_parallel(self) -> Ranks:
        """The ranks that hold the keys of this layer, with the collectives that vLLM is set to."""
        for name, there in (
            ("sliding_window", self.left >= 0),
            ("alibi_slopes", self.alibi_slopes is not None),
            ("cross attention", self.attn_type == AttentionType.ENCODER_DECODER),
            ("VLLM_BATCH_INVARIANT", bool(envs.VLLM_BATCH_INVARIANT)),
        ):
            if there:
                raise NotImplementedError(f"{name}: expected none with ranks that share keys")
        config, group = get_current_vllm_config_or_none(), get_dcp_group()
        apart = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        merge = contract.dcp_a2a_lse_reduce if apart else contract.cp_lse_ag_out_rs

        def combine(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            own, of_own = merge(out, lse.transpose(0, 1).contiguous(), group, return_lse=True)
            return own, of_own.transpose(0, 1)

        return Ranks(lambda q: group.all_gather(q.contiguous(), dim=1), combine)

    def window_size(self, causal: bool) -> tuple[int, int]:
        """(left, right): a window looks to both sides where nothing is causal."""
        return self.left, -1 if causal else self.left

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: SplitKVMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [tokens, num_heads, head_size] into output, which is returned.

        The keys and values are in the cache already; key and value are read by encoders, and where
        ranks share keys.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: expected None, got scales")
        x = attn_metadata
        if x is None:
            self.take_memory(query)
            return output.zero_()
        causal = x.causal and self.attn_type == AttentionType.DECODER
        if x.ranged:
            self.expect_ranges(layer, x.ranged)
        options = self.options | {"window_size": self.window_size(causal)}
        options["out_scale"] = output_scale
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
            options["alibi_slopes"] = self.alibi_slopes
        if x.whole or self.attn_type in WITHOUT_CACHE:
            n = x.num_actual_tokens
            assert key is not None and value is not None
            tensors = query[:n], key[:n], value[:n], x.query_start_loc, x.step.max_seqlen_q
            attend_packed(*tensors, output[:n], {**options, "causal": causal}, self.plans)
            return output
        pages = self.pages(layer, kv_cache)
        if self.ranks is not None:
            tokens = query, key, value
            attend_over_ranks(*tokens, pages, x.step, causal, output, options, self.ranks)
        elif x.shared is None:
            attend(query, pages, x.step, output, options, self.plans)
        else:
            attend_with_prefix(query, pages, x.shared, output, options)
        return output

    def expect_ranges(self, layer: Any, ranged: str) -> None:
        """Refuses tokens that see later ones where that would be another mask than vLLM's."""
        flags, of_window = ranged == "requests", self.left >= 0
        cut = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        if of_window and (flags or cut):
            what = (
                "causal: expected one flag for all requests" if flags else "ranges: expected none"
            )
            raise NotImplementedError(f"{what} beside a window that cuts them")
        if self.attn_type != AttentionType.DECODER:
            what = f"attn_type: expected decoder, got {self.attn_type}"
            raise NotImplementedError(f"{what} with tokens that see later ones")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether vLLM is to have results rounded here: to e4m3 by one scale. On Hopper not, though
        `forward` would: the kernels that are fastest there for prompts store 16 bits."""
        return quant_key == kFp8StaticTensorSym and current().capability != (9, 0)

    def take_memory(self, like: Tensor) -> None:
        """Takes as much as a step may, and gives it back: vLLM measures what a model needs beside
        its caches in a run without metadata. Kernels that read 8 bits may widen what a prompt
        reads first."""
        if self.kv_cache_dtype in (*SCALED, *SCALED_BY_TOKEN):
            like.new_empty(MOST_BYTES, dtype=torch.uint8)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes a step's keys and values, in one launch; a slot below 0 is not written."""
        if self.attn_type in WITHOUT_CACHE or not kv_cache.numel():
            return
        pages = self.pages(layer, kv_cache)
        append(key, value, pages.k, pages.v, slot_mapping, **pages.scales)

    def pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The cache of a layer as kernels read it: made once, as vLLM binds a layer to one."""
        bound = self._bound_to
        if bound is None or bound[0] is not kv_cache or bound[1] is not layer._k_scale:
            self._pages = self._make_pages(layer, kv_cache)
            self._bound_to = kv_cache, layer._k_scale
        assert self._pages is not None
        return self._pages

    def _make_pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        if self.kv_cache_dtype in SCALED_BY_TOKEN:
            return planes(kv_cache, SCALED_BY_TOKEN[self.kv_cache_dtype])
        k, v = map(strided, kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
        stored = SCALED.get(self.kv_cache_dtype)
        if stored is None:
            return Pages(k, v)
        scales = layer._k_scale.view(-1), layer._v_scale.view(-1)
        return Pages(k.view(stored), v.view(stored), *scales)

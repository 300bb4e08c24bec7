"""The plugin in a real vLLM: found by its entry point, asked as an engine asks, and small models.

Run by `make test-vllm`, in an environment that has vLLM's build for CPUs.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from torch import Tensor
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.utils import AttentionGroup
from vllm_contract import config

from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.integrations import vllm as adapter

ENGINE = Path(__file__).with_name("vllm_engine.py")
RUNS = {
    "models": ("--models", "llama,qwen2,mistral,gemma2,bloom,gpt_oss"),
    "blocks of 64": ("--models", "llama", "--page", "64"),
    "a cached prefix": ("--models", "llama", "--shared", "64"),
    "a prefix written in the same step": ("--models", "llama", "--shared", "96", "--together", "1"),
    "an encoder": ("--models", "bert"),
    "drafts": ("--models", "llama", "--speculate", "4"),
    "int8": ("--models", "llama,gpt_oss", "--kv", "int8_per_token_head"),
    "fp8": ("--models", "llama,gpt_oss", "--kv", "fp8"),
    "e5m2": ("--models", "llama", "--kv", "fp8_e5m2"),
}


def test_release() -> None:
    assert vllm.__version__ in adapter.TESTED


def test_entry_point() -> None:
    load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_class() is adapter.SplitKVBackend


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, None),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, None),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: expected auto"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, None),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
)
def test_what_vllm_is_told(wrong: dict[str, object], reason: str | None) -> None:
    """By the question that it asks before it takes a backend."""
    asked: dict[str, object] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": True,
        "device_capability": vllm.platforms.interface.DeviceCapability(8, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
        "use_non_causal": True,
        "use_batch_invariant": True,
    }
    ask = adapter.SplitKVBackend.validate_configuration
    if not wrong.keys() <= inspect.signature(ask).parameters.keys():
        assert vllm.__version__ != adapter.TESTED[-1]  # an older release, which does not ask it
        return
    reasons = ask(**asked | wrong)
    if reason is None:
        assert reasons == []
    else:
        assert any(reason in said for said in reasons), reasons


@pytest.mark.parametrize("run", RUNS)
def test_engine(run: str, tmp_path: Path) -> None:
    command = (sys.executable, ENGINE, "check", "--folder", tmp_path, *RUNS[run])
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_bench(tmp_path: Path) -> None:
    command = [sys.executable, str(ENGINE), "bench", "--folder", str(tmp_path), "--shape", "tiny"]
    command += ["--cases", "3x40,1x100", "--tokens", "4", "--repeats", "1", "--most", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows] == ["3x40", "1x100"]
    assert all(row["ms_a_step"] > 0 and row["ms_to_first_token"] > 0 for row in rows)


def described(new: list[int], lengths: list[int], table: Tensor) -> CommonAttentionMetadata:
    """vLLM's description of a step, for builders that derive from ours."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )


class Layer:
    """A layer of 4 heads on 2 of 16, whose keys and values fill blocks of 16 in order."""

    def __init__(
        self, backend: Any, lengths: list[int], impl: dict[str, Any], drafted: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.k, self.v = (torch.randn(len(lengths), 128, 2, 16) for _ in range(2))
        self.q = torch.randn(sum(lengths), 4, 16)
        self.table = torch.arange(8 * len(lengths), dtype=torch.int32).view(-1, 8)
        cache = torch.cat([self.k, self.v], dim=-1).view(-1, 16, 2, 32)
        self.cache, self.name = cache.transpose(1, 2), "layer"
        self.kv_sharing_target_layer_name = None
        self._k_scale = self._v_scale = torch.tensor(1.0)
        self.impl = backend.get_impl_cls()(4, 16, 0.25, 2, **impl)
        spec, device = SimpleNamespace(block_size=16), torch.device("cpu")
        self.builder = backend.get_builder_cls()(spec, ["layer"], config(128, 128, drafted), device)

    def __call__(self, made: Any, tokens: int, key: Any = None, value: Any = None) -> Tensor:
        out = torch.full((tokens, 4, 16), torch.nan)
        return self.impl.forward(self, self.q[:tokens], key, value, self.cache, made, out)


@pytest.mark.parametrize(
    ("new", "lengths"),
    [
        ([1, 40, 20], [70, 97, 20]),
        ([1, 1, 1, 1], [32, 33, 64, 1]),
        ([1, 1, 31, 33], [65, 1, 32, 65]),
        ([32, 64, 1], [32, 128, 96]),
        ([3, 3, 3], [33, 35, 66]),
    ],
    ids=["in chunks", "tokens at edges", "behind edges", "whole chunks", "drafts over edges"],
)
@pytest.mark.parametrize("drafted", [0, 2])
def test_chunked_attention(new: list[int], lengths: list[int], drafted: int) -> None:
    """vLLM's own builder above ours, as of Llama 4: a token sees the keys of its own chunk."""
    backend = create_chunked_local_attention_backend(adapter.SplitKVBackend, 32)
    layer = Layer(backend, lengths, {}, drafted)
    made = layer.builder.build(0, described(new, lengths, layer.table))
    found = layer(made, sum(new)).split(new)
    q = layer.q[: sum(new)].split(new)
    for b, length in enumerate(lengths):
        given = q[b][None], layer.k[b : b + 1, :length], layer.v[b : b + 1, :length]
        wanted = reference.attention(*given, mask=Mask(True, chunk=32), softmax_scale=0.25)[0][0]
        torch.testing.assert_close(found[b].double(), wanted, rtol=1e-5, atol=1e-5)
    other = layer.builder.update_block_table(made, layer.table.flip(0), made.step.page_table)
    assert not torch.equal(layer(other, sum(new)), torch.cat(found))


def test_cross_attention() -> None:
    """vLLM's own builder and layer around ours, as of Whisper: keys of an encoder, written in the
    first step of a request."""
    backend = create_cross_attention_backend(adapter.SplitKVBackend)
    lengths = [37, 5, 100]
    layer = Layer(backend, lengths, {"attn_type": AttentionType.ENCODER_DECODER})
    k, v = (torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (layer.k, layer.v))
    layer.cache.fill_(torch.nan)
    for new, tokens, given in (([4, 1, 7], [4, 1, 7], (k, v)), ([1, 1, 1], [5, 2, 8], ())):
        x = described(new, tokens, layer.table)
        x.encoder_seq_lens_cpu = np.array(lengths, dtype=np.int32)
        x.encoder_seq_lens = torch.tensor(lengths, dtype=torch.int32)
        found = layer(layer.builder.build(0, x), sum(new), *given).split(new)
        for b, q in enumerate(layer.q[: sum(new)].split(new)):
            keys = layer.k[b : b + 1, : lengths[b]], layer.v[b : b + 1, : lengths[b]]
            wanted = reference.attention(q[None], *keys, softmax_scale=0.25)[0][0]
            torch.testing.assert_close(found[b].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("new", "lengths", "capture"),
    [
        ([1, 1, 40, 7], [70, 5, 97, 7], False),
        ([1, 1, 1, 0], [70, 5, 97, 0], True),
    ],
    ids=["prompts beside decodes", "a captured step, one request of it padding"],
)
def test_model_runner_v2(new: list[int], lengths: list[int], capture: bool) -> None:
    """What the model runner of GPUs makes of a step, which vLLM's build for CPUs does not run."""
    layer = Layer(adapter.SplitKVBackend, lengths, {})
    group = AttentionGroup(
        adapter.SplitKVBackend,
        layer_names=["layer"],
        kv_cache_spec=SimpleNamespace(block_size=16),
        kv_cache_group_id=0,
        metadata_builders=[layer.builder],
    )
    starts, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, *new], lengths))
    starts = starts.cumsum(0).int()
    rows = len(new) if capture else sum(new)
    made = build_attn_metadata(
        [[group]],
        num_reqs=len(new),
        num_tokens=rows,
        query_start_loc_gpu=starts,
        query_start_loc_cpu=starts,
        max_query_len=max(new),
        seq_lens=seq_lens,
        max_seq_len=128 if capture else max(lengths),
        block_tables=[layer.table],
        slot_mappings=[torch.full((rows,), -1)],
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        seq_lens_cpu_upper_bound=seq_lens,
        for_cudagraph_capture=capture,
    )["layer"]
    assert (made.step.rest is None) == capture
    found = layer(made, rows)[: sum(new)].split(new)
    for b, q in enumerate(layer.q[: sum(new)].split(new)):
        if new[b]:
            keys = layer.k[b : b + 1, : lengths[b]], layer.v[b : b + 1, : lengths[b]]
            wanted = reference.attention(q[None], *keys, mask=Mask(True), softmax_scale=0.25)[0][0]
            torch.testing.assert_close(found[b].double(), wanted, rtol=1e-5, atol=1e-5)

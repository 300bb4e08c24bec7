"""The plugin in a real vLLM: found by its entry point, asked as an engine asks, and small models.

Run by `make test-vllm`, in an environment that has vLLM's build for CPUs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from splitkv.integrations import vllm as adapter

ENGINE = Path(__file__).with_name("vllm_engine.py")
RUNS = {
    "models": ("--models", "llama,qwen2,mistral,gemma2,bloom,gpt_oss"),
    "blocks of 64": ("--models", "llama", "--page", "64"),
    "a cached prefix": ("--models", "llama", "--shared", "64"),
    "drafts": ("--models", "llama", "--speculate", "4"),
    "int8": ("--models", "llama", "--kv", "int8_per_token_head", "--tolerance", "0.5"),
    "fp8": ("--models", "llama", "--kv", "fp8", "--tolerance", "1"),
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
        ({"attn_type": AttentionType.ENCODER_DECODER}, "attention type"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: expected auto"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_pcp": True}, "PCP not supported"),
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
    reasons = adapter.SplitKVBackend.validate_configuration(**asked | wrong)
    if reason is None:
        assert reasons == []
    else:
        assert any(reason in said for said in reasons), reasons


@pytest.mark.parametrize("run", RUNS)
def test_engine(run: str, tmp_path: Path) -> None:
    command = (sys.executable, ENGINE, "check", "--folder", tmp_path, *RUNS[run])
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]

"""Megatron's core attention, made and called as there; what it takes of Megatron is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import splitkv
from splitkv.integrations.megatron import CoreAttention, window_of

HEADS, GROUPS, DIM, TOKENS = 4, 2, 16, 12


class AttnMaskType(Enum):
    """As megatron.core.transformer.enums has it."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def config(**options: Any) -> SimpleNamespace:
    known = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": DIM}
    known |= {"attention_dropout": 0.0, "window_size": None, "window_attn_skip_freq": None}
    return SimpleNamespace(**{**known, **options})


def core(group: ProcessGroup, mask: str = "causal", **options: Any) -> CoreAttention:
    pg_collection = SimpleNamespace(tp=group, cp=group)
    given = {"pg_collection": pg_collection, "cp_comm_type": "p2p"}
    of_layer = {"layer_number": 2, "attention_type": "self", "attn_mask_type": AttnMaskType[mask]}
    return CoreAttention(config(**options), **of_layer, **given)


def test_a_layer(group: ProcessGroup) -> None:
    attend = core(group, softmax_type="learnable", window_size=(5, 0))
    assert attend.softmax_offset is not None
    with torch.no_grad():
        attend.softmax_offset.copy_(torch.randn(HEADS))
    q, k, v = (torch.randn(TOKENS, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    found = attend(q, k, v, torch.ones(1, 1, TOKENS, TOKENS), attn_mask_type=AttnMaskType.causal)
    of_batch = (x.transpose(0, 1) for x in (q, k, v))
    sinks = attend.softmax_offset.detach()
    out = splitkv.attention(*of_batch, causal=True, window_size=(5, 0), sink_logits=sinks)
    assert found.shape == (TOKENS, 2, HEADS * DIM)
    torch.testing.assert_close(found, out.flatten(-2).transpose(0, 1))


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_packed_sequences(mask: str, group: ProcessGroup) -> None:
    bounds = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    params = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=7,
        max_seqlen_kv=7,
    )
    q, k, v = (torch.randn(TOKENS, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    found = core(group, mask)(q, k, v, None, packed_seq_params=params)
    out = splitkv.attention_varlen(q, k, v, bounds, bounds, 7, 7, causal=mask == "causal")
    torch.testing.assert_close(found, out.flatten(-2))


def test_windows_of_layers() -> None:
    every = {"window_size": (5, 0)}
    assert window_of(config(), 1) is None
    assert window_of(config(**every), 1) == (5, 0)
    for skipped, layers in ((2, [1, 3]), ([1, 0, 0, 1], [1, 4])):
        of = config(**every, window_attn_skip_freq=skipped)
        assert [n for n in range(1, 5) if window_of(of, n)] == layers


def test_without_groups_those_of_megatron_are_taken(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, utils = ModuleType("parallel_state"), ModuleType("utils")
    state.get_tensor_model_parallel_group = lambda: group  # type: ignore[attr-defined]
    state.get_context_parallel_group = lambda: group  # type: ignore[attr-defined]
    utils.make_sharded_tensors_for_checkpoint = (  # type: ignore[attr-defined]
        lambda tensors, prefix, axes, offsets: (list(tensors), prefix, axes, offsets)
    )
    named = {"parallel_state": state, "transformer.utils": utils}
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, f"megatron.core.{name}", module)
    made = CoreAttention(config(softmax_type="learnable"), 1, AttnMaskType.causal, "self")
    assert made.cp_group is group and made.num_heads == HEADS
    names, prefix, axes, offsets = made.sharded_state_dict("layer.")
    assert (names, prefix, axes) == (["softmax_offset"], "layer.", {"softmax_offset": 0})
    assert offsets == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling: expected False"),
        ({"softmax_type": "sink"}, "softmax_type: expected 'vanilla', 'off-by-one' or "),
    ],
)
def test_a_malformed_configuration(
    options: dict[str, Any], message: str, group: ProcessGroup
) -> None:
    with pytest.raises(ValueError) as refused:
        core(group, **options)
    assert str(refused.value).startswith(message)


def test_a_malformed_call(group: ProcessGroup) -> None:
    q, k, v = (torch.randn(TOKENS, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    with pytest.raises(ValueError, match="attention_bias: expected None"):
        core(group)(q, k, v, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="argument of CoreAttention: expected attention_dropout"):
        CoreAttention(config(), 1, AttnMaskType.causal, "self", head_dim=3)

"""A policy-gradient step under verl's Ulysses: packed sequences, gpt-oss, sinks trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Raised, Ranks

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from rank_models import LENGTHS, batch, gpt_oss, policy_loss, step  # noqa: E402


def in_one_process(kv_heads: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients, one sequence after the other, by eager attention."""
    model = gpt_oss("eager", kv_heads)
    ids, _, actions, advantages = batch()
    parts = [model(input_ids=x, use_cache=False).logits for x in ids.split(LENGTHS, 1)]
    loss = policy_loss(torch.cat(parts, 1), actions, advantages)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_step_is_that_of_one_process(kv_heads: int, ranks: Ranks) -> None:
    loss, grads = in_one_process(kv_heads)
    found: list[Any] = ranks.run(step, 2, kv_heads, "splitkv_ulysses")
    torch.testing.assert_close(sum(part for part, _ in found), loss, rtol=1e-5, atol=1e-5)
    assert any(name.endswith("sinks") for name in grads)
    for name, grad in grads.items():
        total = sum(part[name] for _, part in found if name in part)
        size = grad.abs().max().item()
        torch.testing.assert_close(total / size, grad / size, rtol=0, atol=1e-5, msg=name)


def test_the_implementation_without_an_exchange_refuses(ranks: Ranks) -> None:
    for found in ranks.each(step, 2, 4, "splitkv"):
        assert isinstance(found, Raised)
        assert found.kind == "UnsupportedLayer"
        assert "ulysses_sequence_parallel_size: expected 1, got 2" in found.message
        assert "splitkv_ulysses" in found.message


def test_an_exchange_that_is_not_in_place_is_missed(ranks: Ranks) -> None:
    for found in ranks.each(step, 2, 4, "splitkv_ulysses", False):
        assert isinstance(found, Raised)
        assert found.kind == "UnsupportedLayer"
        assert "expected 1 where nothing exchanges heads, got 2" in found.message
        assert "apply_monkey_patch" in found.message


def test_a_layer_of_text_without_positions_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import flash_attention

    from splitkv.integrations import verl

    monkeypatch.setattr(verl, "ulysses_size", lambda: 2)
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", lambda *args: None)
    layer, picture = torch.nn.Module(), torch.nn.Module()
    picture.is_causal = False  # type: ignore[assignment]
    verl.expect_exchange(layer, torch.arange(3)[None])
    verl.expect_exchange(picture, None)
    with pytest.raises(NotImplementedError, match="position_ids: expected those of this rank's"):
        verl.expect_exchange(layer, None)


def test_sinks_of_other_heads_raise() -> None:
    from splitkv.integrations.verl import sinks_of

    assert sinks_of(torch.ones(4), 4).shape == (4,)
    with pytest.raises(ValueError, match=r"s_aux.shape\[0\]: expected 4, the heads of the 1 ranks"):
        sinks_of(torch.ones(8), 4)

"""A policy-gradient step under verl's Ulysses: packed sequences, gpt-oss, sinks trained."""

from __future__ import annotations

import pytest
import torch
from ranks import Raised, Ranks

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from rank_models import assert_step, step  # noqa: E402


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_step_is_that_of_one_process(kv_heads: int, ranks: Ranks) -> None:
    assert_step(ranks.run(step, 2, kv_heads, "splitkv_ulysses"), kv_heads, 1e-5)


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

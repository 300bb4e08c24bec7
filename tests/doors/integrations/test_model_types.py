"""A sample of the model types that `make test-models` runs, of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from model_types import OUTCOMES, SAMPLE  # noqa: E402
from sweeping import outcome_of  # noqa: E402
from transformers import AutoModelForSeq2SeqLM, BigBirdPegasusConfig  # noqa: E402

from splitkv import UnsupportedProblem  # noqa: E402
from splitkv.integrations import transformers as integration  # noqa: E402

BIGBIRD_PEGASUS: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "block_size": 4,
    "num_random_blocks": 1,
    "init_std": 0.2,
}


@pytest.mark.filterwarnings("ignore")  # of transformers' models
@pytest.mark.parametrize("model_type", SAMPLE)
def test_equal_or_refused(model_type: str) -> None:
    outcome = outcome_of(model_type)
    assert outcome.kind == OUTCOMES[model_type], outcome


def test_the_sample_spans_the_families() -> None:
    assert len(set(SAMPLE)) == 40
    assert {OUTCOMES[model_type] for model_type in SAMPLE} == set(OUTCOMES.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention_type", ["original_full", "block_sparse"])
@torch.no_grad()
def test_bigbird_pegasus_is_equal_or_refused(attention_type: str, padded: bool) -> None:
    """Its encoder has attention of its own: full, which takes a mask, or sparse, which takes none.
    Its decoder, whose layers do not say that they are causal, runs on splitkv."""
    integration.register()
    tokens = torch.randint(3, 90, (2, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, -9:] = 1 - padded

    def run(name: str, last: int) -> torch.Tensor:
        torch.manual_seed(0)
        config = BigBirdPegasusConfig(**BIGBIRD_PEGASUS, attention_type=attention_type)
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=name).eval()
        target = tokens.clone()
        target[:, -1] = last
        logits: torch.Tensor = model(tokens, mask, decoder_input_ids=target).logits
        return logits

    if attention_type == "original_full":
        with pytest.raises(UnsupportedProblem, match="attention_mask: expected a model that"):
            run("splitkv", 5)
        return
    eager, ours = run("eager", 5), run("splitkv", 5)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[:, 0], run("splitkv", 6)[:, 0]), "the first token sees the last"

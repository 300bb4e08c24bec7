"""Whole models read through caches: the demo's, untrained and small, and one of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from splitkv.demo.model import Model, Shape, eager_attend
from splitkv.lab.bench import quality
from splitkv.lab.bench.quality import CACHES, DemoReader, Kept, Needle

SMALL = Shape(width=48, hidden=64, num_layers=2, head_dim=16, window=12, context=40)
EVERYTHING = Kept("all in a window", sink_tokens=2, share=1.0)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = Model(SMALL)
    for layer in model.layers:
        torch.nn.init.normal_(layer.sink_logits)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(SMALL.vocabulary, (3, 40), generator=torch.Generator().manual_seed(1))


def test_a_model_reads_the_same_through_a_cache_as_without(
    model: Model, tokens: torch.Tensor
) -> None:
    with torch.no_grad():
        plain = model(tokens, torch.arange(40), eager_attend)
    reader = DemoReader(model, "cpu")
    for kept in (CACHES[0], EVERYTHING):
        found = quality.logits_of(reader, kept, tokens)
        assert (found - plain).norm() < 0.02 * plain.norm(), kept.name
    nats = F.cross_entropy(plain[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert quality.perplexity(reader, CACHES[0], tokens) == pytest.approx(math.exp(nats), rel=0.02)


def test_what_a_cache_leaves_out_changes_what_is_read(model: Model, tokens: torch.Tensor) -> None:
    reader = DemoReader(model, "cpu")
    exact = quality.logits_of(reader, CACHES[0], tokens)
    away = {
        kept.name: ((quality.logits_of(reader, kept, tokens) - exact).norm() / exact.norm()).item()
        for kept in CACHES[1:]
    }
    assert 0 < away["int8"] < away["fp8"] < away["sinks and window"]
    assert away["window alone"] > away["int8"]
    # nothing is left out of the first tokens, as many as the window
    count = int(0.25 * 40)
    window = quality.logits_of(reader, next(k for k in CACHES if k.name == "window alone"), tokens)
    assert (window[:, :count] - exact[:, :count]).norm() < 0.02 * exact[:, :count].norm()


def test_layers_with_a_window_of_their_own_keep_it(model: Model) -> None:
    cached = quality.Cached(CACHES[3], DemoReader(model, "cpu").sizes, 1, 40, "cpu")
    assert cached.ring is not None and cached.step == 1
    cached.extend(1)
    x = torch.randn(1, 1, 4, 16), *torch.randn(2, 1, 1, 2, 16)
    sink = torch.zeros(4)
    cached.attend(0, *x, window_size=(11, 0), sink_logits=sink)
    assert cached.pages.k[0].abs().sum() > 0 and cached.ring.k[0].abs().sum() == 0
    cached.attend(1, *x, window_size=(-1, -1), sink_logits=sink)
    assert cached.ring.k[1].abs().sum() > 0 and cached.pages.k[1].abs().sum() == 0


def test_a_needle_is_found_where_every_token_of_the_answer_is_the_most_likely() -> None:
    class Knows:
        """Predicts the token two before, always."""

        name, device = "knows", "cpu"
        sizes = quality.Sizes(1, 1, 16)

        def __init__(self) -> None:
            self.last = torch.zeros(0)

        def read(self, tokens: Any, positions: Any, cached: Any) -> torch.Tensor:
            if positions[0] == 0:
                self.last = tokens[:, :1]
            before = torch.cat([self.last, tokens[:, :-1]], 1)
            self.last = tokens[:, -1:]
            return F.one_hot(before, 16).float()

    right = Needle(torch.tensor([5, 6, 5, 6, 5, 6, 5]), 3)
    wrong = Needle(torch.tensor([5, 6, 5, 6, 5, 6, 4]), 3)
    assert quality.found_needles(Knows(), CACHES[0], [right, wrong, right, right]) == 0.75


def test_a_pass_key_is_told_at_its_depth_and_asked_for_at_the_end() -> None:
    def encode(words: str) -> list[int]:
        return list(words.encode())

    for depth in (0.0, 0.5):
        needle = quality.pass_key(encode, 48213, depth, 400)
        said = bytes(needle.tokens.tolist()).decode()
        assert len(said) == 400 and said.endswith("The pass key is 48213")
        assert said.index("Remember") == pytest.approx(depth * 400, abs=90)
        assert needle.answer == 5


def test_the_demo_is_asked_what_it_was_not_trained_on_and_has_a_row_a_cache() -> None:
    exam = quality.demo_exam("cpu", SMALL, steps=2, texts=2)
    assert exam.text.shape == (2, 40) and not exam.needles
    rows = list(quality.take(exam))
    assert [row["kernel"] for row in rows] == [kept.name for kept in CACHES]
    for row in rows:
        assert row["model"] == "demo" and row["tokens"] == 80 and row["needles"] == 0
        assert 1 < row["perplexity"] < 1000 and row["found"] is None


def test_a_model_of_transformers_reads_the_same_through_a_cache() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2
    )
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(64, (2, 40))
    with torch.no_grad():
        plain = model(tokens).logits
    reader = quality.Pretrained(model, "cpu")
    for kept in (CACHES[0], EVERYTHING):
        found = quality.logits_of(reader, kept, tokens)
        assert (found - plain).norm() < 0.02 * plain.norm(), kept.name
    assert (quality.logits_of(reader, CACHES[4], tokens) - plain).norm() > 0.02 * plain.norm()


def test_without_the_packages_it_says_which() -> None:
    absent = quality.missing()
    if absent:
        with pytest.raises(ValueError, match=r"^smollm2: expected its packages, got .*importable"):
            quality.smollm2_exam("cpu")

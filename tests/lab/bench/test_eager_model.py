"""The benchmark of a whole model without any setting, on a CPU and a small model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from models import make_model  # noqa: E402

from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.lab.bench import eager_model as lab  # noqa: E402
from splitkv.runtime.model_config import attention_sizes  # noqa: E402


def test_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, small in {
        "NEW_TOKENS": 3,
        "WARM_SHAPE": (1, 4),
        "STEPS": 2,
        "TURNS": 1,
        "TURN_TOKENS": 2,
        "STEP_TOKENS": 8,
    }.items():
        monkeypatch.setattr(lab, name, small)
    monkeypatch.setattr(lab, "SHAPES", ((1, 5), (2, 7)))
    integration.register()
    lab.register_nothing()
    model = make_model("llama")
    off = lab.logits_off(model)
    assert set(off) == set(lab.NAMES) and max(off.values()) < 1e-3
    lab.generate_table(model)
    lab.training_table(model)
    said = capsys.readouterr().out.splitlines()
    in_turns = [line for line in said if "in turns" in line or "training" in line]
    rows = [line.split() for line in said if " x " in line and line not in in_turns]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (batch, tokens, name) for batch, tokens in (("1", "5"), ("2", "7")) for name in lab.NAMES
    ]
    assert all(len(row) == 4 + 2 * lab.RUNS and float(row[4]) > 0 for row in rows)
    assert said[-1].startswith("training step of 1 x 8: median splitkv ")
    assert len(in_turns) == 3
    for line in in_turns:  # shares of sdpa's, of medians and of the least
        shares = re.findall(r"(splitkv|sdpa|nothing) ([\d.]+) \(([\d.]+)\)", line)
        assert [name for name, *_ in shares] == [*lab.IN_TURNS] * 2
        for three in (shares[:3], shares[3:]):
            ms = {name: float(taken) for name, taken, _ in three}
            for name, _, share in three:
                assert float(share) == pytest.approx(ms[name] / ms["sdpa"], abs=0.02, rel=0.02)


def test_kernels_of_the_runs_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache that grows, for all batches and lengths, and of training."""
    made: list[Any] = []
    monkeypatch.setattr(lab, "warmup_model", lambda *given: made.append(given))
    model = make_model("llama")
    lab.compiled_ahead(model)
    ((config, serving),) = made
    assert attention_sizes(config).num_heads == model.config.num_attention_heads
    assert {lab.WARM_SHAPE[0], *(batch for batch, _ in lab.SHAPES)} == {*serving.batch_sizes}
    longest = max(tokens for _, tokens in lab.SHAPES) + lab.NEW_TOKENS
    assert serving.caches == ("growing",) and serving.training
    assert serving.max_seqlen >= longest and serving.max_seqlen_q >= longest


def test_nothing_leaves_the_rest_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The model runs and trains, and its logits are not those of attention."""
    lab.register_nothing()
    model, ids = make_model("llama").train(), torch.arange(12)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
    model.set_attn_implementation(lab.NOTHING)
    logits = model(ids, attention_mask=torch.ones_like(ids), labels=ids).logits
    assert (logits - expected).abs().max() > 1e-3
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    lab.generation(model, 2, 5, new=3)()

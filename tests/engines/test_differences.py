"""What is told of runs and times, by such of which it is known."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from differences import compare_runs, compare_with_fp32  # noqa: E402
from engine_runs import covered  # noqa: E402
from small_models import logprobs_of, save_model  # noqa: E402


def request(ids: list[int], logprobs: list[float], gaps: list[float]) -> dict[str, list[Any]]:
    return {"ids": ids, "logprobs": logprobs, "gaps": gaps}


def test_runs_that_part() -> None:
    reference = [
        request([1, 2, 3], [-1.0, -2.0, -3.0], [0.5, 0.02, 0.7]),
        request([4, 5], [-1.0, -1.0], [0.3, 0.4]),
    ]
    found = [
        request([1, 9, 3], [-1.25, -2.0, -9.0], [0.5, 0.1, 0.7]),
        request([4, 5], [-0.75, -1.0], [0.3, 0.4]),
    ]
    row = compare_runs(found, reference)
    assert row["share"] == 0.6 and row["differences"] == 1
    assert row["gap_50"] == row["gap_100"] == 0.02 and row["gap_50_of_all"] == 0.4
    assert row["apart_mean"] == 0 and row["apart_most"] == 0.25
    assert row["apart_rms"] == pytest.approx(math.sqrt(0.125 / 3), abs=1e-6)


def test_runs_that_are_alike() -> None:
    run = [request([1, 2], [-1.0, -2.0], [0.5, 0.6])]
    row = compare_runs(run, run)
    assert row["share"] == 1 and row["differences"] == 0 and math.isnan(row["gap_50"])


def test_a_run_beside_fp32(tmp_path: Path) -> None:
    """Its own log-probabilities are told as they are; of others how far they are off."""
    model, prompt, chosen = save_model("llama", tmp_path), [5, 6, 7], [8, 9]
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    wanted, best = logprobs_of(loaded, prompt, chosen)
    by_hand = loaded(torch.tensor([prompt + chosen])).logits[0, 2:4].log_softmax(-1)
    torch.testing.assert_close(wanted, by_hand[[0, 1], chosen])
    logprobs = (wanted + torch.tensor([0.5, -0.5])).tolist()
    row = compare_with_fp32(model, [prompt], [request(chosen, logprobs, [0.0, 0.0])] * 2)
    assert row["tokens"] == 2 and row["right"] == sum(best == torch.tensor(chosen))
    assert abs(row["off_mean"]) < 1e-4
    assert row["off_rms"] == pytest.approx(0.5, abs=1e-4)


def test_time_that_spans_cover() -> None:
    spans = [[3.0, 4.0], [0.0, 2.0], [1.0, 2.5], [0.5, 1.0], [4.0, 4.5]]
    assert covered(spans) == 4 and covered(spans[:1]) == 1 and covered([]) == 0

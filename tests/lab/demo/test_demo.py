"""The demo: it trains, generates the tokens of plain PyTorch, and says no when it does not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the lab extra is not installed")

import splitkv  # noqa: E402
from splitkv import demo  # noqa: E402
from splitkv.demo import model as models  # noqa: E402
from splitkv.demo import text  # noqa: E402
from splitkv.runtime import dispatch
from splitkv.runtime.call_cache import CallCache

SMALL = models.Shape(width=48, hidden=64, num_layers=2, head_dim=16, window=12)


def run(**kwargs: Any) -> int:
    return demo.run(device="cpu", shape=SMALL, **{"steps": 8, **kwargs})


def small_model() -> models.Model:
    torch.manual_seed(0)
    model = models.Model(SMALL)
    for layer in model.layers:
        torch.nn.init.normal_(layer.sink_logits)
    torch.nn.init.normal_(model.head.weight)  # logits far enough apart to tell models apart
    return model


def test_runs_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert run() == 0
    assert torch.get_num_threads() == threads
    said = capsys.readouterr().out
    for words in ("it fell", "all tokens are equal", "NVIDIA H200", "decode_split", "splits"):
        assert words in said, f"expected {words!r} in the output"


def test_stops_after_the_time_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(steps=None, seconds=0.5) == 0
    assert "it fell" in capsys.readouterr().out


def test_same_seed_same_training(capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for seed in (0, 0, 1):
        run(seed=seed)
        losses.append(capsys.readouterr().out.split("not seen:")[1].split("nats")[0])
    assert losses[0] == losses[1] != losses[2]


def test_fails_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: Any) -> torch.Tensor:
        tokens = models.generate(*args)
        tokens[0, -1] ^= 1
        return tokens

    monkeypatch.setattr(demo, "generate", wrong)
    assert run() == 1
    assert "1 tokens differ" in capsys.readouterr().out


@pytest.mark.parametrize("loss", ["same", "nan"])
def test_fails_when_the_loss_does_not_fall(
    loss: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(console: Any, model: models.Model, *_: Any) -> tuple[int, float]:
        if loss == "nan":
            model.head.weight.data.fill_(float("nan"))
        return 0, 0.0

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "generate", lambda *_: torch.zeros(4, 8, dtype=torch.int64))
    monkeypatch.setattr(demo, "generate_eager", lambda *_: torch.zeros(4, 8, dtype=torch.int64))
    assert run() == 1
    assert "it did not fall" in " ".join(capsys.readouterr().out.split())


def test_without_rich_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run() == 1
    assert "pip install 'splitkv[lab]'" in capsys.readouterr().out


def test_text_is_the_same_every_time() -> None:
    words = text.corpus(50_000)
    assert words == text.corpus(50_000) and len(words) == 50_000
    tokens = text.encode("caf\u00e9\n")
    assert tokens.tolist() == [99, 97, 102, 63, 10]
    assert text.decode(tokens) == "caf?\n"


def test_text_that_is_not_there_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="standard library: expected source files in"):
        text.corpus()


def test_eager_attention_is_the_definition() -> None:
    """Row by row: the exponentials of the visible scores over their sum and the sink's."""
    layer = small_model().layers[0]
    q, k, v = torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    out = models.eager_attend(layer, q, k, v)
    for i, head in ((0, 0), (5, 1), (19, 3)):
        first = max(0, i - SMALL.window + 1)
        s = k[0, first : i + 1, head // 2] @ q[0, i, head] / 4
        expected = s.exp() @ v[0, first : i + 1, head // 2]
        expected /= s.exp().sum() + layer.sink_logits[head].exp()
        torch.testing.assert_close(out[0, i, head], expected)


def test_cached_generation_is_eager_generation() -> None:
    model = small_model()
    prompts = torch.randint(1, 128, (3, 30))
    lengths = torch.tensor([1, 17, 30], dtype=torch.int32)
    prompts[torch.arange(30) >= lengths[:, None]] = 0
    tokens = models.generate(model, prompts, lengths, 20)
    assert tokens.unique().numel() > 5
    assert torch.equal(tokens, models.generate_eager(model, prompts, lengths, 20))


def test_shows_the_problems_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans printed are for the calls made: the same problems, window and full layer alike."""
    ran = []

    def spy(problem: splitkv.Problem, *args: Any, **kwargs: Any) -> Any:
        ran.append(problem)
        return make_plan(problem, *args, **kwargs)

    make_plan = dispatch.make_plan
    monkeypatch.setattr(dispatch, "make_plan", spy)
    monkeypatch.setattr(dispatch, "calls", CallCache())
    model = models.Model(SMALL)
    tokens = text.encode(text.corpus())
    g = torch.Generator().manual_seed(0)
    demo.loss_of(model, demo.batch_of(tokens, SMALL.context, g)).backward()
    prompts, lengths = demo.make_prompts(tokens, torch.device("cpu"))
    models.generate(model, prompts, lengths, demo.NUM_TOKENS)
    assert set(ran) == {problem for _, problem in demo.problems(SMALL)}

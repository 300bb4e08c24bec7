"""Other libraries: their reasons, and the processes that they run in."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from small_cases import small

from splitkv.core.masks import Mask
from splitkv.lab.harness import peers, process
from splitkv.lab.harness.cases import Inputs
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Protocol
from splitkv.testing import assert_close


def test_peers_say_which_features_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda module: True)
    lacking = {
        "mqa8_b64_mixed_page16": "lengths that differ: expected equal lengths",
        "mqa8_b64_4096_q4_page16": "query tokens 4: expected 1",
        "gpt_oss_b1_4096_page16": "sink logits: expected none",
        "gpt_oss_b1_4096_window128_nosink_page16": "mask causal window(127, -1): expected causal",
    }
    for case, reason in lacking.items():
        assert reasons("sglang_triton", case) == [[reason]]
        assert reasons("fa3", case) == [[]]
        assert (reason in reasons("flashinfer", case)[0]) == ("mixed" not in case)
        assert reason in reasons("cudnn", case)[0]
    for name in peers.PEERS:
        assert not any("lengths" in r for r in sum(reasons(name, "mqa8_b1_512"), []))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("what", ["one", "tokens", "window"])
def test_flex_attends_as_decode(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here: what is compared is how it is called."""
    from torch._functorch import config
    from torch.nn.attention import flex_attention

    plain = flex_attention.create_block_mask
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(
        flex_attention,
        "create_block_mask",
        lambda *args, _compile, **options: plain(*args, **options),
    )
    mask = Mask(True, window_left=9) if what == "window" else Mask(True)
    case = small(seqlen_q=1 if what == "one" else 3, mask=mask)
    (variant,) = peers.PEERS["flex"].variants
    assert not variant.unsupported(case)
    assert variant.unsupported(small("page16")) == ["place paged(16): expected contiguous"]
    inputs = Inputs(case, 2, device="cpu")
    ref, pt = inputs.references()
    with config.patch(donated_buffer=True):  # and back
        assert_close(variant.prepare(inputs).call(0), ref, pt)


def reasons(name: str, case: str) -> list[list[str]]:
    return [variant.unsupported(CASES[case]) for variant in peers.PEERS[name].variants]


def test_peers_say_why_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda module: False)
    assert reasons("fa2", "mqa8_b1_512") == [[], []]
    assert reasons("cudnn", "mqa8_b1_512_page16") == [["place paged(16): expected contiguous"]] * 2
    assert reasons("fa3", "mqa8_b1_512") == [["module peers.fa3: expected importable, got none"]]
    missing = "module peers.fi or flashinfer: expected importable, got none"
    assert reasons("flashinfer", "mqa8_b8_4096") == [
        [missing, "batch 8: expected 1 with a contiguous cache"],
        [missing, "place contiguous: expected pages"],
    ]
    monkeypatch.setattr(peers, "importable", lambda module: True)
    assert reasons("flashinfer", "mqa8_b8_4096_page16") == [[], []]


def test_peers_are_named() -> None:
    assert peers.parse("none") == [] and peers.parse("all") == list(peers.PEERS)
    assert peers.parse("fa3, cudnn") == ["fa3", "cudnn"]
    with pytest.raises(ValueError, match=r"^peers: expected all, none or some of .*, got 'fa4'$"):
        peers.parse("fa3,fa4")


def worker(monkeypatch: pytest.MonkeyPatch, code: str) -> peers.Worker:
    monkeypatch.setattr(peers, "importable", lambda module: True)
    return peers.Worker("flashinfer", Protocol(), [sys.executable, "-c", code])


def test_a_process_that_ends_is_a_reason_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"library": "flashinfer", "kernel": "tensor cores", "us": 7.0}
    w = worker(
        monkeypatch,
        f"import sys; input(); print({json.dumps(row)!r}, flush=True); sys.exit('it broke')",
    )
    for _ in range(process.MAX_STARTS):
        first, second = w.measure(CASES["mqa8_b1_512_page16"])
        assert first == row
        assert second["kernel"] == "xqa" and second["us"] is None
        assert second["reasons"] == ["its process ended: status 1, it broke"]
    for given_up in w.measure(CASES["mqa8_b1_512_page16"]):
        assert given_up["reasons"] == ["its process ended 3 times before"]


def test_a_process_answers_case_after_case(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, sys\n"
        "for case in sys.stdin:\n"
        "    row = dict(library='flashinfer', kernel=case.strip())\n"
        "    print(json.dumps(row), '{}', sep='\\n', flush=True)\n"
    )
    w = worker(monkeypatch, code)
    for name in ("mqa8_b1_512_page16", "mqa8_b8_4096_page16"):
        assert [row["kernel"] for row in w.measure(CASES[name])] == [name]
    assert w.process.starts == 1
    w.stop()


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    w = worker(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(peers, "SECONDS", 0.1)
    for row in w.measure(CASES["mqa8_b1_512_page16"]):
        assert row["reasons"] == ["its process took more than 0.1 s"]
    assert w.process.child is None

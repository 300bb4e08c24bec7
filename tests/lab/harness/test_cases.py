"""Operands of a case of decode: a call, its bytes, its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CODECS
from small_cases import SMALL, small

import splitkv
from splitkv.core.kv import AS_IS, Codec, Paged
from splitkv.core.masks import Mask
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.suites import PLACES
from splitkv.testing import assert_close

VARIED = {
    "plain": {},
    "lengths": {"lengths": (48, 1, 17)},
    "tokens": {"seqlen_q": 4},
    "window": {"mask": Mask(True, window_left=7)},
    "sink": {"sink_logits": True, "mask": Mask(True, window_left=7, sink_tokens=2)},
    "dims": {"head_dim_v": 32, "dtype": "float16"},
}


@pytest.mark.parametrize("what", VARIED)
@pytest.mark.parametrize("place", PLACES)
def test_inputs_are_a_call_of_decode(place: str, what: str) -> None:
    case = small(place, **VARIED[what])
    inputs = Inputs(case, 2, device="cpu", seed=1)
    assert torch.equal(inputs.q[0], inputs.x) and torch.equal(inputs.q[1], inputs.x)
    assert not torch.equal(inputs.k[0], inputs.k[1])
    keys = case.lengths or (48, 48, 48)
    assert inputs.lengths.tolist() == list(keys)
    if inputs.table is not None:
        used = [-(-n // 16) for n in keys]
        pages = [row[:n] for row, n in zip(inputs.table.tolist(), used, strict=True)]
        assert sorted(sum(pages, [])) == list(range(sum(used)))
        assert len(inputs.k[0]) == sum(used)
    ref, pt = inputs.references()
    assert_close(splitkv.decode(**inputs.arguments(0)), ref, pt)
    given = inputs.arguments(0)
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    assert splitkv.plan(*tensors, **given).problem == case.problem


def test_lengths_known_to_the_host_are_no_argument() -> None:
    case = Case("host", replace(SMALL, lengths="host", place=Paged(32)))
    given = Inputs(case, 1, device="cpu").arguments(0)
    assert "cache_seqlens" not in given and given["max_seqlen_k"] == 48
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    assert splitkv.plan(*tensors, **given).problem == case.problem


def test_inputs_refuse_what_they_do_not_make() -> None:
    with pytest.raises(ValueError, match="^problem: expected decode without score modifiers"):
        Inputs(small(return_lse=True), 1, device="cpu")


@pytest.mark.parametrize("codec", [AS_IS, *CODECS], ids=str)
def test_blank_inputs_have_no_keys(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is drawn or quantised for them."""
    case = small("page16", codec=codec)
    filled = Inputs(case, 2, device="cpu").arguments(1)
    for name in ("torch.randn", "splitkv.lab.harness.cases.quantize_kv"):
        monkeypatch.setattr(name, None)
    blank = Inputs(case, 2, device="cpu", blank=True)
    assert not blank.lengths.any() and blank.table is not None and not blank.table.any()
    found = blank.arguments(1)
    assert found.keys() == filled.keys()
    for name, x in filled.items():
        if isinstance(x, torch.Tensor):
            assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)


def test_the_bytes_of_a_case_are_those_of_its_own_lengths() -> None:
    assert small().kv_bytes == 3 * 48 * 2 * 2 * 16 * 2
    assert small(lengths=(48, 1, 17)).kv_bytes == 66 * 2 * 2 * 16 * 2
    windowed = small(lengths=(48, 1, 17), mask=Mask(True, window_left=7))
    assert windowed.kv_bytes == (8 + 1 + 8) * 2 * 2 * 16 * 2


def test_the_reference_in_parts_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(small("page16", lengths=(17, 48, 3)), 1, device="cpu")
    whole = inputs.references()
    monkeypatch.setattr("splitkv.lab.harness.cases.REFERENCE_BYTES", 2 * SMALL.kv_bytes // 3)
    for a, b in zip(whole, inputs.references(), strict=True):
        torch.testing.assert_close(a, b)

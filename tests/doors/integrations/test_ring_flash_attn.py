"""The functions that ring-flash-attn calls, by the arguments and in the way that it calls them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.integrations import ring_flash_attn
from splitkv.integrations.ring_flash_attn import FUNCTIONS
from splitkv.testing import assert_close

SCORES = (
    *("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right"),
    *("softcap", "alibi_slopes"),
)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OF_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
SIGNATURES = {
    "_flash_attn_forward": (*"qkv", *SCORES, "return_softmax"),
    "_flash_attn_varlen_forward": (
        *(*"qkv", *LENGTHS, *SCORES, "return_softmax"),
        *("block_table", "leftpad_k", "seqused_k", "zero_tensors"),
    ),
    "_flash_attn_backward": (*OF_BACKWARD, *SCORES, "deterministic", "rng_state"),
    "_flash_attn_varlen_backward": (
        *(*OF_BACKWARD, *LENGTHS, *SCORES),
        *("deterministic", "rng_state", "zero_tensors"),
    ),
}
"""Of flash_attn 2.8."""
TOTAL, HEADS, KV_HEADS, DIM = 24, 4, 2, 16
CU_SEQLENS = (0, 7, 7, 24)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_those_of_flash_attn(name: str) -> None:
    # by getfullargspec, which has no keyword-only ones among its args, it fills what it leaves out
    assert tuple(inspect.getfullargspec(FUNCTIONS[name]).args) == SIGNATURES[name]


def called(name: str, **given: Any) -> Any:
    """A function by name, what is not given filled from its defaults, None where there is none."""
    spec = inspect.getfullargspec(FUNCTIONS[name])
    defaults = spec.defaults or ()
    filled = dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults))  # noqa: B905
    return FUNCTIONS[name](**(filled | {"dropout_p": 0, "softmax_scale": DIM**-0.5} | given))


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_two_ranks(packed: bool) -> None:
    """What the second of two ranks does: a causal block of its own keys, and all of the first's;
    packed, sequences of as many tokens on each."""
    outer = (TOTAL,) if packed else (2, TOTAL)
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    first, second = (
        {name: torch.randn(*outer, heads, DIM) for name, heads in shapes.items()} for _ in range(2)
    )
    dout = torch.randn(*outer, HEADS, DIM)
    lengths: dict[str, Any] = {}
    middle = ""
    if packed:
        bounds, middle = torch.tensor(CU_SEQLENS, dtype=torch.int32), "varlen_"
        lengths = dict(zip(LENGTHS, (bounds, bounds, 17, 17), strict=True))
    blocks = (second, True), (first, False)
    forward, backward = (f"_flash_attn_{middle}{name}" for name in ("forward", "backward"))
    parts = [
        called(forward, q=second["q"], k=x["k"], v=x["v"], causal=causal, **lengths)
        for x, causal in blocks
    ]
    assert all(part[2] is None and part[3] is None for part in parts)
    out, lse = splitkv.merge_states(*parts[0][:2], *parts[1][:2])
    dq, grads = torch.zeros_like(second["q"]), []
    for x, causal in blocks:
        buffers = {f"d{name}": torch.full_like(x[name], torch.nan) for name in shapes}
        called(
            backward,
            **{"dout": dout, "q": second["q"], "k": x["k"], "v": x["v"], "out": out},
            **{"softmax_lse": lse, "causal": causal, **buffers, **lengths},
        )
        dq += buffers["dq"]
        grads.append((buffers["dk"], buffers["dv"]))
    found = [out, dq, *(torch.cat([b, a], -3) for a, b in zip(*grads, strict=True))]
    exact, working = (_by_definition(first, second, dout, packed, upcast=x) for x in (True, False))
    for name, x, ref, pt in zip(("out", "dq", "dk", "dv"), found, exact, working, strict=True):
        assert_close(x, ref, pt, factor=2.0 if name == "out" else 3.0, name=name)


def _by_definition(
    first: dict[str, Tensor], second: dict[str, Tensor], dout: Tensor, packed: bool, *, upcast: bool
) -> list[Tensor]:
    """out, dq, dk and dv of the second rank's queries, keys in the order of the ranks."""
    leaves = [
        second["q"].clone(),
        *(torch.cat([first[name], second[name]], -3) for name in "kv"),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    if not packed:
        out = reference.attention(*leaves, mask=Mask(True), upcast=upcast)[0]
    else:
        q, k, v = leaves
        outs = []
        for begin, end in zip(CU_SEQLENS[:-1], CU_SEQLENS[1:], strict=True):
            own = slice(begin, end)
            of_both = slice(begin, end), slice(TOTAL + begin, TOTAL + end)
            keys, values = (torch.cat([x[part] for part in of_both]) for x in (k, v))
            one = q[None, own], keys[None], values[None]
            outs.append(reference.attention(*one, mask=Mask(True), upcast=upcast)[0][0])
        out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p: expected 0: other ranks would drop other weights, got"),
        ({"return_softmax": True}, "return_softmax: expected False without dropout, got True"),
        ({"block_table": torch.zeros(1, 1)}, "block_table: expected None, got"),
    ],
)
def test_what_it_never_asks_for_raises(change: dict[str, Any], message: str) -> None:
    q = torch.randn(TOTAL, HEADS, DIM)
    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    call = {"q": q, "k": q, "v": q, **dict(zip(LENGTHS, (bounds, bounds, 17, 17), strict=True))}
    with pytest.raises(ValueError) as refused:
        called("_flash_attn_varlen_forward", **call, causal=True, **change)
    assert str(refused.value).startswith(message)


def test_register_needs_no_flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package of its name, which imports flash_attn as it does."""
    monkeypatch.setattr(ring_flash_attn, "find_spec", lambda name: None)
    package = tmp_path / "ring_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("from . import ring\n")
    (package / "ring.py").write_text(
        "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for _ in range(2):  # again, with what is imported already
            ring_flash_attn.register()
            ring = sys.modules["ring_flash_attn.ring"]
            assert ring._flash_attn_forward is FUNCTIONS["_flash_attn_forward"]
            assert ring._flash_attn_backward is FUNCTIONS["_flash_attn_backward"]
            assert not {name for name in sys.modules if name.startswith("flash_attn")}
            ring._flash_attn_forward = None  # type: ignore[attr-defined]
    finally:
        for name in [name for name in sys.modules if name.startswith("ring_flash_attn")]:
            del sys.modules[name]


def test_register_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_flash_attn, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ring_flash_attn", None)
    with pytest.raises(ModuleNotFoundError, match="ring_flash_attn"):
        ring_flash_attn.register()
    assert "flash_attn" not in sys.modules

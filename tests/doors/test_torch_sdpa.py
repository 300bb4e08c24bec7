"""splitkv as torch's FlashAttention: offered, activated, refusing, restored.

The operators have no CPU kernels in torch, so they get some here, in torch's place; the kernels of
this package are what `tests/gpu/test_torch_sdpa.py` runs.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from splitkv.core.device import GPUS, cpu
from splitkv.integrations import torch_sdpa
from splitkv.kernels import prefill
from splitkv.runtime.autograd import _recording
from splitkv.runtime.call_cache import CallCache

aten = torch.ops.aten
Q, K, V = (2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    """(out, lse) of [batch, heads, tokens, dim] in plain torch, the mask aligned bottom-right."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, problem: Any, scale: float) -> Any:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out, _ = attention(*leaves, problem.mask.causal, scale)
    return torch.autograd.grad(out, leaves, grad)


class Torch:
    """torch's kernels: what they were called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        self.calls.append("forward")
        out, lse = attention(q, k, v, is_causal, scale)
        seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, None, None, q.shape[2], k.shape[2], seed, unused, q.new_empty(0)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        self.calls.append("backward")
        return q.new_ones(q.shape), k.new_ones(k.shape), v.new_ones(v.shape)

    def packed(self, q: Tensor, *_: Any, **__: Any) -> Any:
        self.calls.append("packed")
        seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return q.new_zeros(q.shape), q.new_zeros(1).float(), seed, unused, q.new_empty(0)

    def packed_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self.backward(*args, **kwargs)

    def efficient(self, q: Tensor, *_: Any, **__: Any) -> Any:
        self.calls.append("efficient")
        return q.clone(), q.new_empty(0), q.new_empty(0), q.new_empty(0)

    def cudnn(self, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Any:
        self.calls.append("cudnn")
        empty = q.new_empty(0)
        return q.clone(), empty, None, None, q.shape[2], k.shape[2], empty, empty, empty


PLACES = ("forward", "backward", "packed", "packed_backward", "efficient", "cudnn")
OPERATORS = dict(zip((*torch_sdpa.OPERATORS, *torch_sdpa.OTHERS), PLACES, strict=True))


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    """torch with CPU kernels, and an A100 wherever this package looks at a device."""
    made, library = Torch(), Library("aten", "IMPL", "CPU")
    for operator, name in OPERATORS.items():
        library.impl(operator, getattr(made, name), "CPU")
    torch.library._impls -= library._op_impls  # they stand in for kernels that Python did not make
    monkeypatch.setattr(torch_sdpa, "calls", CallCache())
    monkeypatch.setattr(torch_sdpa, "_said", set())
    monkeypatch.setattr(torch_sdpa, "device_of", lambda q: GPUS["a100"])
    yield made
    library._destroy()


class Launched:
    """In place of the kernels: they compute in plain torch, and say what they were given."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.operands: list[Any] = []

    def forward(self, launcher: prefill.PrefillLauncher, x: Any, seed: Tensor | None) -> Any:
        self.operands.append(x)
        self.seeds.append(None if seed is None else int(seed))
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        out, lse = attention(q, k, v, launcher.problem.mask.causal, x.softmax_scale)
        return x.out.copy_(out.transpose(1, 2)), lse

    def backward_for(self, plan: Any, x: Any) -> Any:
        def run(x: Any, seed: Any, out: Tensor, lse: Tensor, grad: Tensor, *_: Any) -> Any:
            self.seeds.append(None if seed is None else int(seed))
            q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
            with _recording():
                found = gradients(q, k, v, grad.transpose(1, 2), plan.problem, x.softmax_scale)
            return *(g.transpose(1, 2) for g in found), None, None

        return run


@pytest.fixture
def launched(in_torch: Torch, monkeypatch: pytest.MonkeyPatch) -> Launched:
    made = Launched()
    monkeypatch.setattr(prefill.PrefillLauncher, "forward", lambda *args: made.forward(*args))
    monkeypatch.setattr(torch_sdpa, "backward_for", made.backward_for)
    return made


@pytest.fixture
def active(in_torch: Torch) -> Iterator[None]:
    handle = torch_sdpa.activate("CPU")
    yield
    handle.remove()


def tensors(*shapes: tuple[int, ...], grad: bool = True) -> list[Tensor]:
    return [torch.randn(s).half().float().requires_grad_(grad) for s in shapes]


def test_the_name_is_offered_and_nothing_else_changes() -> None:
    """Not on import, and not by `register`."""
    code = (
        "import torch, torch.nn.attention as a\n"
        "before = torch._C._get_sdp_priority_order()\n"
        "from splitkv.integrations import torch_sdpa\n"
        "assert 'splitkv' not in a.list_flash_attention_impls()\n"
        "torch_sdpa.register()\n"
        "assert 'splitkv' in a.list_flash_attention_impls()\n"
        "assert a.current_flash_attention_impl() is None\n"
        "assert torch._C._get_sdp_priority_order() == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_activated_by_name_and_restored(in_torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention comes first while it is this one; an order set since then stays."""
    torch_sdpa.register()
    activate = torch_sdpa.activate
    monkeypatch.setitem(
        torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "splitkv", lambda: activate("CPU")
    )
    before = torch._C._get_sdp_priority_order()
    cudnn_first = [3, *(n for n in before if n != 3)]
    try:
        for order, after in ((None, cudnn_first), ([2, 1, 0, 3, 4], [2, 1, 0, 3, 4])):
            torch._C._set_sdp_priority_order(cudnn_first)
            torch.nn.attention.activate_flash_attention_impl("splitkv")
            assert torch.nn.attention.current_flash_attention_impl() == "splitkv"
            assert torch._C._get_sdp_priority_order()[:2] == [torch_sdpa.FLASH, 3]
            if order is not None:
                torch._C._set_sdp_priority_order(order)
            torch.nn.attention.restore_flash_attention_impl()
            assert torch._C._get_sdp_priority_order() == after
        q, k, v = tensors(Q, K, V)
        aten._scaled_dot_product_flash_attention(q, k, v)
        assert in_torch.calls == ["forward"]
    finally:
        torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward(launched: Launched, active: None, causal: bool, scale: Any) -> None:
    """Grouped heads, causal, scale; the gradients in the layouts of their tensors."""
    q, k, v = tensors(Q, K, V)
    out, lse, *_, max_q, max_k, seed, unused, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=scale
    )
    grad = torch.randn_like(out)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = attention(*leaves, causal, scale)
    wanted.backward(grad)
    out.backward(grad)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    for x, y in zip((q, k, v), leaves, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    assert (max_q, max_k, out.stride()) == (6, 9, torch.empty_like(q).stride())
    assert (seed.shape, seed.dtype, unused.shape) == ((2,), torch.uint64, ())
    assert launched.seeds == [None, None]


def test_backward_draws_what_forward_drew(launched: Launched, active: None) -> None:
    """The seed comes from torch's generator and lies where torch keeps its own."""
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        q, k, v = tensors(Q, K, V)
        aten._scaled_dot_product_flash_attention(q, k, v, 0.25)[0].sum().backward()
        forward, backward = launched.seeds[-2:]
        assert forward == backward and forward is not None
        assert launched.operands[-1].dropout_p == 0.25
        runs.append(forward)
    assert runs[0] == runs[1] != runs[2]


def test_a_layout_is_bound_once(
    launched: Launched, active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(Q, K, V, grad=False)
    first = aten._scaled_dot_product_flash_attention(q, k, v)
    monkeypatch.setattr(torch_sdpa, "_bind_anew", None)
    again = aten._scaled_dot_product_flash_attention(q.clone(), k, v)
    torch.testing.assert_close(first[0], again[0])
    assert launched.operands[0].q is not launched.operands[1].q
    kept = [bound for entries in torch_sdpa.calls.recent.values() for _, _, bound in entries]
    assert kept and all(bound.operands.q is None for bound in kept)


def test_what_is_kept_is_bounded(
    launched: Launched, active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdpa, "calls", CallCache(max_calls=3))
    for tokens in range(1, 8):
        q, k, v = tensors((1, 2, tokens, 16), (1, 2, 9, 16), (1, 2, 9, 16), grad=False)
        aten._scaled_dot_product_flash_attention(q, k, v)
        assert 0 < len(torch_sdpa.calls) <= 3


def test_a_kernel_is_replaced_with_the_filters_of_warnings_left_alone() -> None:
    """They are of the process: other threads would see a change. torch's own warning stays, which
    2.14 has no more."""
    silent = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    code = (
        "import warnings, torch\n"
        "from torch.library import Library\n"
        "from splitkv.integrations import torch_sdpa\n"
        "before, warnings.catch_warnings = list(warnings.filters), None\n"
        "library = Library('aten', 'IMPL', 'CPU')\n"
        "torch_sdpa._replace(library, 'relu', lambda keys, x: x + 1, 'CPU')\n"
        "assert warnings.filters == before\n"
        "assert torch.relu(torch.zeros(1)) == 1, 'the kernel is in place'\n"
    )
    for option in ("default", "error"):
        command = [sys.executable, "-W", f"{option}:Warning only once:UserWarning", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert (torch_sdpa.REPLACED in done.stderr) == (option == "default" and not silent)


REFUSALS: dict[str, tuple[Any, str]] = {
    "debug mask": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True),
        "return_debug_mask: expected False, got True",
    ),
    "an odd head": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(
            *(x[..., :12].contiguous() for x in (q, k, v))
        ),
        "head_dim 12",
    ),
    "slopes": (
        lambda q, k, v: aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, 6, 9, 0.0, False, False,
            alibi_slopes=torch.ones(4),
        ),
        r"alibi_slopes: expected None, got \[4\]",
    ),
    "bounds of queries alone": (
        lambda q, k, v: aten._flash_attention_forward(
            *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),
            torch.tensor([0, 12]).int(), None, 12, 18, 0.0, False, False,
        ),
        "cum_seq_k: expected bounds with cum_seq_q, got None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, reason", REFUSALS.values(), ids=list(REFUSALS))
def test_what_is_refused_runs_in_torch(
    launched: Launched, in_torch: Torch, active: None, call: Any, reason: str
) -> None:
    """And says so, once for each reason."""
    q, k, v = tensors(Q, K, V, grad=False)
    with pytest.warns(UserWarning, match=f"torch's own FlashAttention: {reason}"):
        call(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(q, k, v)
    assert len(in_torch.calls) == 2 and not launched.operands


def test_a_refused_forward_has_torch_s_backward(
    launched: Launched, in_torch: Torch, active: None
) -> None:
    q, k, v = tensors((1, 2, 6, 12), (1, 2, 6, 12), (1, 2, 6, 12))
    with pytest.warns(UserWarning, match="head_dim 12"):
        aten._scaled_dot_product_flash_attention(q, k, v)[0].sum().backward()
    assert in_torch.calls == ["forward", "backward"] and not launched.seeds


NOT_OFFERED: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"attn_bias": torch.zeros(6, 9)}, r"attn_mask: expected None, got \[6, 9\]"),
    "dtype": ({}, "query: expected float16 or bfloat16, got float32"),
    "causal": ({"is_causal": True}, "is_causal: expected as many queries as keys, got 6 and 9"),
    "dims": ({"value": torch.zeros(2, 2, 9, 8)}, r"one head_dim, got \[16, 16, 8\]"),
    "wide": (
        {n: torch.zeros(1, 1, 6, 320) for n in ("query", "key", "value")},
        "head_dim: expected at most 256, got 320",
    ),
}


@pytest.mark.parametrize("changes, reason", NOT_OFFERED.values(), ids=list(NOT_OFFERED))
@pytest.mark.parametrize("operator", torch_sdpa.OTHERS)
def test_what_torch_does_not_offer_is_named(
    in_torch: Torch, active: None, operator: str, changes: dict[str, Any], reason: str
) -> None:
    q, k, v = tensors(Q, K, V, grad=False)
    given = {"query": q, "key": k, "value": v, "attn_bias": None, "compute_log_sumexp": False}
    with pytest.warns(UserWarning, match=f"runs on {torch_sdpa.OTHERS[operator]}, .*{reason}"):
        getattr(aten, operator)(**{**given, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(aten, operator)(**{**given, **changes})
    assert in_torch.calls == [OPERATORS[operator]] * 2


def test_a_backend_that_the_user_chose_is_not_talked_about(in_torch: Torch, active: None) -> None:
    q, k, v = (x.half() for x in tensors(K, K, V, grad=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aten._scaled_dot_product_efficient_attention(q, k, v, None, False)  # its own preference
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            aten._scaled_dot_product_efficient_attention(q.float(), k, v, None, False)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)


def test_another_fallback_is_not_taken_for_a_kernel(
    in_torch: Torch, active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PyTorch kernels of this package call SDPA themselves."""
    monkeypatch.setattr(torch_sdpa, "device_of", lambda q: cpu())
    q, k, v = tensors(Q, K, V, grad=False)
    with pytest.warns(UserWarning, match="torch's own FlashAttention"):
        aten._scaled_dot_product_flash_attention(q, k, v)
    assert in_torch.calls == ["forward"]


@pytest.mark.parametrize("operator", torch_sdpa.OPERATORS)
def test_every_argument_of_torch_s_schema_has_a_place(operator: str) -> None:
    schema = getattr(aten, operator).default._schema
    parameters = inspect.signature(torch_sdpa.OPERATORS[operator]).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [a.name for a in schema.arguments if not a.kwarg_only]
    missing = {a.name for a in schema.arguments} - {*parameters}
    assert takes_more or not missing


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    before = torch._C._get_sdp_priority_order()
    with pytest.raises(RuntimeError, match="^torch: expected one that is built with CUDA"):
        torch_sdpa.activate()
    assert torch._C._get_sdp_priority_order() == before

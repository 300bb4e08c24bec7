"""`F.scaled_dot_product_attention` after `activate_flash_attention_impl("splitkv")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import DEVICE
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from splitkv.integrations import torch_sdpa
from splitkv.testing import Call, Mask, Problem, check

PROBLEM = Problem("dense", 2, 8, 8, 64, 64, 130, 130)
PROBLEMS = {
    "plain": PROBLEM,
    "causal": replace(PROBLEM, mask=Mask(causal=True), head_dim=128, head_dim_v=128),
    "grouped": replace(PROBLEM, num_kv_heads=2, seqlen_q=77, seqlen_k=300),
    "one_kv_head": replace(PROBLEM, num_kv_heads=1, mask=Mask(causal=True), dtype="float16"),
    "one_query": replace(PROBLEM, num_kv_heads=2, seqlen_q=1, seqlen_k=500),
    "wide": replace(PROBLEM, head_dim=256, head_dim_v=256, mask=Mask(causal=True)),
    "odd": replace(PROBLEM, head_dim=72, head_dim_v=72, mask=Mask(causal=True)),
    "long": replace(PROBLEM, batch=1, seqlen_q=2100, seqlen_k=2100, mask=Mask(causal=True)),
}


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_sdpa, "_said", set())
    torch_sdpa.register()
    activate_flash_attention_impl("splitkv")
    yield
    restore_flash_attention_impl()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every forward and backward of this package's kernels."""
    seen: list[str] = []

    def count(name: str) -> None:
        run = getattr(torch_sdpa, f"_{name}")

        def call(*args: Any) -> Any:
            result = run(*args)  # raises where the call is not ours
            seen.append(name)
            return result

        monkeypatch.setattr(torch_sdpa, f"_{name}", call)

    count("forward")
    count("backward")
    return seen


def exact(*qkv: Tensor, **options: Any) -> Tensor:
    """In fp32, by torch's own arithmetic."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*(x.float() for x in qkv), **options)


def run(problem: Problem, call: Call) -> tuple[Tensor, None]:
    q, k, v = (call[n].transpose(1, 2) for n in "qkv")
    causal, scale = problem.mask.causal, call["softmax_scale"]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_sdpa(name: str, grad: bool, launches: list[str]) -> None:
    check(replace(PROBLEMS[name], needs_grad=grad), device=DEVICE, run=run)
    assert launches == ["forward", "backward"][: 1 + grad]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process alone, in a group of NCCL."""
    here = torch.device(DEVICE, torch.cuda.current_device())
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=here)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")  # a prototype's
@pytest.mark.parametrize("causal", [False, True])
def test_context_parallel(causal: bool, mesh: DeviceMesh, launches: list[str]) -> None:
    """torch's ring of one rank asks this package for each block, forward and backward."""
    first = [torch.randn(2, 4, 256, 64, device=DEVICE).bfloat16() for _ in "qkv"]
    grad = torch.randn_like(first[0])
    own = [x.clone() for x in first]
    held: dict[str, Any] = {"buffers": own, "buffer_seq_dims": [2, 2, 2]}
    with context_parallel(mesh, no_restore_buffers=set(own), **held):
        for x in own:
            x.requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*own, is_causal=causal)
        out.backward(grad)
    assert launches == ["forward", "backward"]
    leaves = [x.float().requires_grad_() for x in first]
    wanted = exact(*leaves, is_causal=causal)
    wanted.backward(grad.float())
    found = out, *(x.grad for x in own)
    for x, ref in zip(found, (wanted, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(x.float(), ref, rtol=2e-2, atol=2e-2)


def test_scale_and_a_head_dim_that_torch_pads(launches: list[str]) -> None:
    q, k, v = torch.randn(3, 2, 4, 90, 60, device=DEVICE).bfloat16()
    out = scaled_dot_product_attention(q, k, v, scale=0.07, is_causal=True)
    wanted = exact(q, k, v, scale=0.07, is_causal=True)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
    assert launches == ["forward"] and out.shape == q.shape


def test_dropout(launches: list[str]) -> None:
    """Drawn from torch's generator, and the same in backward: the output is linear in v."""
    q, k, v = (torch.randn(1, 2, 200, 64, device=DEVICE).bfloat16() for _ in range(3))
    v.requires_grad_()
    torch.manual_seed(3)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    other = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(out, again) and not torch.equal(out, other)
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, grad)
    one, two = (grad.double() * out.double()).sum(), (dv.double() * v.double()).sum()
    scale = (grad.double() * out.double()).abs().sum()
    assert (one - two).abs() < 1e-3 * scale
    wanted = exact(q, k, v)
    mean = torch.stack(
        [scaled_dot_product_attention(q, k, v, dropout_p=0.5).float() for _ in range(200)]
    ).mean(0)
    assert (mean - wanted).abs().mean() < 0.2 * wanted.abs().mean()
    assert launches[:4] == ["forward", "forward", "forward", "backward"]


def test_nested_tensors(launches: list[str]) -> None:
    """Jagged batches reach the kernels for packed sequences, causal too, and have gradients."""
    lengths = (70, 1, 200)
    parts = [[torch.randn(n, 4, 64, device=DEVICE).bfloat16() for n in lengths] for _ in range(3)]
    nested = [
        torch.nested.nested_tensor(p, layout=torch.jagged, requires_grad=True).transpose(1, 2)
        for p in parts
    ]
    out = scaled_dot_product_attention(*nested, is_causal=True)
    for i, made in enumerate(out.transpose(1, 2).unbind()):
        qkv = (p[i].transpose(0, 1)[None] for p in parts)
        wanted = exact(*qkv, is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(made.float(), wanted, rtol=2e-2, atol=2e-2)
    out.values().sum().backward()
    assert launches == ["forward", "backward"]


def test_varlen_of_torch(launches: list[str]) -> None:
    """`torch.nn.attention.varlen`, causal, against the same with torch's own kernels."""
    bounds = torch.tensor([0, 40, 41, 200], dtype=torch.int32, device=DEVICE)
    leaves = [torch.randn(200, 4, 64, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
    grad = torch.randn(200, 4, 64, device=DEVICE).bfloat16()

    def run() -> list[Tensor]:
        out = varlen_attn(*leaves, bounds, bounds, 159, 159, window_size=(-1, 0))
        return [out, *torch.autograd.grad(out, leaves, grad)]

    here = run()
    assert launches == ["forward", "backward"]
    restore_flash_attention_impl()
    for ours, theirs in zip(here, run(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=3e-2)
    assert launches == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_compiled(grad: bool, launches: list[str]) -> None:
    """The strides that torch's fakes promise are those that come."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=True) + 1

    shapes = (2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 64)
    tensors = [torch.randn(s, device=DEVICE).bfloat16().requires_grad_(grad) for s in shapes]
    views = [x.transpose(1, 2) for x in tensors]
    torch._dynamo.reset()
    out = torch.compile(step, fullgraph=True)(*views)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = step(*(x.detach().float() for x in views))
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
    if grad:
        out.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
    assert launches == ["forward", "backward"][: 1 + grad]


def test_in_a_graph(no_host_sync: Callable[[], AbstractContextManager[None]]) -> None:
    q, k, v = torch.randn(3, 2, 4, 128, 64, device=DEVICE).bfloat16()
    for _ in range(2):
        scaled_dot_product_attention(q, k, v, is_causal=True)
    with no_host_sync():
        scaled_dot_product_attention(q, k, v, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, is_causal=True))


def test_what_is_not_ours_runs_in_torch(launches: list[str]) -> None:
    """A mask, fp32: torch's other backends, named once; after restoring, torch's own."""
    q, k, v = torch.randn(3, 1, 2, 32, 64, device=DEVICE).bfloat16()
    mask = torch.ones(32, 32, dtype=torch.bool, device=DEVICE).tril()
    with pytest.warns(UserWarning, match="attn_mask: expected None"):
        masked = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.warns(UserWarning, match="got float32"):
        scaled_dot_product_attention(q.float(), k.float(), v.float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not launches
    causal = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(causal.float(), masked.float(), rtol=2e-2, atol=2e-2)
    assert launches == ["forward"]
    restore_flash_attention_impl()
    scaled_dot_product_attention(q, k, v, is_causal=True)
    assert launches == ["forward"]

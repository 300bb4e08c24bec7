"""Other libraries, each behind one function, timed by the protocol of `timing`.

A peer that cannot run a case, or is not here, says why: its reasons are data in the results. Those
of torch run in this process; each of the others in a process of its own, for they bring CUDA
runtimes and hooks into torch that do not bear each other:

    python -m splitkv.lab.harness.peers NAME MODE cold|warm

with case names on stdin and JSON lines on stdout.

The kernels of FlashAttention-3, vLLM and SGLang are called through thin loaders in a package
`peers` on the Python path; FlashInfer through its loader there, or as it is installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from splitkv.core.errors import expect
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.process import Ended, Process
from splitkv.lab.harness.suites import case_named
from splitkv.lab.harness.timing import Prepared, Protocol, Variant, measure

WORKSPACE_BYTES = 256 << 20
SECONDS = 240  # that a process may take for a case; the first one loads and compiles


def sdpa(backend: SDPBackend, packed: bool) -> Callable[[Inputs], Prepared]:
    """A kernel of torch's SDPA. Packed: the query heads of a KV head as its query rows."""

    def prepare(inputs: Inputs) -> Prepared:
        q = inputs.q.transpose(2, 3)  # [buffers, batch, heads, 1, head_dim]
        if packed:
            q = inputs.q.view(*inputs.q.shape[:2], inputs.problem.num_kv_heads, -1, q.shape[-1])
        k, v = inputs.k.transpose(2, 3), inputs.v.transpose(2, 3)

        def call(i: int) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q[i], k[i], v[i], enable_gqa=not packed)

        cudnn = backend == SDPBackend.CUDNN_ATTENTION
        return Prepared(call, str(torch.backends.cudnn.version()) if cudnn else torch.__version__)

    return prepare


def flex_attend(p: Problem, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention compiled for a problem, the mask as blocks where it hides keys: attention over
    tensors [batch, tokens, heads, head_dim]."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shift = p.seqlen_k - p.seqlen_q

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return p.mask.visible(i + shift, j)

    torch._dynamo.reset()
    config.donated_buffer = False  # as gradients are asked again and again
    blocks = None
    if p.visible_pairs < p.seqlen_q * p.seqlen_k:
        sizes: tuple[Any, ...] = (None, None, p.seqlen_q, p.seqlen_k)
        blocks = create_block_mask(visible, *sizes, device=device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return compiled(q, k, v, block_mask=blocks, enable_gqa=p.group > 1).transpose(1, 2)

    return attend


def flex(inputs: Inputs) -> Prepared:
    """FlexAttention over a contiguous cache."""
    attend = flex_attend(inputs.problem, inputs.q.device)
    return Prepared(lambda i: attend(inputs.q[i], inputs.k[i], inputs.v[i]), torch.__version__)


def fa3(
    inputs: Inputs,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    ahead: bool = True,
) -> Prepared:
    """FlashAttention-3; it decides what is not given. `ahead`: its schedule is made before."""
    fa, p = import_module("peers.fa3"), inputs.problem
    options: dict[str, Any] = {
        "causal": p.mask.causal,
        "window_size": (p.mask.window_left, p.mask.window_right),
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
    }
    schedule = None
    if ahead:
        schedule = fa.get_scheduler_metadata(
            *(p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_kv_heads, p.head_dim),
            inputs.lengths,
            qkv_dtype=inputs.k.dtype,
            page_size=inputs.page_size,
            **options,
        )
    if inputs.sink is not None:
        options["s_aux"] = inputs.sink
    q = inputs.q
    if p.codec.name == "fp8":  # it multiplies in e4m3, q and p too
        q = q.to(inputs.k.dtype)
        one = torch.ones(p.batch, p.num_kv_heads, device=q.device)
        scales = {"k_descale": inputs.k_scale, "v_descale": inputs.v_scale}
        options |= {"q_descale": one, **{name: one * x[0] for name, x in scales.items()}}

    def call(i: int) -> Tensor:
        return fa.flash_attn_with_kvcache(
            *(q[i], inputs.k[i], inputs.v[i], inputs.lengths, inputs.table),
            scheduler_metadata=schedule,
            **options,
        )

    return Prepared(call, getattr(fa, "__version__", None))


def load_flashinfer() -> Any:
    """FlashInfer, by the loader that has its modules compiled ahead where that is here."""
    if importable("peers.fi"):
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
        import_module("peers.fi")
    return import_module("flashinfer")


def workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def flashinfer_tensor_cores(inputs: Inputs) -> Prepared:
    """FlashInfer's decode on tensor cores, planned ahead; one contiguous sequence, or pages."""
    fi, p = load_flashinfer(), inputs.problem
    if inputs.table is None:
        one = inputs.q[:, 0, 0], inputs.k[:, 0], inputs.v[:, 0]

        def call(i: int) -> Tensor:
            q, k, v = (x[i] for x in one)
            return fi.single_decode_with_kv_cache(q, k, v, use_tensor_cores=True)

        return Prepared(call, fi.__version__)
    page_size = inputs.page_size or 1
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
    pages = (inputs.lengths + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    used = torch.arange(inputs.table.shape[1], device=pages.device) < pages[:, None]
    last_page_len = (inputs.lengths - 1) % page_size + 1
    wrapper.plan(
        *(indptr, inputs.table[used], last_page_len),
        *(p.num_heads, p.num_kv_heads, p.head_dim, page_size),
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )
    return Prepared(
        lambda i: wrapper.run(inputs.q[i, :, 0], (inputs.k[i], inputs.v[i])), fi.__version__
    )


def flashinfer_xqa(inputs: Inputs) -> Prepared:
    """TensorRT-LLM's XQA kernel through FlashInfer."""
    fi, p = load_flashinfer(), inputs.problem
    xqa = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    scratch, out = workspace(), torch.empty_like(inputs.q[:, :, 0])

    def call(i: int) -> Tensor:
        return xqa(
            *(inputs.q[i, :, 0], (inputs.k[i], inputs.v[i]), scratch),
            *(inputs.table, inputs.lengths, p.seqlen_k),
            bmm1_scale=p.head_dim**-0.5,
            bmm2_scale=1.0,
            kv_layout="NHD",
            out=out[i],
        )

    return Prepared(call, fi.__version__)


def vllm_triton(inputs: Inputs) -> Prepared:
    """vLLM's unified attention; a contiguous cache as pages in order."""
    vllm, p = import_module("peers.vllm_triton"), inputs.problem
    decoder = vllm.Decoder(p.num_heads, p.num_kv_heads, p.head_dim)
    k, v, table, out = inputs.k, inputs.v, inputs.table, torch.empty_like(inputs.q[:, :, 0])
    if table is None:
        k, v = (x.view(len(x), -1, 16, *x.shape[3:]) for x in (k, v))
        table = torch.arange(k.shape[1], dtype=torch.int32, device=k.device).view(p.batch, -1)
    cu_seqlens_q = offsets(inputs, 1)

    def call(i: int) -> Tensor:
        return decoder(
            *(inputs.q[i, :, 0], k[i], v[i], table, inputs.lengths, cu_seqlens_q, 1, p.seqlen_k),
            *(out[i], p.head_dim**-0.5),
        )

    return Prepared(call, getattr(vllm, "__version__", None))


def sglang_triton(inputs: Inputs) -> Prepared:
    """SGLang's decode, its number of splits chosen ahead, as once a step for all layers."""
    sglang, p = import_module("peers.sglang_triton"), inputs.problem
    decoder = sglang.Decoder(p.batch, p.num_heads, p.num_kv_heads, p.head_dim)
    decoder.plan(inputs.lengths)
    k, v, out = inputs.k, inputs.v, torch.empty_like(inputs.q[:, :, 0])
    page_size = inputs.page_size or 1
    if inputs.table is None:
        k, v = (x.flatten(1, 2) for x in (k, v))
        slots = torch.arange(k.shape[1], device=k.device)
    else:
        offsets_in_page = torch.arange(page_size, device=k.device)
        slots = (inputs.table.long()[..., None] * page_size + offsets_in_page).flatten()
    indptr = offsets(inputs, p.seqlen_k)

    def call(i: int) -> Tensor:
        return decoder.run(
            *(inputs.q[i, :, 0], k[i], v[i], out[i], indptr, slots, p.head_dim**-0.5),
            page_size=page_size,
        )

    return Prepared(call, getattr(sglang, "__version__", None))


def offsets(inputs: Inputs, each: int) -> Tensor:
    """[batch + 1] int32: 0, each, 2 * each, ..."""
    count = inputs.problem.batch + 1
    return torch.arange(count, dtype=torch.int32, device=inputs.lengths.device) * each


def importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not here
        return False


def needs(*modules: str) -> Callable[[Case], list[str]]:
    """A reason unless one of the modules can be imported."""

    def against(case: Case) -> list[str]:
        if any(importable(module) for module in modules):
            return []
        return [f"module {' or '.join(modules)}: expected importable, got none"]

    return against


def contiguous_only(case: Case) -> list[str]:
    paged = case.place != "contiguous"
    return [f"place {case.problem.place}: expected contiguous"] if paged else []


def paged_only(case: Case) -> list[str]:
    paged = case.place != "contiguous"
    return [] if paged else [f"place {case.problem.place}: expected pages"]


def one_sequence_unless_paged(case: Case) -> list[str]:
    batch = case.problem.batch
    if case.place != "contiguous" or batch == 1:
        return []
    return [f"batch {batch}: expected 1 with a contiguous cache"]


def only(*features: str) -> Callable[[Case], list[str]]:
    """A reason for each feature of a case that is not among these."""

    def against(case: Case) -> list[str]:
        p = case.problem
        there = {
            "lengths": (case.lengths is not None, "lengths that differ: expected equal lengths"),
            "tokens": (p.seqlen_q > 1, f"query tokens {p.seqlen_q}: expected 1"),
            "window": (p.mask.left is not None, f"mask {p.mask}: expected causal"),
            "chunk": (p.mask.chunk > 0, f"mask {p.mask}: expected no chunks"),
            "sink": (p.sink_logits, "sink logits: expected none"),
            "int8": (p.codec.name == "int8", f"kv {p.codec}: expected as it is"),
            "fp8": (p.codec.name == "fp8", f"kv {p.codec}: expected as it is"),
        }
        return [
            reason
            for name, (there_is, reason) in there.items()
            if there_is and name not in features
        ]

    return against


def every(*checks: Callable[[Case], list[str]]) -> Callable[[Case], list[str]]:
    """All reasons of all checks."""
    return lambda case: [reason for check in checks for reason in check(case)]


@dataclass(frozen=True)
class Peer:
    """A library: its variants, and whether it has to run in a process of its own."""

    variants: tuple[Variant, ...]
    own_process: bool = True


def _sdpa_peer(library: str, backend: SDPBackend) -> Peer:
    kernels = {"sdpa": False, "sdpa packed": True}
    variants = (
        Variant(library, kernel, sdpa(backend, packed), every(contiguous_only, only()))
        for kernel, packed in kernels.items()
    )
    return Peer(tuple(variants), own_process=False)


_FLEX = every(contiguous_only, only("tokens", "window", "chunk"))
_FLASHINFER = every(needs("peers.fi", "flashinfer"), only("lengths"))
PEERS: dict[str, Peer] = {
    "fa2": _sdpa_peer("fa2", SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
    "fa3": Peer(
        (
            Variant(
                *("fa3", "metadata ahead", fa3),
                every(needs("peers.fa3"), only("lengths", "tokens", "window", "sink", "fp8")),
                coarse=True,
            ),
        )
    ),
    "flex": Peer((Variant("flex", "compiled", flex, _FLEX),)),
    "flashinfer": Peer(
        (
            Variant(
                *("flashinfer", "tensor cores", flashinfer_tensor_cores),
                every(_FLASHINFER, one_sequence_unless_paged),
            ),
            Variant("flashinfer", "xqa", flashinfer_xqa, every(_FLASHINFER, paged_only)),
        )
    ),
    "vllm_triton": Peer(
        (
            Variant(
                *("vllm_triton", "unified", vllm_triton),
                every(needs("peers.vllm_triton"), only("lengths")),
            ),
        )
    ),
    "sglang_triton": Peer(
        (
            Variant(
                *("sglang_triton", "decode", sglang_triton),
                every(needs("peers.sglang_triton"), only()),
            ),
        )
    ),
}


def parse(names: str, known: Collection[str] = PEERS) -> list[str]:
    """`all`, `none`, or names with commas between."""
    if names in ("all", "none"):
        return list(known) if names == "all" else []
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        expect(name in known, "peers", f"all, none or some of {','.join(known)}", name)
    return chosen


class Worker:
    """A peer in a process of its own, which stays from case to case."""

    def __init__(self, name: str, protocol: Protocol, command: Sequence[str] | None = None) -> None:
        self.variants = PEERS[name].variants
        warmth = "warm" if protocol.warm else "cold"
        own = (sys.executable, "-m", "splitkv.lab.harness.peers", name, protocol.mode, warmth)
        self.process = Process(command or own)

    def measure(self, case: Case) -> Iterator[dict[str, Any]]:
        """The rows of `timing.measure`; what ends the process is the reason of those left."""
        against = {variant: variant.unsupported(case) for variant in self.variants}
        if all(against.values()):
            yield from (variant.row(reasons=reasons) for variant, reasons in against.items())
            return
        left = {(variant.library, variant.kernel): variant for variant in self.variants}
        try:
            self.process.send(case.name)
            while row := self.process.receive(SECONDS):
                left.pop((row["library"], row["kernel"]), None)
                yield row
        except Ended as error:
            yield from (variant.row(reasons=[str(error)]) for variant in left.values())

    def stop(self) -> None:
        self.process.stop()


def serve(name: str, mode: str, warmth: str) -> None:
    """Measure the cases named on stdin; a row a line, and {} after each case."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    protocol = Protocol(mode, warmth == "warm")
    for line in sys.stdin:
        for row in measure(case_named(line.strip()), PEERS[name].variants, protocol):
            print(json.dumps(row), file=answers, flush=True)
        torch.cuda.empty_cache()
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])

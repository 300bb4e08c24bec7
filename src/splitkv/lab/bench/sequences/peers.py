"""Other libraries over whole sequences, each behind one function; see `lab.peers` for the rules.

    python -m splitkv.lab.bench.sequences.peers NAME BURST_US     lines of JSON on stdin and stdout

A process is asked `{"case": NAME, "direction": ...}` and answers a row a variant and `{}`; then
`{"sample": KEY}` for a burst, and `{"end": true}` before the next case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from splitkv.core.kv import Paged
from splitkv.lab.bench.sequences.suites import CASES
from splitkv.lab.bench.sequences.timing import Here, Pace, Prepared, Row, Sample
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.peers import SECONDS, Peer, every, flex_attend, needs
from splitkv.lab.harness.process import Ended, Process
from splitkv.lab.harness.sequence_cases import Inputs, direction
from splitkv.lab.harness.timing import Variant, one_line


def sdpa(backend: SDPBackend) -> Callable[[Inputs], Prepared]:
    """A kernel of torch's SDPA, heads before tokens as views. Its causal mask is aligned top-left,
    which is ours only with as many queries as keys."""

    def prepare(inputs: Inputs) -> Prepared:
        p = inputs.problem
        options: dict[str, Any] = {"is_causal": p.mask.causal, "enable_gqa": p.group > 1}

        def call() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        cudnn = backend == SDPBackend.CUDNN_ATTENTION
        return Prepared(call, str(torch.backends.cudnn.version()) if cudnn else torch.__version__)

    return prepare


def fa3x(inputs: Inputs) -> Prepared:
    """FlashAttention-3 upstream, forward and backward, dense or packed."""
    fa, p = import_module("peers.fa3x"), inputs.problem
    options: dict[str, Any] = {"causal": p.mask.causal, "window_size": inputs.window_size}
    if p.needs_grad:
        options["deterministic"] = p.deterministic

    def call() -> Tensor:
        tensors, cu = (inputs.q, inputs.k, inputs.v), inputs.cu_seqlens
        if cu is None:
            return fa.flash_attn_func(*tensors, **options)
        return fa.flash_attn_varlen_func(*tensors, cu, cu, p.seqlen_q, p.seqlen_k, **options)

    return Prepared(call, getattr(fa, "__version__", None))


def fa3(inputs: Inputs) -> Prepared:
    """FlashAttention-3 as vLLM builds it: forward alone, and of packed sequences alone, so that
    dense ones come packed."""
    fa, p = import_module("peers.fa3"), inputs.problem
    options: dict[str, Any] = {"causal": p.mask.causal, "window_size": inputs.window_size}
    if inputs.sink is not None:
        options["s_aux"] = inputs.sink
    q = inputs.q
    if inputs.k_scale is not None:  # e4m3 times e4m3: q with a scale a KV head, as the keys
        assert inputs.v_scale is not None
        rows = (p.batch, p.num_kv_heads)
        largest = q.abs().unflatten(-2, (p.num_kv_heads, -1)).amax((-1, -2)).float()
        scale = largest.amax(1 if largest.dim() == 3 else 0).expand(rows) / 448.0
        of_heads = scale.repeat_interleave(p.group, 1)[:, None, :, None]
        q = (q.float() / of_heads).to(inputs.k.dtype)
        descales = scale, inputs.k_scale.expand(rows), inputs.v_scale.expand(rows)
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    tensors = q, inputs.k, inputs.v
    cu_q = cu_k = inputs.cu_seqlens
    if inputs.cu_seqlens is None:
        count = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device)
        cu_q, cu_k = count * p.seqlen_q, count * p.seqlen_k
        tensors = q.flatten(0, 1), inputs.k.flatten(0, 1), inputs.v.flatten(0, 1)
    options |= {"cu_seqlens_q": cu_q}
    if inputs.table is None:
        options |= {"cu_seqlens_k": cu_k}
    else:
        options |= {"page_table": inputs.table, "seqused_k": inputs.lengths}
    options |= {"max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k}

    def call() -> Tensor:
        return fa.fwd(*tensors, **options)[0].view(*q.shape[:-1], p.head_dim_v)

    return Prepared(call, getattr(fa, "__version__", None))


def flex(inputs: Inputs) -> Prepared:
    """FlexAttention, compiled for the case."""
    attend = flex_attend(inputs.problem, inputs.q.device)
    return Prepared(lambda: attend(inputs.q, inputs.k, inputs.v), torch.__version__)


def only(*features: str) -> Callable[[Case], list[str]]:
    """A reason for each feature of a case that is not among these."""

    def against(case: Case) -> list[str]:
        p = case.problem
        there = {
            "backward": (p.needs_grad, "direction backward: expected forward"),
            "packed": (p.kind == "varlen", "kind varlen: expected dense"),
            "pages": (isinstance(p.place, Paged), f"keys {p.place}: expected none in pages"),
            "window": (p.mask.left is not None, f"mask {p.mask}: expected causal or full"),
            "sink_tokens": (p.mask.num_bands > 1, f"sink tokens {p.mask.sink_tokens}: expected 0"),
            "chunk": (p.mask.chunk > 0, f"mask {p.mask}: expected no chunks"),
            "sink_logits": (p.sink_logits, "sink logits: expected none"),
            "deterministic": (p.deterministic, "deterministic True: expected False"),
            "int8": (p.codec.name == "int8", f"kv {p.codec}: expected none of int8"),
            "fp8": (p.codec.name == "fp8", f"kv {p.codec}: expected none of e4m3"),
            "unequal": (
                p.seqlen_q != p.seqlen_k and p.mask.causal,
                f"queries {p.seqlen_q}: expected as many as keys under a causal mask",
            ),
        }
        return [
            reason
            for name, (there_is, reason) in there.items()
            if there_is and name not in features
        ]

    return against


_FA3X_FEATURES = ("backward", "packed", "window", "deterministic", "unequal")
_FA3_FEATURES = ("packed", "pages", "window", "sink_logits", "unequal", "fp8")
_FA3X = every(needs("peers.fa3x"), only(*_FA3X_FEATURES))
_FA3 = every(needs("peers.fa3"), only(*_FA3_FEATURES))
_FLEX = only("backward", "window", "chunk", "sink_tokens", "unequal")
_TORCH = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PEERS: dict[str, Peer] = {
    **{
        name: Peer((Variant(name, "sdpa", sdpa(backend), only("backward")),), own_process=False)
        for name, backend in _TORCH.items()
    },
    "fa3x": Peer((Variant("fa3x", "upstream", fa3x, _FA3X),)),
    "fa3": Peer((Variant("fa3", "vllm", fa3, _FA3),)),
    "flex": Peer((Variant("flex", "compiled", flex, _FLEX),)),
}


class There:
    """The variants of a peer in a process of its own, which stays from case to case."""

    def __init__(self, name: str, pace: Pace, command: Sequence[str] | None = None) -> None:
        self.variants = PEERS[name].variants
        module = "splitkv.lab.bench.sequences.peers"
        self.process = Process(command or (sys.executable, "-m", module, name, str(pace.burst_us)))
        self.against: dict[Variant, list[str]] = {}

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Start the process if it will be asked, so that it imports while others do."""
        able = (not v.unsupported(case) for case in cases for v in self.variants)
        if any(able):
            self.process.start()

    def begin(self, case: Case) -> None:
        self.against = {variant: variant.unsupported(case) for variant in self.variants}
        self.asked = not all(self.against.values())
        self.failed: str | None = None
        if self.asked:
            self._ask({"case": case.name, "direction": direction(case)})

    def _ask(self, question: dict[str, Any]) -> None:
        try:
            self.process.send(json.dumps(question))
        except Ended as error:
            self.failed = str(error)

    def rows(self) -> Iterator[Row]:
        left = {(variant.library, variant.kernel): variant for variant in self.variants}
        try:
            while self.asked and not self.failed and (row := self.process.receive(SECONDS)):
                left.pop((row["library"], row["kernel"]), None)
                yield row
        except Ended as error:
            self.failed = str(error)
        for variant in left.values():
            yield variant.row(reasons=self.against[variant] or [self.failed])

    def sample(self, key: str) -> Sample:
        self._ask({"sample": key})
        try:
            answer = {"error": self.failed} if self.failed else self.process.receive(SECONDS)
        except Ended as error:
            self.failed = str(error)
            raise
        if "error" in answer:
            raise Ended(answer["error"])
        return Sample(**answer)

    def end(self) -> None:
        if self.asked and not self.failed:
            self._ask({"end": True})

    def stop(self) -> None:
        self.process.stop()


def serve(name: str, burst_us: str) -> None:
    """Answer what is asked on stdin; see the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    here = Here(PEERS[name].variants, Pace(burst_us=float(burst_us)))
    for line in sys.stdin:
        question = json.loads(line)
        if "case" in question:
            here.begin(CASES[question["direction"], question["case"]])
            for row in here.rows():
                answer(row)
            answer({})
        elif "sample" in question:
            try:
                answer(here.sample(question["sample"])._asdict())
            except Exception as error:  # the reason why it has no time
                answer({"error": one_line(error)})
        else:
            here.end()


if __name__ == "__main__":
    serve(*sys.argv[1:])

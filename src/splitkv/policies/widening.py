"""Keys in 8 bits on Hopper: made a working type by a launch before, or tile by tile as they come.

`hopper_prefill_widened` reads and writes all keys once more, and then multiplies in 16 bits at the
full rate; `hopper_prefill_quantised` multiplies at `RATES` times that. So of

    saved = flops / flops of 16 bits a second * (1 / rate - 1)
    spent = a launch + bytes that are read and written / bandwidth

the larger decides. What is widened is memory of the call, for as many keys of every sequence as the
longest may have: past `MOST_BYTES` nothing is. Of packed sequences whose keys are in pages, a batch
of a server, only the longest is known, and the others are taken for single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitkv.device import Device, MiB
from splitkv.kv import AS_IS, Paged
from splitkv.plans import Kernel
from splitkv.policies.shared import QUANTISED, WIDENED
from splitkv.problem import Problem

# Rates of `hopper_prefill_quantised` in terms of those of bf16, by codec, products and whether
# scales are of tokens: on one H200, where int8 widened and full and e4m3 half were not timed, and
# are guessed from the others.
RATES = {
    ("int8", "widened", False): 0.6,
    ("int8", "widened", True): 0.55,
    ("int8", "half", False): 0.92,
    ("int8", "half", True): 0.65,
    ("int8", "full", False): 0.8,
    ("int8", "full", True): 0.7,
    ("fp8", "widened", False): 0.6,
    ("fp8", "widened", True): 0.45,
    ("fp8", "half", False): 0.75,
    ("fp8", "half", True): 0.65,
    ("fp8", "full", False): 0.92,
    ("fp8", "full", True): 0.7,
}
FULL = "fp8", "full", False
LONG, RATE_OF_LONG = 8192, 1.08  # of `FULL` from so many keys on
RATE_OF_OTHERS = 0.4  # of `prefill`
FLOPS_OF_SM = 5.7e12  # a second, of bf16
LAUNCH = 4e-6
BANDWIDTH_SHARE = 0.85
MOST_BYTES = 1024 * MiB


def rate_of(problem: Problem) -> float:
    """That of `hopper_prefill_quantised`."""
    kind = problem.codec.name, problem.products, problem.codec.granularity == "token"
    return RATE_OF_LONG if kind == FULL and problem.seqlen_k >= LONG else RATES[kind]


def seconds(problem: Problem, device: Device) -> float:
    """What making keys and values a working type takes."""
    moved = problem.kv_bytes + problem.widened.kv_bytes
    return LAUNCH + moved / (BANDWIDTH_SHARE * device.bandwidth)


def workspace_bytes(problem: Problem) -> int:
    """Of keys and values of a working type."""
    keys = problem.batch * problem.seqlen_k * problem.num_kv_heads
    return keys * (problem.head_dim + problem.head_dim_v) * problem.element_bytes


def saved(problem: Problem, device: Device, rate: float) -> float:
    """Seconds that products at the rate of 16 bits take less than at that times `rate`."""
    pairs = problem.batch * problem.visible_pairs
    if problem.kind == "varlen" and isinstance(problem.place, Paged):
        pairs = problem.visible_pairs + (problem.batch - 1) * problem.seqlen_k
    flops = 2 * pairs * problem.num_heads * (problem.head_dim + problem.head_dim_v)
    return flops / (FLOPS_OF_SM * device.num_sms) * (1 / rate - 1)


def pays(problem: Problem, device: Device, rate: float) -> bool:
    """Whether widening first is faster than a kernel of this rate."""
    fits = workspace_bytes(problem) <= MOST_BYTES
    return fits and saved(problem, device, rate) > seconds(problem, device)


def in_order(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> list[Kernel]:
    """The candidates, with the one that widens first before the others for whole sequences, or
    behind all kernels of this package."""
    names = [kernel.name for kernel in candidates]
    if problem.codec == AS_IS or WIDENED not in names:
        return list(candidates)
    rate = rate_of(problem) if QUANTISED in names else RATE_OF_OTHERS
    first = QUANTISED, "prefill"
    if not pays(problem, device, rate):
        first = "torch_sdpa", "torch_math"
    widens = [kernel for kernel in candidates if kernel.name == WIDENED]
    others = [kernel for kernel in candidates if kernel.name != WIDENED]
    at = min((n for n, kernel in enumerate(others) if kernel.name in first), default=len(others))
    return others[:at] + widens + others[at:]

"""Keys in 8 bits on Hopper: what is made a working type by a launch before, or tile by tile.

`hopper_prefill_widened` reads and writes all keys and values once more, and then multiplies in 16
bits at the full rate; `hopper_prefill_half` does so with values, and multiplies at `RATES_OF_HALF`
times that, after a q of 16 bits has been rounded; `hopper_prefill_quantised` reads both as they are
stored, at `RATES` times that. So

    seconds = flops / (flops of 16 bits a second * rate) + spent
    spent   = a launch + bytes that are read and written / bandwidth, where there is a launch before
              + row tiles of an SM * ROUNDING, of `hopper_prefill_half`

and the least decides. What is made ready is memory of the call, for as many keys of every sequence
as the longest may have: past `MOST_BYTES` nothing is. Of packed sequences whose keys are in pages,
a batch of a server, only the longest is known, and the others are taken for single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitkv.core.device import Device, MiB
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies.shared import HALF, QUANTISED, READY_BEFORE

# Rates of `hopper_prefill_quantised` in terms of those of bf16, by codec, products and whether
# scales are of tokens, on one H200; and of chunks whose keys are in pages, where others.
RATES = {
    ("int8", "widened", False): 0.54,
    ("int8", "widened", True): 0.45,
    ("int8", "half", False): 0.86,
    ("int8", "half", True): 0.65,
    ("int8", "full", False): 0.8,
    ("int8", "full", True): 0.61,
    ("fp8", "widened", False): 0.57,
    ("fp8", "widened", True): 0.46,
    ("fp8", "half", False): 0.97,
    ("fp8", "half", True): 0.72,
    ("fp8", "full", False): 0.92,
    ("fp8", "full", True): 0.7,
}
FULL = "fp8", "full", False
RATES_IN_PAGES = {("int8", "half", False): 0.94, ("fp8", "half", False): 1.06, FULL: 1.12}
LONG, RATE_OF_LONG = 8192, 1.08  # of `FULL` from so many keys on
# With q in 8 bits, in terms of bf16: measurements/thresholds.md#whole-sequences-in-8-bits.
RATES_OF_HALF = {"int8": 1.03, "fp8": 1.12}
# Seconds that so many rows of q take more where they come in 16 bits: see there.
ROUNDING, ROWS = {"int8": 2e-6, "fp8": 1e-6}, 192
RATE_OF_OTHERS = 0.4  # of `prefill`
FLOPS_OF_SM = 5.7e12  # a second, of bf16
LAUNCH = 4e-6
BANDWIDTH_SHARE = 0.85
MOST_BYTES = 1024 * MiB


def rate_of(problem: Problem) -> float:
    """The rate of `hopper_prefill_quantised`."""
    kind = problem.codec.name, problem.products, problem.codec.granularity == "token"
    if isinstance(problem.place, Paged) and kind in RATES_IN_PAGES:
        return RATES_IN_PAGES[kind]
    return RATE_OF_LONG if kind == FULL and problem.seqlen_k >= LONG else RATES[kind]


def columns_made_ready(name: str, problem: Problem) -> int:
    """Columns of a key and its value that a kernel of `READY_BEFORE` makes a working type."""
    return problem.head_dim_v if name == HALF else problem.head_dim + problem.head_dim_v


def seconds(name: str, problem: Problem, device: Device) -> float:
    """The time in which a kernel of `READY_BEFORE` makes keys and values, or values, a working
    type."""
    columns, dims = columns_made_ready(name, problem), problem.head_dim + problem.head_dim_v
    moved = (problem.kv_bytes + problem.widened.kv_bytes) * columns // dims
    return LAUNCH + moved / (BANDWIDTH_SHARE * device.bandwidth)


def workspace_bytes(name: str, problem: Problem) -> int:
    """Bytes of what it makes."""
    keys = problem.batch * problem.seqlen_k * problem.num_kv_heads
    return keys * columns_made_ready(name, problem) * problem.element_bytes


def multiplying(problem: Problem, device: Device) -> float:
    """Seconds that products take at the rate of 16 bits."""
    pairs = problem.batch * problem.visible_pairs
    if problem.kind == "varlen" and isinstance(problem.place, Paged):
        pairs = problem.visible_pairs + (problem.batch - 1) * problem.seqlen_k
    flops = 2 * pairs * problem.num_heads * (problem.head_dim + problem.head_dim_v)
    return flops / (FLOPS_OF_SM * device.num_sms)


def time_of(name: str, problem: Problem, device: Device) -> float:
    """Seconds of a kernel of `READY_BEFORE`; infinite where it would take too much memory."""
    once = multiplying(problem, device)
    if name == HALF:
        once /= RATES_OF_HALF[problem.codec.name]
        if problem.q_granularity == "none":
            rows = problem.batch * problem.seqlen_q * problem.num_heads
            once += rows / ROWS / device.num_sms * ROUNDING[problem.codec.name]
    room = workspace_bytes(name, problem)
    return once + seconds(name, problem, device) if room <= MOST_BYTES else float("inf")


def in_order(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> list[Kernel]:
    """The candidates, with those of `READY_BEFORE` that are faster before the others for whole
    sequences, the fastest first, and the rest behind all kernels of this package."""
    if problem.codec == AS_IS:
        return list(candidates)
    names = [kernel.name for kernel in candidates]
    if not any(name in READY_BEFORE for name in names):
        return list(candidates)
    rate = rate_of(problem) if QUANTISED in names else RATE_OF_OTHERS
    tiles = multiplying(problem, device) / rate
    timed = [(time_of(k.name, problem, device), k) for k in candidates if k.name in READY_BEFORE]
    timed.sort(key=lambda one: one[0])
    others = [kernel for kernel in candidates if kernel.name not in READY_BEFORE]

    def before(ready: list[Kernel], names: Sequence[str]) -> None:
        at = (n for n, kernel in enumerate(others) if kernel.name in names)
        n = next(at, len(others))
        others[n:n] = ready

    before([kernel for time, kernel in timed if time >= tiles], ("torch_sdpa", "torch_math"))
    before([kernel for time, kernel in timed if time < tiles], (QUANTISED, "prefill"))
    return others

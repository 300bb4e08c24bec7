"""Limits of `prefill`, its configs, its traffic and the resources of an SM that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import Config, Plan, Traffic, tile_config
from splitkv.core.problem import Operands, Problem
from splitkv.core.scores import PLAIN
from splitkv.core.variants import Gradients, HopperBackward
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.kernels.host.partition import num_parts, padded, padded_dims
from splitkv.kernels.limits import backward, hopper_backward
from splitkv.kernels.limits.reasons import Reasons
from splitkv.planner.policies.backward import with_row_splits

NAME = "prefill"
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


Shape = tuple[int, int, int, int]  # tile_m, tile_n, num_warps, num_stages


FEW_ROWS: tuple[Shape, ...] = ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2))


# By the larger padded head dimension: those that ptxas, for sm_90, fits into registers.
HALF: dict[int, tuple[Shape, ...]] = {
    64: (
        *((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        *((32, 64, 4, 3), (32, 64, 4, 2), *FEW_ROWS),
    ),
    128: (
        *((128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        *((32, 64, 4, 3), (32, 64, 4, 2), *FEW_ROWS),
    ),
    256: (
        *((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        *FEW_ROWS,
    ),
}


SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2)),
    128: ((32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 4, 2)),
    256: ((16, 16, 8, 2), (16, 16, 4, 2)),
}


def unsupported(problem: Problem, device: Device) -> list[str]:
    reasons = Reasons()

    reasons.expect_triton(problem, device)
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8 or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            expected = f"expected a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            reasons.append(f"{name} {dim}: {expected}")
    if problem.needs_grad:
        reasons += against_gradients(problem)
    reasons += problem.mask.beyond("sink_tokens", "attention_chunk")
    return reasons


def against_gradients(problem: Problem) -> Reasons:
    """Reasons against gradients of kernels for whole sequences."""
    reasons = Reasons()
    forward_only = problem.kind == "decode" or isinstance(problem.place, Paged)
    forward_only |= problem.codec != AS_IS
    forward_only |= problem.bidirectional_ranges or problem.sequence_sink_tokens
    reasons.expect(not forward_only, "gradient: expected inputs that require none")
    reasons.expect(not problem.out_scale, "out_scale: expected None beside gradients")
    return reasons


def shapes(problem: Problem, device: Device) -> list[Shape]:
    """The tile shapes for these head dimensions with no more rows than a sequence has, best first.

    128 keys a step are the best for the tensor cores of sm_90, but take registers that modifiers
    need as well, and leave much of a narrow window to be masked. A tile in one page has one look-up
    and the addresses of contiguous keys.
    """
    table = HALF if problem.element_bytes == 2 else SINGLE
    found = table[max(64, padded(problem.head_dim), padded(problem.head_dim_v))]
    rows = max(problem.rows, min(tile_m for tile_m, *_ in found))
    enough = min(tile_m for tile_m in (16, 32, 64, 128) if tile_m >= min(rows, 128))
    mask = problem.mask
    narrow = mask.left is not None and mask.right is not None and mask.left + mask.right < 512
    modified = problem.score != PLAIN or problem.dropout
    fewer_keys = narrow or modified or device.capability[0] != 9
    page_size = problem.place.page_size if isinstance(problem.place, Paged) else 0
    of_keys = problem.codec.granularity == "token"  # two more loads a key: 128 of them spill
    found = tuple(s for s in found if s[0] <= enough and not (of_keys and s[:2] == (128, 128)))
    return sorted(
        found,
        key=lambda shape: (
            fewer_keys and shape[1] == 128,
            page_size >= 64 and page_size % shape[1] > 0,
        ),
    )


def shared_bytes(problem: Problem, config: Config, device: Device) -> int:
    """The most shared memory that Triton takes for a config: q, tiles in flight, sums of rows.

    Of what is widened a copy, and scales of keys. After the loop the output goes through it.
    """
    dim, dim_v = padded_dims(problem, device, config.tile_m, config.num_warps)
    sums = 8 * config.tile_m + 64
    if device.capability[0] == 10 and config.tile_m >= 64:  # tcgen05: of four warps
        sums = max(sums, 1024)
    loop = config.tile_m * dim * problem.element_bytes + sums
    loop += config.num_stages * config.tile_n * (dim + dim_v) * problem.kv_element_bytes
    if problem.codec != AS_IS:
        a_key = max(dim, dim_v) * problem.element_bytes + 8 * (config.num_stages + 1)
        loop += config.tile_n * a_key
    return max(loop, 4 * config.tile_m * dim_v)


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits."""
    for tile_m, tile_n, num_warps, num_stages in shapes(problem, device):
        config = tile_config(tile_m, tile_n, num_warps, num_stages)
        if shared_bytes(problem, config, device) <= device.smem_per_block:
            yield config


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    pairs = problem.batch * problem.num_heads * problem.visible_pairs
    parts, cut = num_parts(problem, config), problem.batch * problem.cut_tokens * problem.num_heads
    return Traffic(
        kv_bytes=problem.kv_bytes,
        q_bytes=rows * problem.head_dim * problem.element_bytes,
        out_bytes=rows * (problem.head_dim_v * problem.out_element_bytes + 4 * problem.return_lse),
        partial_bytes=2 * parts * cut * (problem.head_dim_v + 2) * 4 if parts > 1 else 0,
        flops=2 * pairs * (problem.head_dim + problem.head_dim_v),
    )


def backward_variants(problem: Problem, device: Device) -> Iterator[Gradients]:
    """Every way of making the gradients without its row splits, the best first: those for Hopper
    where they can, then those for any GPU."""
    if not hopper_backward.unsupported(problem, device):
        yield from hopper_backward.variants(problem, device)
    yield from backward.variants(problem, device)


def prefill_without_tma(plan: Plan, operands: Operands, why: str) -> Plan:
    """The plan with the same number of splits by this kernel, for one whose kernel cannot read the
    tensors; merge: as there, where no cluster merges."""
    merge = "combine" if plan.config.merge == "cluster" else plan.config.merge
    config = next(configs(plan.problem, plan.device))
    config = replace(config, num_splits=plan.config.num_splits, merge=merge)
    other = replace(plan, kernel=NAME, config=config, why=f"{plan.why}; {why}")
    return refit(other, operands)


def refit(plan: Plan, operands: Operands) -> Plan:
    """The plan for tensors that this one does not fit: gradients by the kernels for any GPU where
    TMA cannot describe the operands. Else the plan itself."""
    if not isinstance(plan.backward, HopperBackward) or not unfit(operands):
        return plan
    problem, device = plan.problem, plan.device
    found = with_row_splits(problem, device, next(backward.variants(problem, device)))
    return replace(plan, backward=found, why=f"{plan.why}; gradients: {unfit(operands)[0]}")

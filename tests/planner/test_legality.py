"""Plans made by hand: what a kernel cannot be launched with is refused before it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from typing import Any

import cases
import numpy
import pytest
from compiling import layouts_in_8_bits

from splitkv.core.device import CPU, GPUS
from splitkv.core.kv import Codec, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.plan import SCHEDULED, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.flash_attn import scheduler
from splitkv.kernels import prefill
from splitkv.kernels.hopper.prefill import quantised as prefill_quantised
from splitkv.planner.legality import is_legal
from splitkv.planner.policies import fixed
from splitkv.planner.policies.shared import MAX_SPLITS
from splitkv.planner.registry import KERNELS, POLICIES, completed, kernel_named, make_plan
from splitkv.runtime.dispatch import fit_plan
from splitkv.testing import bind, make_operands

H200 = GPUS["h200"]
DECODE = Problem("decode", 2, 8, 2, 128, 128, 1, 4096, mask=Mask(causal=True), lengths="device")
ON_HOST = replace(DECODE, lengths="host")
INT8 = replace(DECODE, num_heads=16, num_kv_heads=1, seqlen_q=3, codec=Codec("int8", "head"))
INT8 = replace(INT8, products="half")
DENSE = Problem("dense", 2, 8, 2, 128, 128, 512, 512)
SOME = [*cases.DECODE[::9], *cases.HOPPER[::9], *cases.QUANTIZED[::9], *cases.HOPPER_QUANTIZED[::9]]
PROBLEMS = [DECODE, ON_HOST, INT8, DENSE, *(case.problem for case in SOME)]
OF_KERNEL = {
    "hopper_decode_split": DECODE,
    "decode_split": DECODE,
    "hopper_prefill": DENSE,
    "hopper_prefill_quantised": INT8,
    "hopper_prefill_half": INT8,
    "hopper_prefill_widened": INT8,
    "prefill": DENSE,
    "torch_sdpa": DENSE,
    "torch_math": DECODE,
}
HOPPER, QUANTISED = "hopper_decode_split", "hopper_prefill_quantised"


def plan_of(problem: Problem, kernel: str, **changes: Any) -> Plan:
    """The kernel's first config, of clusters if these are asked for, with changes."""
    cluster = changes.get("merge") == "cluster"
    found = kernel_named(kernel).configs(problem, H200)
    config = next(c for c in found if (c.merge == "cluster") == cluster)
    return Plan(problem, H200, "mine", kernel, replace(config, **changes), "made by hand")


def refused(message: str, problem: Problem, kernel: str, **changes: Any) -> None:
    """With this message, whatever is said about it besides."""
    with pytest.raises(ValueError) as caught:
        fit_plan(plan_of(problem, kernel, **changes), problem, H200)
    assert str(caught.value).partition("; ")[0] == f"plan.config.{message}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_numbers_that_a_kernel_lacks(kernel: Kernel) -> None:
    problem = OF_KERNEL[kernel.name]
    assert kernel.unsupported(problem, H200) == []
    for name in ("tile_m", "tile_n", "num_warps", "num_stages"):
        for value in (0, -4, 5, 48, 1 << 20):
            plan = plan_of(problem, kernel.name, **{name: value})
            with pytest.raises(ValueError, match=rf"^plan.config.{name}: expected .*, got {value}"):
                fit_plan(plan, problem, H200)
        said = f"{name}: expected an integer, got 2.0"
        refused(said, problem, kernel.name, **{name: 2.0})
    for parts in (0, -1, MAX_SPLITS + 1):
        said = f"num_splits: expected 1 to {MAX_SPLITS}, got {parts}"
        refused(said, problem, kernel.name, num_splits=parts)
    refused("programs: expected at least 0, got -1", problem, kernel.name, programs=-1)
    refused("appends: expected False, got True", problem, kernel.name, appends=True)


def test_the_numbers_that_others_go_with_are_said() -> None:
    said = "num_stages: expected 1, 2 or 3, got 4; decode_split has these with pack_gqa True, "
    said += "tile_m 16, tile_n 128, num_warps 4"
    plan = plan_of(DECODE, "decode_split", tile_n=128, num_stages=4)
    with pytest.raises(ValueError, match=f"^plan.config.{said}$"):
        fit_plan(plan, DECODE, H200)


@pytest.mark.parametrize("parts", [3, 4, 8])
def test_clusters_of_so_many_parts(parts: int) -> None:
    said = f"num_splits: expected 2, got {parts}"
    refused(said, INT8, QUANTISED, merge="cluster", num_splits=parts)
    if parts == 3:
        said = "num_splits: expected 2, 4 or 8, got 3"
        refused(said, DECODE, HOPPER, merge="cluster", num_splits=parts)


def test_clusters_of_other_shapes_and_schedules() -> None:
    two = {"merge": "cluster", "num_splits": 2}
    refused("tile_m: expected 64, got 128", INT8, QUANTISED, **two, tile_m=128)
    refused("programs: expected more than 0, got 0", INT8, QUANTISED, **two, programs=0)
    for cut in ({"schedule": "fixed", "split_size": 2048}, {"schedule": "batch", "programs": 9}):
        said = f"schedule: expected 'even', got '{cut['schedule']}'"
        refused(said, DECODE, HOPPER, **two, **cut)


@pytest.mark.parametrize(
    "changes",
    [{"products": "full"}, {"seqlen_q": 5}, {"num_heads": 15}],
    ids=["no 16 bits", "two row tiles", "heads apart"],
)
def test_problems_without_clusters(changes: dict[str, Any]) -> None:
    problem = replace(INT8, **changes)
    config = plan_of(INT8, QUANTISED, merge="cluster", num_splits=2).config
    plan = Plan(problem, H200, "mine", QUANTISED, config, "made by hand")
    said = f"merge: expected 'combine' or 'last', got 'cluster'; {QUANTISED} has no tile here whose"
    with pytest.raises(ValueError, match=f"^plan.config.{said} parts are clusters$"):
        fit_plan(plan, problem, H200)


def test_what_is_counted_where_a_launcher_is_bound() -> None:
    """Sequences whose splits are clusters; programs of a launch that merges."""
    most = prefill_quantised.MOST_ALONG_AN_AXIS
    plan = plan_of(replace(INT8, batch=most), QUANTISED, merge="cluster", num_splits=2)
    prefill_quantised.bind(completed(plan), layouts_in_8_bits(plan.problem))
    plan = plan_of(replace(INT8, batch=most + 1), QUANTISED, merge="cluster", num_splits=2)
    said = f"^plan.config.merge: expected .* more than {most} sequences, got 'cluster'$"
    with pytest.raises(ValueError, match=said):
        prefill_quantised.bind(completed(plan), layouts_in_8_bits(plan.problem))
    plan = plan_of(replace(INT8, batch=2200), "prefill", merge="last", num_splits=MAX_SPLITS)
    said = "^plan.config.merge: expected 'combine' of 2252800 programs, got 'last'$"
    with pytest.raises(ValueError, match=said):
        prefill.PrefillLauncher(plan, layouts_in_8_bits(plan.problem))


@pytest.mark.parametrize("kernel", ["decode_split", HOPPER])
def test_parts_that_leave_keys_out(kernel: str) -> None:
    fixed_parts = {"schedule": "fixed", "num_splits": 4}
    said = "split_size: expected more than 0, got 0"
    refused(said, DECODE, kernel, **fixed_parts)
    said = "split_size: expected a multiple of tile_n=64, got 1000"
    refused(said, DECODE, kernel, **fixed_parts, split_size=1000)
    said = "num_splits: expected at least 5, got 4"
    refused(said, DECODE, kernel, **fixed_parts, split_size=960)
    fit_plan(plan_of(DECODE, kernel, **fixed_parts, split_size=1024), DECODE, H200)


@pytest.mark.parametrize("kernel", ["decode_split", HOPPER])
def test_programs_that_share_a_batch(kernel: str) -> None:
    for programs in (0, 1, 65536):
        said = f"programs: expected 2 to 65535, got {programs}"
        refused(said, DECODE, kernel, schedule="batch", programs=programs)
    said = "schedule: expected 'even' or 'fixed', got 'batch'"
    refused(said, ON_HOST, kernel, schedule="batch", programs=9)
    refused("programs: expected 0, got 9", DECODE, kernel, programs=9)


OWN_SINKS = replace(DECODE, batch=64, mask=Mask(True, 500, -1, FAR), sequence_sink_tokens=True)


@pytest.mark.parametrize("kernel", ["decode_split", HOPPER])
@pytest.mark.parametrize("schedule", ["batch", *SCHEDULED])
def test_what_shares_a_batch_has_one_number_of_sink_tokens(kernel: str, schedule: Any) -> None:
    said = f"schedule: expected 'even' or 'fixed', got '{schedule}'"
    refused(said, OWN_SINKS, kernel, schedule=schedule, programs=132)
    alike = replace(OWN_SINKS, sequence_sink_tokens=False)
    fit_plan(plan_of(alike, kernel, schedule=schedule, programs=132), alike, H200)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gpu", GPUS)
def test_policies_share_no_batch_out_beside_sink_tokens_of_each_sequence(
    gpu: str, policy: str
) -> None:
    device, bounds = GPUS[gpu], (4, 700, FAR)
    for bound, batch, seqlen_k in product(bounds, (2, 64), (512, 1 << 17)):
        mask = replace(OWN_SINKS.mask, sink_tokens=bound)
        problem = replace(OWN_SINKS, mask=mask, batch=batch, seqlen_k=seqlen_k)
        made = make_plan(problem, device, policy=policy)
        assert made.config.schedule in ("even", "fixed")
        assert fit_plan(made, problem, device) == made


def test_a_plan_is_for_one_number_of_sink_tokens_or_for_one_of_each_sequence() -> None:
    plan = make_plan(OWN_SINKS, H200)
    alike = replace(OWN_SINKS, sequence_sink_tokens=False)
    for made, problem in ((plan, alike), (make_plan(alike, H200), OWN_SINKS)):
        with pytest.raises(ValueError, match="^plan: expected one for "):
            fit_plan(made, problem, H200)
    # of whole sequences that the window reaches across, neither matters
    varlen = replace(OWN_SINKS, kind="varlen", place=Ragged(), seqlen_q=900, seqlen_k=900)
    short = replace(varlen, seqlen_k=400, mask=Mask(True), sequence_sink_tokens=False)
    assert fit_plan(make_plan(varlen, H200), short, H200).problem == short


@pytest.mark.parametrize("schedule", ["even", "batch"])
def test_a_size_of_parts_that_are_not_of_a_size(schedule: Any) -> None:
    """Which would be ignored."""
    programs = 9 if schedule == "batch" else 0
    how = {"schedule": schedule, "programs": programs, "split_size": 64}
    refused("split_size: expected 0, got 64", DECODE, HOPPER, **how)


def test_numbers_of_other_types() -> None:
    """Also after plans that are equal to them."""
    for name, right, wrong, said in (
        ("num_splits", 1, True, "an integer, got True"),
        ("num_stages", 2, 2.0, "an integer, got 2.0"),
        ("pack_gqa", True, 1, "True or False, got 1"),
        ("appends", False, 0, "True or False, got 0"),
    ):
        fit_plan(plan_of(DECODE, "decode_split", **{name: right}), DECODE, H200)
        refused(f"{name}: expected {said}", DECODE, "decode_split", **{name: wrong})
    made = plan_of(DECODE, "decode_split", num_splits=numpy.int64(3))
    assert type(fit_plan(made, DECODE, H200).config.num_splits) is int


CUTS: list[dict[str, Any]] = [
    *({"num_splits": n} for n in (1, 2, 3, 17, MAX_SPLITS)),
    *({"schedule": "batch", "programs": n, "num_splits": 4} for n in (2, 3, 4, 7, 65535)),
    *({"schedule": "fixed", "split_size": n, "num_splits": 256} for n in (256, 1024, 1 << 20)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_legal_is_bound(kernel: Kernel) -> None:
    """Every schedule, merge and number of parts that is not refused."""
    problem = replace(OF_KERNEL[kernel.name], seqlen_k=512)
    operands = bind(problem, make_operands(problem))
    bound = 0
    for found, cut, merge in product(
        islice(kernel.configs(problem, H200), 0, None, 7), CUTS, kernel.merges
    ):
        config = replace(found, **{"merge": merge, **cut})
        if is_legal(kernel, problem, H200, config):
            try:
                plan = completed(Plan(problem, H200, "mine", kernel.name, config, "made by hand"))
            except ValueError:  # parts that cannot be a cluster
                continue
            kernel.bind(plan, operands)
            assert kernel.traffic(problem, config).bytes > 0
            bound += 1
    assert bound >= 1


def test_new_tokens_that_a_kernel_leaves_to_append() -> None:
    problem = replace(DECODE, seqlen_new=1)
    fit_plan(plan_of(problem, HOPPER, appends=True), problem, H200)
    for other, kernel, why in (
        (problem, "prefill", "it writes no new tokens"),
        (replace(problem, lengths="host"), HOPPER, "lengths host: expected device"),
    ):
        with pytest.raises(ValueError, match=f"^plan.config.appends: .*, got True; {why}$"):
            fit_plan(plan_of(other, kernel, appends=True), other, H200)


def test_metadata_of_a_tile_that_does_not_suit_the_call() -> None:
    """Of 256 columns in 8 bits no tile is wide, and metadata does not know of 8 bits: it is decided
    again."""
    problem = replace(DECODE, num_heads=16, num_kv_heads=1, head_dim=256, head_dim_v=256)
    made = plan_of(replace(problem, seqlen_q=2), HOPPER, tile_m=64, num_stages=2)
    assert fit_plan(made, made.problem, H200) == completed(made)
    call = replace(made.problem, codec=INT8.codec, products="half")
    fitted = scheduler.fitted(made, call)
    assert fitted.config.tile_m < 64
    assert fit_plan(fitted, call, H200) == fitted


@pytest.mark.parametrize("device", [H200, GPUS["a100"], CPU], ids=str)
def test_every_config_is_legal(device: Any) -> None:
    for problem in PROBLEMS:
        for kernel in KERNELS:
            if not kernel.unsupported(problem, device):
                for config in kernel.configs(problem, device):
                    assert is_legal(kernel, problem, device, config)


@pytest.mark.parametrize(
    "policy", [*POLICIES, fixed.with_split_size(100)], ids=[*POLICIES, "parts of 100 keys"]
)
def test_every_plan_of_a_policy_is_legal(policy: Any) -> None:
    """For shorter caches, too."""
    for problem in PROBLEMS:
        made = make_plan(problem, H200, policy=policy)
        for seqlen_k in {problem.seqlen_k, max(1, problem.seqlen_k - 1), 1}:
            mask = problem.mask.within(problem.seqlen_q, seqlen_k)
            fit_plan(made, replace(problem, seqlen_k=seqlen_k, mask=mask), H200)


@pytest.mark.parametrize("problem", [DECODE, ON_HOST], ids=str)
def test_parts_of_a_size_hold_the_keys_of_shorter_caches(problem: Problem) -> None:
    """Whose window may start inside a tile where that of the longest does not."""
    problem = replace(problem, mask=Mask(True, 127, -1, 4))
    made = make_plan(problem, H200, policy=fixed.with_split_size(64))
    for seqlen_k in range(3968, 4097):
        fit_plan(made, replace(problem, seqlen_k=seqlen_k), H200)

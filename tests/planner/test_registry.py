"""What exists is complete: every kernel says its limits, configs and traffic, and has a case."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import cases
import pytest
import torch
import training
from fake_gpu import functions_called

from splitkv.core.device import CPU, GPUS
from splitkv.core.errors import UnsupportedProblem
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Config, Kernel, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.core.scores import Score
from splitkv.kernels import records
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.limits import decode_split
from splitkv.kernels.limits import hopper_decode_split as hopper_decode_split_limits
from splitkv.kernels.limits.hopper_decode_split import CLUSTERS
from splitkv.planner import registry
from splitkv.planner.policies import (
    decode_cost,
    fixed,
    persistent,
    shared,
    short_queries,
    tuned_tables,
)
from splitkv.planner.policies.shared import WHOLE_SEQUENCES
from splitkv.planner.registry import (
    DEFAULT,
    KERNELS,
    POLICIES,
    decided_lengths,
    kernel_named,
    make_plan,
    rounded_up,
)

H200 = GPUS["h200"]
MOST_CALLS = {"h100_pcie": 3200, "h100": 4400, "h200": 6600}
"""Functions that Python calls for a plan, C functions counted; of the first there is no table."""
DEVICES = {**GPUS, "cpu": CPU}
DECODE = Problem("decode", 2, 8, 2, 64, 64, 1, 130, mask=Mask(causal=True), lengths="device")
UNSPLIT = ("torch_sdpa", "torch_math")  # kernels with a single config
CASES = cases.DECODE + cases.HOPPER

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
every_device = pytest.mark.parametrize("gpu", DEVICES)


def test_a_cluster_has_parts_to_merge() -> None:
    plan = make_plan(DECODE, H200)
    with pytest.raises(ValueError, match="^merge: expected parts for a cluster to merge, got 1$"):
        replace(plan, config=Config(merge="cluster"))


def test_names_are_unique() -> None:
    assert len({k.name for k in KERNELS}) == len(KERNELS)
    assert DEFAULT in POLICIES
    assert all(kernel_named(k.name) is k for k in KERNELS)


@every_kernel
def test_a_kernel_is_named_after_its_file(kernel: Kernel) -> None:
    home = kernel.name
    if home.startswith("hopper_"):  # hopper_prefill_half: hopper/prefill/half.py
        _, room, *rest = home.split("_")
        variant = "_".join(rest) if room == "prefill" else ""
        home = f"hopper.{room}.{variant or 'kernel'}"
    assert import_module(f"splitkv.kernels.{home}")
    assert getattr(records, kernel.name.upper()) is kernel
    if not kernel.name.startswith("torch"):
        limits = import_module(f"splitkv.kernels.limits.{kernel.name}")
        assert kernel.name == limits.NAME and limits.unsupported is kernel.unsupported


@every_kernel
def test_a_kernel_has_cases(kernel: Kernel) -> None:
    """On some device; a kernel that no case reaches is a kernel that no test runs."""
    problems = [case.problem for case in CASES]
    problems += [training.problem_of(values) for values in cases.pairs(training.AXES)]
    quantised = cases.pairs(training.QUANTISED_AXES, training.has_units)
    problems += [training.problem_of(values) for values in quantised]
    served = [
        problem
        for problem in problems
        if any(not kernel.unsupported(problem, device) for device in DEVICES.values())
    ]
    assert served


@every_device
def test_every_case_has_a_kernel(gpu: str) -> None:
    for case in cases.DECODE:
        problem, device = case.problem, DEVICES[gpu]
        assert any(not k.unsupported(problem, device) for k in KERNELS), case


@pytest.mark.parametrize("gpu", GPUS)
def test_decode_split_runs_every_case_without_quantised_keys(gpu: str) -> None:
    """So where another kernel lacks a schedule or cannot have the layout, this one is there."""
    for case in cases.PAIRWISE + cases.HOPPER + cases.EDGES:
        assert decode_split.unsupported(case.problem, GPUS[gpu]) == [], case


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_kernel_for_hopper_runs_its_cases(gpu: str) -> None:
    assert cases.HOPPER_ROWS == hopper_decode_split.WIDE
    for case in cases.HOPPER:
        assert hopper_decode_split_limits.unsupported(case.problem, GPUS[gpu]) == [], case
        taken = make_plan(case.problem, GPUS[gpu], policy="waves").kernel
        assert taken == "hopper_decode_split", case


DECODE_SCHEDULES = ("even", "batch", "fixed", *SCHEDULED)


@every_kernel
def test_a_kernel_has_every_schedule_or_says_which(kernel: Kernel) -> None:
    assert set(kernel.schedules) <= {"even", "batch", "fixed", *SCHEDULED, "items"}
    splits = dict.fromkeys(WHOLE_SEQUENCES, ("even", "fixed"))
    splits["hopper_prefill"] = ("even", "fixed", "items")
    splits |= dict.fromkeys(("hopper_decode_split", "decode_split"), DECODE_SCHEDULES)
    assert kernel.schedules == splits.get(kernel.name, ("even",))


@every_device
@every_kernel
def test_a_kernel_has_configs_wherever_it_runs(kernel: Kernel, gpu: str) -> None:
    """The policies take its shapes at one split, and at least one of them has to be there."""
    device = DEVICES[gpu]
    for case in CASES:
        if kernel.unsupported(case.problem, device):
            continue
        found = list(kernel.configs(case.problem, device))
        assert found, case
        assert len(set(found)) == len(found), case
        assert found[0].num_splits == 1, case
        if kernel.name in UNSPLIT:
            assert found == [Config()]


@every_kernel
def test_traffic_is_counted_for_every_case(kernel: Kernel) -> None:
    for case in CASES:
        if kernel.unsupported(case.problem, H200):
            continue
        config = next(iter(kernel.configs(case.problem, H200)))
        traffic = kernel.traffic(case.problem, config)
        assert isinstance(traffic, Traffic)
        numbers = (traffic.kv_bytes, traffic.q_bytes, traffic.out_bytes, traffic.flops)
        assert all(isinstance(n, int) and n > 0 for n in numbers), case
        assert traffic.partial_bytes >= 0 and traffic.bytes >= sum(numbers[:3])


@pytest.mark.parametrize("gpu", GPUS)
def test_configs_of_decode_split_are_legal(gpu: str) -> None:
    device = GPUS[gpu]
    for case in cases.PAIRWISE + cases.EDGES:
        problem = case.problem
        for config in decode_split.configs(problem, device):
            tiles = (config.tile_m, config.tile_n)
            assert all(16 <= tile <= 128 and tile & (tile - 1) == 0 for tile in tiles), case
            assert config.num_warps in (2, 4, 8) and config.num_stages >= 1, case
            assert config.tile_m == decode_split.tile_m(problem), case
            assert decode_split.shared_bytes(problem, config, device) <= device.smem_per_block, case
            default = Config()
            assert (config.schedule, config.programs, config.split_size) == (
                default.schedule,
                default.programs,
                default.split_size,
            ), case


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_configs_of_the_kernel_for_hopper_are_legal(gpu: str) -> None:
    device = GPUS[gpu]
    for case in cases.HOPPER:
        problem = case.problem
        anywhere = {config.tile_n for config in decode_split.configs(problem, device)}
        for config in hopper_decode_split_limits.configs(problem, device):
            assert config == Config(
                tile_m=config.tile_m,
                tile_n=config.tile_n,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                num_splits=config.num_splits,
                merge="cluster" if config.num_splits > 1 else "combine",
            ), case
            assert config.num_splits in (1, *CLUSTERS), case
            assert config.tile_m in hopper_decode_split_limits.rows_of_tile(problem), case
            assert config.num_warps == max(4, config.tile_m // 16), case
            nearest = min(anywhere, key=lambda tile_n: abs(tile_n - config.tile_n))
            assert config.tile_n % nearest == 0, "parts of whole tiles where TMA cannot be, too"
            boxes = config.tile_n // hopper_decode_split.box_rows(problem, config.tile_n)
            assert boxes * hopper_decode_split.box_rows(problem, config.tile_n) == config.tile_n
            shared = hopper_decode_split_limits.shared_bytes(problem, config)
            assert shared <= device.smem_per_block, case


@pytest.mark.parametrize(
    ("place", "rows"),
    [(Contiguous(), 64), (Paged(16), 16), (Paged(48), 16), (Paged(32), 32), (Paged(256), 64)],
    ids=str,
)
def test_keys_that_arrive_together_lie_in_one_page(place: Any, rows: int) -> None:
    assert hopper_decode_split.box_rows(replace(DECODE, place=place), 64) == rows


LIMITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kind": "dense"}, "kind dense: expected decode"),
    ({"dtype": "float64"}, "dtype float64: expected bfloat16, float16 or float32"),
    ({"head_dim": 72}, "head_dim 72: expected a multiple of 16 from 16 to 256"),
    ({"head_dim": 272}, "head_dim 272: expected a multiple of 16 from 16 to 256"),
    ({"head_dim_v": 8}, "head_dim_v 8: expected a multiple of 16 from 16 to 256"),
    ({"seqlen_q": 17}, "seqlen_q 17: expected at most 16"),
    ({"num_heads": 130}, "query heads a KV head 65: expected at most 64"),
    ({"batch": 65536}, "batch 65536: expected at most 65535"),
    (
        {"num_heads": 65536, "num_kv_heads": 65536},
        "KV heads x row tiles 65536: expected at most 65535",
    ),
    ({"dropout": True}, "dropout_p: expected 0"),
    ({"needs_grad": True}, "gradient: expected inputs that require none"),
)


@pytest.mark.parametrize(("change", "reason"), LIMITS, ids=lambda x: str(x)[:40])
def test_decode_split_says_each_limit(change: dict[str, Any], reason: str) -> None:
    assert decode_split.unsupported(replace(DECODE, **change), H200) == [reason]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 16, "head_dim_v": 256},
        {"seqlen_q": 16},
        {"num_heads": 128},
        {"batch": 65535},
        {"num_heads": 65535, "num_kv_heads": 65535},
    ],
    ids=str,
)
def test_decode_split_runs_at_each_limit(change: dict[str, Any]) -> None:
    assert decode_split.unsupported(replace(DECODE, **change), H200) == []


def test_decode_split_names_the_device_it_cannot_use() -> None:
    turing = replace(H200, name="NVIDIA T4", capability=(7, 5))
    assert decode_split.unsupported(DECODE, turing) == ["device sm_75: expected sm_80 or newer"]
    assert decode_split.unsupported(DECODE, CPU) == ["device cpu: expected cuda"]


ROWS = "query heads a KV head x query tokens"
HOPPER_LIMITS: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({"dtype": "float32"}, ["dtype float32: expected bfloat16 or float16"]),
    ({"head_dim": 80}, ["head_dim 80: expected 64, 128 or 256"]),
    ({"head_dim_v": 192}, ["head_dim_v 192: expected 64, 128 or 256"]),
    ({"num_heads": 26, "seqlen_q": 5}, [f"{ROWS} 65: expected at most 64"]),
    (
        {"num_heads": 66, "head_dim": 256, "codec": Codec("fp8", "head")},
        [f"{ROWS} 33: expected at most 32"],
    ),
    ({"place": Paged(1)}, ["page_size 1: expected a multiple of 16"]),
    ({"place": Paged(24)}, ["page_size 24: expected a multiple of 16"]),
    # what it shares with decode_split
    ({"kind": "dense"}, ["kind dense: expected decode"]),
    ({"num_heads": 2, "seqlen_q": 17}, ["seqlen_q 17: expected at most 16"]),
    ({"batch": 65536}, ["batch 65536: expected at most 65535"]),
    ({"dropout": True}, ["dropout_p: expected 0"]),
    ({"needs_grad": True}, ["gradient: expected inputs that require none"]),
    (
        {"dtype": "float32", "head_dim": 96, "place": Paged(8)},
        [
            "dtype float32: expected bfloat16 or float16",
            "head_dim 96: expected 64, 128 or 256",
            "page_size 8: expected a multiple of 16",
        ],
    ),
)


@pytest.mark.parametrize(("change", "reasons"), HOPPER_LIMITS, ids=lambda x: str(x)[:40])
def test_the_kernel_for_hopper_says_each_limit(change: dict[str, Any], reasons: list[str]) -> None:
    """And what it leaves alone, the next kernel runs."""
    problem = replace(DECODE, **change)
    assert hopper_decode_split_limits.unsupported(problem, H200) == reasons
    plan = make_plan(problem, H200)
    assert plan.kernel != "hopper_decode_split"
    assert dict(plan.rejected)["hopper_decode_split"] == tuple(reasons)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 256, "head_dim_v": 64},
        {"num_heads": 128},
        {"num_heads": 8, "seqlen_q": 16},
        {"num_heads": 64, "head_dim": 256, "codec": Codec("fp8", "head")},
        {"place": Paged(16)},
        {"place": Paged(48)},
        {"dtype": "float16"},
        {"batch": 65535},
        {"score": Score(True, True), "sink_logits": True, "mask": Mask(True, 9, -1, 2)},
    ],
    ids=str,
)
def test_the_kernel_for_hopper_runs_at_each_limit(change: dict[str, Any]) -> None:
    assert hopper_decode_split_limits.unsupported(replace(DECODE, **change), H200) == []


@every_device
def test_the_kernel_for_hopper_is_for_hopper(gpu: str) -> None:
    device = DEVICES[gpu]
    reasons = hopper_decode_split_limits.unsupported(DECODE, device)
    on_hopper = device.capability == (9, 0) and device.kind == "cuda"
    assert reasons == ([] if on_hopper else [f"device {device.arch}: expected sm_90"])
    assert (make_plan(DECODE, device).kernel == "hopper_decode_split") == on_hopper


def operands(**changes: torch.Tensor) -> Operands:
    given = {
        "q": torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16),
        "k": torch.zeros(2, 130, 2, 64, dtype=torch.bfloat16),
        "v": torch.zeros(2, 130, 2, 64, dtype=torch.bfloat16),
    }
    return Operands(**given | changes)


GAPS = {
    "after_heads": lambda x: torch.zeros(2, 130, 2, 68, dtype=x.dtype)[..., :64],
    "after_tokens": lambda x: torch.zeros(2, 130, 132, dtype=x.dtype)[..., :128].unflatten(
        2, x.shape[2:]
    ),
    "after_sequences": lambda x: torch.zeros(2, 130 * 128 + 4, dtype=x.dtype)[:, :-4].unflatten(
        1, x.shape[1:]
    ),
    "before_all": lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
}


@pytest.mark.parametrize("where", GAPS)
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_tma_cannot_describe(name: str, where: str) -> None:
    """Gaps of 8 bytes; the plan then names another kernel, and why."""
    assert hopper_decode_split.unfit(operands()) == []
    odd = operands(**{name: GAPS[where](operands().k)})
    reason = f"{name}: expected strides and an address that are multiples of 16 bytes"
    assert hopper_decode_split.unfit(odd) == [reason]
    plan = make_plan(DECODE, H200, unfit=lambda kernel: kernel.unfit(odd))
    assert plan.kernel == "decode_split"
    assert dict(plan.rejected)["hopper_decode_split"] == (reason,)


def test_what_tma_can_describe() -> None:
    """Heads before tokens, gaps of 16 bytes, and one cache for all sequences."""
    k = torch.zeros(2, 2, 140, 72, dtype=torch.bfloat16).transpose(1, 2)[:, :130, :, :64]
    v = torch.zeros(130, 2, 64, dtype=torch.bfloat16).expand(2, -1, -1, -1)
    assert hopper_decode_split.unfit(operands(k=k, v=v)) == []


def test_both_are_unfit() -> None:
    odd = {name: GAPS["before_all"](operands().k) for name in ("k", "v")}
    reasons = hopper_decode_split.unfit(operands(**odd))
    assert [reason.split(":")[0] for reason in reasons] == ["k", "v"]


def test_all_limits_are_said_at_once_in_order() -> None:
    problem = DECODE
    for change, _ in LIMITS:
        problem = replace(problem, **change)
    said = [reason.split(" ")[0] for reason in decode_split.unsupported(problem, CPU)]
    assert said == [
        *("kind", "device", "dtype", "head_dim", "head_dim_v", "seqlen_q"),
        *("batch", "KV", "dropout_p:", "gradient:"),
    ]


@pytest.mark.parametrize(("gpu", "most"), MOST_CALLS.items())
def test_a_new_plan_calls_few_functions(
    gpu: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, as times depend on the machine: of a cache with one sequence, where several kernels
    and many numbers of splits are weighed, and of the first plan of a process."""
    monkeypatch.setattr(registry, "_choices", {})
    problem = Problem("decode", 1, 32, 8, 128, 128, 1, 1000, mask=Mask(causal=True))
    made = partial(make_plan, problem, GPUS[gpu])
    kept = shared.shapes, shared.clusters, decode_cost.batch_of, short_queries.queries_of
    for cached in (*kept, persistent.best_known, tuned_tables.table_of):
        cached.cache_clear()
    first, again = functions_called(made), functions_called(made)
    assert again < first // 5 and first <= most, first


def test_the_plan_keeps_the_reasons_against_each_kernel() -> None:
    plan = make_plan(replace(DECODE, needs_grad=True), H200)
    assert plan.kernel != "decode_split"
    said = "gradient: expected inputs that require none"
    assert dict(plan.rejected)["decode_split"] == (said,)
    assert make_plan(DECODE, H200).kernel == "hopper_decode_split"
    assert make_plan(DECODE, GPUS["a100"]).kernel == "decode_split"
    assert make_plan(DECODE, CPU).kernel in UNSPLIT


@pytest.mark.parametrize("num_splits", [1, 3, 5])
def test_num_splits_overrides_the_policy(num_splits: int) -> None:
    plan = make_plan(replace(DECODE, seqlen_k=4096), H200, num_splits=num_splits)
    assert (plan.policy, plan.config.num_splits) == ("fixed", num_splits)


def test_a_policy_of_the_caller() -> None:
    plan = make_plan(DECODE, H200, policy=fixed.with_split_size(64))
    assert (plan.policy, plan.config.schedule, plan.config.split_size) == ("fixed", "fixed", 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_splits": -1}, "num_splits: expected 0 to 1024, got -1"),
        ({"num_splits": 2000}, "num_splits: expected 0 to 1024, got 2000"),
        ({"num_splits": 2.0}, "num_splits: expected an integer, got 2.0"),
        ({"num_splits": True}, "num_splits: expected an integer, got True"),
        (
            {"policy": "x"},
            f"policy: expected {', '.join(map(repr, [*POLICIES][:-1]))} or {[*POLICIES][-1]!r}, "
            "got 'x'",
        ),
    ],
    ids=str,
)
def test_make_plan_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(DECODE, H200, **arguments)
    assert str(error.value) == message


def test_unsupported_problem_lists_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reason of every kernel, under the problem and the device."""
    candidates = tuple(k for k in KERNELS if k.name != "torch_math")  # which has no limits
    monkeypatch.setattr("splitkv.planner.registry.KERNELS", candidates)
    problem = replace(
        DECODE,
        head_dim=72,
        dtype="float64",
        seqlen_q=32,
        place=Paged(16),
        score=Score(softcap=True),
        return_lse=True,
    )
    with pytest.raises(UnsupportedProblem) as error:
        make_plan(problem, H200)
    assert error.value.problem is problem and error.value.device is H200
    assert str(error.value) == (
        "no kernel can run this problem on NVIDIA H200 (sm_90, 132 SMs)\n"
        "  decode: batch 2, heads 8/2, head_dim 72/64, seqlen_q 32, seqlen_k <=130, float64, "
        "kv paged(16), mask causal, softcap, return lse\n"
        "  hopper_decode_split       dtype float64: expected bfloat16, float16 or float32\n"
        "                            head_dim 72: expected a multiple of 16 from 16 to 256\n"
        "                            seqlen_q 32: expected at most 16\n"
        "                            dtype float64: expected bfloat16 or float16\n"
        "                            head_dim 72: expected 64, 128 or 256\n"
        "                            query heads a KV head x query tokens 128: expected at most "
        "64\n"
        "  decode_split              dtype float64: expected bfloat16, float16 or float32\n"
        "                            head_dim 72: expected a multiple of 16 from 16 to 256\n"
        "                            seqlen_q 32: expected at most 16\n"
        "  hopper_prefill            dtype float64: expected bfloat16, float16 or float32\n"
        "                            dtype float64: expected bfloat16 or float16\n"
        "                            head_dim/head_dim_v 72/64: expected multiples of 8 in tiles "
        "of one of 64/64, 128/128, 256/256, 192/128\n"
        "  hopper_prefill_quantised  dtype float64: expected bfloat16, float16 or float32\n"
        "                            dtype float64: expected bfloat16 or float16\n"
        "                            kv as_is: expected int8 or fp8\n"
        "                            head_dim/head_dim_v 72/64: expected 64/64 or 128/128\n"
        "  hopper_prefill_half       dtype float64: expected bfloat16, float16 or float32\n"
        "                            dtype float64: expected bfloat16 or float16\n"
        "                            kv as_is: expected int8 or fp8\n"
        "                            head_dim/head_dim_v 72/64: expected 64/64 or 128/128\n"
        "  hopper_prefill_widened    dtype float64: expected bfloat16, float16 or float32\n"
        "                            dtype float64: expected bfloat16 or float16\n"
        "                            head_dim/head_dim_v 72/64: expected multiples of 8 in tiles "
        "of one of 64/64, 128/128, 256/256, 192/128\n"
        "                            kv as_is: expected int8, fp8 or fp8_e5m2\n"
        "  prefill                   dtype float64: expected bfloat16, float16 or float32\n"
        "  torch_sdpa                softcap: expected 0, got a soft cap\n"
        "                            return_lse: expected False, got True"
    )


@pytest.mark.parametrize("longest", [1, 5, 33, 200, 1000, 4096, 5000])
def test_every_length_is_decided_as_one_of_those_told(longest: int) -> None:
    told = decided_lengths(longest)
    assert told == sorted(set(told), reverse=True) and told[0] == longest and told[-1] == 1
    assert {min(rounded_up(keys), longest) for keys in range(1, longest + 1)} <= set(told)


@pytest.mark.parametrize("seqlen", [1024, 16384])
def test_whole_sequences_take_the_kernel_for_hopper(seqlen: int) -> None:
    problem = Problem("dense", 4, 32, 8, 128, 128, seqlen, seqlen, mask=Mask(causal=True))
    for of in (problem, replace(problem, needs_grad=True)):
        assert make_plan(of, GPUS["h200"]).kernel == "hopper_prefill"
        assert make_plan(of, GPUS["l4"]).kernel == "prefill"

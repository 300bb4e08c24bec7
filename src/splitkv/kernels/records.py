"""The record of each kernel: what a planner knows of it, and its launcher.

A launcher, and with it device code, Triton and torch, is imported when it is first bound: a plan is
made without.
"""

from __future__ import annotations

from typing import Any

from splitkv.core.plan import SCHEDULED, Kernel, Plan
from splitkv.core.problem import Operands
from splitkv.kernels import torch_math, torch_sdpa
from splitkv.kernels.hopper.primitives import tma_limits
from splitkv.kernels.host import partition
from splitkv.kernels.limits import (
    decode_split,
    hopper_decode_split,
    hopper_prefill,
    hopper_prefill_half,
    hopper_prefill_quantised,
    hopper_prefill_widened,
    prefill,
    scale_layout,
)

HOST_RULES = ("even", "fixed")  # values of Config.schedule that whole sequences have
ITEM_RULES = (*HOST_RULES, "items")  # those of the ones that have a schedule of packed sequences
EVERY_RULE = ("even", "batch", "fixed", *SCHEDULED)  # those of decode


def _hopper_decode_split(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.hopper.decode.kernel import bind

    return bind(plan, operands)


def _decode_split(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.decode_split import bind

    return bind(plan, operands)


def _hopper_prefill(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.hopper.prefill.kernel import bind

    return bind(plan, operands)


def _hopper_prefill_quantised(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.hopper.prefill.quantised import bind

    return bind(plan, operands)


def _hopper_prefill_half(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.hopper.prefill.half import WidenedValues

    return WidenedValues(plan, operands)


def _hopper_prefill_widened(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.hopper.prefill.widened import WidenedOperands

    return WidenedOperands(plan, operands)


def _prefill(plan: Plan, operands: Operands) -> Any:
    from splitkv.kernels.prefill import PrefillLauncher

    return PrefillLauncher(plan, operands)


HOPPER_DECODE_SPLIT = Kernel(
    name=hopper_decode_split.NAME,
    unsupported=hopper_decode_split.unsupported,
    configs=hopper_decode_split.configs,
    variants=hopper_decode_split.variants,
    traffic=hopper_decode_split.traffic,
    bind=_hopper_decode_split,
    unfit=hopper_decode_split.unfit,
    refit=hopper_decode_split.refit,
    schedules=EVERY_RULE,
    merges=("combine", "cluster"),
    apart=decode_split.apart,
)
DECODE_SPLIT = Kernel(
    name=decode_split.NAME,
    unsupported=decode_split.unsupported,
    configs=decode_split.configs,
    traffic=partition.traffic,
    bind=_decode_split,
    unfit=scale_layout.unfit,
    schedules=EVERY_RULE,
    apart=decode_split.apart,
)
HOPPER_PREFILL = Kernel(
    name=hopper_prefill.NAME,
    unsupported=hopper_prefill.unsupported,
    configs=hopper_prefill.configs,
    variants=hopper_prefill.variants,
    gradients=prefill.backward_variants,
    traffic=prefill.traffic,
    bind=_hopper_prefill,
    unfit=tma_limits.unfit,
    refit=hopper_prefill.refit,
    schedules=ITEM_RULES,
    merges=("combine", "last"),
)
HOPPER_PREFILL_QUANTISED = Kernel(
    name=hopper_prefill_quantised.NAME,
    unsupported=hopper_prefill_quantised.unsupported,
    configs=hopper_prefill_quantised.configs,
    variants=hopper_prefill_quantised.variants,
    traffic=hopper_prefill_quantised.traffic,
    bind=_hopper_prefill_quantised,
    unfit=tma_limits.unfit,
    refit=hopper_prefill_quantised.refit,
    schedules=HOST_RULES,
    merges=("combine", "last", "cluster"),
)
HOPPER_PREFILL_HALF = Kernel(
    name=hopper_prefill_half.NAME,
    unsupported=hopper_prefill_half.unsupported,
    configs=hopper_prefill_half.configs,
    variants=hopper_prefill_half.variants,
    traffic=hopper_prefill_half.traffic,
    bind=_hopper_prefill_half,
    unfit=hopper_prefill_half.unfit,
    refit=hopper_prefill_half.refit,
    schedules=HOST_RULES,
    merges=("combine", "last"),
)
HOPPER_PREFILL_WIDENED = Kernel(
    name=hopper_prefill_widened.NAME,
    unsupported=hopper_prefill_widened.unsupported,
    configs=hopper_prefill_widened.configs,
    variants=hopper_prefill_widened.variants,
    traffic=hopper_prefill_widened.traffic,
    bind=_hopper_prefill_widened,
    unfit=hopper_prefill_widened.unfit,
    schedules=HOST_RULES,
    merges=("combine", "last"),
)
PREFILL = Kernel(
    name=prefill.NAME,
    unsupported=prefill.unsupported,
    configs=prefill.configs,
    gradients=prefill.backward_variants,
    traffic=prefill.traffic,
    bind=_prefill,
    refit=prefill.refit,
    schedules=HOST_RULES,
    merges=("combine", "last"),
)
TORCH_SDPA = Kernel(
    name="torch_sdpa",
    unsupported=torch_sdpa.unsupported,
    configs=torch_sdpa.configs,
    traffic=torch_sdpa.traffic,
    bind=torch_sdpa.bind,
)
TORCH_MATH = Kernel(
    name="torch_math",
    unsupported=torch_math.unsupported,
    configs=torch_math.configs,
    traffic=torch_math.traffic,
    bind=torch_math.bind,
)

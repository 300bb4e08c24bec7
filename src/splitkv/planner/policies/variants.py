"""The choice of a variant: which one of a kernel's runs with the numbers of a plan.

A kernel lists the variants that it can run beside a config (`Kernel.variants`); each function here
chooses one of them. Thresholds are constants; what they were taken from is in
measurements/thresholds.md#variants-of-decode-on-hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from splitkv.core.device import MiB
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import SCHEDULED, Config
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE, box_rows, visited
from splitkv.core.variants import (
    HopperDecode,
    HopperPrefill,
    HopperPrefillQuantised,
    Variant,
)

# A producer warp issues copies of tiles of many boxes where the keys and values of all sequences
# are so many elements and a split has so many tiles; of 8 bits: where rows are gathered instead.
LARGE_CACHE, LONG_SPLIT = 32 * MiB, 16
LARGE_CACHE_8BIT, LONG_SPLIT_8BIT = 16 * MiB, 4
SMALL_PAGE = 64  # keys: pages of no multiple of it are gathered where elements have 8 bits
MOST_HEADS_IN_BULK = 8  # KV heads whose scales are copied in one piece; a program keeps one's
LONG_IN_BULK = 2  # rings that a split of several heads has more tiles than, to copy scales in bulk


def hopper_decode(problem: Problem, config: Config) -> HopperDecode:
    """The variant of decode on Hopper."""
    load: Literal["tma", "producer_warp", "gather"] = "tma"
    key_scales: Literal["none", "per_tile", "preloaded", "bulk"] = "none"
    if config.schedule in SCHEDULED or has_producer_warp(problem, config):
        load = "producer_warp"
    elif gathers(problem, config):
        load = "gather"
    if problem.codec.granularity == "token":
        key_scales = "per_tile"
        if preloads_scales(problem, config):
            key_scales = "preloaded"
        elif copies_scales_in_bulk(problem, config):
            key_scales = "bulk"
    return HopperDecode(load, key_scales)


def large_cache(problem: Problem) -> int:
    """Elements of keys and values from which on a producer warp may gain."""
    return LARGE_CACHE if problem.codec == AS_IS else LARGE_CACHE_8BIT


def long_split(problem: Problem) -> int:
    """Tiles of a split from which on a producer warp may gain."""
    return LONG_SPLIT if problem.codec == AS_IS else LONG_SPLIT_8BIT


def has_producer_warp(problem: Problem, config: Config) -> bool:
    """Whether a warp that does not multiply issues copies: those of many boxes, in long splits of
    large caches, where splits are even. Clusters of more than two do not all find room at once."""
    boxes = config.tile_n // box_rows(problem, config.tile_n)
    narrow = config.tile_m == 16 and config.num_stages > 1
    even = config.schedule == "even" and (config.merge == "combine" or config.num_splits == 2)
    alone = even and not problem.early_kv and not config.appends
    if boxes == 1 or not narrow or not alone:
        return False
    large = problem.kv_bytes >= large_cache(problem) * problem.kv_element_bytes
    return large and visited(problem, config.tile_n) >= long_split(problem) * config.num_splits


def gathers(problem: Problem, config: Config) -> bool:
    """Whether all threads copy rows, and not TMA: boxes of a few keys of 8 bits are so small that
    issuing each of them takes longer, but for a warp of its own."""
    small = isinstance(problem.place, Paged) and problem.place.page_size % SMALL_PAGE > 0
    alike = problem.head_dim == problem.head_dim_v
    narrow = problem.codec != AS_IS and config.tile_m < WIDE
    return small and alike and narrow and not has_producer_warp(problem, config)


def issues_all_tiles_first(problem: Problem, config: Config) -> bool:
    """Whether all tiles of a split are on their way before the first is worked on: as many as the
    ring has stages at most, where sequences are as long as they may be."""
    even = config.schedule == "even" and not problem.early_kv and not config.appends
    return even and visited(problem, config.tile_n) <= config.num_splits * config.num_stages


def preloads_scales(problem: Problem, config: Config) -> bool:
    """Whether scales of keys are loaded before the tiles, all of which are on their way at once."""
    token = problem.codec.granularity == "token" and config.tile_m < WIDE
    first = issues_all_tiles_first(problem, config)
    return token and first and not has_producer_warp(problem, config)


def may_copy_scales_in_bulk(problem: Problem, config: Config) -> bool:
    """Whether scales of keys can be copied as they lie, those of all KV heads, of which a program
    keeps few."""
    token = problem.codec.granularity == "token" and config.tile_m < WIDE
    whole = box_rows(problem, config.tile_n) == config.tile_n and not gathers(problem, config)
    return token and whole and problem.num_kv_heads <= MOST_HEADS_IN_BULK


def copies_scales_in_bulk(problem: Problem, config: Config) -> bool:
    """Whether they are: in long splits; not beside new tokens, which would have to be fenced off
    once more."""
    heads, most = problem.num_kv_heads, LONG_IN_BULK * config.num_stages * config.num_splits
    long = heads == 1 or visited(problem, config.tile_n) > most
    apart = preloads_scales(problem, config) or problem.early_kv or config.appends
    apart = apart or config.schedule in SCHEDULED
    return may_copy_scales_in_bulk(problem, config) and long and not apart


def hopper_prefill(problem: Problem, config: Config, legal: Sequence[Variant]) -> Variant:
    """The variant of `hopper_prefill` and its like: results leave by a place of their own, q of the
    next row tile is loaded meanwhile, and maxima are lazy, each wherever there is room."""

    def worth(variant: Variant) -> tuple[bool, int, bool]:
        assert isinstance(variant, HopperPrefill)
        return variant.out == "own_tiles", variant.q_stages, variant.maxima == "lazy"

    return max(legal, key=worth)


def hopper_prefill_quantised(problem: Problem, config: Config, legal: Sequence[Variant]) -> Variant:
    """The variant of `hopper_prefill_quantised`: items by the place in the grid, and two stages of
    q, wherever they can be."""

    def worth(variant: Variant) -> tuple[bool, int]:
        assert isinstance(variant, HopperPrefillQuantised)
        return variant.items == "by_grid", variant.q_stages

    return max(legal, key=worth)


CHOOSERS: dict[str, Callable[[Problem, Config, Sequence[Variant]], Variant]] = {
    "hopper_decode_split": lambda problem, config, legal: hopper_decode(problem, config),
    "hopper_prefill": hopper_prefill,
    "hopper_prefill_quantised": hopper_prefill_quantised,
    "hopper_prefill_half": hopper_prefill,
    "hopper_prefill_widened": hopper_prefill,
}
"""By kernel, of those that have several variants, the function that chooses one."""

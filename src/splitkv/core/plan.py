"""The decision as a value: which kernel runs, with which numbers, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any, ClassVar, Literal

from splitkv.core.device import Device
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.problem import Operands, Problem
from splitkv.core.values import Value

WIDE = 64  # packed rows of a tile of decode on Hopper that a warpgroup multiplies by wgmma
MOST_IN_BULK = 8  # KV heads: see `scales_in_bulk`
# Elements of keys and values, tiles of a part, see `asked_apart`; where that is `eased`.
LARGE, LONG = (32 << 20, 16 << 20), (16, 4)

SCHEDULED = "ranges", "head_ranges", "proportional"
"""The values of Config.schedule by which a schedule of the step says what programs work on."""


@dataclass(frozen=True, slots=True)
class Plain(Value):
    """The variant of kernels that have nothing to choose but the numbers of a Config."""

    TAG: ClassVar[str | None] = "plain"


@dataclass(frozen=True, slots=True)
class HopperDecode(Value):
    """What decode on Hopper alone can choose: how tiles and scales of keys arrive.

    load        tma: the warps that multiply issue TMA copies; producer_warp: a warp that does not
                multiply issues them; gather: all warps copy rows
    start       producer_warp: it begins before_q or after_q is read
    key_scales  scales of each key: none; per_tile, beside their tile; preloaded, before the tiles;
                bulk, those of all KV heads together
    """

    TAG: ClassVar[str | None] = "hopper_decode"

    load: Literal["tma", "producer_warp", "gather"] = "tma"
    start: Literal["before_q", "after_q"] = "after_q"
    key_scales: Literal["none", "per_tile", "preloaded", "bulk"] = "none"


@dataclass(frozen=True, slots=True)
class Config(Value):
    """The numbers of a decision.

    num_splits   most parts that the keys of one sequence and KV head are cut into
    schedule     even: every sequence is cut into num_splits parts by its own length;
                 batch: `programs` parts a KV head and row tile are shared out over the whole batch
                 on the device, each sequence getting parts in proportion to its length (even, on
                 whole sequences: programs that go through the row tiles, 0: one each);
                 fixed: parts of `split_size` keys whatever else is in the batch, so that the bits
                 of a row do not depend on its neighbours;
                 ranges, head_ranges, proportional: a schedule of the step, made on the device,
                 says where each of `programs` programs starts; see kernels/schedule.py
    tile_m       packed query rows a program; tile_n: keys a step
    num_stages   tiles of keys and values that a program has in flight
    pack_gqa     the query heads of a KV head share one program
    merge        combine: the parts of a row are merged by a second kernel; cluster: by the programs
                 that made them, which run together; last: by those that come last, in one launch;
                 pairs: two and two by their programs, and then by the pair that comes last
    appends      the kernel writes new tokens itself; without it `append` runs before the kernel
    variant      what the kernel alone can choose: set by the plan that has the config
    """

    num_splits: int = 1
    tile_m: int = 16
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    schedule: Literal["even", "batch", "fixed", "ranges", "head_ranges", "proportional"] = "even"
    programs: int = 0
    split_size: int = 0
    pack_gqa: bool = True
    merge: Literal["combine", "cluster", "last", "pairs"] = "combine"
    appends: bool = False
    variant: Plain | HopperDecode = Plain()

    @property
    def clustered(self) -> bool:
        """Whether programs are clusters, which merge."""
        return self.merge in ("cluster", "pairs")

    @property
    def shape(self) -> Config:
        """The config of this tile with one split."""
        return replace(self, num_splits=1, merge="combine", appends=False, variant=Plain())


def shares_of(config: Config) -> str:
    """What a schedule of the step was made for, of a config."""
    tile = f"tiles of {config.tile_m} x {config.tile_n}"
    return f"{config.schedule} of {config.programs} programs, {tile}"


def box_rows(problem: Problem, tile_n: int) -> int:
    """Keys that arrive in one copy by TMA: a tile, or what of it lies in one page."""
    if isinstance(problem.place, Paged):
        page_size = problem.place.page_size
        return min(tile_n, page_size & -page_size)
    return tile_n


def visited(problem: Problem, tile_n: int) -> int:
    """Tiles of a sequence as long as it may be: tile/band.py on the host."""
    tiles = end = 0
    for lo, hi in problem.span:
        first, end = max(lo // tile_n, end), -(-hi // tile_n)
        tiles += end - first
    return tiles


def eased(problem: Problem) -> bool:
    """Whether `asked_apart` is so of smaller caches and shorter parts: of 8 bits, where rows are
    gathered instead."""
    return problem.codec != AS_IS


def asked_apart(problem: Problem, config: Config) -> bool:
    """Whether a warp of decode on Hopper that does not multiply asks for tiles: those of many
    boxes, in long parts of large caches. Of 16 bits, with 16 tiles or more a part it gained 0.3 to
    12 %, with 8 lost up to 4 %. Of 8 bits, where rows are gathered instead, it gained 4 to 10 %
    with 4 to 8 tiles of 17 and 34 MB and lost 1 to 9 % with one and two of 8 MB. Clusters of four
    were up to 13 % slower, as not all of them found room at once."""
    boxes = config.tile_n // box_rows(problem, config.tile_n)
    narrow = config.tile_m == 16 and config.num_stages > 1
    large = problem.kv_bytes >= LARGE[eased(problem)] * problem.kv_element_bytes
    even = config.schedule == "even" and (config.merge == "combine" or config.num_splits == 2)
    alone = even and not problem.early_kv and not config.appends
    long = visited(problem, config.tile_n) >= LONG[eased(problem)] * config.num_splits
    return boxes > 1 and narrow and large and alone and long


def asked_early(problem: Problem, config: Config) -> bool:
    """Whether that warp begins before q is read: 1 to 10 % faster, but with several KV heads and 32
    tiles or more a part 1 % slower, and 1 to 4 % with 16 of 16 bits or with a scale a key."""
    shared = problem.codec != AS_IS and problem.codec.granularity != "token"
    few = 32 if shared else 16
    return problem.num_kv_heads == 1 or visited(problem, config.tile_n) < few * config.num_splits


def gathers(problem: Problem, config: Config) -> bool:
    """Whether decode on Hopper has rows copied by all threads and not by TMA: boxes of a few keys
    of 8 bits are so small that asking for each of them takes longer, but for a warp of its own."""
    small = isinstance(problem.place, Paged) and problem.place.page_size % 64 > 0
    alike = problem.head_dim == problem.head_dim_v
    narrow = problem.codec != AS_IS and config.tile_m < WIDE
    return small and alike and narrow and not asked_apart(problem, config)


def asked_at_once(problem: Problem, config: Config) -> bool:
    """Whether decode on Hopper asks for all tiles of a part before the first is worked on: as many
    as slots at most, where sequences are as long as they may be."""
    even = config.schedule == "even" and not problem.early_kv and not config.appends
    return even and visited(problem, config.tile_n) <= config.num_splits * config.num_stages


def ring_holds_all(problem: Problem, config: Config) -> bool:
    """Whether it does whatever the lengths are: a window of a shorter sequence may have a tile
    more."""
    return asked_at_once(problem, config) and problem.mask.left is None


def scales_at_once(problem: Problem, config: Config) -> bool:
    """Whether decode on Hopper loads scales of keys before it asks for the tiles, which is for all
    of a part at once: up to 11 % faster. Where tiles follow, whose scales are waited for, it was up
    to 4 % slower."""
    token = problem.codec.granularity == "token" and config.tile_m < WIDE
    return token and asked_at_once(problem, config) and not asked_apart(problem, config)


def may_be_in_bulk(problem: Problem, config: Config) -> bool:
    """Whether decode on Hopper has scales of keys copied as they lie in long parts: those of all KV
    heads, of which a program keeps few."""
    token = problem.codec.granularity == "token" and config.tile_m < WIDE
    whole = box_rows(problem, config.tile_n) == config.tile_n and not gathers(problem, config)
    return token and whole and problem.num_kv_heads <= MOST_IN_BULK


def scales_in_bulk(problem: Problem, config: Config) -> bool:
    """Whether it does: not where all are loaded at once, nor beside new tokens, which would have to
    be fenced off once more. Of several heads parts of four tiles were up to 4 % slower so, longer
    ones up to 12 % faster."""
    heads, most = problem.num_kv_heads, 2 * config.num_stages * config.num_splits
    long = heads == 1 or visited(problem, config.tile_n) > most
    apart = scales_at_once(problem, config) or problem.early_kv or config.appends
    apart = apart or config.schedule in SCHEDULED
    return may_be_in_bulk(problem, config) and long and not apart


def hopper_decode(problem: Problem, config: Config) -> HopperDecode:
    """The variant of decode on Hopper for a problem and the numbers of a plan."""
    load: Literal["tma", "producer_warp", "gather"] = "tma"
    start: Literal["before_q", "after_q"] = "after_q"
    key_scales: Literal["none", "per_tile", "preloaded", "bulk"] = "none"
    if config.schedule in SCHEDULED:
        load, start = "producer_warp", "before_q"
    elif asked_apart(problem, config):
        load, start = "producer_warp", "before_q" if asked_early(problem, config) else "after_q"
    elif gathers(problem, config):
        load = "gather"
    if problem.codec.granularity == "token":
        key_scales = "per_tile"
        if scales_at_once(problem, config):
            key_scales = "preloaded"
        elif scales_in_bulk(problem, config):
            key_scales = "bulk"
    return HopperDecode(load, start, key_scales)


def expect_variant(problem: Problem, config: Config) -> None:
    """A variant of decode on Hopper that computes the problem with these numbers."""
    variant, name = config.variant, "plan.config.variant"
    if not isinstance(variant, HopperDecode):
        return
    hint = "variant=Plain() has the kernel choose"
    narrow, boxes = config.tile_m < WIDE, config.tile_n // box_rows(problem, config.tile_n)
    alone = not problem.early_kv and not config.appends
    if config.schedule in SCHEDULED:
        expect(narrow, "plan.config.tile_m", f"less than {WIDE} with a schedule", config.tile_m)
        expect_one_of(f"{name}.load", variant.load, ("producer_warp",), hint)
        expect_one_of(f"{name}.start", variant.start, ("before_q",), hint)
    elif variant.load == "producer_warp":
        apart = boxes > 1 and config.tile_m == 16 and config.num_stages > 1
        apart = apart and config.schedule == "even" and alone
        expect(apart, f"{name}.load", "'tma' or 'gather'", variant.load, hint)
    if variant.load == "gather":
        rows = isinstance(problem.place, Paged) and problem.codec != AS_IS and narrow
        rows = rows and problem.head_dim == problem.head_dim_v
        expect(rows, f"{name}.load", "'tma'", variant.load, hint)
    ways = ["none"]
    if problem.codec.granularity == "token":
        ways = ["per_tile"]
        if narrow and alone and variant.load != "producer_warp":
            ways.append("preloaded")
            if boxes == 1 and variant.load == "tma" and problem.num_kv_heads <= MOST_IN_BULK:
                ways.append("bulk")
    expect_one_of(f"{name}.key_scales", variant.key_scales, ways, hint)


def ring_of(problem: Problem, config: Config) -> Literal["holds_split", "wraps"]:
    """Whether no split of decode on Hopper has more tiles than the ring has stages, whatever the
    lengths are; where a producer warp begins after q is read, it treats all alike."""
    variant = config.variant
    late = isinstance(variant, HopperDecode) and variant.load == "producer_warp"
    late = late and isinstance(variant, HopperDecode) and variant.start == "after_q"
    holds = ring_holds_all(problem, config) and config.tile_m < WIDE and not late
    return "holds_split" if holds else "wraps"


VARIANTS: dict[str, Callable[[Problem, Config], Plain | HopperDecode]] = {
    "hopper_decode_split": hopper_decode
}
"""Of the kernels that have a variant, the function that chooses it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and operations a kernel and config cost on a problem."""

    kv_bytes: int
    q_bytes: int
    out_bytes: int
    partial_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.kv_bytes + self.q_bytes + self.out_bytes + self.partial_bytes


@dataclass(frozen=True)
class Kernel:
    """One algorithm: its limits, its configurations, its traffic and how to launch it.

    unsupported(problem, device) -> every reason against, one line each; empty: it can
    configs(problem, device)     -> every legal Config, the cheapest first
    traffic(problem, config)     -> Traffic
    bind(plan, operands)         -> a launcher for this plan and memory layout: called with operands
                                    of that layout, it runs and returns (out, lse or None)
    apart(problem)               -> every reason why new tokens are appended by a launch apart;
                                    empty: the kernel can write them itself
    unfit(operands)              -> every reason of the memory layout against, which no Problem says
    refit(plan, operands)        -> the plan for a memory layout that another variant is for
    schedules                    the values of Config.schedule that it has
    merges                       those of Config.merge
    """

    name: str
    unsupported: Callable[[Problem, Device], list[str]]
    configs: Callable[[Problem, Device], Iterator[Config]]
    traffic: Callable[[Problem, Config], Traffic]
    bind: Callable[[Plan, Operands], Callable[[Operands], tuple[Any, Any]]] = field(repr=False)
    unfit: Callable[[Operands], list[str]] = field(default=lambda operands: [], repr=False)
    refit: Callable[[Plan, Operands], Plan] = field(default=lambda plan, operands: plan, repr=False)
    schedules: tuple[str, ...] = ("even",)
    merges: tuple[str, ...] = ("combine",)
    apart: Callable[[Problem], list[str]] = field(
        default=lambda problem: ["it writes no new tokens"], repr=False
    )

    def launch(self, operands: Operands, plan: Plan) -> tuple[Any, Any]:
        """Bind and run once."""
        return self.bind(plan, operands)(operands)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy returns."""

    kernel: str
    config: Config
    why: str


@dataclass(frozen=True)
class Plan(Value):
    """A decision: pass it back as `plan=` to skip deciding, print it, store it, compare it.

    A kernel that has variants is given the one that `VARIANTS` chooses where the config has none.
    """

    problem: Problem
    device: Device
    policy: str
    kernel: str
    config: Config
    why: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        parts = self.config.num_splits
        merges = self.config.merge != "cluster" or parts > 1
        expect(merges, "merge", "parts for a cluster to merge", parts)
        even = self.config.merge != "pairs" or (parts > 2 and parts % 2 == 0)
        expect(even, "merge", "several pairs of parts", parts)
        numbers = self.config.num_splits, self.config.tile_n, self.config.num_stages
        legal = all(isinstance(n, Integral) and n >= 1 for n in numbers)  # else it is refused later
        if legal and self.kernel in VARIANTS and isinstance(self.config.variant, Plain):
            chosen = VARIANTS[self.kernel](self.problem, self.config)
            object.__setattr__(self, "config", replace(self.config, variant=chosen))

    @cached_property
    def handle(self) -> str:
        """All of the plan as a string, for compiled graphs and files, which cannot hold it."""
        return json.dumps(self.as_dict(), separators=(",", ":"))


@lru_cache(maxsize=4096)
def plan_with_handle(handle: str) -> Plan:
    """The plan with this handle, wherever that was made; the same one while it is in use."""
    try:
        data = json.loads(handle)
    except ValueError:
        raise ValueError(f"plan: expected the handle of a plan, got {handle!r}") from None
    return Plan.from_dict(data)

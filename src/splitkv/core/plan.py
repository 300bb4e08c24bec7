"""The decision as a value: which kernel runs, with which numbers, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal
from weakref import WeakValueDictionary

from splitkv.core.device import Device
from splitkv.core.errors import expect
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import SPLIT_TILES
from splitkv.core.values import Value
from splitkv.core.variants import Gradients, Plain, Variant

SCHEDULED = "ranges", "head_ranges", "proportional"
Rule = Literal["even", "batch", "fixed", "ranges", "head_ranges", "proportional", "items"]
"""The values of Config.schedule by which a schedule of the step says what programs work on."""


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
                 says where each of `programs` programs starts; see kernels/schedule.py;
                 items: a schedule of row tiles of prompts and of splits of few queries, these of
                 `split_size` keys or more, each a program: see kernels/schedule_items.py
    tile_m       packed query rows a program; tile_n: keys a step
    num_stages   tiles of keys and values that a program has in flight
    pack_gqa     the query heads of a KV head share one program
    merge        combine: the parts of a row are merged by a second kernel; cluster: by the programs
                 that made them, which run together; last: by those that come last, in one launch
    appends      the kernel writes new tokens itself; without it `append` runs before the kernel
    split_tiles  what a split costs beside its tiles, in tiles, where ranges are cut
    variant      what the kernel alone can choose: core/variants.py; Plain of one that has several:
                 chosen where a plan is made or taken
    """

    num_splits: int = 1
    tile_m: int = 16
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    schedule: Rule = "even"
    programs: int = 0
    split_size: int = 0
    pack_gqa: bool = True
    merge: Literal["combine", "cluster", "last"] = "combine"
    appends: bool = False
    variant: Variant = Plain()
    split_tiles: int = SPLIT_TILES

    @property
    def shape(self) -> Config:
        """The config of this tile with one split."""
        return _shape_of(self)


@cache  # kernels list the same few for every problem
def tile_config(
    tile_m: int,
    tile_n: int,
    num_warps: int,
    num_stages: int,
    *,
    programs: int = 0,
    pack_gqa: bool = True,
    in_cluster: int = 1,
) -> Config:
    """The config of a tile shape in one split, or in as many as a cluster has."""
    merge: Literal["combine", "cluster"] = "combine" if in_cluster == 1 else "cluster"
    tile = tile_m, tile_n, num_warps, num_stages
    return Config(in_cluster, *tile, programs=programs, pack_gqa=pack_gqa, merge=merge)


@lru_cache(maxsize=4096)  # policies ask for it of the same few configs with every cost they weigh
def _shape_of(config: Config) -> Config:
    by_items = config.schedule == "items"
    return replace(
        config,
        num_splits=1,
        schedule="even" if by_items else config.schedule,
        split_size=0 if by_items else config.split_size,
        split_tiles=SPLIT_TILES,
        merge="combine",
        appends=False,
        variant=Plain(),
    )


def shares_of(config: Config) -> str:
    """The numbers of a config that a schedule of the step was made for."""
    tile = f"tiles of {config.tile_m} x {config.tile_n}"
    split = f"a split counts as {config.split_tiles}"
    return f"{config.schedule} of {config.programs} programs, {tile}, {split}"


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


def _only_plain(problem: Problem, device: Device, config: Config) -> list[Variant]:
    return [Plain()]


@dataclass(frozen=True)
class Kernel:
    """One algorithm: its limits, its configurations, its traffic and how to launch it.

    unsupported(problem, device) -> every reason against, one line each; empty: it can
    configs(problem, device)     -> every legal Config without its variant, the cheapest first
    variants(problem, device, config)
                                 -> every legal Config.variant beside the numbers of a config
    gradients(problem, device)   -> every legal Plan.backward without its row splits, the best
                                    first; none: the kernel has no gradient of its own
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
    variants: Callable[[Problem, Device, Config], list[Variant]] = field(
        default=_only_plain, repr=False
    )
    gradients: Callable[[Problem, Device], Iterable[Gradients]] = field(
        default=lambda problem, device: (), repr=False
    )
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
    """The answer of a policy."""

    kernel: str
    config: Config
    why: str


@dataclass(frozen=True)
class Plan(Value):
    """A decision: pass it back as `plan=` to skip deciding, print it, store it, compare it.

    backward   what makes the gradients, where the problem needs them and the kernel has them
    """

    problem: Problem
    device: Device
    policy: str
    kernel: str
    config: Config
    why: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    backward: Gradients | None = None

    def __new__(cls, *_: Any, **__: Any) -> Plan:  # of copies and unpickled ones too
        made = super().__new__(cls)
        _alive[id(made)] = made
        return made

    def __post_init__(self) -> None:
        parts = self.config.num_splits
        merges = self.config.merge != "cluster" or parts > 1
        expect(merges, "merge", "parts for a cluster to merge", parts)

    @cached_property
    def handle(self) -> str:
        """All of the plan as a string, for compiled graphs and files, which cannot hold it."""
        return json.dumps(self.as_dict(), separators=(",", ":"))


_alive: WeakValueDictionary[int, Plan] = WeakValueDictionary()


def plan_at(identity: int) -> Plan:
    """The plan in use whose `id` this is; a traced graph has constants for numbers only."""
    return _alive[identity]


@lru_cache(maxsize=4096)
def plan_with_handle(handle: str) -> Plan:
    """The plan with this handle, wherever that was made; the same one while it is in use."""
    try:
        data = json.loads(handle)
    except ValueError:
        raise ValueError(f"plan: expected the handle of a plan, got {handle!r}") from None
    return Plan.from_dict(data)

"""The works that `splitkv reproduce` times, step by step: shapes, and ways to cut each.

The rules of the sequence-aware split heuristic's source are taken as it states them: blocks of 128
keys, tiles counted over batch and KV heads, and the number of splits handed to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product, zip_longest
from typing import Any

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.problem import Problem
from splitkv.core.scales import DEFAULT_PRODUCTS
from splitkv.core.tiles import ceil_div
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES, SUITES
from splitkv.lab.harness.work import DEFAULT, Way, Work
from splitkv.lab.tune.problems import MATRIX, case_of
from splitkv.planner.policies import flash_attention_3, paged_attention_v2, sequence_aware
from splitkv.planner.policies.flash_attention_2 import fewest_splits_near_best, wave_efficiency
from splitkv.planner.policies.flash_attention_3 import MAX_SPLITS, saturated
from splitkv.planner.policies.paged_attention_v2 import PARTITION_SIZE
from splitkv.planner.policies.tuned_tables import tuned_problem

BLOCK = 128  # keys of a block of FlashAttention-3 on the source's stack
SWEEP = ("splits", 512, 64)  # figure 3: the step, its keys, the most splits
TABLE_1 = (128, 256, 384, 512, 2048, 4096), (1, 2, 8)  # keys, KV heads
ABLATION = (128, 256, 384, 512), (1, 2, 4, 8, 32)
BOUNDARY = (128, 192, 256, 320, 384, 385, 448, 512, 513, 576, 640, 768, 896, 1024)
QUICK_BOUNDARY = (256, 384, 385, 512, 513, 640)
QUICK_PACKING = (0, 1, 3, 6, 7)  # of the suite `seed004`: all that claims name, and one between
QUICK_MATRIX = 5  # every so many of the 160, beside those that the rules split differently
PACKED_AS = {"bf16": "packing", "int8": "packing int8", "fp8": "packing fp8"}  # type -> step
CHUNK = 256  # keys of a program of the sink source's decode kernel
CHUNKED_KEYS = (128, 256, 512, 1024, 2048, 4096, 8192)  # and one query token of gpt-oss
GPT_OSS = (64, 8, 64)  # heads, KV heads, head dimension
PAGES = (8, 16, 32, 64, 128)  # the block sizes of the paged source
TRITON = "decode_split"  # our kernel that any GPU runs
# Steps that a backend is not timed on: FlashAttention-3 has no int8 and none of our kernels.
NOT_OF = {"fa3": ("sdpa", "packing int8", "kernels"), "splitkv": ("sdpa", "no metadata")}
MQA_16 = "seed003_mqa-B16-ctx4k_page16"  # the shape of `ten_shapes` with a claim of its own

Rule = Callable[[int, int, int], int]
"""(tiles, blocks of keys, SMs) -> splits."""


def standard(tiles: int, blocks: int, sms: int) -> int:
    """FlashAttention-3's: four blocks or fewer are never split."""
    return flash_attention_3.num_splits_heuristic(tiles, sms, blocks, 1, 0, False, MAX_SPLITS)


def patched(tiles: int, blocks: int, sms: int) -> int:
    """The source's: four blocks in three, where there are fewer than four tiles."""
    return sequence_aware.num_splits_heuristic(tiles, sms, blocks, 1, 0, False, MAX_SPLITS)


def no_guard(tiles: int, blocks: int, sms: int) -> int:
    """The efficiency loop alone, for short contexts too."""
    if saturated(tiles, sms):
        return 1
    most = min(MAX_SPLITS, sms, blocks)
    filled = {splits: wave_efficiency(tiles * splits, sms) for splits in range(1, most + 1)}
    return fewest_splits_near_best(filled)


def any_tiles(tiles: int, blocks: int, sms: int) -> int:
    """`patched` without its second guard: four blocks in three however many tiles there are."""
    return 3 if blocks == 4 and not saturated(tiles, sms) else patched(tiles, blocks, sms)


def shorter_too(tiles: int, blocks: int, sms: int) -> int:
    """`patched` without its first guard: fewer blocks than four are split in three too."""
    return min(3, blocks) if blocks <= 4 and tiles < 4 else patched(tiles, blocks, sms)


RULES: Mapping[str, Rule] = {
    "standard": standard,
    "patched": patched,
    "no guard": no_guard,
    "any tiles": any_tiles,
    "shorter too": shorter_too,
}


def splits_by(rule: str, p: Problem, num_sms: int) -> int:
    """The number of splits that a rule takes of a problem with one query token."""
    return RULES[rule](p.batch * p.num_kv_heads, ceil_div(p.seqlen_k, BLOCK), num_sms)


def forced(splits: Iterable[int]) -> tuple[Way, ...]:
    return tuple(Way(f"s={number}", number) for number in splits)


def by_rules(step: str, case: Case, num_sms: int, rules: Iterable[str]) -> Work:
    """Each rule's way, also where two take the same number: that shows what chance does."""
    ways = (Way(rule, splits_by(rule, case.problem, num_sms)) for rule in rules)
    return Work(step, case, (*ways, DEFAULT))


def mqa(keys: int, kv_heads: int = 1, batch: int = 1) -> Case:
    """8 query heads a KV head of 128."""
    return case_of(tuned_problem(batch, 8 * kv_heads, kv_heads, 128, 1, keys, None))


def works(quick: bool, num_sms: int) -> list[Work]:
    """Everything that decode kernels are timed on, step by step."""
    return [
        *table_1(num_sms),
        split_sweep(),
        *ablation(num_sms),
        *boundary(quick, num_sms),
        *matrix(quick, num_sms),
        *ten_shapes(quick),
        *packing(quick),
        *no_metadata(num_sms),
        *one_launch(quick),
        *sdpa(quick),
        *page_sizes(),
        *kernels(quick),
    ]


def takes(backend: str, step: str) -> bool:
    """Whether a backend is timed on a step."""
    if backend == "torch":
        return step == "sdpa"
    return step not in NOT_OF.get(backend, ())


@cache
def places(num_sms: int) -> Mapping[tuple[str, str], int]:
    """(step, case) -> its place in `works`."""
    return {(w.step, w.case.name): i for i, w in enumerate(works(False, num_sms))}


def in_turns(listed: Iterable[Work]) -> list[Work]:
    """One of every step, then another one of each, those that claims hang on first: whatever ends a
    run, every step has something."""
    steps: dict[str, list[Work]] = {}
    for work in sorted(listed, key=lambda work: not decisive(work)):
        steps.setdefault(work.step, []).append(work)
    turns = zip_longest(*(steps[step] for step in sorted(steps, key=lambda s: len(steps[s]))))
    return [work for turn in turns for work in turn if work is not None]


def decisive(work: Work) -> bool:
    """Whether the rules differ on it, or a claim is of it alone."""
    splits = {way.splits for way in work.ways if way.name in ("standard", "patched")}
    return len(splits) > 1 or work.case.name == MQA_16


def table_1(num_sms: int) -> Iterator[Work]:
    for keys, kv_heads in product(*TABLE_1):
        yield by_rules("table 1", mqa(keys, kv_heads), num_sms, ("standard", "patched"))


def split_sweep() -> Work:
    step, keys, most = SWEEP
    return Work(step, mqa(keys), (*forced(range(1, most + 1)), DEFAULT))


def ablation(num_sms: int) -> Iterator[Work]:
    for keys, kv_heads in product(*ABLATION):
        case = mqa(keys, kv_heads)
        wanted = sorted({splits_by(rule, case.problem, num_sms) for rule in RULES})
        if len(wanted) > 1:  # else every rule runs the same kernel
            yield Work("ablation", case, (*forced(wanted), DEFAULT))


def boundary(quick: bool, num_sms: int) -> Iterator[Work]:
    for keys in QUICK_BOUNDARY if quick else BOUNDARY:
        yield by_rules("boundary", mqa(keys), num_sms, ("standard", "patched"))


def matrix(quick: bool, num_sms: int) -> Iterator[Work]:
    for i, (batch, keys, kv_heads) in enumerate(product(*MATRIX)):
        work = by_rules("matrix", mqa(keys, kv_heads, batch), num_sms, ("standard", "patched"))
        if not quick or work.ways[0].splits != work.ways[1].splits or i % QUICK_MATRIX == 0:
            yield work


def ten_shapes(quick: bool) -> Iterator[Work]:
    """One pass, and partitions of 512 keys: the fp16 cases of the suite `seed003`."""
    for case in SUITES["seed003"]:
        partitions = ceil_div(case.problem.seqlen_k, PARTITION_SIZE)
        ways = Way("one pass", 1), Way("partitions", partitions), DEFAULT
        if not quick or case.problem.kv_bytes < 1e9:
            yield Work("ten shapes", case, ways)


def packing(quick: bool) -> Iterator[Work]:
    """Three query tokens of 16 heads on one KV head, with and without packing and splitting: the
    suite `seed004`, in bf16, in int8 with half of the products, and in fp8."""
    ways = (
        Way("neither", 1, False),
        Way("split", 0, False),
        Way("packed", 1, True),
        Way("both", 0, True),
    )
    for dtype, step in PACKED_AS.items():
        cases = SUITES["seed004"]
        for case in (cases[i] for i in QUICK_PACKING) if quick else cases:
            yield Work(step, stored_as(case, dtype), ways)


def stored_as(case: Case, dtype: str) -> Case:
    """The case with keys and values of this type, and scales of each head."""
    if dtype == "bf16":
        return case
    codec: Any = Codec(dtype, "head")  # type: ignore[arg-type]
    p = replace(case.problem, codec=codec, products=DEFAULT_PRODUCTS[codec.name])
    return replace(case, name=f"{case.name}_{dtype}", problem=p)


def kernels(quick: bool) -> Iterator[Work]:
    """The shapes of `packing` in int8 on the portable kernel and by default; the longest contexts
    if `quick`."""
    cases = SUITES["seed004"]
    for case in cases[-3:] if quick else cases:
        yield Work("kernels", stored_as(case, "int8"), (Way("triton", kernel=TRITON), DEFAULT))


def no_metadata(num_sms: int) -> Iterator[Work]:
    """The rows of table 1 in which the rules differ, without scheduler metadata made ahead."""
    for kv_heads in (1, 2):
        work = by_rules("no metadata", mqa(512, kv_heads), num_sms, ("standard", "patched"))
        yield work._replace(ways=tuple(way._replace(ahead=False) for way in work.ways))


def one_launch(quick: bool) -> Iterator[Work]:
    """One query token of gpt-oss: a program for all keys of a head, or one for each chunk."""
    heads, kv_heads, head_dim = GPT_OSS
    for keys in CHUNKED_KEYS[:: 2 if quick else 1]:
        case = case_of(tuned_problem(1, heads, kv_heads, head_dim, 1, keys, None))
        chunks = ceil_div(keys, CHUNK)
        ways = Way("one program", 1), Way("chunks", chunks), DEFAULT
        yield Work("one launch", case, ways)


def contiguous(case: Case) -> Case:
    """The case with its keys in one piece."""
    name = case.name.removesuffix(f"_{case.place}")
    return replace(case, name=name, problem=replace(case.problem, place=Contiguous()))


def sdpa(quick: bool) -> Iterator[Work]:
    """The ten shapes on torch's own attention, which knows no pages."""
    for work in ten_shapes(quick):
        yield Work("sdpa", contiguous(work.case), (Way("sdpa"),))


def page_sizes() -> Iterator[Work]:
    """The shape whose gap no block size closed, over the block sizes of the source."""
    case = CASES[MQA_16]
    for size in PAGES:
        name = case.name.replace("page16", f"page{size}")
        p = replace(case.problem, place=Paged(size))
        ways = Way("one pass", 1), Way("partitions", ceil_div(p.seqlen_k, PARTITION_SIZE))
        yield Work("page sizes", replace(case, name=name, problem=p), ways)


def picks(rule: paged_attention_v2.Rule, p: Problem, num_sms: int) -> str:
    """The way of `ten_shapes` that a rule of paged attention v2 takes."""
    programs, partitions = p.batch * p.num_kv_heads, ceil_div(p.seqlen_k, PARTITION_SIZE)
    split = programs < rule.sm_share * num_sms and partitions >= rule.min_partitions
    return "partitions" if split else "one pass"

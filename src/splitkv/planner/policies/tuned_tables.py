"""Tables of timed plans, which the policy `tuned` follows: rows, files, and what is near in them.

`splitkv tune` makes a table; `tables/README.md` says what is in it. Problems of a class may take
each other's plans:

    class      pages smaller than a tile, or whole tiles; head_dim rounded up to a power of two; the
               bytes of an element; and packed rows of a narrow tile, a wide one or more have to be
               the same
    place      in octaves (factors of two), over batch * KV heads, visible keys, packed query rows
               of a KV head from `NARROW` on, and page size, where a contiguous cache and all larger
               pages count as pages of `WHOLE_PAGES`
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from splitkv.core.device import GPUS, Device
from splitkv.core.errors import expect
from splitkv.core.kv import Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE
from splitkv.planner.policies.shared import WHOLE_SEQUENCES

TABLES = Path(__file__).parent / "tables"
SCHEMA = 1
EQUAL = "equal"  # the mix whose sequences are all as long as may be
CAUSAL, CONTIGUOUS = Mask(causal=True), Contiguous()
TUNED_BYTES = 2  # of an element of the problems that tables are made of
# Between the rows of a file, which are its last value; before and behind them.
NEXT_LINE, ROWS, ROWS_END = ",\n  ", '"rows": [\n  ', "\n ]\n}\n"
DIMS = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "page_size")
# Keys of a tile that lies in one page are read as those of a contiguous cache, which counts as
# pages of so many keys.
WHOLE_TILES, WHOLE_PAGES = 64, 128
NARROW = 16  # packed rows of the least tile: fewer take as long
Likeness = tuple[tuple[int, ...], tuple[str, int, int], bool]
"""What shapes of a kernel have in common that are alike: see `likeness_of`."""


@dataclass(frozen=True)
class Timed:
    """A plan and the microseconds that it took; its number of splits is part of the config."""

    kernel: str
    config: Config
    us: float

    @cached_property
    def likeness(self) -> Likeness:
        """Equal for shapes of the kernel that are alike: see `likeness_of`."""
        return likeness_of(self.kernel, self.config)


@dataclass(frozen=True, slots=True)
class Measured:
    """A problem of the table and the plans timed for it, the fastest first.

    mix   of which lengths: `EQUAL`, or a name of lengths that differ; "": all as long, and plans
          that cut every sequence alike
    """

    problem: Problem
    plans: tuple[Timed, ...]
    mix: str = ""


class Near(NamedTuple):
    """A problem of a table, so many octaves away. logs: of measured over model, by number of the
    plan, as far as they were asked for."""

    octaves: float
    measured: Measured
    logs: dict[int, float]


class Rows(Sequence[Measured]):
    """The rows of a file as Measured, each read when it is first looked at: a plan asks for few,
    and a file has thousands of timed plans.

    shapes   a kernel and the fields of a tile shape, by number
    lines    JSON of the values of `DIMS`, and of plans as [number of the shape, splits, us]
    alike    the numbers of the rows of each class, or none: they are to be found
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, Mapping[str, Any]]],
        lines: Sequence[str],
        alike: Sequence[list[int]] = (),
    ) -> None:
        self._shapes, self._lines, self._alike = shapes, lines, alike
        self._made: dict[int, Measured] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number not in self._made:
            *sizes, plans = json.loads(self._lines[number])
            self._made[number] = Measured(tuned_problem(*sizes), _timed_of(self._shapes, plans))
        return self._made[number]

    def __iter__(self) -> Iterator[Measured]:  # a row that names no shape is not the end
        return (self[number] for number in range(len(self)))

    def sizes(self, numbers: Iterable[int]) -> Iterator[Sizes]:
        """The Sizes of the problems of rows, without making any or reading its plans."""
        dims = [self._lines[number].partition(",[")[0] for number in numbers]
        for of_row in json.loads(f"[{'],'.join(dims)}]]" if dims else "[]"):
            batch, heads, kv_heads = of_row[:3]  # the order of `DIMS`
            head_dim, seqlen_q, seqlen_k = of_row[3:6]
            rows = seqlen_q * heads // kv_heads
            yield Sizes(batch * kv_heads, seqlen_k, rows, of_row[6], head_dim, TUNED_BYTES)

    def classes(self) -> dict[SizeClass, list[int]]:
        """The numbers of the rows of each class."""
        if not self._alike:
            return _numbers_by_class(self.sizes(range(len(self))))
        firsts = self.sizes([numbers[0] for numbers in self._alike])
        return dict(zip(map(class_of, firsts), self._alike, strict=True))


@dataclass(frozen=True)
class Table:
    """The problems measured on one GPU; `made`: driver, versions, commit, date, command; `note`:
    what `why` says of it besides the GPU; `mixes`: problems once more for each of several mixes of
    lengths."""

    gpu: str
    made: Mapping[str, Any]
    measured: Sequence[Measured]
    note: str = ""
    mixes: tuple[Measured, ...] = ()

    @cached_property
    def classes(self) -> dict[SizeClass, list[int]]:
        """The numbers of the problems of each class."""
        if isinstance(self.measured, Rows):
            return self.measured.classes()
        return _numbers_by_class(map(_sizes_of, self.measured))

    @cached_property
    def _places(self) -> dict[SizeClass, list[tuple[tuple[float, ...], int]]]:
        return {}

    @cached_property
    def _logs(self) -> dict[tuple[int, Device], dict[int, float]]:
        return {}

    def places(self, of: SizeClass) -> list[tuple[tuple[float, ...], int]]:
        """(where it stands, its number) of every problem of a class."""
        found = self._places.get(of)
        if found is None:
            numbers, measured = self.classes.get(of, []), self.measured
            if isinstance(measured, Rows):
                sizes = measured.sizes(numbers)
            else:
                sizes = (_sizes_of(measured[number]) for number in numbers)
            found = [(place_of(x), number) for x, number in zip(sizes, numbers, strict=True)]
            self._places[of] = found
        return found

    def near(self, octaves: float, number: int, device: Device) -> Near:
        """A problem so many octaves away, and what is known of its plans on a device."""
        logs = self._logs.setdefault((number, device), {})
        return Near(octaves, self.measured[number], logs)


def _numbers_by_class(sizes: Iterable[Sizes]) -> dict[SizeClass, list[int]]:
    found: dict[SizeClass, list[int]] = {}
    for number, of in enumerate(sizes):
        found.setdefault(class_of(of), []).append(number)
    return found


def file_name(gpu: str) -> str:
    """`h200.json` for a GPU of the table of devices, else from the name that CUDA reports."""
    known = next((key for key, device in GPUS.items() if device.name == gpu), None)
    words = "".join(c if c.isalnum() or c == "_" else " " for c in gpu.lower()).split()
    return (known or "_".join(words).strip("_")) + ".json"


def dump(table: Table) -> str:
    """A table as JSON, one problem a line."""
    known: dict[str, int] = {}

    def row(measured: Measured) -> str:
        plans = []
        for timed in measured.plans:
            shape = json.dumps([timed.kernel, _shape(timed.config)])
            shape_id = known.setdefault(shape, len(known))
            plans.append([shape_id, timed.config.num_splits, round(timed.us, 2)])
        mix = [measured.mix] if measured.mix else []
        cells = [*dims(measured.problem).values(), *mix, plans]
        return json.dumps(cells, separators=(",", ":"))

    rows, mixes = [row(measured) for measured in table.measured], [row(x) for x in table.mixes]
    head = {"schema": SCHEMA, "gpu": table.gpu, **table.made, "columns": [*DIMS, "plans"]}
    alike = _numbers_by_class(map(_sizes_of, table.measured))
    head["classes"] = [*alike.values()]
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    before = [("mixes", mixes)] if mixes else []
    for name, lines in (("shapes", known), *before, ("rows", rows)):
        parts.append(f'"{name}": [\n  ' + NEXT_LINE.join(lines) + "\n ]")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def load(path: Path) -> Table:
    """A table that `dump` wrote, all of it. Raises ValueError where it is none."""
    table = opened(path)
    try:
        return replace(table, measured=(*table.measured,))
    except (IndexError, KeyError, TypeError, ValueError) as error:  # as of another version
        expect(False, "table", "what this version's `splitkv tune` writes", f"{path}: {error}")
        raise


def opened(path: Path) -> Table:
    """A table whose problems are made when they are looked at. Raises ValueError for a file that is
    none."""
    expect(path.is_file(), "table", "a file that `splitkv tune` wrote", str(path))
    try:
        data = _values(path.read_text())
    except ValueError:
        data = None
    schema = data.get("schema") if isinstance(data, dict) else None
    expect(schema == SCHEMA, "table", f"JSON with schema {SCHEMA}", f"{path}: schema {schema}")
    try:
        return _parsed(data)
    except (IndexError, KeyError, TypeError, ValueError) as error:  # as of another version
        expect(False, "table", "what this version's `splitkv tune` writes", f"{path}: {error}")
        raise


def _values(text: str) -> Any:
    """The values of a file, the rows that `dump` wrote left as the lines that they are: a hundred
    thousand characters of JSON take longer than a plan."""
    head, begun, rest = text.partition(ROWS)
    if begun and rest.endswith(ROWS_END):
        lines = rest.removesuffix(ROWS_END).split(NEXT_LINE)
        return json.loads(f'{head}"rows": []}}') | {"rows": lines}
    data = json.loads(text)  # no table, or one that another program has laid out
    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        data["rows"] = [json.dumps(row) for row in data["rows"]]
    return data


def _parsed(data: Any) -> Table:
    own = "schema", "gpu", "columns", "classes", "shapes", "mixes", "rows"
    made = {name: value for name, value in data.items() if name not in own}
    rows = Rows(data["shapes"], data["rows"], data.get("classes", ()))
    mixes = []
    for *sizes, mix, plans in data.get("mixes", ()):
        mixes.append(Measured(tuned_problem(*sizes), _timed_of(data["shapes"], plans), mix))
    return Table(data["gpu"], made, rows, mixes=tuple(mixes))


def _timed_of(
    shapes: Sequence[tuple[str, Mapping[str, Any]]], plans: Sequence[tuple[int, int, float]]
) -> tuple[Timed, ...]:
    """The plans of a row, by numbers of shapes."""
    found = []
    for number, splits, us in plans:
        kernel, shape = shapes[number]
        found.append(Timed(kernel, Config(splits, **shape), us))
    return tuple(found)


def tuned_problem(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    page_size: int | None,
) -> Problem:
    """A problem of the kind that tables are made of: bf16, causal, lengths on the device."""
    return Problem(
        *("decode", batch, num_heads, num_kv_heads, head_dim, head_dim, seqlen_q, seqlen_k),
        mask=CAUSAL,
        place=CONTIGUOUS if page_size is None else Paged(page_size),
        lengths="device",
    )


def dims(problem: Problem) -> dict[str, int | None]:
    """The arguments of `tuned_problem` that give this problem."""
    page_size = problem.place.page_size if isinstance(problem.place, Paged) else None
    return {**{name: getattr(problem, name) for name in DIMS[:-1]}, "page_size": page_size}


def user_tables() -> Path:
    """Where `splitkv tune` writes: $SPLITKV_CACHE, else `splitkv` in the user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("SPLITKV_CACHE") or Path(caches) / "splitkv")


@cache
def table_of(gpu: str) -> Table | None:
    """The package's table of this GPU joined to the user's, None where there is neither.

    One of the user's that cannot be read is left out, with a warning.
    """
    ours, theirs = (folder / file_name(gpu) for folder in (TABLES, user_tables()))
    shipped = opened(ours) if ours.is_file() else None
    if not theirs.is_file():
        return shipped
    try:
        own = load(theirs)
    except (OSError, ValueError) as error:
        warnings.warn(f"the policy tuned goes without your table: {error}", stacklevel=2)
        return shipped
    note = f", your table of {str(own.made.get('date', 'no date'))[:10]}"
    both = joined(own, *((shipped.measured, shipped.mixes) if shipped else ((),)))
    return replace(both, note=note)


def joined(table: Table, others: Sequence[Measured], mixes: Sequence[Measured] = ()) -> Table:
    """The table and what others have measured besides: of a problem in both its own times count, of
    all its mixes."""

    def added(own: Sequence[Measured], others: Sequence[Measured]) -> tuple[Measured, ...]:
        told = {tuple(dims(m.problem).values()) for m in own}
        return *own, *(m for m in others if tuple(dims(m.problem).values()) not in told)

    measured, mixed = added(table.measured, others), added(table.mixes, mixes)
    return replace(table, measured=measured, mixes=mixed)


class Sizes(NamedTuple):
    """Sizes by which problems of decode are near each other: sequences times KV heads, visible
    keys, packed rows, keys of a page, None where contiguous, the wider head dimension, bytes of an
    element."""

    heads: int
    keys: int
    rows: int
    page_size: int | None
    head_dim: int
    element_bytes: int


def sizes_of(problem: Problem) -> Sizes:
    """The Sizes of a problem."""
    place, wider = problem.place, max(problem.head_dim, problem.head_dim_v)
    page_size = place.page_size if isinstance(place, Paged) else None
    heads = problem.batch * problem.num_kv_heads
    where = heads, problem.visible_keys, problem.rows, page_size
    return Sizes(*where, wider, problem.kv_element_bytes)


def _sizes_of(measured: Measured) -> Sizes:
    return sizes_of(measured.problem)


class SizeClass(NamedTuple):
    """The class of problems whose plans may be taken for each other's: tiles in one piece,
    bits of the wider head dimension, bytes of an element, row tiles' kind."""

    whole: bool
    dim_bits: int
    element_bytes: int
    tiles: int


def class_of(sizes: Sizes) -> SizeClass:
    """The class of problems of these sizes."""
    return _class_of_sizes(*sizes[2:])


@cache
def _class_of_sizes(
    rows: int, page_size: int | None, head_dim: int, element_bytes: int
) -> SizeClass:
    whole = page_size is None or page_size % WHOLE_TILES == 0
    tiles = (rows > NARROW) + (rows > WIDE)
    return SizeClass(whole, (head_dim - 1).bit_length(), element_bytes, tiles)


def place_of(sizes: Sizes) -> tuple[float, ...]:
    """Where a problem stands, in octaves."""
    page_size = WHOLE_PAGES if sizes.page_size is None else min(sizes.page_size, WHOLE_PAGES)
    rows = max(sizes.rows, NARROW)
    return tuple([math.log2(max(1, x)) for x in (sizes.heads, sizes.keys, rows, page_size)])


def _shape(config: Config) -> dict[str, Any]:
    """A config without its number of splits, as far as it is not the default; its variant is made
    anew for the problem of each plan."""
    default = Config(num_splits=config.num_splits)
    names = (field.name for field in fields(config) if field.name != "variant")
    named = {name: getattr(config, name) for name in names}
    return {name: value for name, value in named.items() if value != getattr(default, name)}


def likeness_of(kernel: str, config: Config) -> Likeness:
    """Equal for a shape of one kernel on problems of other numbers of rows: for decode, but for
    wide tiles; for whole sequences with as many rows a tile."""
    tile_m = config.tile_m if kernel in WHOLE_SEQUENCES else config.tile_m // WIDE
    tile = tile_m, config.tile_n, config.num_warps, config.num_stages
    rule, split_size = config.schedule, config.split_size
    if rule == "items":
        rule, split_size = "even", 0
    return tile, (rule, split_size, config.programs), config.pack_gqa

"""Looking things up in the records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import quantiles

from splitkv.lab.harness.lines import Record
from splitkv.lab.reproduce.model import rows_named
from splitkv.lab.reproduce.works import places

BESIDE = (
    "decode step",
    "prefill step",
    "trace",
    "training",
)  # steps that are not of attention kernels
QUALITY = "quality"  # a step whose results are no times: those of any machine count


class Results:
    """The records of the newest run: one GPU, one state of the sources, of each work the last.

    quality   model -> the last record of what caches cost it, of any machine
    """

    def __init__(self, records: Iterable[Record]) -> None:
        listed, self.quality = list[Record](), dict[str, Record]()
        for r in records:
            if r.get("step") == QUALITY:
                self.quality[r["case"]] = r
            else:
                listed.append(r)
        self.works: dict[tuple[str, str, str], Record] = {}
        self.sequences: dict[tuple[str, str, str], Record] = {}
        for r in listed:
            same = all(r[name] == listed[-1][name] for name in ("gpu", "commit"))
            if same and r["suite"] == "reproduce":
                self.works[r["step"], r["backend"], r["case"]] = r
            elif same:
                self.sequences[r["direction"], r["case"], r["library"]] = r

    @property
    def where(self) -> str:
        """The GPU, as every record says."""
        for r in (*self.works.values(), *self.sequences.values()):
            return str(r["gpu"])
        return "no GPU"

    @property
    def num_sms(self) -> int:
        """SMs of the GPU, as the works say."""
        return next(r["num_sms"] for r in self.works.values())

    def of(self, step: str, backend: str) -> list[Record]:
        """The records of a step, in the order of its works."""
        found = [r for (s, b, _), r in self.works.items() if (s, b) == (step, backend)]
        of = places(self.num_sms) if found else {}
        return sorted(found, key=lambda r: of.get((step, r["case"]), len(of)))

    def backends(self, step: str) -> list[str]:
        return list(dict.fromkeys(b for s, b, _ in self.works if s == step))

    def rows(self, step: str) -> list[Record]:
        """The rows of a step that is not of attention kernels, [] where it was not run."""
        return [row for (s, *_), r in self.works.items() if s == step for row in r["rows"]]

    def fastest(self, step: str, backend: str, case: str) -> float | None:
        """The least time of the ways of a case."""
        record = self.works.get((step, backend, case))
        return None if record is None else min(times(record).values(), default=None)

    def whole(self, direction: str, library: str) -> dict[str, Record]:
        """case -> record of whole sequences that has a time."""
        return {
            case: r
            for (d, case, name), r in self.sequences.items()
            if (d, name) == (direction, library) and r["us"] is not None
        }

    def everything(self) -> Iterator[tuple[Record, Record]]:
        """(work, row) of all kernels of attention."""
        for (step, *_), r in self.works.items():
            if step not in BESIDE:
                yield from ((r, row) for row in r["rows"])

    def us(self, step: str, backend: str, case: str, way: str) -> float | None:
        record = self.works.get((step, backend, case))
        return None if record is None else times(record).get(way)

    def parts_of(self, step: str) -> dict[str, float]:
        """The times of a model's step by part, {} where it was not run."""
        (record,) = self.of(step, "torch") or [{"rows": []}]
        return times(record)

    def rate(self, direction: str, case: str, library: str) -> Record | None:
        """The record of whole sequences, None where there is no time."""
        record = self.sequences.get((direction, case, library))
        return record if record and record["us"] is not None else None


def newest(records: Sequence[Record]) -> Record:
    """The last record of a run, which says where it was; of results without one the last of all."""
    runs = [r for r in records if r.get("step") != QUALITY]
    return (runs or records)[-1]


def times(record: Record) -> dict[str, float]:
    """way -> microseconds, of those that have a time."""
    return rows_named(record["rows"])


def quartiles(record: Record) -> dict[str, tuple[float, float]]:
    """way -> the first and third quartile of the medians of its repeats, of those repeated."""
    found = {}
    for row in record["rows"]:
        if row["us"] is not None and len(row.get("repeats_us", ())) > 1:
            cuts = quantiles(row["repeats_us"], n=4, method="inclusive")
            found[row["kernel"]] = cuts[0], cuts[-1]
    return found


def ratio(record: Record, slow: str, fast: str) -> float | None:
    """How many times as long one way takes as another."""
    us = times(record)
    return us[slow] / us[fast] if slow in us and fast in us else None


def splits_of(record: Record, way: str) -> int:
    """The number of splits asked for by a way; 0 where the library decided."""
    return next(splits for name, splits, *_ in record["ways"] if name == way)


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    listed = list(values)
    return math.exp(math.fsum(map(math.log, listed)) / len(listed))

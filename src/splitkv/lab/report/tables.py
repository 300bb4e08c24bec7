"""Tables from results: records, as they stand in JSON lines, to Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from splitkv.core.errors import expect_one_of
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.lines import read as read_lines
from splitkv.planner.policies.shared import count

OURS = "splitkv"
FA3 = "fa3"  # the kernel of a plan of FlashAttention-3, of which a config has the splits alone
ABSENT = "-"
SWEPT_OVER_KEYS = "@"  # in the name of a case that is another one with so many keys


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of files of JSON lines."""
    return [record for path in paths for record in read_lines(path)]


def latest(records: Iterable[Record]) -> list[Record]:
    """Of each case and library's kernel the last record, in the order of the first."""
    found = {}
    for record in records:
        names = ("case", "mode", "cache", "gpu")
        key = (title(record), *(record[name] for name in names))
        found[key] = record
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Standing:
    """How one of our variants stands in a case, beside the fastest peer that ran."""

    case: str
    kv_bytes: int
    floor_us: float | None
    ours: Record
    best: Record | None

    @property
    def over_floor(self) -> float | None:
        us = self.ours["us"]
        return None if us is None or self.floor_us is None else us - self.floor_us

    @property
    def ratio(self) -> float | None:
        """How many times as long the best peer takes."""
        us = self.ours["us"]
        return None if us is None or self.best is None else self.best["us"] / us


def standings(records: Iterable[Record]) -> list[Standing]:
    """A standing for each of our records."""
    by_case: dict[Any, list[Record]] = {}
    for r in latest(records):
        by_case.setdefault((r["case"], r["mode"], r["cache"], r["gpu"]), []).append(r)
    found = []
    for (case, *_), rows in by_case.items():
        peers = [r for r in rows if not r["library"].startswith(OURS) and r["us"] is not None]
        best = min(peers, key=lambda r: r["us"], default=None)
        found += [
            Standing(case, r["kv_bytes"], r["floor_us"], r, best)
            for r in rows
            if r["library"].startswith(OURS)
        ]
    return found


def summary(records: Sequence[Record]) -> str:
    """One Markdown table: floor, ours, the best peer; below it the geometric mean of the ratios."""
    header = [
        "case",
        "KV MB",
        "floor us",
        "ours us",
        "over floor",
        "TB/s",
        "best peer",
        "us",
        "ratio",
    ]
    several = {s.ours["library"] for s in standings(records)} != {OURS}
    rows = [
        [
            f"{s.case} {s.ours['library']}" if several else s.case,
            f"{s.kv_bytes / 1e6:.1f}",
            number(s.floor_us),
            number(s.ours["us"]),
            number(s.over_floor),
            number(s.ours["tbs"]),
            title(s.best) if s.best else ABSENT,
            number(s.best["us"] if s.best else None),
            number(s.ratio),
        ]
        for s in standings(records)
    ]
    text = table(header, rows)
    ratios = [s.ratio for s in standings(records) if s.ratio is not None]
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        text += (
            f"\n\nbest peer / ours over {len(ratios)} cases: geometric mean {mean:.2f}, "
            f"least {min(ratios):.2f}, most {max(ratios):.2f}"
        )
    return text


def besides(records: Sequence[Record]) -> str:
    """Ours on cases that stand beside another: how many times as long they take; or nothing."""
    ours = {(r["library"], r["case"]): r for r in latest(records) if r["library"].startswith(OURS)}
    found = []
    for (library, _), r in ours.items():
        other = ours.get((library, r.get("beside")))
        if other and None not in (r["us"], other["us"]):
            found.append((r["us"] / other["us"], r, other))
    if not found:
        return ""
    rows = [
        [title(r), r["case"], number(r["us"]), o["case"], number(o["us"]), f"{ratio:.3f}"]
        for ratio, r, o in found
    ]
    most, worst, _ = max(found, key=lambda triple: triple[0])
    mean = math.exp(math.fsum(math.log(ratio) for ratio, *_ in found) / len(found))
    return (
        table(["library", "case", "us", "beside", "us", "ratio"], rows)
        + f"\n\nratio over {len(found)} cases: geometric mean {mean:.3f}, "
        + f"most {most:.3f} ({worst['case']})"
    )


def sections(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each command. A reproduction's are one: its claims are about all of them."""
    for r in records:
        expect_one_of("suite", r["suite"], by_command())
    if any(r["suite"] == "reproduce" for r in records):
        return {"reproduce": list(records)}
    found: dict[str, list[Record]] = {}
    for r in records:
        found.setdefault(r["suite"], []).append(r)
    return found


def report(records: Sequence[Record]) -> str:
    """Markdown for the results of any command."""
    return "\n\n".join(section(name, part) for name, part in sections(records).items())


def section(command: str, records: Sequence[Record]) -> str:
    """Markdown for the results of one command."""
    return by_command()[command](records)


def by_command() -> dict[str, Callable[[Sequence[Record]], str]]:
    """What makes Markdown of the results of each command."""
    return {
        **{"decode": bench_report, "study": studies_report, "sweep": sweep_report},
        **dict.fromkeys(("prefill", "backward", "varlen"), rates_report),
        "reproduce": reproduce_report,
    }


def reproduce_report(records: Sequence[Record]) -> str:
    """The tables of the sources, and the claims checked again."""
    from splitkv.lab.reproduce import claims, tables  # which are made of the tables here

    return tables.report(records, claims.check(records))


def bench_report(records: Sequence[Record]) -> str:
    """Where and when, the summary, every library's time, and what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(provenance, records)):
        here = latest(r for r in records if provenance(r) == where)
        titles = list(dict.fromkeys(title(r) for r in here if r["us"] is not None))
        rows = [
            [case, *(cell(found.get(name)) for name in titles)]
            for case, found in by_case(here).items()
        ]
        parts += [where, summary(here), table(["us (spread)", *titles], rows)]
        parts += filter(None, [besides(here), reasons_list(here)])
    return "\n\n".join(parts)


def rates_report(records: Sequence[Record]) -> str:
    """Of whole sequences: where and when, each direction's tables, what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(provenance, records)):
        here = [r for r in records if provenance(r) == where]
        parts += [where, *rates_tables(here)]
    return "\n\n".join(parts)


def rates_tables(records: Sequence[Record]) -> list[str]:
    """For each direction the rates, the times, the memory, ours beside ours, and reasons."""
    parts = []
    for direction in dict.fromkeys(r["direction"] for r in records):
        here = latest(r for r in records if r["direction"] == direction)
        titles = list(dict.fromkeys(title(r) for r in here if r["us"] is not None))
        cases = by_case(here)
        times = [[case, *(cell(rows.get(t)) for t in titles)] for case, rows in cases.items()]
        parts += [rates_table(here), table([f"{direction}, us (spread)", *titles], times)]
        if any(r.get("peak_bytes") is not None for r in here):
            memory = [[c, *(megabytes(rows.get(t)) for t in titles)] for c, rows in cases.items()]
            parts.append(table([f"{direction}, MB allocated by a call", *titles], memory))
        parts += filter(None, [besides(here), reasons_list(here)])
    return parts


def megabytes(r: Record | None) -> str:
    """What a call allocates."""
    allocated = None if r is None else r.get("peak_bytes")
    return ABSENT if allocated is None else f"{allocated / 1e6:.1f}"


def rates_table(records: Sequence[Record]) -> str:
    """TFLOP/s of one direction, a row a case: every library, the share of the peak that the fastest
    of ours reaches, and how many times as long the best peer takes; below it the means."""
    timed = [r for r in records if r["us"] is not None]
    titles = list(dict.fromkeys(map(title, timed)))
    titles.sort(key=lambda name: not name.startswith(OURS))
    rows, ratios = [], []
    for case, found in by_case(records).items():
        mine, theirs = (
            min(
                (r for t, r in found.items() if t.startswith(OURS) == own and r["us"] is not None),
                key=lambda r: r["us"],
                default=None,
            )
            for own in (True, False)
        )
        ratio = theirs["us"] / mine["us"] if mine and theirs else None
        ratios += [] if ratio is None else [ratio]
        rates = [found[t]["tflops"] if t in found else None for t in titles]
        rows.append(
            [
                *(case, *(ABSENT if rate is None else f"{rate:.0f}" for rate in rates)),
                percent(mine["peak_fraction"] if mine else None),
                *(title(theirs) if theirs else ABSENT, number(ratio)),
            ]
        )
    header = [f"{records[0]['direction']}, TFLOP/s", *titles, "of peak", "best peer", "ratio"]
    text = table(header, rows)
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        text += (
            f"\n\nbest peer / ours over {len(ratios)} cases: geometric mean {mean:.2f}, "
            f"least {min(ratios):.2f}, most {max(ratios):.2f}"
        )
    peaks = [r["peak_tflops"] for r in timed if r["peak_tflops"] is not None]
    if peaks:
        text += f"\n\nmatrix peak in the same rounds {min(peaks):.0f} to {max(peaks):.0f} TFLOP/s"
    clocks = [r["clocks"]["sm_mhz"] for r in timed if r["clocks"]]
    if clocks:
        text += f"\n\nSM clock of the timed calls {min(clocks)} to {max(clocks)} MHz"
    return text


def by_case(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """case -> title -> record."""
    found: dict[str, dict[str, Record]] = {}
    for r in records:
        found.setdefault(r["case"], {})[title(r)] = r
    return found


def reasons_list(records: Sequence[Record]) -> str:
    """What did not run on how many cases, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in records:
        for reason in r["reasons"]:
            reasons.setdefault((title(r), reason), []).append(r["case"])
    cases = len(by_case(records))
    return "\n".join(
        f"* {name} on {len(on)} of {cases} cases: {reason}"
        for (name, reason), on in reasons.items()
    )


def studies_report(records: Sequence[Record]) -> str:
    """Of the studies of each run, how much longer than the best each policy's plan took."""
    last = {(machine(r), r["case"]): r for r in records}
    parts = []
    for where in dict.fromkeys(map(machine, records)):
        parts += [where, regret_table([r for (its, _), r in last.items() if its == where])]
    return "\n\n".join(parts)


def regret(record: Record, policy: str) -> float | None:
    """How much longer the policy's plan took than the best, as a share; None without a time."""
    us = record["chosen"][policy]["us"]
    return None if us is None or record["best"] is None else us / record["best"]["us"] - 1


def regret_table(records: Sequence[Record], worst: int = 5) -> str:
    """Of each policy the median, the 90th percentile and the worst; below it the worst cases."""
    rows, listed = [], []
    for policy in dict.fromkeys(name for r in records for name in r["chosen"]):
        known = [(regret(r, policy), r) for r in records if policy in r["chosen"]]
        found = sorted(((x, r) for x, r in known if x is not None), key=lambda pair: -pair[0])
        shares = [share for share, _ in found]
        if not shares:
            continue
        tenth, middle = shares[(len(shares) - 1) // 10], median(shares)
        cells = [f"{share:.1%}" for share in (middle, tenth, shares[0])]
        rows.append([policy, str(len(shares)), str(len(known) - len(shares)), *cells])
        listed += [
            [
                policy,
                f"{share:.1%}",
                r["case"],
                *plan_cells(r["chosen"][policy]),
                *plan_cells(r["best"]),
            ]
            for share, r in found[:worst]
        ]
    header = ["policy", "over the best", "case", "its plan", "us", "best plan", "us"]
    return (
        table(["policy", "cases", "no time", "median", "90th percentile", "worst"], rows)
        + "\n\n"
        + table(header, listed)
    )


def plan_cells(plan: Record) -> list[str]:
    """A plan with its time, in two cells."""
    return [f"{plan['kernel']} {shape_of(plan['config'])}", number(plan["us"])]


def shape_of(config: Record) -> str:
    """`8 x 64 keys, 4 warps, 2 stages`; of FlashAttention-3 the splits."""
    if "tile_n" not in config:
        return count(config["num_splits"], "split") if config["num_splits"] else "its own splits"
    text = f"{config['num_splits']} x {config['tile_n']} keys, {config['num_warps']} warps, "
    return f"{text}{config['num_stages']} stages"


def boundary_table(records: Sequence[Record]) -> str:
    """Studies of one shape at several numbers of keys: the best plan and each policy's."""
    policies = list(dict.fromkeys(name for r in records for name in r["chosen"]))
    rows = []
    for r in sorted(records, key=lambda r: r["problem"]["seqlen_k"]):
        if r["best"] is not None:
            plans = [r["best"], *(r["chosen"].get(name) for name in policies)]
            cells = [
                f"{number(p['us'])} ({p['config']['num_splits'] or 'own'})" if p else ABSENT
                for p in plans
            ]
            rows.append([str(r["problem"]["seqlen_k"]), *cells])
    return table(["keys: us (splits)", "best", *policies], rows)


def sweep_report(records: Sequence[Record]) -> str:
    """Of each case swept, the best number of splits of each kernel, and every policy's choice."""
    parts = []
    for where in dict.fromkeys((machine(r), r["case"]) for r in records):
        here = [r for r in records if (machine(r), r["case"]) == where]
        parts += [f"{where[1]}: {where[0]}", sweep_table(here)]
    return "\n\n".join(parts)


def sweep_table(records: Sequence[Record]) -> str:
    """One case: a row for the best plan of each kernel, and one for each policy."""
    swept = [r for r in records if not r["policy"] and r["us"] is not None]
    fastest = {
        kernel: min((r for r in swept if r["kernel"] == kernel), key=lambda r: r["us"])
        for kernel in dict.fromkeys(r["kernel"] for r in swept)
    }
    chosen = {asked(r): r for r in records if r["policy"] and r["us"] is not None}
    least = min((r["us"] for r in [*swept, *chosen.values()]), default=0.0)
    rows = [
        [name, *plan_cells(r), f"{r['us'] / least - 1:+.1%}"]
        for name, r in [*((f"best of {k}", r) for k, r in fastest.items()), *chosen.items()]
    ]
    return table(["", "plan", "us", "over the best"], rows)


def asked(record: Record) -> str:
    """Whose choice a point of a sweep is, and of what."""
    policy = str(record["policy"])
    return f"{policy} on {FA3}" if record["kernel"] == FA3 else policy


def provenance(record: Record) -> str:
    """The line over a table: GPU, software, protocol, sources, day."""
    protocol = f"{record['dtype']}, {record['mode']}, {record['cache']}"
    return machine(record, protocol)


def machine(record: Record, *more: str) -> str:
    """GPU, software, sources, day."""
    versions = record["versions"]
    software = ", ".join(f"{n} {versions[n]}" for n in ("torch", "triton"))
    where = f"{record['gpu']}, driver {record['driver']}, {software}"
    return "; ".join([where, *more, f"{record['commit']}, {record['date'][:10]}"])


def title(record: Record) -> str:
    return (
        record["library"]
        if OURS in record["library"]
        else f"{record['library']} {record['kernel']}"
    )


def cell(record: Record | None) -> str:
    if record is None or record["us"] is None:
        return ABSENT
    return f"{record['us']:.2f} ({record['spread_us']:.2f})"


def number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0%}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as text too."""
    widths = [max(3, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]
    cells = [
        [
            x.ljust(w) if i == 0 else x.rjust(w)
            for i, (x, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (header, *rows)
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))

"""Tables of studies and sweeps: what plans took, and how much longer than the best."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import FA3, machine
from splitkv.lab.report.markdown import ABSENT, number, table
from splitkv.planner.policies.shared import count

SWEPT_OVER_KEYS = "@"  # in the name of a case that is another one with so many keys


def studies_report(records: Sequence[Record]) -> str:
    """How much longer than the best each policy's plan took, in the studies of each run."""
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
    """Median, 90th percentile and worst of each policy; below them the worst cases."""
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
    """Each case swept: the best number of splits of each kernel, and every policy's choice."""
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

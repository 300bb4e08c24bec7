"""Pictures of benchmarks: bars against peers, speed-ups as a heat map, time over work.

A floor is what no call can be faster than: of decode the time to read K and V, of whole sequences
the time of the flops at the matrix peak, each measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2
from typing import Any

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import OURS, by_case, latest, machine, provenance, title

CASES_A_ROW = 6
COLORS = [f"C{i}" for i in range(10)] + ["0.2", "0.5", "0.8"]
MARKS = "osD^vPX*hp<>8"
OCTAVES = 2.0  # at which the colours of speed-ups end


def pictures(command: str, records: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """(name, picture), for each machine and protocol, of what has a time."""
    timed = [r for r in records if r["us"] is not None]
    for where in dict.fromkeys((provenance(r), r.get("direction")) for r in timed):
        here = latest(r for r in timed if (provenance(r), r.get("direction")) == where)
        name = command if where[1] in (None, command) else f"{command}-{where[1]}"
        if any(r["floor_us"] for r in here):
            yield f"{name}-bars", bars(here)
        if any(standing(rows) for rows in by_case(here).values()):
            yield f"{name}-speedups", speedups(here)
    for where_ran in dict.fromkeys(map(machine, timed)):
        its = [r for r in timed if machine(r) == where_ran and r.get("flops")]
        if its:
            yield f"{command}-times", times(latest_of_each(its))


def latest_of_each(records: Sequence[Record]) -> list[Record]:
    """`latest`, where directions and types share the names of cases."""
    kinds = dict.fromkeys((r.get("direction"), r["dtype"]) for r in records)
    return [
        r
        for kind in kinds
        for r in latest(r for r in records if (r.get("direction"), r["dtype"]) == kind)
    ]


def titles_of(records: Sequence[Record]) -> list[str]:
    """Libraries and their kernels, ours first."""
    return sorted(dict.fromkeys(map(title, records)), key=lambda name: not name.startswith(OURS))


def look(titles: Sequence[str]) -> dict[str, tuple[str, str]]:
    """title -> colour and mark."""
    return {t: (COLORS[i % len(COLORS)], MARKS[i % len(MARKS)]) for i, t in enumerate(titles)}


def bars(records: Sequence[Record]) -> Figure:
    """The floor's time over that of each case and library: 1 is as fast as can be."""
    known = [r for r in records if r["floor_us"]]
    cases, titles = by_case(known), titles_of(known)
    colors, names = look(titles), list(cases)
    rows = [names[i : i + CASES_A_ROW] for i in range(0, len(names), CASES_A_ROW)]
    figure = Figure(figsize=(12, 1.4 + 2.1 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, sharey=True)[:, 0]
    width = 0.84 / len(titles)
    for axes, row in zip(panels, rows, strict=True):
        for i, name in enumerate(titles):
            found = [(x, cases[c][name]) for x, c in enumerate(row) if name in cases[c]]
            offset = (i - (len(titles) - 1) / 2) * width
            axes.bar(
                [x + offset for x, _ in found],
                [r["floor_us"] / r["us"] for _, r in found],
                width,
                color=colors[name][0],
                label=name,
            )
        axes.set_xticks(range(len(row)), row, fontsize=7)
        axes.set_xlim(-0.5, CASES_A_ROW - 0.5)
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_ylabel("floor / time", fontsize=8)
        axes.grid(axis="y", alpha=0.3)
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        [entries[t] for t in titles], titles, loc="outside lower center", ncols=5, fontsize=8
    )
    figure.suptitle(
        f"{what(known[0])}: share of the floor's speed\n{provenance(known[0])}", fontsize=9
    )
    return figure


def standing(rows: dict[str, Record]) -> tuple[Record, list[Record]] | None:
    """The fastest of ours and the peers of a case, None where one is missing."""
    mine = [r for name, r in rows.items() if name.startswith(OURS)]
    theirs = [r for name, r in rows.items() if not name.startswith(OURS)]
    return (min(mine, key=lambda r: r["us"]), theirs) if mine and theirs else None


def speedups(records: Sequence[Record]) -> Figure:
    """How many times as long each peer takes as the fastest of ours, a row a case."""
    found = {case: pair for case, rows in by_case(records).items() if (pair := standing(rows))}
    peers = list(dict.fromkeys(title(r) for _, theirs in found.values() for r in theirs))
    ratios = [{title(r): r["us"] / mine["us"] for r in theirs} for mine, theirs in found.values()]
    grid = [[log2(row[p]) if p in row else float("nan") for p in peers] for row in ratios]
    size = (3.5 + 1.1 * len(peers), 1.6 + 0.26 * len(found))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    shades = axes.imshow(grid, cmap="RdBu", norm=TwoSlopeNorm(0, -OCTAVES, OCTAVES), aspect="auto")
    for y, row in enumerate(ratios):
        for x, p in enumerate(peers):
            if p in row:
                dark = abs(log2(row[p])) > 0.7 * OCTAVES
                given: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
                axes.text(x, y, f"{row[p]:.2f}", color="white" if dark else "black", **given)
    axes.set_xticks(range(len(peers)), [p.replace(" ", "\n", 1) for p in peers], fontsize=7)
    axes.set_yticks(range(len(found)), list(found), fontsize=7)
    bar = figure.colorbar(shades, ax=axes, ticks=(-2, -1, 0, 1, 2), shrink=0.6, extend="both")
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"], fontsize=7)
    where = provenance(records[0])
    axes.set_title(f"{what(records[0])}: time of a peer over ours\n{where}", fontsize=8, wrap=True)
    return figure


def times(records: Sequence[Record]) -> Figure:
    """Time over work, both logarithmic, with the floor as a line.

    A panel a layout of the cache, or a direction and type of whole sequences. The work of decode is
    the bytes of K and V, its floor the time to read them, which nothing is faster than. The work of
    whole sequences is their operations, their line the rate of one large `torch.matmul` in the same
    run, which a kernel that draws less power can pass.
    """
    panels: dict[str, list[Record]] = {}
    for r in records:
        panels.setdefault(panel(r), []).append(r)
    titles = titles_of(records)
    style = look(titles)
    figure = Figure(figsize=(1.0 + 4.6 * len(panels), 4.8), layout="constrained")
    grid: Any = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)
    axes_of_panels = list(grid[0])
    entries: dict[str, Any] = {}
    for axes, (name, rows) in zip(axes_of_panels, panels.items(), strict=True):
        for library in (t for t in titles if any(title(r) == t for r in rows)):
            color, mark = style[library]
            points = sorted((work(r), r["us"]) for r in rows if title(r) == library)
            (entries[library],) = axes.plot(
                *zip(*points, strict=True),
                color=color,
                marker=mark,
                linestyle="none",
                markersize=4,
                alpha=0.8,
                label=library,
                zorder=3 if library.startswith(OURS) else 2,
            )
        floor = sorted({(work(r), r["floor_us"]) for r in rows if r["floor_us"]})
        if floor:
            label = floor_label(rows[0])
            (entries[label],) = axes.plot(
                *zip(*floor, strict=True), color="black", linewidth=1, label=label
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(labelsize=8)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(work_label(rows[0]), fontsize=8)
        axes.grid(alpha=0.3)
    axes_of_panels[0].set_ylabel("microseconds", fontsize=8)
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.suptitle(f"{what(records[0])}: time over work\n{machine(records[0])}", fontsize=9)
    return figure


def panel(r: Record) -> str:
    """The title of the panel of `times` that a record is in."""
    if "panel" in r:
        return str(r["panel"])
    if r.get("direction"):
        return f"{r['direction']}, {r['dtype']}"
    return str(r["shape"]["place"])


def work(r: Record) -> float:
    """Megabytes of K and V of decode, teraflops of whole sequences."""
    return float(r["flops"] / 1e12 if r.get("direction") else r["kv_bytes"] / 1e6)


def work_label(r: Record) -> str:
    return "TFLOP" if r.get("direction") else "MB of keys and values"


def floor_label(r: Record) -> str:
    return "the rate of one large matmul" if r.get("direction") else "only reading K and V"


def what(r: Record) -> str:
    return str(r.get("direction") or r["suite"])

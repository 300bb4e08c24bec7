"""Pictures of results, as matplotlib draws them: the file's ending says the format.

`pictures` makes all that the records of one command give, for a folder or a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from splitkv.core.errors import expect
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import machine
from splitkv.lab.report import bench_plots
from splitkv.lab.report.sections import sections
from splitkv.lab.report.studies import SWEPT_OVER_KEYS, asked

MARKS = "osD^vPX*h"
ENDINGS = (".svg", ".png", ".pdf")
MANY_DOTS = 2000  # more are an image in a picture of lines
GAP = (math.nan, math.nan)  # between lines that are drawn as one
# Text stays text, and the same results give the same bytes.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "splitkv"}
NO_DATE = {"Date": None, "Creator": None, "Format": None, "Type": None}


def draw(records: Sequence[Record], path: Path) -> None:
    """The last case that was swept, or studies of one shape at several numbers of keys."""
    swept = [r for r in records if r["suite"] == "sweep"]
    studied = [r for r in records if r["suite"] == "study"]
    expect(swept or studied, "plot", "results of `splitkv sweep`", "none")
    if swept:
        save(splits([r for r in swept if r["case"] == swept[-1]["case"]]), path)
    else:
        save(boundary(studied), path)


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    """Every picture that there is, as .svg files of a folder."""
    paths = []
    for name, part in sections(records).items():
        for kind, figure in pictures(name, part).items():
            paths.append(folder / f"{kind}.svg")
            save(figure, paths[-1])
    return paths


def pictures(command: str, records: Sequence[Record]) -> dict[str, Figure]:
    """name -> picture, of the records of one command."""
    found: dict[str, Figure] = {}
    if command == "sweep":
        for where in dict.fromkeys((machine(r), r["case"]) for r in records):
            here = [r for r in records if (machine(r), r["case"]) == where]
            found[unused(f"splits-{where[1]}", found)] = splits(here)
    elif command == "study":
        over_keys = [r for r in records if SWEPT_OVER_KEYS in r["case"]]
        shapes = [(machine(r), r["case"].split(SWEPT_OVER_KEYS)[0]) for r in over_keys]
        for where in dict.fromkeys(shapes):
            here = [r for r, shape in zip(over_keys, shapes, strict=True) if shape == where]
            found[unused(f"keys-{where[1]}", found)] = boundary(here)
    elif command == "reproduce":
        if swept := [r for r in records if r.get("step") == "splits"]:
            found["splits"] = split_curves(swept)
    elif command not in ("ranks", "host"):  # a table says it
        for name, figure in bench_plots.pictures(command, records):
            found[unused(name, found)] = figure
    return found


def unused(name: str, found: dict[str, Figure]) -> str:
    """The name, or the first of name-2, name-3, ... that is not yet in `found`."""
    number = 1
    while (tried := name if number == 1 else f"{name}-{number}") in found:
        number += 1
    return tried


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = NO_DATE if path.suffix == ".svg" else None
    with matplotlib.rc_context(SVG):
        figure.savefig(path, dpi=150, metadata=metadata)


def splits(records: Sequence[Record]) -> Figure:
    """Microseconds over the number of splits: a thin line a tile shape, a thick one for the fastest
    of each kernel, and a mark for what each policy chooses."""
    swept = [r for r in records if not r["policy"] and r["us"] is not None]
    figure, axes = _axes(records[0], "splits")
    for color, kernel in enumerate(dict.fromkeys(r["kernel"] for r in swept)):
        mine = [r for r in swept if r["kernel"] == kernel]
        fastest: dict[int, float] = {}
        tiles: dict[str, list[tuple[int, float]]] = {}
        for r in sorted(mine, key=lambda r: r["config"]["num_splits"]):
            number, c = r["config"]["num_splits"], r["config"]
            fastest[number] = min(r["us"], fastest.get(number, r["us"]))
            shape = str({name: value for name, value in c.items() if name != "num_splits"})
            tiles.setdefault(shape, []).append((number, r["us"]))
        for points in tiles.values():
            axes.plot(*zip(*points, strict=True), color=f"C{color}", linewidth=0.7, alpha=0.6)
        line = {"color": f"C{color}", "linewidth": 2, "label": kernel}
        axes.plot(list(fastest), list(fastest.values()), **line)
    for i, r in enumerate(r for r in records if r["policy"] and r["us"] is not None):
        if r["config"]["num_splits"] == 0:  # which number that was is not known
            axes.axhline(r["us"], color="black", linewidth=0.8, linestyle=":", label=asked(r))
            continue
        mark = {"marker": MARKS[i % len(MARKS)], "linestyle": "none", "label": asked(r)}
        axes.plot([r["config"]["num_splits"]], [r["us"]], markersize=8, zorder=3, **mark)
    return _finished(figure, axes)


def boundary(records: Sequence[Record]) -> Figure:
    """Microseconds over the number of keys: the best plan, and each policy's."""
    timed = [r for r in records if r["best"] is not None]
    timed.sort(key=lambda r: r["problem"]["seqlen_k"])
    figure, axes = _axes(records[0], "keys")
    best = [(r["problem"]["seqlen_k"], r["best"]["us"]) for r in timed]
    if best:
        axes.plot(*zip(*best, strict=True), color="black", linewidth=3, alpha=0.3, label="best")
    for i, policy in enumerate(dict.fromkeys(name for r in timed for name in r["chosen"])):
        points = [
            (r["problem"]["seqlen_k"], plan["us"])
            for r in timed
            if (plan := r["chosen"].get(policy)) and plan["us"] is not None
        ]
        if points:
            mark = {"marker": MARKS[i % len(MARKS)], "markersize": 4, "linewidth": 1}
            axes.plot(*zip(*points, strict=True), label=policy, **mark)
    return _finished(figure, axes)


def _axes(record: Record, over: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(over)
    axes.set_ylabel("us")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title(f"{record['case']}\n{machine(record)}", fontsize=9)
    return figure, axes


def _finished(figure: Figure, axes: Any) -> Figure:
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def split_curves(records: Sequence[Record]) -> Figure:
    """Microseconds over the number of splits of a reproduction: a line a backend, and a mark for
    what its library decides by itself."""
    figure, axes = _axes(records[0], "splits")
    for color, r in enumerate(records):
        us = {row["kernel"]: row["us"] for row in r["rows"] if row["us"] is not None}
        swept = [(splits, us[name]) for name, splits, *_ in r["ways"] if splits and name in us]
        if swept:
            axes.plot(*zip(*swept, strict=True), color=f"C{color}", label=r["backend"])
        if "default" in us:
            line = {"color": f"C{color}", "linestyle": ":", "label": f"{r['backend']}, its choice"}
            axes.axhline(us["default"], **line)
        if 3 in (s for s, _ in swept):
            axes.plot([3], [dict(swept)[3]], "o", color=f"C{color}", label="patched: 3")
    return _finished(figure, axes)


def draw_lineage(records: Sequence[Record], best: int | None, path: Path) -> None:
    """Every candidate of a search in the order of their making: its time over the default's, the
    fastest so far that passed, and a line from the best to its parents, and theirs."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    timed = {r["number"]: r["ratio"] for r in records if r["ratio"] is not None}
    passed = [r for r in records if r["reason"] is None and r["worst"] is not None]
    dots: dict[str, Any] = {"color": "0.7", "markersize": 3, "label": "candidates"}
    dots["rasterized"] = len(timed) > MANY_DOTS
    axes.plot(list(timed), list(timed.values()), ".", **dots)
    least, line = float("inf"), list[tuple[int, float]]()
    for r in passed:
        if r["ratio"] < least or r is passed[-1]:
            least = min(least, r["ratio"])
            line.append((r["number"], least))
    if line:
        axes.step(*zip(*line, strict=True), where="post", color="C0", label="best that passed")
    left, seen = [] if best is None else [best], set[int]()
    ancestry = list[tuple[float, float]]()
    while left:
        number = left.pop()
        for parent in () if number in seen else records[number]["parents"]:
            if number in timed and parent in timed:
                ancestry += (number, timed[number]), (parent, timed[parent]), GAP
            left.append(parent)
        seen.add(number)
    if ancestry:
        axes.plot(*zip(*ancestry, strict=True), color="C1", linewidth=0.8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="the default")
    axes.set_xlabel("candidate")
    axes.set_ylabel("time over the default's")
    if timed:
        low = min(*timed.values(), 1.0)
        axes.set_ylim(low - 0.02, max(1.2, low + 0.3))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)

"""`report.md` of a reproduction: every table of the sources, as measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product

from splitkv.lab.bench.quality import quality_table
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import machine
from splitkv.lab.harness.suites import CASES
from splitkv.lab.report.markdown import ABSENT, number, table
from splitkv.lab.report.sequences import rates_tables
from splitkv.lab.reproduce import prefill_step
from splitkv.lab.reproduce.claims.verdict import NOT_RUN, Verdict
from splitkv.lab.reproduce.model import LLAMA, PARTS, step_us
from splitkv.lab.reproduce.results import Results, mean, newest, quartiles, ratio, splits_of, times
from splitkv.lab.reproduce.works import RULES, TABLE_1, mqa, picks, splits_by
from splitkv.planner.policies import paged_attention_v2

STEPS = (
    *("table 1", "splits", "ablation", "boundary", "matrix", "no metadata", "one launch"),
    *("ten shapes", "sdpa", "page sizes", "packing", "packing int8", "packing fp8", "kernels"),
)
TITLES = {
    "table 1": "Table 1: standard and patched rule, batch 1",
    "splits": "Figure 3: 512 keys, 1 KV head, every number of splits",
    "ablation": "The guards of the rule taken away one by one, batch 1",
    "boundary": "The boundary: 1 KV head, batch 1",
    "matrix": "The regression matrix",
    "ten shapes": "Paged attention v2: ten shapes, fp16, pages of 16",
    "no metadata": "Table 1 without scheduler metadata made ahead",
    "one launch": "One query token of 64 heads: a program for all keys, or for each chunk",
    "sdpa": "The ten shapes in torch's own attention, contiguous",
    "page sizes": "16 x 32/1 x 4096 on pages of 8 to 128",
    "packing": "Packing and splitting: 3 query tokens, 16 heads on 1 KV head, bf16",
    "packing int8": "Packing and splitting, int8",
    "packing fp8": "Packing and splitting, fp8",
    "kernels": "3 query tokens, int8: the portable Triton kernel and the default",
}


CONFIGURATIONS = "The regression matrix, every configuration"


def report(records: Sequence[Record], verdicts: Iterable[Verdict]) -> str:
    """Markdown: where, the claims, and a section a step."""
    if not records:
        return "# Reproduction\n\nNo results."
    claims = ["## Claims", claims_table(verdicts)]
    return "\n\n".join(["# Reproduction", machine(newest(records)), *claims, *measured(records)])


def measured(records: Sequence[Record]) -> list[str]:
    """A heading and a table for each step and backend."""
    results, parts = Results(records), list[str]()
    for step in STEPS:
        for backend in results.backends(step):
            parts += [f"## {TITLES[step]}, on {backend}", TABLES[step](results, backend)]
    for backend in results.backends("matrix"):
        parts += [f"## {CONFIGURATIONS}, on {backend}", configurations_table(results, backend)]
    if results.parts_of("decode step"):
        parts += ["## A decode step", step_table(results)]
    if results.parts_of("prefill step"):
        parts += ["## A prompt with int8 keys through a layer", prompts_table(results)]
    if rows := results.rows("trace"):
        header = ["kernel of FlashAttention-2", "keys", "grid"]
        cells = [[r["kernel"], str(r["keys"]), " x ".join(map(str, r["grid"]))] for r in rows]
        parts += ["## One token of Qwen2.5-7B, traced", table(header, cells)]
    if rows := results.rows("training"):
        header = ["training", "runs", "loss at the end", "distance from fp32"]
        cells = [[r["kernel"], str(r["runs"]), f"{r['loss']:.4f}", away(r)] for r in rows]
        parts += ["## Loss curves", table(header, cells)]
    for record in results.quality.values():
        parts += [f"## What caches cost a model: {record['case']}", quality_table(record)]
    if results.sequences:
        parts += ["## Whole sequences", *rates_tables(list(results.sequences.values()))]
    return parts


def away(row: Record) -> str:
    """How far a training was from fp32 at most."""
    return ABSENT if row["distance"] is None else f"{row['distance']:.4f}"


def counts(verdicts: Iterable[Verdict]) -> str:
    """`12 PASS, 1 FAIL, 3 NOT RUN`."""
    words = [v.verdict for v in verdicts]
    return ", ".join(f"{words.count(word)} {word}" for word in ("PASS", "FAIL", NOT_RUN))


def source_table(verdicts: Iterable[Verdict]) -> str:
    """A row a claim: where it stands, the source's figure, ours and the other library's, verdicts
    and reasons."""
    found: dict[str, list[Verdict]] = {}
    for v in verdicts:
        found.setdefault(v.text, []).append(v)
    rows = []
    for text, own in found.items():
        theirs = [v for v in own if v.backend.startswith("fa")]
        ours = [v for v in own if v not in theirs]
        cells = [" ".join(map(value_of, those)) or ABSENT for those in (ours, theirs)]
        words = [", ".join(v.verdict for v in those) or ABSENT for those in (ours, theirs)]
        why = "; ".join(f"{v.backend}: {with_checks(v)}" for v in own)
        rows.append([text, own[0].where, own[0].figure, *cells, *words, why])
    header = ["claim", "where", "the source's", "ours", "FlashAttention's"]
    header += ["ours", "FlashAttention's", "why"]
    return table(header, rows, words=(0, 1, 2, 5, 6, 7))


def with_checks(verdict: Verdict) -> str:
    """Why, and of a claim that failed what else was looked at."""
    return f"{verdict.why} [{verdict.checked}]" if verdict.checked else verdict.why


def value_of(verdict: Verdict) -> str:
    """The value of a verdict in a cell."""
    return ABSENT if verdict.value is None else f"{verdict.value:.3g}"


def claims_table(verdicts: Iterable[Verdict]) -> str:
    rows = [
        [
            v.verdict,
            v.claim,
            ABSENT if v.value is None else f"{v.value:.3g}",
            v.relation,
            f"{v.bound:g}",
            with_checks(v),
        ]
        for v in verdicts
    ]
    return table(["", "claim", "value", "", "bound", "why"], rows)


def rules_table(results: Results, backend: str, step: str) -> str:
    """Standard, patched and the library's default, with the numbers of splits."""
    rows, apart = [], {r["case"]: r for r in results.of("no metadata", backend)}
    apart = apart if step == "table 1" else {}
    for r in results.of(step, backend):
        us, shape = times(r), r["problem"]
        splits = [f"{splits_of(r, way)}" for way in ("standard", "patched")]
        gain = ratio(r, "standard", "patched")
        rows.append(
            [
                str(shape["seqlen_k"]),
                str(shape["num_kv_heads"]),
                *(
                    f"{number(us.get(w))} ({s})"
                    for w, s in zip(("standard", "patched"), splits, strict=True)
                ),
                number(gain),
                number(us.get("default")),
            ]
        )
        if apart:
            without = apart.get(r["case"])
            gain = None if without is None else ratio(without, "standard", "patched")
            rows[-1].append(number(gain))
    header = ["keys", "KV heads", "standard us (splits)", "patched", "speed-up", "default"]
    return table([*header, "speed-up without metadata"] if apart else header, rows)


def splits_table(results: Results, backend: str) -> str:
    (record,) = results.of("splits", backend)
    us = times(record)
    swept = {splits_of(record, way): t for way, t in us.items() if way != "default"}
    least = min(swept.values(), default=0.0)
    rows = [[str(n), number(t), f"{t / least - 1:+.1%}"] for n, t in sorted(swept.items())]
    rows.append(["default", number(us.get("default")), ""])
    return table(["splits", "us", "over the best"], rows)


def ablation_table(results: Results, backend: str) -> str:
    """Each rule's time, looked up by its number of splits."""
    rows = []
    for r in results.of("ablation", backend):
        shape, us = r["problem"], times(r)
        case = mqa(shape["seqlen_k"], shape["num_kv_heads"])
        cells = []
        for rule in RULES:
            splits = splits_by(rule, case.problem, results.num_sms)
            cells.append(f"{number(us.get(f's={splits}'))} ({splits})")
        line = [str(shape["seqlen_k"]), str(shape["num_kv_heads"]), *cells]
        rows.append([*line, number(us.get("default"))])
    return table(["keys", "KV heads", *(f"{rule} us" for rule in RULES), "default"], rows)


def matrix_table(results: Results, backend: str) -> str:
    """Speed-ups over batches and KV heads, a row a number of keys."""
    records = results.of("matrix", backend)
    rows = []
    for keys in dict.fromkeys(r["problem"]["seqlen_k"] for r in records):
        here = [r for r in records if r["problem"]["seqlen_k"] == keys]
        cells = [str(keys), str(len(here))]
        for slow, fast in (("standard", "patched"), ("standard", "default")):
            found = [x for r in here if (x := ratio(r, slow, fast)) is not None]
            cells += (
                [number(min(found)), number(mean(found)), number(max(found))]
                if found
                else [ABSENT] * 3
            )
        rows.append(cells)
    header = ["keys", "shapes", "patched least", "mean", "most", "default least", "mean", "most"]
    return table(header, rows)


def configurations_table(results: Results, backend: str) -> str:
    """Every configuration of the matrix: the medians of the repeats, and their quartiles."""
    ways = ("standard", "patched", "default")
    rows = []
    for r in results.of("matrix", backend):
        us, between, shape = times(r), quartiles(r), r["problem"]
        cells = [str(shape[name]) for name in ("batch", "seqlen_k", "num_kv_heads")]
        for way in ways:
            ends = f" ({between[way][0]:.2f} to {between[way][1]:.2f})" if way in between else ""
            cells.append(number(us.get(way)) + ends)
        rows.append([*cells, number(ratio(r, "standard", "patched"))])
    header = ["batch", "keys", "KV heads", *(f"{way} us (quartiles)" for way in ways), "speed-up"]
    return table(header, rows)


def ten_table(results: Results, backend: str) -> str:
    rows = []
    for r in results.of("ten shapes", backend):
        us, p = times(r), CASES[r["case"]].problem
        ways = [number(us.get(way)) for way in ("one pass", "partitions")]
        rules = (paged_attention_v2.PERMISSIVE, paged_attention_v2.CONSERVATIVE)
        chosen = [picks(rule, p, results.num_sms) for rule in rules]
        name = r["case"].removeprefix("seed003_").removesuffix("_page16")
        rows.append([name, *ways, *chosen, number(us.get("default"))])
    header = ["shape", "one pass us", "partitions us", "permissive", "conservative", "default us"]
    return table(header, rows)


def ways_table(results: Results, backend: str, step: str) -> str:
    """Every way of every shape, and the fastest."""
    names: dict[str, None] = {}
    for r in results.of(step, backend):
        names |= dict.fromkeys(times(r))
    rows = []
    for r in results.of(step, backend):
        us = times(r)
        fastest = min(us, key=lambda way: us[way], default=ABSENT)
        rows.append([r["case"], *(number(us.get(name)) for name in names), fastest])
    return table(["us", *names, "fastest"], rows)


def packing_table(results: Results, backend: str, step: str) -> str:
    """Microseconds of each way, and the bandwidth with both."""
    names = ("neither", "split", "packed", "both")
    rows = []
    for r in results.of(step, backend):
        us, shape = times(r), r["problem"]
        rate = r["kv_bytes"] / us["both"] / 1e3 if "both" in us else None
        cells = [number(us.get(way)) for way in names]
        rows.append(
            [f"{shape['seqlen_k']} x {shape['batch']}", *cells, f"{rate:.0f}" if rate else ABSENT]
        )
    return table(["keys x batch, us", *names, "GB/s of both"], rows)


def step_table(results: Results) -> str:
    """Milliseconds a token by the number of keys, for every backend and way."""
    parts = results.parts_of("decode step")
    if not set(PARTS) <= parts.keys():
        return "not complete"
    rest = [parts[part] for part in PARTS]
    lines = [
        f"{LLAMA.name}: {LLAMA.layers} layers of {rest[0]:.1f} us besides attention; "
        f"vocabulary {rest[1]:.1f} us"
    ]
    ways = list(product(results.backends("table 1"), ("standard", "patched", "default")))
    rows = []
    for keys in TABLE_1[0]:
        cells = []
        for backend, way in ways:
            us = results.us("table 1", backend, mqa(keys).name, way)
            cells.append(ABSENT if us is None else f"{step_us(LLAMA, us, *rest) / 1e3:.3f}")
        rows.append([str(keys), *cells])
    lines.append(table(["keys: ms a token", *(" ".join(way) for way in ways)], rows))
    return "\n\n".join(lines)


def prompts_table(results: Results) -> str:
    """Milliseconds of a layer by the tokens of a prompt."""
    us, rows = results.parts_of("prefill step"), []
    for tokens in prefill_step.TOKENS:
        of = prefill_step.parts_of_prompt(us, tokens)
        rows.append([str(tokens), *(ABSENT if x is None else f"{x / 1e3:.3f}" for x in of)])
    ways = (f"attention, {way}" for way in prefill_step.WAYS)
    return table(["tokens: ms", prefill_step.LAYER, *ways], rows)


TABLES: Mapping[str, Callable[[Results, str], str]] = {
    "table 1": partial(rules_table, step="table 1"),
    "boundary": partial(rules_table, step="boundary"),
    "splits": splits_table,
    "ablation": ablation_table,
    "matrix": matrix_table,
    "ten shapes": ten_table,
    "packing": partial(packing_table, step="packing"),
    "packing int8": partial(packing_table, step="packing int8"),
    "packing fp8": partial(packing_table, step="packing fp8"),
    "no metadata": partial(rules_table, step="no metadata"),
    "one launch": partial(ways_table, step="one launch"),
    "sdpa": partial(ways_table, step="sdpa"),
    "page sizes": partial(ways_table, step="page sizes"),
    "kernels": partial(ways_table, step="kernels"),
}

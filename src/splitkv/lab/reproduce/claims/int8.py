"""Claims and tables of Character.AI's int8 attention (figures of an H100 SXM5, CUDA 12.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from splitkv.lab.harness.records import FA3, OURS
from splitkv.lab.reproduce import prefill_step
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, missing, not_run
from splitkv.lab.reproduce.model import LLAMA, PARTS, step_us
from splitkv.lab.reproduce.results import Results, mean, ratio, times
from splitkv.lab.reproduce.works import PACKED_AS

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
TABLES: Mapping[str, Mapping[str, tuple[int, ...]]] = {  # TFLOP/s by TOKENS; tables 1 and 2
    "full": {
        "bf16": (602, 647, 662, 644, 642, 632),
        "int8": (622, 681, 712, 728, 741, 742),
        "fp8": (734, 858, 932, 974, 963, 958),
    },
    "causal": {
        "bf16": (460, 562, 622, 653, 641, 634),
        "int8": (430, 554, 652, 711, 750, 763),
        "fp8": (461, 632, 787, 894, 962, 947),
    },
}
MOST = 2048  # keys at which table 3 has its largest gain
LONG = 4096  # tokens from which the columns are apart, as the text says of large lengths


class Row(NamedTuple):
    """A row of table 3: microseconds of each way, and GB/s of the last."""

    neither: float
    split: float
    packed: float
    both: float
    rate: float


TABLE_3 = {  # keys -> its row; the batch is 262144 over the keys
    1024: Row(333.59, 333.46, 36.41, 36.42, 1843),
    2048: Row(322.84, 323.05, 34.54, 34.66, 1936),
    4096: Row(342.28, 337.35, 55.20, 40.77, 1646),
    8192: Row(333.40, 328.83, 95.00, 40.05, 1675),
    16384: Row(333.15, 322.58, 169.40, 40.41, 1661),
    32768: Row(331.99, 329.82, 331.10, 42.44, 1581),
    65536: Row(658.82, 335.07, 668.69, 47.02, 1427),
    131072: Row(1337.08, 334.26, 1324.57, 51.90, 1293),
}
DECODE_GAIN = Claim(
    "a decode step with int8 caches: a portable Triton kernel over ours, the most",
    *("int8", "introduction", ">=", 1.3),
    figure="up to 30 %",
)
PREFILL_GAIN = Claim(
    "a prefill of a model: a portable Triton kernel over ours, the most",
    *("int8", "introduction", ">=", 1.1),
    figure="up to 10 %",
)
BANDWIDTH = Claim(
    "3 query tokens, int8 keys: bandwidth by default over the source's on an H100, the least",
    *("int8", "table 3", ">=", 1.0),
)
PACKING = "text below table 3"
WIDE = 1.5  # times the fastest: from here a column counts as rising


def prefill_case(tokens: int, mask: str, dtype: str) -> str:
    """The case of a cell of tables 1 and 2."""
    return f"mqa16_b{32768 // tokens}_{tokens}_{mask}" + ("" if dtype == "bf16" else f"_{dtype}")


def prefill_rates(results: Results) -> Iterator[Verdict]:
    """Every column of tables 1 and 2."""
    for library in (OURS, "fa3x"):
        for number, (mask, columns) in enumerate(TABLES.items(), 1):
            for dtype in columns if library == OURS else ("bf16",):
                text = f"prefill in {dtype}, {mask}: rate over the source's on an H100, mean"
                claim = Claim(text, "int8", f"table {number}", ">=", 1.0)
                found = []
                for tokens, theirs in zip(TOKENS, columns[dtype], strict=True):
                    case = prefill_case(tokens, mask, dtype)
                    record = results.rate("forward", case, library)
                    found += [] if record is None else [(record["tflops"] / theirs, tokens)]
                why = f"no results of prefill on {library}"
                if found:
                    least, at = min(found)
                    why = f"over {len(found)} of {len(TOKENS)} lengths, least {least:.3f} at {at}"
                    why += " tokens"
                yield judge(claim, library, mean(x for x, _ in found) if found else None, why)


def halfway(results: Results) -> Iterator[Verdict]:
    """Half int8 between bf16 and fp8, at the lengths at which the columns are apart."""
    bound = min(
        (int8 - bf16) / (fp8 - bf16)
        for columns in TABLES.values()
        for tokens, bf16, int8, fp8 in zip(TOKENS, *columns.values(), strict=True)
        if tokens >= LONG
    )
    text = "prefill in int8: how far its rate is from that of bf16 to that of fp8, mean"
    where, figure = "fused dequantisation; least of tables 1 and 2", "approximately halfway"
    claim = Claim(text, "int8", where, ">=", round(bound, 3), figure)
    found = []
    for mask in TABLES:
        for tokens in TOKENS:
            rates = [
                results.rate("forward", prefill_case(tokens, mask, dtype), OURS)
                for dtype in ("bf16", "int8", "fp8")
            ]
            if tokens >= LONG and all(rates):
                bf16, int8, fp8 = (r["tflops"] for r in rates if r)
                if fp8 != bf16:
                    found.append((int8 - bf16) / (fp8 - bf16))
    if not found:
        yield judge(claim, OURS, None, "no results of prefill in bf16, int8 and fp8")
        return
    yield judge(claim, OURS, sum(found) / len(found), f"over {len(found)} shapes")


def packing(results: Results, backend: str) -> Iterator[Verdict]:
    """Table 3 and what the source says of it, for each type of keys."""
    for dtype, step in PACKED_AS.items():
        if backend == FA3 and dtype == "int8":
            continue  # it has no int8
        claims = packing_claims(dtype)
        us = {r["problem"]["seqlen_k"]: times(r) for r in results.of(step, backend)}
        whole = {k: t for k, t in sorted(us.items()) if {"split", "both"} <= t.keys()}
        if not whole:
            yield from not_run(tuple(claims.values()), backend, missing(step, backend))
            continue
        gains = {keys: t["split"] / t["both"] for keys, t in whole.items()}
        least, most = min(gains, key=lambda k: gains[k]), max(gains, key=lambda k: gains[k])
        why = f"at {least} keys, {dtype}; most {gains[most]:.1f} at {most} keys"
        yield judge(claims["least"], backend, gains[least], why)
        if MOST in gains:
            yield judge(claims["most"], backend, gains[most], f"at {most} keys, {dtype}")
        else:
            where = f"{step} at {MOST} keys"
            why = untimed(results, step, backend) or missing(where, backend)
            yield judge(claims["most"], backend, None, why)
        both = [t["both"] for t in whole.values()]
        why = f"{min(both):.1f} to {max(both):.1f} us over {len(both)} shapes, {dtype} keys"
        yield judge(claims["even"], backend, max(both) / min(both), why)
        shorter, longer = min(gains), max(gains)
        why = f"{gains[shorter]:.1f} at {shorter} keys, {gains[longer]:.1f} at {longer}"
        share = gains[shorter] / gains[longer] if len(gains) > 1 else None
        yield judge(claims["batch"], backend, share, why)
        yield from unsplit(claims, whole, backend, step)


def untimed(results: Results, step: str, backend: str) -> str:
    """Says why a step's shape with `MOST` keys was run and has no time; empty: it was not run."""
    for r in results.of(step, backend):
        if r["problem"]["seqlen_k"] == MOST:
            reasons = [reason for row in r["rows"] for reason in row["reasons"]]
            return f"no time at {MOST} keys: {reasons[0]}" if reasons else ""
    return ""


def packing_claims(dtype: str) -> dict[str, Claim]:
    """The claims on one type; their bounds are those of the source's int8."""
    of = f"packing, {dtype} keys"
    both = [row.both for row in TABLE_3.values()]
    first, last = TABLE_3[min(TABLE_3)], TABLE_3[max(TABLE_3)]
    linear = last.neither / TABLE_3[max(TABLE_3) // 2].neither
    return {
        "least": Claim(f"{of}, with splitting: the least speed-up", "int8", PACKING, ">=", 6.4),
        "most": Claim(f"{of}, with splitting: the most", "int8", PACKING, ">=", 9.3),
        "even": Claim(
            f"{of}, with splitting: slowest over fastest shape of one size",
            *("int8", "table 3", "<=", 1.5),
            figure=f"{max(both) / min(both):.3f}, near constant",
        ),
        "batch": Claim(
            f"{of}, with splitting: speed-up at the largest batch over that at the smallest",
            *("int8", PACKING, ">=", 1.0),
            figure=f"{first.split / first.both / (last.split / last.both):.2f}",
        ),
        "linear": Claim(
            f"{dtype} keys, neither split nor packed: time as the batch halves from 4 to 2",
            *("int8", PACKING, ">=", 1.8),
            figure=f"{linear:.2f}, linear",
        ),
        "earlier": Claim(
            f"{dtype} keys, not split: keys from which unpacked time rises over those of packed",
            *("int8", PACKING, ">=", 2.0),
            figure=f"{rises('neither') / rises('packed'):g}: earlier when packed",
        ),
    }


def rises(column: str) -> int:
    """The keys of table 3 from which a column takes `WIDE` times its least."""
    return first_rise({keys: getattr(row, column) for keys, row in TABLE_3.items()})


def first_rise(us: Mapping[int, float]) -> int:
    """The fewest keys at which a time is `WIDE` times the least; twice the most keys if nowhere."""
    least = min(us.values())
    return next((k for k in sorted(us) if us[k] >= WIDE * least), 2 * max(us))


def unsplit(
    claims: Mapping[str, Claim], whole: Mapping[int, Mapping[str, float]], backend: str, step: str
) -> Iterator[Verdict]:
    """Where time rises without splitting, and the bandwidth with it."""
    neither, packed = (
        {k: t[way] for k, t in whole.items() if way in t} for way in ("neither", "packed")
    )
    last = max(TABLE_3)
    ends = [neither.get(keys) for keys in (last // 2, last)]
    if None in ends:
        yield judge(claims["linear"], backend, None, missing(f"{step} at {last} keys", backend))
    else:
        half, whole_time = (float(x or 0) for x in ends)
        why = f"{half:.1f} us with batch 4, {whole_time:.1f} us with batch 2"
        yield judge(claims["linear"], backend, whole_time / half, why)
    if len(neither) < 2 or len(packed) < 2:
        yield judge(claims["earlier"], backend, None, missing(step, backend))
    else:
        alone, together = first_rise(neither), first_rise(packed)
        why = f"from {alone} keys unpacked, from {together} packed"
        yield judge(claims["earlier"], backend, alone / together, why)


def bandwidth(results: Results) -> Verdict:
    """The bandwidth of table 3 by default; packing is taken out of a kernel that is not it."""
    rates = {}
    for r in results.of("kernels", OURS):
        keys, us = r["problem"]["seqlen_k"], times(r).get("default")
        if us is not None:
            rates[keys] = bytes_of_table(keys) / us / 1e3 / TABLE_3[keys].rate
    if not rates:
        return judge(BANDWIDTH, OURS, None, missing("kernels", OURS))
    least = min(rates, key=lambda k: rates[k])
    why = f"at {least} keys, of {len(rates)} shapes"
    return judge(BANDWIDTH, OURS, rates[least], why)


def bytes_of_table(keys: int) -> int:
    """Bytes of a cache of table 3 in int8: 262144 keys in all, one head of 128, K and V."""
    return 262144 // keys * keys * 2 * 128


def end_to_end(results: Results) -> Iterator[Verdict]:
    """A model's step with int8 caches on ours, and on the Triton kernel that any GPU runs."""
    parts = results.parts_of("decode step")
    found = []
    for r in results.of("kernels", OURS):
        us = times(r)
        if {"triton", "default"} <= us.keys() and set(PARTS) <= parts.keys():
            rest = [parts[part] for part in PARTS]
            slow, fast = (step_us(LLAMA, us[way], *rest) for way in ("triton", "default"))
            found.append((slow / fast, r["case"], ratio(r, "triton", "default") or 0.0))
    if not found:
        yield judge(DECODE_GAIN, OURS, None, "needs the steps `kernels` and `decode step`")
    else:
        most, case, alone = max(found)
        why = f"at {case}, attention alone {alone:.2f}; the rest of a layer as at batch 1"
        yield judge(DECODE_GAIN, OURS, most, why)
    yield of_prompts(results)
    yield bandwidth(results)


def of_prompts(results: Results) -> Verdict:
    """A layer of a prompt on the Triton kernel that any GPU runs over one by default."""
    us, found = results.parts_of("prefill step"), []
    for tokens in prefill_step.TOKENS:
        of = prefill_step.parts_of_prompt(us, tokens)
        if None not in of:
            rest, slow, fast = (float(x or 0) for x in of)
            found.append(((rest + slow) / (rest + fast), tokens, slow / fast))
    if not found:
        return judge(PREFILL_GAIN, OURS, None, missing("prefill step", OURS))
    most, tokens, alone = max(found)
    why = f"at a prompt of {tokens} tokens, attention alone {alone:.2f}"
    return judge(PREFILL_GAIN, OURS, most, why)

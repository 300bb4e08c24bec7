"""Everything that is drawn, and how often."""

from __future__ import annotations

from collections.abc import Callable

from fuzz import attend, caches, flash, models, others, sdpa, steps
from fuzz.draw import Draw, Drawn
from fuzz.malformed import malformed, respelt

KINDS: dict[str, tuple[Callable[[Draw], Drawn], int]] = {
    "attention": (attend.dense, 10),
    "varlen": (attend.ragged, 8),
    "decode": (attend.decode, 12),
    "paged": (attend.paged, 6),
    "flash": (flash.dense, 6),
    "flash_varlen": (flash.varlen, 6),
    "kvcache": (flash.with_kvcache, 10),
    "step": (steps.step, 8),
    "combine": (flash.combine, 1),
    "paged_cache": (caches.paged, 5),
    "ring_cache": (caches.ring, 5),
    "quantize": (others.quantize_kv, 2),
    "merge": (others.merge_states, 1),
    "append": (others.append, 2),
    "plans": (others.plans, 4),
    "warmup": (others.warmup, 1),
    "metadata": (others.metadata, 1),
    "models": (models.model, 5),
    "sdpa": (sdpa.sdpa, 4),
}


# Of these one argument is broken at times, or numbers come as NumPy's.
PLAIN = (
    *("attention", "varlen", "decode", "paged", "flash", "flash_varlen", "kvcache", "step"),
    *(
        "combine",
        "quantize",
        "merge",
        "append",
        "warmup",
        "metadata",
        "plans",
        "paged_cache",
        "ring_cache",
    ),
)
# torch's own attention is replaced on a GPU; a model of the interpreter's would take minutes.
WHERE = {"sdpa": ("cuda",), "models": ("cpu", "cuda"), "warmup": ("cpu", "cuda")}
WHERES = ("cpu", "interpret", "cuda")
MALFORMED, RESPELT = 0.2, 0.06


def drawn_by(d: Draw, only: str = "") -> Drawn:
    """The kind is of the variant."""
    names = [name for name in only.split(",") if name not in ("", "malformed")]
    names = names or [name for name in KINDS if d.where in WHERE.get(name, WHERES)]
    kind = d.variant.choices(names, [KINDS[name][1] for name in names])[0]
    make = KINDS[kind][0]
    chance = 1.0 if "malformed" in only else MALFORMED
    if kind in PLAIN and d.chance(chance):
        return malformed(d, make)
    spelling = kind in PLAIN and d.chance(RESPELT)
    drawn = make(d)
    return respelt(d, drawn) if spelling else drawn

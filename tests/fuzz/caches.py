"""PagedKVCache and SinkWindowCache: what is held is kept beside them, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fuzz.attend import bounds
from fuzz.draw import STORED, Draw, Drawn, modifiers, shape, slopes_of
from fuzz.judging import Question, packed, stacked
from fuzz.oracle import LARGEST, Asked, Sequence, Wrong, over
from splitkv.cache import CacheFull, PagedKVCache, SinkWindowCache

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}


@dataclass
class Held:
    """Keys and values of a sequence as they should be stored, dequantised; [n, H_kv, D]."""

    k: Tensor
    v: Tensor
    number: int = 0

    def __len__(self) -> int:
        return self.k.shape[0]


@dataclass
class Store:
    """How tokens are stored, by definition."""

    stored: torch.dtype | None
    granularity: str
    scales: dict[str, Tensor] = field(default_factory=dict)
    mean: Tensor | None = None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The value that is read again of x [.., H_kv, D]."""
        if self.stored is None:
            return x
        y = x.float()
        if name == "k" and self.mean is not None:
            y = y - self.mean
        most = LARGEST[self.stored]
        if self.granularity == "token":
            scale = over(y.abs().amax(-1), most).clamp(min=2.0**-100)
        else:
            scale = self.scales[name].expand(y.shape[:-1])
        z = (y * (1 / scale)[..., None]).clamp(-most, most)
        z = z.round() if self.stored == torch.int8 else z.to(self.stored)
        return z.double() * scale.double()[..., None]


def storing(d: Draw, of: Any) -> tuple[Store, dict[str, Any]]:
    """A store and the arguments of a cache that ask for it."""
    v = d.variant
    kind = v.choice((None, None, "int8", "fp8"))
    granularity, smooth = v.choice(("token", "token", "head", "tensor")), v.random() < 0.25
    if kind is None:
        return Store(None, ""), {"dtype": NAMES[of.dtype]}
    return Store(STORED[kind], granularity), {
        "dtype": kind,
        "granularity": granularity if d.chance(0.8) or granularity != "token" else None,
        "smooth_k": smooth,
    }


def settle(d: Draw, cache: Any, store: Store, of: Any, layers: int) -> None:
    """Scales and means, calibrated: the largest value becomes the largest stored one."""
    if store.stored is None or not (cache.k_mean is not None or store.granularity != "token"):
        return
    k = d.randn(2, 20, of.kv_heads, of.dim, dtype=of.dtype) + 1
    x = d.randn(2, 20, of.kv_heads, of.dim_v, dtype=of.dtype)
    for layer in range(layers):
        cache.calibrate(layer, k, x)
    if cache.k_mean is not None:
        mean = k.float().mean((0, 1))
        if not torch.allclose(cache.k_mean[0], mean, rtol=1e-3, atol=1e-3):
            raise Wrong("k_mean: expected the mean of the keys")
        store.mean = cache.k_mean[0].clone()
    for name, t in (("k", k), ("v", x)):
        y = t.float() - store.mean if name == "k" and store.mean is not None else t.float()
        if store.granularity == "token":
            continue
        held = getattr(cache, f"{name}_scale")[0]
        most = y.abs().amax((0, 1, 3)) if store.granularity == "head" else y.abs().max()
        wanted = over(most, LARGEST[store.stored]).expand_as(held)
        if not torch.allclose(held, wanted, rtol=1e-5):
            raise Wrong(f"{name}_scale: expected {wanted.tolist()}, got {held.tolist()}")
        store.scales[name] = held.clone()


def products_of(store: Store, options: dict[str, Any], d: Draw, asked: Asked) -> Asked:
    if store.stored is None:
        return asked
    products = d.variant.choice(("widened", "half", "full", None))
    if products is not None:
        options["products"] = products
    default = "half" if store.stored == torch.int8 else "widened"
    return replace(asked, stored=store.stored, products=products or default)


def options_of(d: Draw, of: Any, batch: int, store: Store) -> tuple[dict[str, Any], Asked]:
    extra = modifiers(d, of, batch)
    options, asked = dict(extra.kwargs), extra.asked
    asked = products_of(store, options, d, asked)
    if store.mean is not None:
        options.pop("softcap", None)
        options.pop("sink_logits", None)
        asked = replace(asked, softcap=0.0)
    if d.chance(0.5):
        options["return_lse"] = True
    return options, asked


def mean_restored(lse_of: Any, q: Tensor, mean: Tensor, asked: Asked) -> Tensor:
    """The LSE [H, L_q] of keys whose mean was taken off."""
    scale = q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    each = mean.double().repeat_interleave(q.shape[1] // mean.shape[0], 0)
    return lse_of + scale * (q.double() * each).sum(-1).T


def paged(d: Draw) -> Drawn:
    v = d.variant
    page_size = v.choice((1, 4, 16, 16, 64, v.randint(2, 40)))
    of = shape(d, (torch.bfloat16, torch.float16, torch.float32))
    store, how = storing(d, of)
    small = d.where == "interpret"
    most = {"interpret": 24, "cpu": 100, "cuda": 500}[d.where]
    batch, layers = d.rng.randint(1, 3 if small else 5), d.rng.choice((1, 2))
    arguments: dict[str, Any] = {
        "num_pages": d.rng.randint(2, 6) + batch * -(-most // page_size),
        "page_size": page_size,
        "max_batch": batch,
        "max_seqlen": most,
        "num_kv_heads": of.kv_heads,
        "head_dim": of.dim,
        "num_layers": layers,
        "device": d.device,
        **how,
    }
    if of.dim != of.dim_v or d.chance(0.2):
        arguments["head_dim_v"] = of.dim_v
    done: list[str] = []

    def run(**arguments: Any) -> None:
        cache = PagedKVCache(**arguments)
        settle(d, cache, store, of, layers)
        held: list[Held] = []
        for _ in range(d.rng.randint(1, 4 if small else 7)):
            step(d, cache, held, of, store, arguments, done)

    def judge(result: Any) -> None:
        return None

    return Drawn("PagedKVCache", told(run, done), arguments, judge, again=False)


def told(run: Any, done: list[str]) -> Any:
    """A failure says which steps were done before."""

    def function(**arguments: Any) -> Any:
        try:
            return run(**arguments)
        except Wrong as wrong:
            raise Wrong(f"{wrong}\n  steps: {'; '.join(done)}") from None
        except Exception as error:
            error.args = (f"{error}\n  steps: {'; '.join(done)}", *error.args[1:])
            raise

    return function


def empty_of(d: Draw, of: Any, store: Store) -> Held:
    dtype = of.dtype if store.stored is None else torch.float64
    k = torch.zeros(0, of.kv_heads, of.dim, dtype=dtype, device=d.device)
    return Held(k, torch.zeros(0, of.kv_heads, of.dim_v, dtype=dtype, device=d.device))


def step(
    d: Draw, cache: Any, held: list[Held], of: Any, store: Store, given: Any, done: list[str]
) -> None:
    """One of: a new sequence, a fork, fewer tokens, none; and then new tokens, written and seen."""
    act = d.rng.choice(("allocate", "fork", "truncate", "free", "", "", ""))
    if not held or (act == "allocate" and len(held) < given["max_batch"]):
        made = empty_of(d, of, store)
        made.number = cache.allocate()
        held.append(made)
        done.append("allocate")
    elif act == "fork" and len(held) < given["max_batch"]:
        parent = d.rng.choice(held)
        count = d.rng.choice((None, d.rng.randint(0, len(parent))))
        kept = len(parent) if count is None else count
        held.append(Held(parent.k[:kept], parent.v[:kept], cache.fork(parent.number, count)))
        done.append(f"fork {parent.number} of {count}")
    elif act == "truncate":
        one = d.rng.choice(held)
        kept = d.rng.randint(0, len(one))
        cache.truncate(one.number, kept)
        one.k, one.v = one.k[:kept], one.v[:kept]
        done.append(f"truncate {one.number} to {kept}")
    elif act == "free" and len(held) > 1:
        one = held.pop(d.rng.randrange(len(held)))
        cache.free(one.number)
        done.append(f"free {one.number}")
    chosen = d.rng.sample(held, d.rng.randint(1, len(held)))
    alike = d.chance(0.6)
    number = d.rng.choice((1, 1, 1, d.rng.randint(0, 9), d.rng.randint(0, given["max_seqlen"])))
    counts = [number if alike else d.rng.randint(0, 12) for _ in chosen]
    asked_counts: Any = counts[0] if alike and d.chance(0.5) else counts
    numbers = [one.number for one in chosen]
    done.append(f"extend {numbers} by {asked_counts}")
    try:
        cache.extend(numbers, asked_counts)
    except CacheFull:
        done.append("full")
        if any(cache.length(one.number) != len(one) for one in chosen):
            raise Wrong("extend: expected no change where the cache is full") from None
        return
    except ValueError as error:
        if sum(counts) > cache.max_tokens and str(error).startswith("num_tokens: expected"):
            return
        raise
    total = sum(counts)
    dense = len(set(counts)) == 1 and d.chance(0.6)
    lead = (len(chosen), counts[0]) if dense else (total,)
    starts = bounds(counts)
    layers = given["num_layers"]
    fresh = {}
    for name, dim in (("k", of.dim), ("v", of.dim_v)):
        fresh[name] = d.randn(*lead, of.kv_heads, dim, dtype=of.dtype)
    for layer in range(layers):
        cache.append(layer, fresh["k"], fresh["v"])
    for i, one in enumerate(chosen):
        for name in "kv":
            x = fresh[name].reshape(total, *fresh[name].shape[-2:])[starts[i] : starts[i + 1]]
            setattr(one, name, torch.cat([getattr(one, name), store(name, x)]))
        if cache.length(one.number) != len(one):
            raise Wrong(f"length: expected {len(one)}, got {cache.length(one.number)}")
    if not total:
        return
    options, asked = options_of(d, of, len(chosen), store)
    options.setdefault("causal", True)
    layer = d.rng.randint(-layers, layers - 1)
    q = d.randn(*lead, of.heads, of.dim, dtype=of.dtype)
    rows = q.reshape(total, of.heads, of.dim)
    done.append(f"attend {list(q.shape)} {sorted(options)}")
    result = cache.attend(layer, q, **options)
    tensors = {n: x for n, x in options.items() if isinstance(x, Tensor)} | {"q": rows}

    def sequences(x: dict[str, Tensor]) -> list[Sequence]:
        return [
            Sequence(
                x["q"][starts[i] : starts[i + 1]],
                one.k,
                one.v,
                slopes_of(x, i),
                x.get("sink_logits"),
            )
            for i, one in enumerate(chosen)
        ]

    judge_step(d, result, asked, tensors, sequences, of, store, dense, options, starts)


def judge_step(
    d: Draw,
    result: Any,
    asked: Asked,
    tensors: dict[str, Tensor],
    sequences: Any,
    of: Any,
    store: Store,
    dense: bool,
    options: dict[str, Any],
    starts: list[int],
) -> None:
    def assemble(parts: Any) -> Any:
        if store.mean is not None:
            parts = [
                (out, mean_restored(lse, tensors["q"][a:b], store.mean, asked))
                for (out, lse), a, b in zip(parts, starts[:-1], starts[1:], strict=True)
            ]
        return (stacked if dense else packed(starts[-1], starts[:-1]))(parts)

    lse = bool(options.get("return_lse"))
    Question(asked, tensors, sequences, assemble, of.dtype, return_lse=lse).judge(result)


def ring(d: Draw) -> Drawn:
    """SinkWindowCache."""
    of = shape(d, (torch.bfloat16, torch.float16, torch.float32))
    store, how = storing(d, of)
    batch, layers = d.rng.randint(1, 3), d.rng.choice((1, 2))
    tokens = d.rng.choice((0, 1, 4, d.rng.randint(0, 9)))
    window = d.rng.choice((1, 2, 8, d.rng.randint(1, 40)))
    arguments: dict[str, Any] = {
        "batch": batch,
        "sink_tokens": tokens,
        "window": window,
        "num_kv_heads": of.kv_heads,
        "head_dim": of.dim,
        "num_layers": layers,
        "device": d.device,
        **how,
    }
    if of.dim != of.dim_v or d.chance(0.2):
        arguments["head_dim_v"] = of.dim_v
    done: list[str] = []

    def run(**arguments: Any) -> None:
        cache = SinkWindowCache(**arguments)
        settle(d, cache, store, of, layers)
        held = [empty_of(d, of, store) for _ in range(batch)]
        for _ in range(d.rng.randint(1, 5)):
            if d.chance(0.08):
                cache.reset()
                held = [empty_of(d, of, store) for _ in range(batch)]
                done.append("reset")
            count = d.rng.choice((1, 1, 1, d.rng.randint(1, 2 * (tokens + window))))
            pads = [d.rng.randint(0, count) for _ in held] if d.chance(0.2) else None
            done.append(f"extend {count} leftpad {pads}")
            cache.extend(count, None if pads is None else d.index_of(pads))
            fresh = {
                "k": d.randn(batch, count, of.kv_heads, of.dim, dtype=of.dtype),
                "v": d.randn(batch, count, of.kv_heads, of.dim_v, dtype=of.dtype),
            }
            for layer in range(layers):
                cache.append(layer, fresh["k"], fresh["v"])
            for b, one in enumerate(held):
                first = 0 if pads is None else pads[b]
                for name in "kv":
                    new = store(name, fresh[name][b, first:])
                    setattr(one, name, torch.cat([getattr(one, name), new]))
            extra = modifiers(d, of, batch)
            names = ("softmax_scale", "softcap", "sink_logits")
            options = {n: x for n, x in extra.kwargs.items() if n in names}
            asked = Asked(scale=extra.asked.scale, softcap=extra.asked.softcap)
            asked = products_of(store, options, d, asked)
            if store.mean is not None:
                options = {n: x for n, x in options.items() if n in ("softmax_scale", "products")}
                asked = replace(asked, softcap=0.0)
            if d.chance(0.5):
                options["return_lse"] = True
            q = d.randn(batch, 1, of.heads, of.dim, dtype=of.dtype)
            done.append(f"attend {sorted(options)}")
            result = cache.attend(d.rng.randint(-layers, layers - 1), q, **options)
            tensors = {n: x for n, x in options.items() if isinstance(x, Tensor)}
            tensors["q"] = q.flatten(0, 1)

            def sequences(x: dict[str, Tensor], held: list[Held] = held) -> list[Sequence]:
                made = []
                for b, one in enumerate(held):
                    kept = [i for i in range(len(one)) if i < tokens or i >= len(one) - window]
                    q = x["q"][b : b + 1]
                    made.append(Sequence(q, one.k[kept], one.v[kept], None, x.get("sink_logits")))
                return made

            starts = list(range(batch + 1))
            judge_step(d, result, asked, tensors, sequences, of, store, True, options, starts)

    def judge(result: Any) -> None:
        return None

    return Drawn("SinkWindowCache", told(run, done), arguments, judge, again=False)

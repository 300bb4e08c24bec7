"""PagedKVCache against every sequence's tokens kept in a list."""

from __future__ import annotations

import random as host_random
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.cache import CacheFull, PagedKVCache

HEADS, KV_HEADS, DIM, DIM_V, LAYERS = 4, 2, 16, 32, 2


def make(**options: Any) -> PagedKVCache:
    sizes = {"num_pages": 40, "page_size": 4, "max_batch": 5, "max_seqlen": 64}
    shape = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "head_dim_v": DIM_V, "num_layers": LAYERS}
    return PagedKVCache(**{**sizes, **shape, "dtype": "fp32", **options})


class Model:
    """The sequences of a cache by hand: number -> k, v [LAYERS, tokens, ..]."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.tokens: dict[int, list[Tensor]] = {}

    def allocate(self) -> int:
        number = self.cache.allocate()
        shapes = (LAYERS, 0, KV_HEADS, DIM), (LAYERS, 0, KV_HEADS, DIM_V)
        self.tokens[number] = [torch.zeros(shape) for shape in shapes]
        return number

    def fork(self, number: int, count: int | None = None) -> int:
        child = self.cache.fork(number, count)
        self.tokens[child] = [x[:, :count] for x in self.tokens[number]]
        return child

    def truncate(self, number: int, count: int) -> None:
        self.cache.truncate(number, count)
        self.tokens[number] = [x[:, :count] for x in self.tokens[number]]

    def free(self, number: int) -> None:
        self.cache.free(number)
        del self.tokens[number]

    def step(self, numbers: list[int], counts: list[int]) -> None:
        """Append and attend; every sequence of the step is compared, every layer."""
        cache = self.cache
        cache.extend(numbers, counts)
        new = [[torch.randn(LAYERS, n, KV_HEADS, d) for n in counts] for d in (DIM, DIM_V)]
        q = torch.randn(LAYERS, sum(counts), HEADS, DIM)
        for i, number in enumerate(numbers):
            grown = zip(self.tokens[number], new, strict=True)
            self.tokens[number] = [torch.cat([x, y[i]], 1) for x, y in grown]
        dense = len(set(counts)) == 1 and counts[0] > 0
        for layer in range(LAYERS):
            k, v = (torch.cat([y[layer] for y in x]) for x in new)
            queries = q[layer]
            if dense:
                k, v, queries = (x.unflatten(0, (len(counts), -1)) for x in (k, v, queries))
            cache.append(layer, k, v)
            out = cache.attend(layer, queries)
            out = out.flatten(0, -3).split(counts)
            for i, number in enumerate(numbers):
                self.compare(layer, number, q[layer].split(counts)[i], out[i])
        assert cache.cache_seqlens.tolist()[len(numbers) :] == [0] * (5 - len(numbers))
        assert (cache.slot_mapping[sum(counts) :] == -1).all()

    def compare(self, layer: int, number: int, q: Tensor, out: Tensor) -> None:
        k, v = (x[layer][None] for x in self.tokens[number])
        wanted = splitkv.attention(q[None], k, v, causal=True)[0]
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)

    def check_pages(self) -> None:
        """No page is lost, and none is both free and held."""
        cache = self.cache
        users = [0] * len(cache._users)
        for number in self.tokens:
            held = cache._find(number)
            assert len(held.pages) == -(-held.length // cache.page_size)
            assert held.length == self.tokens[number][0].shape[1]
            for page in held.pages:
                users[page] += 1
        assert users == cache._users
        assert sorted(cache._free) == [page for page, n in enumerate(users) if n == 0]


def test_prompts_and_steps() -> None:
    model = Model(make())
    a, b = model.allocate(), model.allocate()
    model.step([a], [9])
    model.step([b], [20])  # more than decode takes
    for _ in range(6):
        model.step([a, b], [1, 1])
    model.step([b, a], [3, 3])
    model.step([a, b], [2, 5])
    model.check_pages()


def test_a_fork_shares_pages_until_one_of_them_writes() -> None:
    model = Model(make())
    a = model.allocate()
    model.step([a], [10])  # two pages and a half
    free = model.cache.num_free_pages
    b, c = model.fork(a), model.fork(a)
    assert model.cache.num_free_pages == free
    model.step([b], [1])
    assert model.cache.num_free_pages == free - 1  # its copy of the last page
    model.step([a, b, c], [1, 1, 1])  # two share a page: one of them copies
    assert model.cache.num_free_pages == free - 2
    d = model.fork(a, 8)  # whole pages: nothing to copy
    model.step([d, a], [1, 1])
    e = model.fork(a, 3)
    model.step([e], [1])
    for number in (a, b, c, d, e):
        model.step([number], [1])
    model.check_pages()
    for number in (c, a, e, b, d):
        model.free(number)
    assert model.cache.num_free_pages == 40


def test_full_and_nothing_lost() -> None:
    model = Model(make(num_pages=6, max_seqlen=20))
    a, b = model.allocate(), model.allocate()
    model.step([a], [14])
    model.step([b], [5])
    assert model.cache.num_free_pages == 0
    table, lengths = model.cache.page_table.clone(), model.cache.cache_seqlens.clone()
    with pytest.raises(CacheFull, match="num_pages: expected 1 free pages for 6 new tokens, got 0"):
        model.cache.extend([a, b], [3, 3])
    with pytest.raises(
        CacheFull, match="max_seqlen: expected at most 20 tokens a sequence, got 21"
    ):
        model.cache.extend([a], 7)
    c = model.fork(a)
    with pytest.raises(CacheFull, match="num_pages: expected 1 free pages for 1 new tokens, got 0"):
        model.cache.extend([c])
    assert torch.equal(table, model.cache.page_table)
    assert torch.equal(lengths, model.cache.cache_seqlens)
    model.check_pages()
    model.free(b)
    model.step([a, c], [2, 2])
    model.check_pages()


def test_truncate_after_a_rejected_draft() -> None:
    model = Model(make())
    a, b = model.allocate(), model.allocate()
    model.step([a, b], [6, 6])
    for kept in (8, 6, 7, 0, 3):
        model.step([a, b], [5, 5])
        model.truncate(a, min(kept, model.cache.length(a)))
        model.check_pages()
        model.step([b, a], [1, 1])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(seed: int) -> None:
    rng = host_random.Random(seed)
    model = Model(make(num_pages=16, page_size=rng.choice([1, 3, 4, 16])))
    for _ in range(60):
        numbers = list(model.tokens)
        match rng.choice(["allocate", "fork", "free", "truncate", "step", "step", "step"]):
            case "allocate" if len(numbers) < 5:
                model.allocate()
            case "fork" if numbers and len(numbers) < 5:
                parent = rng.choice(numbers)
                model.fork(parent, rng.choice([None, rng.randint(0, model.cache.length(parent))]))
            case "free" if numbers:
                model.free(rng.choice(numbers))
            case "truncate" if numbers:
                number = rng.choice(numbers)
                model.truncate(number, rng.randint(0, model.cache.length(number)))
            case "step" if numbers:
                some = rng.sample(numbers, rng.randint(1, len(numbers)))
                counts = [rng.choice([0, 1, 1, 2, 7]) for _ in some]
                try:
                    model.step(some, counts)
                except CacheFull:
                    model.check_pages()
        model.check_pages()


def test_addresses_stay() -> None:
    model = Model(make())
    cache = model.cache
    fixed = cache.page_table, cache.cache_seqlens, cache.slot_mapping, cache.k, cache.v
    at = [x.data_ptr() for x in fixed]
    a = model.allocate()
    for count in (5, 1, 1, 12):
        model.step([a], [count])
    now = cache.page_table, cache.cache_seqlens, cache.slot_mapping, cache.k, cache.v
    assert at == [x.data_ptr() for x in now]


def test_lse_of_a_prompt() -> None:
    cache = make()
    a = cache.allocate()
    cache.extend([a], 20)
    q = torch.randn(1, 20, HEADS, DIM)
    k, v = torch.randn(1, 20, KV_HEADS, DIM), torch.randn(1, 20, KV_HEADS, DIM_V)
    cache.append(0, k, v)
    out, lse = cache.attend(0, q, return_lse=True)
    wanted, wanted_lse = splitkv.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def test_a_prompt_with_heads_before_tokens_in_memory() -> None:
    cache = make()
    a, b = cache.allocate(), cache.allocate()
    cache.extend([a, b], 20)  # more than decode takes
    q, k = (torch.randn(2, heads, 20, DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS))
    v = torch.randn(2, KV_HEADS, 20, DIM_V).transpose(1, 2)
    cache.append(0, k, v)
    out, lse = cache.attend(0, q, return_lse=True)
    wanted, wanted_lse = splitkv.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def test_what_it_refuses() -> None:
    cache = make()
    a = cache.allocate()
    cache.extend([a], 2)
    k, v = torch.zeros(1, 2, KV_HEADS, DIM), torch.zeros(1, 2, KV_HEADS, DIM_V)
    for wrong, name in (
        (lambda: make(num_pages=0), "num_pages"),
        (lambda: make(page_size=2.5), "page_size"),
        (lambda: make(dtype=torch.float64), "dtype"),
        (lambda: cache.fork(7), "sequence"),
        (lambda: cache.fork(a, 3), "num_tokens"),
        (lambda: cache.free(-1), "sequence"),
        (lambda: cache.truncate(a, -1), "num_tokens"),
        (lambda: cache.extend([a, a]), "sequences"),
        (lambda: cache.extend([a], [1, 2]), "num_tokens"),
        (lambda: cache.extend([a], -1), "num_tokens"),
        (lambda: cache.extend([a], 65), "num_tokens"),
        (lambda: cache.extend(list(range(6))), "number of sequences"),
        (lambda: cache.append(0, k[:, :1], v[:, :1]), "k"),
        (lambda: cache.append(9, k, v), "layer"),
        (lambda: cache.append(0, k, v.bfloat16()), "v"),
        (lambda: cache.attend(0, torch.zeros(1, 2, HEADS, 8)), "q"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            wrong()
    for dtype in ("int4", torch.float64):
        with pytest.raises(ValueError, match="^dtype: expected "):
            make(dtype=dtype)

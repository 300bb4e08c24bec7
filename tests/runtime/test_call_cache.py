"""What a call is known by, in the one cache that all functions share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.runtime import call_cache
from splitkv.runtime.call_cache import MAX_RECENT, CallCache, with_types

Cache = CallCache[object]


@pytest.fixture(params=[True, False], ids=["", "without torch's check"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cache:
    if not request.param:
        monkeypatch.setattr(call_cache, "_TensorGuards", None)
    return CallCache()


def found(cache: Cache, options: Any, *tensors: Tensor) -> object:
    """The call as the functions look for it."""
    bound = cache.match(options, tensors)
    return bound if bound is not None else cache.get_or_bind(options, tensors, object)


def test_equal_kinds_are_bound_once(cache: Cache) -> None:
    first = found(cache, (1,), torch.zeros(2, 3), torch.ones(4))
    assert found(cache, (1,), torch.ones(2, 3), torch.zeros(4)) is first
    assert found(cache, (2,), torch.zeros(2, 3), torch.ones(4)) is not first
    assert cache.get_or_bind((1,), [torch.zeros(2, 3), torch.ones(4)], pytest.fail) is first


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).T,
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, requires_grad=True),
    ],
    ids=["shape", "strides", "dtype", "device", "gradient"],
)
def test_another_layout_is_another_kind(other: Tensor, cache: Cache) -> None:
    first, second = found(cache, (), torch.zeros(2, 3)), found(cache, (), other)
    assert first is not second
    assert found(cache, (), torch.zeros(2, 3)) is first and found(cache, (), other) is second


def test_recording_is_part_of_a_kind(cache: Cache) -> None:
    """Only where something is recorded."""
    plain, learned = torch.zeros(2), torch.zeros(2, requires_grad=True)
    recorded, once = found(cache, (), learned), found(cache, (), plain)
    with torch.no_grad():
        assert found(cache, (), learned) is not recorded
        assert found(cache, (), plain) is once
    assert found(cache, (), learned) is recorded


def test_types_tell_equal_options_apart() -> None:
    options = [with_types((x,)) for x in (1, 1.0, True)]
    assert len(set(options)) == 3
    assert with_types((1, None)) == with_types((1, None))


def test_what_cannot_be_hashed_is_not_kept(cache: Cache) -> None:
    assert found(cache, ([],), torch.zeros(2)) is not found(cache, ([],), torch.zeros(2))
    assert found(cache, (), None) is not found(cache, (), None)  # type: ignore[arg-type]
    assert len(cache) == 0


def test_a_bind_that_raises_leaves_nothing(cache: Cache) -> None:
    def refuse() -> object:
        raise TypeError("of the call itself")

    for _ in range(2):
        with pytest.raises(TypeError, match="of the call itself"):
            cache.get_or_bind((), [torch.zeros(2)], refuse)
    assert len(cache) == 0


def test_a_tensor_given_twice(cache: Cache) -> None:
    """It is checked where it is, and is another kind than two of its layout."""
    x, y = torch.zeros(2), torch.zeros(2)
    twice = found(cache, (), x, y, x)
    assert found(cache, (), y, x, y) is twice
    for _ in range(2):
        assert found(cache, (), x, y, torch.zeros(2)) is twice  # by its layout
        assert found(cache, (), x, x, x) is twice
    assert found(cache, (), x, y, x.double()) is not twice
    if call_cache._TensorGuards is not None:
        (entries,) = cache.recent.values()
        checks = [fits for fits, _, bound in entries if bound is twice]
        for same in ((x, y, x), (x, y, torch.zeros(2)), (x, x, x)):
            assert [fits(*same) for fits in checks].count(True) == 1


def test_lengths_of_the_first_tensor_do_not_push_each_other_out() -> None:
    """As the batches of an engine: each is found by the check, however many there are."""
    cache = Cache()
    batches = [torch.zeros(n, 4) for n in range(1, 20 * MAX_RECENT)]
    calls = [found(cache, (), x, torch.zeros(7)) for x in batches]
    assert [cache.match((), (x, torch.zeros(7))) for x in batches] == calls


def test_a_tensor_without_a_length(cache: Cache) -> None:
    assert found(cache, (), torch.zeros(())) is found(cache, (), torch.zeros(()))


def test_the_latest_layouts_are_tried_first() -> None:
    cache = Cache()
    tensors = [torch.zeros(1, n) for n in range(1, MAX_RECENT + 4)]
    calls = [found(cache, (), x) for x in tensors]
    assert [found(cache, (), x) for x in tensors] == calls
    (recent,) = cache.recent.values()
    assert [bound for _, _, bound in recent] == calls[: -MAX_RECENT - 1 : -1]


def test_an_entry_replaces_what_it_stands_in_front_of() -> None:
    cache = Cache()
    for bound in range(3):
        cache.add((), [torch.zeros(2)], bound)
        cache.add((), [torch.zeros(2, 1)], 10 + bound)
    (recent,) = cache.recent.values()
    assert [bound for _, _, bound in recent] == [12, 2]


@pytest.mark.parametrize("kept", ["get_or_bind", "add"])
def test_it_is_bounded(kept: str) -> None:
    cache = Cache(max_calls=4)
    for n in range(12):
        if kept == "add":
            cache.add((n,), [torch.zeros(2)], n)
        else:
            found(cache, (), torch.zeros(n))
        assert 0 < len(cache) <= 4
    cache.clear()
    assert len(cache) == 0


def any_length(tensors: Any) -> Any:
    return call_cache.check_of(tensors, any_length={1: 1})


def test_a_call_of_any_length_with_tensors_of_another_kind() -> None:
    """One of them given twice, or made in inference mode: each has a check of its own, and what was
    bound to any length serves them all."""
    cache, bound = Cache(), object()
    x, y = torch.zeros(2, 2)
    with torch.inference_mode():
        inferred = torch.zeros(2, 2)[1]
    long = (torch.zeros(1, n, 3, 4) for n in range(5, 50))

    def check(tensors: Any) -> Any:
        return call_cache.check_of(tensors, any_length={2: 1})

    assert cache.get_or_bind_alike("options", [x, y, next(long)], "pattern", check, object) is None
    made = [bound]
    for _ in range(2):
        for other in (y, x, inferred):
            tensors = [x, other, next(long)]
            found = cache.match("options", tensors)
            if found is None:
                found = cache.get_or_bind_alike("options", tensors, "pattern", check, made.pop)
            assert found is bound
    assert cache.match("options", [x, x, next(long)]) is bound


def test_another_thread_may_forget_every_call_at_any_time() -> None:
    """Also between two looks at one table."""
    cache = Cache()
    tensors, check = [torch.zeros(2), torch.zeros(1, 5, 3, 4)], any_length

    class Forgotten(dict[Any, Any]):
        def __contains__(self, key: Any) -> bool:
            known = super().__contains__(key)
            self.clear()
            return known

    cache._by_pattern = Forgotten()
    for _ in range(3):
        cache.get_or_bind_alike("options", tensors, "pattern", check, object)


def test_a_call_of_any_length_is_bound_the_second_time() -> None:
    cache = Cache()
    x, wide = torch.zeros(2), torch.zeros(1, 2, 3, 4)
    bound = object()
    first, second, third = (torch.zeros(1, n, 3, 4) for n in (5, 6, 7))
    given = "options", [x, first], "pattern", any_length
    assert cache.get_or_bind_alike(*given, pytest.fail) is None
    assert cache.get_or_bind_alike("options", [x, second], *given[2:], lambda: bound) is bound
    assert cache.match("options", [x, third]) is bound
    assert cache.get_or_bind_alike("options", [x, third], *given[2:], pytest.fail) is bound
    assert cache.match("options", [x, wide.double()]) is None
    assert cache.match("others", [x, third]) is None
    assert cache.get_or_bind_alike(([],), [x, third], *given[2:], pytest.fail) is None
    cache.clear()
    assert cache.get_or_bind_alike(*given, pytest.fail) is None


def test_what_cannot_be_bound_to_any_length_is_not_tried_again() -> None:
    cache = Cache()
    x = [torch.zeros(2), torch.zeros(1, 5, 3, 4)]
    tried: list[None] = []
    for _ in range(4):
        given = "options", x, "pattern", any_length, lambda: tried.append(None)
        assert cache.get_or_bind_alike(*given) is None
    assert len(tried) == 1


def test_a_check_of_any_length_has_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 8, 5, 4).transpose(1, 2)
    fits = call_cache.check_of([x], any_length={0: 1})
    assert fits is not None
    assert fits(torch.zeros(1, 8, 6, 4).transpose(1, 2)) and fits(x)
    others = {
        "batch": torch.zeros(2, 8, 5, 4).transpose(1, 2),
        "heads": torch.zeros(1, 7, 5, 4).transpose(1, 2),
        "columns": torch.zeros(1, 8, 5, 8).transpose(1, 2)[..., :4],
        "order": torch.zeros(1, 5, 8, 4),
        "type": x.half(),
        "gradient": x.clone().requires_grad_(),
    }
    assert [name for name, other in others.items() if fits(other)] == []
    monkeypatch.setattr(call_cache, "_TensorGuards", None)
    assert call_cache.check_of([x], any_length={0: 1}) is None


def test_a_check_of_packed_tensors_of_any_length() -> None:
    """Their first dimension; heads before tokens have a stride that follows from it."""
    x = torch.zeros(8, 5, 4).transpose(0, 1)
    fits = call_cache.check_of([x, torch.zeros(3)], any_length={0: 0})
    assert fits is not None and fits(torch.zeros(8, 9, 4).transpose(0, 1), torch.zeros(3))
    for other in (torch.zeros(5, 8, 4), torch.zeros(7, 9, 4).transpose(0, 1), x.half()):
        assert not fits(other, torch.zeros(3))
    assert not fits(x, torch.zeros(4))


def test_a_call_of_any_first_length_is_found_by_its_options_alone() -> None:
    cache = Cache()
    x, bound = [torch.zeros(n, 3, 4) for n in (5, 6, 7)], object()
    check: Any = lambda tensors: call_cache.check_of(tensors, any_length={0: 0})  # noqa: E731
    for one in x[:2]:
        found = cache.get_or_bind_alike((), [one], "", check, lambda: bound, any_first=True)
    assert found is bound and cache.match((), [x[2]], any_first=True) is bound
    assert (
        cache.match((), [x[1]]) is None and cache.match((), [x[2].half()], any_first=True) is None
    )


def test_a_call_like_another_but_for_its_first_option(cache: Cache) -> None:
    x = [torch.zeros(2, 3)]
    assert not cache.is_another((1, "rest"), x)
    bound = cache.get_or_bind((1, "rest"), x, object)
    assert not cache.is_another((1, "rest"), x) and bound is found(cache, (1, "rest"), *x)
    assert cache.is_another((2, "rest"), x)
    assert not cache.is_another((2, "others"), x) and not cache.is_another((2, "rest"), [x[0].T])
    assert not cache.is_another(([],), x) and not cache.is_another((1, "rest"), [None])

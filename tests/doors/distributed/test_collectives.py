"""Transfers beside computation, and gradients of what several ranks get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_tasks import events
from ranks import Ranks

from splitkv.distributed.collectives import Copies, Rows

MANY = 64  # copies: a sum of so many ones beside 256 stays at 256 in bf16


def test_copies_are_the_slices() -> None:
    x = torch.randn(6, 2, 3, requires_grad=True)
    out = Copies.apply(x, slice(2, 5), slice(0, 0), slice(0, 3))
    assert torch.equal(out, torch.cat([x[2:5], x[0:3]]))
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, grad)
    (exact,) = torch.autograd.grad(torch.cat([x[2:5], x[0:3]]), x, grad)
    torch.testing.assert_close(found, exact)


def test_gradients_of_copies_are_summed_in_fp32() -> None:
    x = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = Copies.apply(x, *[slice(0, 2)] * (MANY + 1))
    grad = torch.ones_like(out)
    grad[:2] = 256
    (found,) = torch.autograd.grad(out, x, grad)
    assert found.tolist() == [[256 + MANY] * 2, [256 + MANY] * 2, [0, 0]]


def test_rows_are_those_that_are_held() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    index, held = torch.tensor([[3, 0], [3, 1]]), torch.tensor([[True, False], [True, True]])
    out = Rows.apply(x, index, held)
    assert torch.equal(out, torch.stack([x[[3, 0]] * torch.tensor([[1], [0]]), x[[3, 1]]]))
    (found,) = torch.autograd.grad(out.sum(), x)
    assert found.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]
    none = Rows.apply(x[:0], index, torch.zeros_like(held))
    assert torch.equal(none, torch.zeros(2, 2, 2))
    none.sum().backward()


def test_gradients_of_rows_are_summed_in_fp32() -> None:
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.ones(MANY + 1, dtype=torch.long)
    out = Rows.apply(x, index, torch.ones_like(index, dtype=torch.bool))
    grad = torch.ones_like(out)
    grad[0] = 256
    (found,) = torch.autograd.grad(out, x, grad)
    assert found.tolist() == [[0], [256 + MANY]]


def between(events: list[str], kind: str) -> list[int]:
    """How many transfers are on their way at every event of a kind."""
    found, on_way = [], 0
    for event in events:
        on_way += (event == "start") - (event == "wait")
        if event == kind:
            found.append(on_way)
    assert on_way == 0, f"expected all transfers to be waited for, got {events}"
    return found


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [
        # The second half of the heads comes beside the first, whose output goes beside the second.
        ({"exchange": "heads"}, [1, 1], [1, 1]),
        # The second half of the keys comes beside the first; backwards one goes home beside it.
        ({"exchange": "keys"}, [1, 0], [0, 1]),
        # A round's keys come beside the round before it, of three pairs of pieces and two.
        ({"exchange": "ring"}, [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
    ],
    ids=["heads", "keys", "ring"],
)
def test_transfers_run_beside_the_computation(
    way: dict[str, Any], forward: list[int], backward: list[int], ranks: Ranks
) -> None:
    for found in ranks.run(events, 2, way):
        assert between(found, "attend")[: len(forward)] == forward, found
        assert between(found, "attend_backward") == backward, found


def test_a_window_moves_its_tail_beside_the_own_keys(ranks: Ranks) -> None:
    """The first rank has no tail to attend to."""
    way = {"exchange": "keys", "window_size": (3, 0)}
    first, second = ranks.each(events, 2, way)
    assert between(first, "attend") == [1] and between(first, "attend_backward") == [1]
    assert between(second, "attend") == [1, 0]
    assert between(second, "attend_backward") == [0, 1]


def test_a_ring_sends_gradients_home_beside_the_next_round(ranks: Ranks) -> None:
    for found in ranks.run(events, 4, {"exchange": "ring", "causal": False}):
        # Four pairs of pieces a round; in the third one keys come and gradients go.
        rounds = between(found, "attend_backward")
        assert rounds == [1] * 4 + [1] * 4 + [2] * 4 + [1] * 4, found

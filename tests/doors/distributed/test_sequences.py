"""attention and attention_varlen over the ranks of a group, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import pairs
from rank_cases import SMALL, Sizes, compare, operands
from rank_tasks import (
    called,
    compiled_caller,
    left_over,
    sequence,
    traffic,
    twice_differentiated,
    with_dtensors,
    with_group,
)
from ranks import Raised, Ranks

TOTAL, DIM = SMALL.total, SMALL.dim
WINDOW: dict[str, Any] = {"causal": True, "window_size": (5, 0)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, -1)},
    "two_sided": {"window_size": (4, 3)},
    "left": {"window_size": (6, -1)},
    "right": {"window_size": (-1, 2)},
    "sinks": {"causal": True, "window_size": (4, 0), "sink_tokens": 3},
    "chunks": {"causal": True, "attention_chunk": 7},
    "softcap": {"causal": True, "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": True},
    "alibi_full": {"alibi_slopes": True},
    "alibi_sinks": {"window_size": (4, 1), "sink_tokens": 3, "alibi_slopes": True},
}
AXES: dict[str, tuple[Any, ...]] = {
    "mask": tuple(MASKS),
    "exchange": ("heads", "keys", "ring"),
    "heads": ((8, 8), (8, 4), (8, 2), (8, 1)),
    "packed": (True, False),
    "layout": ("contiguous", "zigzag"),
    "dtype": ("float32", "bfloat16"),
    "size": (2, 4),
}


def valid(values: dict[str, Any]) -> bool:
    """A ring that goes round takes ALiBi beside 16 bits alone."""
    alibi = values.get("mask") in ("alibi", "alibi_full")
    return not (alibi and values.get("exchange") == "ring" and values.get("dtype") == "float32")


CASES = pairs(AXES, valid)


def name_of(case: dict[str, Any]) -> str:
    packed = "packed" if case["packed"] else "dense"
    heads = "_".join(map(str, case["heads"]))
    rest = (case[name] for name in ("mask", "exchange", "layout", "dtype", "size"))
    return "-".join((*map(str, rest), heads, packed))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_results_and_gradients_are_those_of_one_process(case: dict[str, Any], ranks: Ranks) -> None:
    kind = {"packed": case["packed"], "dtype": getattr(torch, case["dtype"])}
    call = operands(MASKS[case["mask"]], case["heads"], **kind)
    way = {"exchange": case["exchange"], "layout": case["layout"]}
    compare(call, case["layout"], ranks.run(sequence, case["size"], way, call))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", ["causal", "full", "sinks"])
@pytest.mark.parametrize("exchange", ["heads", "keys", "ring"])
def test_an_odd_number_of_ranks(exchange: str, mask: str, packed: bool, ranks: Ranks) -> None:
    """Where keys of one round and gradients of another go between the same two ranks; and fewer
    KV heads than ranks, which do not divide them."""
    call = operands(MASKS[mask], (6, 2), packed=packed, dtype=torch.bfloat16)
    way = {"exchange": exchange, "layout": "zigzag"}
    compare(call, "zigzag", ranks.run(sequence, 3, way, call))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("exchange", ["heads", "keys", "ring"])
def test_no_tokens(exchange: str, packed: bool, ranks: Ranks) -> None:
    none = Sizes(0, (0, 0), DIM, DIM)
    call = operands(WINDOW, (4, 2), packed=packed, dtype=torch.float32, sizes=none)
    way = {"exchange": exchange, "layout": "contiguous"}
    outer = () if packed else (2,)
    for found in ranks.run(sequence, 2, way, call):
        assert found["out"].shape == (*outer, 0, 4, DIM) and found["lse"].shape == (*outer, 4, 0)
        assert found["dk"].shape == (*outer, 0, 2, DIM)
        assert torch.equal(found["dsink_logits"], torch.zeros(4))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [0, 1, 7, 16, 17])
def test_a_causal_window(left: int, packed: bool, sinks: bool, ranks: Ranks) -> None:
    """Of fewer keys than a rank has, of as many, and of more; over sequences that begin and end
    within what a window reaches back to."""
    options: dict[str, Any] = {"causal": True, "window_size": (left, 0)}
    options |= {} if sinks else {"sink_logits": None}
    call = operands(options, (4, 2), packed=packed, dtype=torch.bfloat16)
    way = {"exchange": "keys", "layout": "contiguous"}
    compare(call, "contiguous", ranks.run(sequence, 3, way, call))


@pytest.mark.parametrize("exchange", ["keys", "ring"])
@pytest.mark.parametrize(
    ("size", "mask"),
    [
        (1, {"causal": True, "window_size": (5, 0), "sink_tokens": 3}),
        (2, {"window_size": (13, -1), "sink_tokens": 3}),
        (2, {"window_size": (16, 12), "sink_tokens": 20}),
    ],
)
def test_sink_tokens_before_a_piece_of_ranks_that_get_all_keys(
    size: int, mask: dict[str, Any], exchange: str, ranks: Ranks
) -> None:
    """A rank's two pieces see all tokens together, and the second alone only what a window of its
    packed sequence reaches back to."""
    call = operands(mask, (4, 2), packed=True, dtype=torch.float32)
    way = {"exchange": exchange, "layout": "zigzag"}
    compare(call, "zigzag", ranks.run(sequence, size, way, call))


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
def test_no_second_derivative(window: tuple[int, int], ranks: Ranks) -> None:
    for found in ranks.each(twice_differentiated, 2, window):
        assert isinstance(found, Raised) and "once_differentiable" in found.message


def packed_call(**options: Any) -> dict[str, Any]:
    return {
        "q": torch.randn(TOTAL, 4, DIM),
        "k": torch.randn(TOTAL, 4, DIM),
        "v": torch.randn(TOTAL, 4, DIM),
        "cu_seqlens": torch.tensor((0, TOTAL), dtype=torch.int32),
        "max_seqlen": TOTAL,
        **options,
    }


@pytest.mark.parametrize("exchange", ["keys", "ring"])
def test_a_window_moves_only_keys_that_are_seen(exchange: str, ranks: Ranks) -> None:
    way = {"exchange": exchange, "layout": "contiguous"}
    moved = ranks.run(traffic, 4, way, packed_call(causal=True, window_size=(5, 0)))
    row = 4 * (DIM + DIM)
    for rank, exchanges in enumerate(moved):
        for received in exchanges:
            others = [n // row for peer, n in enumerate(received) if peer != rank]
            before = [5 if peer == rank - 1 else 0 for peer in range(4) if peer != rank]
            assert others == before


def test_a_causal_mask_moves_no_later_keys(ranks: Ranks) -> None:
    way = {"exchange": "keys", "layout": "contiguous"}
    moved = ranks.run(traffic, 4, way, packed_call(causal=True))
    for rank, exchanges in enumerate(moved):
        assert exchanges
        assert all(n == 0 for received in exchanges for n in received[rank + 1 :])


def disagreeing(ranks: Ranks, *calls: dict[str, Any]) -> str:
    """What every rank says of a call."""
    found = ranks.each(called, len(calls), "attention_varlen", list(calls))
    assert all(isinstance(x, Raised) and x.kind == "ValueError" for x in found), found
    said = {x.message for x in found}
    assert len(said) == 1, f"expected one message, got {said}"
    return said.pop()


def tokens(count: int, heads: int = 4, **options: Any) -> dict[str, Any]:
    call = packed_call(**options)
    return call | {n: torch.randn(count, heads, DIM) for n in ("q", "k", "v")}


def test_every_rank_says_the_same_of_ranks_that_disagree(ranks: Ranks) -> None:
    assert disagreeing(ranks, tokens(8), tokens(6)).startswith(
        "q: expected the same on every rank of the group, got '[8, 4, 16] float32 on cpu'"
    )
    assert disagreeing(ranks, tokens(8, causal=True), tokens(8)) == (
        "causal: expected the same on every rank of the group, got True on rank 0 and False on "
        "rank 1"
    )
    one = tokens(8, window_size=(3, -2))
    assert disagreeing(ranks, tokens(8), one) == (
        "window_size right: expected at least -1, got -2 (on rank 1 of the group)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p: expected 0 over the ranks of a group, got 0.1"),
        ({"exchange": "pages"}, "exchange: expected 'heads', 'keys' or 'ring', got 'pages'"),
        ({"layout": "striped"}, "layout: expected 'contiguous' or 'zigzag', got 'striped'"),
        ({"max_seqlen": -1}, "max_seqlen: expected at least 0, got -1"),
        ({"max_seqlen": None}, "max_seqlen: expected an integer, got None"),
        (
            {"exchange": "ring", "alibi_slopes": torch.ones(4).requires_grad_()},
            "alibi_slopes: expected no gradient of them in a ring, got 'one'",
        ),
        (
            {"exchange": "ring", "alibi_slopes": torch.ones(4)},
            "q: expected 16 bits with alibi_slopes in a ring, got 'float32'",
        ),
        ({"sink_logits": torch.ones(3)}, r"sink_logits: expected [num_heads=4], got a tensor"),
        ({"parameter_gradients": "mean"}, "parameter_gradients: expected 'summed' or 'own'"),
    ],
)
def test_a_malformed_call(options: dict[str, Any], message: str, ranks: Ranks) -> None:
    call = tokens(8, **options)
    assert disagreeing(ranks, call, call).startswith(message)


def test_heads_that_do_not_divide(ranks: Ranks) -> None:
    call = tokens(8, heads=3)
    said = disagreeing(ranks, call, call)
    assert said == "num_heads: expected a multiple of ranks=2, got 3"


def test_an_odd_number_of_tokens_in_zigzag(ranks: Ranks) -> None:
    call = tokens(7, exchange="ring")
    said = disagreeing(ranks, call, call)
    assert said == "q: expected an even number of tokens a rank with layout='zigzag', got 7"


def test_a_distributed_tensor_is_told_to_be_local(ranks: Ranks) -> None:
    for found in ranks.each(with_dtensors, 2):
        assert isinstance(found, Raised)
        assert found.message == "q: expected this rank's part, got 'a DTensor'; pass q.to_local()"


def test_a_compiled_caller_leaves_the_call_out(ranks: Ranks) -> None:
    for eager, compiled in ranks.run(compiled_caller, 2):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("how", ["none", "both", "two_dimensions", "others", "no_group"])
def test_a_malformed_group(how: str, ranks: Ranks) -> None:
    message = {
        "none": "group: expected a process group, or a device_mesh, got None",
        "both": "device_mesh: expected None with a group, got",
        "two_dimensions": "device_mesh: expected 1 dimension, got '2 dimensions'; pass the",
        "others": 'group: expected one that this rank belongs to, got "another ranks\' group"',
        "no_group": "group: expected a process group, got 'cp'",
    }[how]
    for found in ranks.each(with_group, 2, how):
        assert isinstance(found, Raised) and found.kind == "ValueError", found
        assert found.message.startswith(message), found.message


@pytest.mark.parametrize("exchange", ["heads", "keys", "ring"])
def test_nothing_is_left_of_a_step(exchange: str, ranks: Ranks) -> None:
    """No circle holds what was exchanged until garbage is collected."""
    assert ranks.run(left_over, 2, exchange) == [0, 0]

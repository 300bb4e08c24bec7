"""Problems that `splitkv tune` and `regret` take."""

from __future__ import annotations

import pytest

from splitkv.lab.tune import problems
from splitkv.lab.tune.problems import Draw


def test_problems_are_drawn_over_every_axis() -> None:
    cases = problems.drawn(320, 0, 1.1e9)
    assert [c.name for c in cases] == [c.name for c in problems.drawn(320, 0, 1.1e9)]
    others = {c.name for c in problems.drawn(150, 1, 1.1e9)}
    assert len(others.intersection(c.name for c in cases)) < 5
    assert len({c.name for c in cases}) == 320
    found = [c.problem for c in cases]
    assert max(p.kv_bytes for p in found) <= 1.1e9
    for axis, values in (
        (lambda p: p.num_kv_heads, problems.KV_HEADS),
        (lambda p: p.group, problems.RATIOS),
        (lambda p: p.head_dim, problems.HEAD_DIMS),
        (lambda p: getattr(p.place, "page_size", None), problems.PAGE_SIZES),
        (lambda p: p.seqlen_q, (1, 4, 16)),
        (lambda p: min(7, p.batch.bit_length() - 1), range(8)),
        (lambda p: p.seqlen_k.bit_length() - 1, range(7, 19)),
    ):
        counts = {value: [axis(p) for p in found].count(value) for value in values}
        assert sum(counts.values()) == 320 and min(counts.values()) >= 8
    assert all(p.batch <= 256 and 128 <= p.seqlen_k <= 1 << 19 for p in found)
    with pytest.raises(ValueError, match=r"^max_bytes: expected at least 10000000.0, got 5$"):
        problems.drawn(10, 0, 5)


def test_the_matrix_is_that_of_the_source() -> None:
    cases = problems.matrix()
    assert len({case.name for case in cases}) == 160
    assert {c.problem.group for c in cases} == {8}
    assert cases[0].name == "b1_h8x1_d128_q1_k128"


def test_what_is_known_is_tuned_too_in_shares() -> None:
    whole = problems.tuning(Draw(20, 0, 1e9), with_known=True)
    assert len(whole) == len({case.name for case in whole})
    assert {case.name for case in problems.matrix()} < {case.name for case in whole}
    shares = [
        problems.tuning(Draw(20, 0, 1e9, problems.share_of(f"{k}/3")), with_known=True)
        for k in (1, 2, 3)
    ]
    assert sorted(case.name for share in shares for case in share) == sorted(
        case.name for case in whole
    )
    for text in ("0/3", "4/3", "1", "a/b", "1/2/3"):
        with pytest.raises(ValueError, match=r"^share: expected k/n with k from 1 to n, got "):
            problems.share_of(text)


def test_problems_whose_lengths_differ() -> None:
    draw = Draw(20, 0, 1e9, mixes=12)
    found = list(problems.mixed(draw))
    assert len(found) == 12 and found == list(problems.mixed(draw))
    assert not list(problems.mixed(Draw(20, 0, 1e9)))
    cases = [case for of in found for case in of]
    assert len({case.name for case in cases}) == 12 * len(problems.MIXES)
    for of in found:
        assert tuple(map(problems.mix_of, of)) == problems.MIXES
        assert len({case.problem for case in of}) == 1
        for case in of:
            p, lengths = case.problem, case.lengths
            assert lengths is not None and len(lengths) == p.batch > 1
            assert max(lengths) == p.seqlen_k and p.lengths == "device"
            assert p.kv_bytes <= 1e9
        assert set(of[0].lengths or ()) == {of[0].problem.seqlen_k}
    known = problems.tuning(draw, with_known=False)
    assert len(known) == 20 + len(cases)
    assert problems.mix_of(known[0]) == ""

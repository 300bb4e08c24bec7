"""The grammar of refusals."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy
import pytest
import torch

from splitkv.core import errors
from splitkv.core.errors import UnsupportedProblem

ZEROS = torch.zeros(512, 16, 4, 128, dtype=torch.float16)

REFUSALS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: errors.expect_shape(
            "k_cache", ZEROS, num_pages=None, page_size=None, num_kv_heads=8, head_dim=128
        ),
        "k_cache: expected [num_pages, page_size, num_kv_heads=8, head_dim=128], "
        "got [512, 16, 4, 128]",
    ),
    (
        lambda: errors.expect_shape("q", ZEROS, batch=None, head_dim=64),
        "q: expected [batch, head_dim=64], got [512, 16, 4, 128]",
    ),
    (
        lambda: errors.expect_shape("q", [1, 2], batch=None),
        "q: expected a tensor [batch], got [1, 2]; pass torch.as_tensor(q)",
    ),
    (lambda: errors.expect_tensor("q", None), "q: expected a tensor, got None"),
    (
        lambda: errors.expect_dtype("q", ZEROS, "bfloat16"),
        "q: expected dtype bfloat16, got float16",
    ),
    (
        lambda: errors.expect_dtype("q", ZEROS, "bfloat16", "float32", "float64"),
        "q: expected dtype bfloat16, float32 or float64, got float16",
    ),
    (
        lambda: errors.expect_device("v", ZEROS, "cuda:0"),
        "v: expected device cuda:0, got cpu",
    ),
    (
        lambda: errors.expect_last_dim_contiguous("k", torch.zeros(2, 3).T),
        "k: expected stride 1 in the last dimension, got [1, 3]; pass k.contiguous()",
    ),
    (lambda: errors.expect_int("num_splits", 2.0), "num_splits: expected an integer, got 2.0"),
    (lambda: errors.expect_int("num_splits", True), "num_splits: expected an integer, got True"),
    (
        lambda: errors.expect_int("num_splits", torch.tensor(2)),
        "num_splits: expected an integer, got a tensor of shape []",
    ),
    (lambda: errors.expect_bool("causal", 1), "causal: expected True or False, got 1"),
    (
        lambda: errors.expect_number("softcap", float("nan")),
        "softcap: expected a finite number, got nan",
    ),
    (lambda: errors.expect_number("softcap", "1"), "softcap: expected a finite number, got '1'"),
    (lambda: errors.expect_number("softcap", True), "softcap: expected a finite number, got True"),
    (
        lambda: errors.expect_number("softcap", torch.tensor(1.0)),
        "softcap: expected a finite number, got a tensor of shape []",
    ),
    (
        lambda: errors.expect_int("num_splits", numpy.zeros(1, int)),
        "num_splits: expected an integer, got a numpy.ndarray of shape [1]",
    ),
    (lambda: errors.expect_positive("batch", 0), "batch: expected more than 0, got 0"),
    (
        lambda: errors.expect_positive("scale", float("nan")),
        "scale: expected more than 0, got nan",
    ),
    (lambda: errors.expect_at_least("window", -2, -1), "window: expected at least -1, got -2"),
    (
        lambda: errors.expect_in_range("dropout_p", 1.5, 0, 1),
        "dropout_p: expected 0 to 1, got 1.5",
    ),
    (
        lambda: errors.expect_divides("num_heads", 28, num_kv_heads=8),
        "num_heads: expected a multiple of num_kv_heads=8, got 28",
    ),
    (
        lambda: errors.expect_divides("num_heads", 28, num_kv_heads=0),
        "num_heads: expected a multiple of num_kv_heads=0, got 28",
    ),
    (
        lambda: errors.expect_one_of("policy", "best", ["waves", "fixed"]),
        "policy: expected 'waves' or 'fixed', got 'best'",
    ),
    (
        lambda: errors.expect_none_with("page_table", ZEROS, "a contiguous cache"),
        "page_table: expected None with a contiguous cache, got a tensor of shape "
        "[512, 16, 4, 128]",
    ),
    (
        lambda: errors.expect_given_with("k_scale", None, "an int8 cache"),
        "k_scale: expected a value with an int8 cache, got None",
    ),
]


@pytest.mark.parametrize(("refuse", "message"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_refusal_has_its_exact_message(refuse: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        refuse()
    assert str(caught.value) == message


def test_what_is_right_passes() -> None:
    shape = errors.expect_shape(
        "k", ZEROS, num_pages=None, page_size=16, num_kv_heads=4, head_dim=128
    )
    assert shape == (512, 16, 4, 128)
    errors.expect_dtype("k", ZEROS, "bfloat16", "float16")
    errors.expect_device("k", ZEROS, torch.device("cpu"))
    errors.expect_last_dim_contiguous("k", ZEROS.transpose(1, 2))
    errors.expect_last_dim_contiguous("k", torch.zeros(3, 1).expand(3, 1))
    errors.expect_int("n", 0)
    errors.expect_int("n", numpy.int64(3))
    errors.expect_number("softcap", 30)
    errors.expect_number("softmax_scale", 1 / numpy.sqrt(64))
    errors.expect_number("softmax_scale", numpy.float32(0.125))
    errors.expect_in_range("p", 0.0, 0, 1)
    errors.expect_divides("num_heads", 28, num_kv_heads=4)


def unsupported() -> UnsupportedProblem:
    return UnsupportedProblem(
        "decode: batch 8, heads 64/8, head_dim 80",
        "H100 (sm_90, 132 SMs)",
        [
            (
                "decode_split_sm90",
                ["page_size 16: expected a multiple of 64", "head_dim 80: expected 64 or 128"],
            ),
            ("prefill", ["q_len 1: expected at least 16"]),
        ],
    )


def test_unsupported_problem_names_every_kernel_with_every_reason() -> None:
    assert str(unsupported()) == (
        "no kernel can run this problem on H100 (sm_90, 132 SMs)\n"
        "  decode: batch 8, heads 64/8, head_dim 80\n"
        "  decode_split_sm90  page_size 16: expected a multiple of 64\n"
        "                     head_dim 80: expected 64 or 128\n"
        "  prefill            q_len 1: expected at least 16"
    )
    assert isinstance(unsupported(), NotImplementedError)


def test_unsupported_problem_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(unsupported()))
    assert str(again) == str(unsupported())
    assert again.reasons == unsupported().reasons

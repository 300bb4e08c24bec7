"""TransformerEngine's call shape over ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_cases import compare, operands
from rank_tasks import core_attention
from ranks import Raised, Ranks


@pytest.mark.parametrize("format_", ["sbhd", "bshd"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_a_layer(comm: str, format_: str, ranks: Ranks) -> None:
    call = operands({"causal": True}, (4, 2), packed=False, dtype=torch.bfloat16)
    call["grad_lse"].zero_()
    options = {"cp_comm_type": comm, "qkv_format": format_, "parameter_gradients": "summed"}
    found = ranks.run(core_attention, 2, call, options)
    compare(call, "zigzag", found)


def test_gradients_of_its_own_add_up(ranks: Ranks) -> None:
    call = operands({"causal": True}, (4, 2), packed=False, dtype=torch.float32)
    both = [
        ranks.run(core_attention, 2, call, {"cp_comm_type": "p2p", "parameter_gradients": how})
        for how in ("own", "summed")
    ]
    own, summed = ([part["dsink_logits"] for part in found] for found in both)
    torch.testing.assert_close(own[0] + own[1], summed[0])
    assert torch.equal(summed[0], summed[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_comm_type": "a2a+p2p"}, "cp_comm_type: expected 'p2p', 'all_gather' or 'a2a', got"),
        ({"qkv_format": "thd", "attn_mask_type": "padding"}, "qkv_format: expected 'sbhd' or 'bsh"),
        ({"attention_dropout": 0.1}, "dropout_p: expected 0 over the ranks of a group, got 0.1"),
    ],
)
def test_what_there_is_not_over_ranks(options: dict[str, Any], message: str, ranks: Ranks) -> None:
    call = operands({}, (4, 2), packed=options.get("qkv_format") == "thd", dtype=torch.float32)
    for found in ranks.each(core_attention, 2, call, options):
        assert isinstance(found, Raised) and found.kind == "ValueError", found
        assert found.message.startswith(message), found.message

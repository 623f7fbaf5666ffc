"""The memory that `nvlink_p2p` lays out on every rank."""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p.buffers import place_shapes
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.config import Wire

PLACES = 3 * 5  # ranks * max_tokens

# sizes of which no two are equal: rows and answers as (columns, dtype), then packets of a row and of an answer
CASES = {
    "plain": (
        {"top_k": 3, "hidden_size": 256},
        (256, torch.bfloat16), 0, (256, torch.bfloat16), (134, 130),  # 2 * 3 + 128; 128 + 1, and one to be even
    ),
    "one expert": (
        {"top_k": 1, "hidden_size": 264, "dtype": torch.float32},
        (264, torch.float32), 0, (264, torch.float32), (266, 266),
    ),
    "fp8_block": (
        {"top_k": 4, "hidden_size": 384, "wire": Wire(dispatch="fp8_block", combine="fp8")},
        (384, torch.float8_e4m3fn), 3, (384, torch.float8_e4m3fn), (108, 98),  # 2 * 4 + 96 + 3; 96 + 1
    ),
    "nvfp4": (
        {"top_k": 7, "hidden_size": 256, "wire": Wire(dispatch="nvfp4", input_scale=0.02)},
        (128, torch.uint8), 16, (256, torch.bfloat16), (50, 130),  # 14 + 32 + 4
    ),
    "mxfp8": (
        {"top_k": 2, "hidden_size": 128, "wire": Wire(dispatch="mxfp8")},
        (128, torch.float8_e4m3fn), 4, (128, torch.bfloat16), (38, 66),  # 4 + 32 + 1; 64 + 1
    ),
    "per route": (
        {"top_k": 3, "hidden_size": 256, "per_route": True},
        (256, torch.bfloat16), 0, (256, torch.bfloat16), (134, 130),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("low_latency_tokens", "few"), [(2, 2), (9, 5)])
def test_each_place_holds_what_a_call_puts_there(case, low_latency_tokens, few):
    """A packet carries 4 bytes. A row has two packets for each route, and one for each word of its numbers and scales.
    An answer has one for each word, and one that always comes. Both are an even number."""
    options, rows, scales, answers, packets = CASES[case]
    shape = dispatch_shape(**options)
    found = place_shapes(shape, low_latency_tokens)
    top_k, returned = options["top_k"], options["top_k"] if shape.per_route else 1
    assert found["rows"] == ((PLACES, rows[0]), rows[1])
    assert found["scales"][0] == (PLACES, scales)
    assert found["ids"] == ((PLACES, top_k), torch.int32)
    assert found["weights"] == ((PLACES, top_k), torch.float32)
    assert found["answers"] == ((PLACES * returned, options["hidden_size"]), shape.dtype)
    assert found["arrived"] == ((PLACES * returned, answers[0]), answers[1])
    rounded = PLACES * returned if answers[1] != shape.dtype else 0
    assert found["rounded"] == ((rounded, answers[0]), answers[1])
    assert found["row_packets"] == ((3, few, packets[0]), torch.int64)
    assert found["answer_packets"] == ((3, few * returned, packets[1]), torch.int64)
    assert found["weight_packets"] == ((5, top_k), torch.int64)
    assert found["flags"] == ((3, 3), torch.int32)


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_a_call_are_those_of_its_places(case):
    shape = dispatch_shape(**CASES[case][0])
    few = NVLinkP2PDispatcher._low_latency_tokens(shape)
    size = 0
    for sizes, dtype in place_shapes(shape, few).values():
        size += -(-torch.Size(sizes).numel() * dtype.itemsize // 256) * 256
    assert NVLinkP2PDispatcher.buffer_bytes(shape) == size


def dispatch_shape(**options) -> DispatchShape:
    return DispatchShape(**{"dtype": torch.bfloat16, "slots_per_rank": 4, "num_ranks": 3, "max_tokens": 5} | options)

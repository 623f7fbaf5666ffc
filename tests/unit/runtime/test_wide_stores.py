"""Test that kernels store 16 bytes per instruction to peers' memory, on PTX compiled for Hopper.

Triton emits such stores only if the pointer itself is declared to be aligned.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

from ep_moe.all2all.nvlink_p2p import bulk, low_latency, low_latency_answers
from ep_moe.experts.hopper import route_sort
from ep_moe.runtime.waiting import Waiting

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton compiles nothing")

PACKETS = {
    "RANK": 1,
    "TOP_K": 8,
    "WIDTH": 8,
    "FEW": 32,
    "PACKETS": 1042,
    "WORDS": 1024,
    "WHOLE": 4096,
    "BLOCK": 512,
    "PUT": True,
    "PDL": True,
}
TABLES = dict.fromkeys(
    ("replicas", "counts", "expert_load", "slot_load", "counting", "seed", "experts", "sent_weights")
)
FLAGS = {
    "RANK": 1,
    "RANKS": 4,
    "LANES": 4,
    "TOP_K": 8,
    "WIDTH": 8,
    "MOST": 0,
    "PDL": True,
    "CHOOSERS": 4,
    "TILE": 32,
    **TABLES,
}
PLAIN = {"SCALES": 0, "SCALE_BLOCK": 1, "ROUNDS": "", "SMALLEST": 1e-10}
GIVE = {"RANK": 1, "RANKS": 4, "TOP_K": 8, "WIDTH": 8}
ANSWERS = {
    **PACKETS,
    "RANKS": 4,
    "ROUTES": 8,
    "sent_weights": None,
    "PART": 128,
    "LANES": 4,
    "DTYPE": None,
    "TAKE": False,
}
REDUCE = {"TOP_K": 8, "WEIGHTED": True, "TURNS": 4, "BLOCK": 1024, "PDL": True}
TYPES = {
    "x": "*i32", "x_scale": "*i32", "input_scale": "fp32", "ids": "*i64", "weights": "*fp32", "peers": "*i64",
    "flags": "*i32", "sequence": "*i32", "sent": "*i32", "packets": "*i64", "rows": "*i32", "scales": "*i32",
    "got_ids": "*i32", "got_weights": "*fp32", "out": "*bf16", "answers": "*i32", "y": "*bf16", "slots": "*i32",
    "number": "*i32",
}  # fmt: skip


def ptx_of(kernel: Any, constants: dict[str, Any], warps: int, *, rounded: bool) -> str:
    """Return a kernel's PTX. rounded: results travel in E4M3."""
    names = kernel.arg_names
    known = TYPES | ({"rows": "i32"} if kernel is route_sort._reduce else {})
    known |= {"out": "*u8", "answers": "*bf16"} if rounded else {}
    types = {name: "constexpr" if name in constants else known.get(name, _number(name)) for name in names}
    given = {(names.index(name),): constants[name] for name in names if name in constants}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*" or _even(name)}
    jitted = kernel.kernel if isinstance(kernel, Waiting) else kernel
    source = ASTSource(jitted, types, given, even)
    target = GPUTarget("cuda", 90, 32)
    return str(compile(source, target=target, options={"num_warps": warps}).asm["ptx"])


def stores(ptx: str) -> Counter[int]:
    """Return the number of store instructions by their bytes."""
    found = re.findall(r"st\.global(?:\.wt)?(?:\.v(\d))?\.b(\d+)", ptx)
    return Counter(int(vector or 1) * int(bits) // 8 for vector, bits in found)


def _number(name: str) -> str:
    return "i64" if name == "offset" or name.endswith("_at") else "i32"


def _even(name: str) -> bool:
    return name in ("offset", "size", "stride") or name.endswith("_at")


@pytest.mark.parametrize(("kernel", "constants", "warps", "wide"), [
    (bulk._send, {**FLAGS, **PLAIN, "ELEMENTS": 1024, "BLOCK": 1024}, 4, 4 * 2),
    (bulk._give, {**GIVE, "NUMBERS": 1024, "BLOCK": 1024, "ROUNDS": False}, 4, 2),
    (bulk._give, {**GIVE, "NUMBERS": 2048, "BLOCK": 2048, "ROUNDS": True}, 4, 1),
    (low_latency._send, {**PACKETS, **PLAIN, **TABLES, "MOST": 0, "TAKE": False}, 4, 2),
    (low_latency_answers._receive, {**ANSWERS, "ROUNDS": False}, 4, 2),
    (low_latency_answers._receive, {**ANSWERS, "ROUNDS": True}, 4, 2),
    (route_sort._reduce, {**REDUCE, "number": None}, 2, 2),
    (route_sort._reduce, {**REDUCE, "number": None, "rounded": True}, 2, 1),
    (route_sort._reduce, REDUCE, 2, 4),
    (route_sort._reduce, {**REDUCE, "rounded": True}, 2, 2),
], ids=[
    "send", "give", "give rounded", "send by packets", "receive by packets", "rounded by packets", "reduce", "reduce "
    "rounded",
    "reduce by packets", "reduce rounded by packets",
])  # fmt: skip
def test_rows_are_stored_16_bytes_at_once(kernel, constants, warps, wide):
    """Rows are stored 16 bytes at a time.

    wide: the least number of such stores, for a program's row or packets: bytes / 16 / threads, for each peer written
    to.
    """
    rounded = constants.get("rounded") or constants.get("ROUNDS") is True
    ptx = ptx_of(kernel, constants, warps, rounded=rounded)
    found = stores(ptx)
    assert found[16] >= wide
    assert not {1, 2} & set(found), "of numbers one by one"
    assert "div.rn.f32" not in ptx, "an answer has no scale that it is divided by"

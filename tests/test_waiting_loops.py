"""Kernels that wait for peers, compiled for Hopper: all warps of a program leave the loop together, if they meet at
barriers in it. Warps that read a peer's memory one by one may each have read something else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing", allow_module_level=True)

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ep_moe import Wire
from ep_moe.all2all import p2p_cells_triton, p2p_kernels_triton
from ep_moe.all2all.base import Geometry
from ep_moe.all2all.p2p_memory import Workspace, place_shapes
from ep_moe.experts import pair_kernels
from ep_moe.types import PhysicalIds, PhysicalRouting
from ep_moe.workspace import carved_bytes
from tests.test_triton_compiles import Hopper

BF16, TOKENS, TOP_K = torch.bfloat16, 16, 8
WIRES = {
    "plain": Wire(),
    "fp8_block": Wire(dispatch="fp8_block"),
    "fp8_row": Wire(dispatch="fp8_row"),
    "fp8_tensor": Wire(dispatch="fp8_tensor", input_scale=0.02),
    "answers in E4M3": Wire(dispatch="fp8_tensor", combine="fp8", input_scale=0.02),
}


# reads of what others write meanwhile
OTHERS = re.compile(r"ld\.volatile\.global|atom\.global|ld\.global\.\w+\.acquire")


def waiting_loops(ptx: str) -> Iterator[list[str]]:
    """Instructions of each loop that reads what others write meanwhile."""
    lines = [line.strip() for line in ptx.splitlines()]
    places = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\$L\w+:", line)}
    for label, begin in places.items():
        jumps = [
            at for at, line in enumerate(lines) if at > begin and re.search(rf"bra(\.uni)?\s+{re.escape(label)};", line)
        ]
        body = lines[begin + 1 : jumps[-1] + 1] if jumps else []
        if any(OTHERS.search(line) for line in body):
            yield body


def parts_warps(body: list[str]) -> bool:
    """Whether a branch depends on what a thread has read from global memory by itself. What comes back from shared
    memory is the same for all."""
    if not any(line.startswith("bar.sync") for line in body):
        return False
    own: set[str] = set()
    for _ in range(2):  # what an iteration leaves to the next
        for line in body:
            guard, _, instruction = line.rpartition("@")[2].partition(" ") if line.startswith("@") else ("", "", line)
            operation, _, rest = instruction.strip().partition(" ")
            if operation.startswith("bra"):
                if guard.lstrip("!") in own:
                    return True
                continue
            found = re.findall(r"%\w+", rest)
            written = re.findall(r"%\w+", rest.split("}")[0]) if rest.strip().startswith("{") else found[:1]
            reads = {*found[len(written) :], guard.lstrip("!")}
            if OTHERS.match(operation) or reads & own:
                own.update(written)
            elif not operation.startswith("ld.shared") and not guard:
                own.difference_update(written)
            if operation.startswith("ld.shared"):
                own.difference_update(written)
    return False


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """PTX of what is launched within."""
    found, run = [], JITFunction.run

    def kept(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, warmup=True, **options).asm["ptx"])

    with mock.patch.object(driver, "_active", Hopper()), mock.patch.object(JITFunction, "run", kept):
        yield found


def workspace(hidden: int, ranks: int, wire: Wire) -> Workspace:
    geometry = Geometry(
        hidden_size=hidden, top_k=TOP_K, cap=8, num_ranks=ranks, dtype=BF16, max_tokens=TOKENS, wire=wire
    )
    shapes = place_shapes(geometry, TOKENS)
    own = torch.zeros(carved_bytes(shapes), dtype=torch.uint8)
    memory = SimpleNamespace(local=own, peers=[own] * ranks, addresses=torch.tensor([own.data_ptr()] * ranks))
    return Workspace(geometry, 0, shapes, memory)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("hidden", [256, 2048, 7168])
def test_warps_leave_together(hidden, ranks, wire, compiled):
    made = workspace(hidden, ranks, WIRES[wire])
    x, out = torch.zeros(TOKENS, hidden, dtype=BF16), torch.zeros(TOKENS, hidden, dtype=BF16)
    ids = PhysicalIds(torch.zeros(TOKENS, TOP_K, dtype=torch.int64))
    routing = PhysicalRouting(ids, torch.ones(ids.shape))
    p2p_cells_triton.send(made, x, None, routing, TOKENS)
    for put in (False, True):
        p2p_cells_triton.receive(made, out, TOKENS, put=put)
    p2p_kernels_triton.send(made, x, None, routing, TOKENS, 132)
    p2p_kernels_triton.receive(made, out, TOKENS, tell=True)
    scales = made.geometry.scales
    p2p_kernels_triton.announce(made, torch.zeros(TOKENS, scales) if scales else None, routing, TOKENS)
    assert len(compiled) == 6
    for number, ptx in enumerate(compiled):
        loops = list(waiting_loops(ptx))
        assert loops, f"kernel {number} waits for nobody"
        assert not any(map(parts_warps, loops)), f"kernel {number}"


@pytest.mark.parametrize(("rows", "loops"), [(16, 1), (512, 1), (1024, 2)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_warps_that_sort_leave_together(ranks, rows, loops, compiled):
    """While rows still come."""
    ids, found = torch.zeros(rows, TOP_K, dtype=torch.int32), torch.zeros(rows * TOP_K, dtype=torch.int32)
    told = torch.zeros(ranks, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    pair_kernels.group_pairs(
        ids,
        32,
        found,
        found.view(ids.shape),
        found[:32],
        found,
        weights=torch.ones(ids.shape),
        soon=True,
        told=told,
    )
    (ptx,) = compiled
    found = list(waiting_loops(ptx))
    assert len(found) == loops
    assert not any(map(parts_warps, found))


@pytest.mark.parametrize(
    ("guard", "parts"),
    [("setp.gt.s32 %p1, %r4, 0;", False), ("add.s32 %r5, %r4, %r1;\nsetp.gt.s32 %p1, %r5, 0;", True)],
)
def test_a_loop_that_goes_by_what_a_warp_has_read(guard, parts):
    """That of the kernel which did not come back: a sum of all warps, and one of each warp's own."""
    ptx = f"""
    $L__BB0_1:
    mov.u64 %rd1, 0x0;
    @%p2 ld.volatile.global.b64 {{ %rd1 }}, [ %rd9 + 0 ];
    mov.b64 {{_, %r1}}, %rd1;
    redux.sync.add.s32 %r2, %r1, %r3;
    bar.sync 0;
    st.shared.b32 [ %r8 + 0 ], %r2;
    bar.sync 0;
    ld.shared.b32 %r4, [global_smem];
    {guard}
    @%p1 bra $L__BB0_1;
    """
    (body,) = waiting_loops(ptx)
    assert parts_warps(body) is parts
    assert not parts_warps([line for line in body if "bar.sync" not in line]), "warps that never meet may part"

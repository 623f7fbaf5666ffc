"""Test that all warps of a waiting kernel leave its loop together, on PTX compiled for Hopper.

Warps must leave together if they meet at barriers in the loop. Each warp may have read another value from a peer's
memory, and leave at another time. A binary that may do so is not launched.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import driver

import ep_moe
from ep_moe import Wire
from ep_moe.all2all.nvlink_p2p import bulk, low_latency, low_latency_answers, route_weights
from ep_moe.all2all.nvlink_p2p.signals import any_of, late_packets, still_missing
from ep_moe.errors import BackendUnavailable
from ep_moe.experts.hopper import route_sort
from ep_moe.runtime import waiting
from ep_moe.runtime.waiting import Waiting
from ep_moe.runtime.warp_paths import divergent_branch, waiting_loops
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.triton_compiles import Hopper
from tests.fixtures.waiting_loops import BF16, TOKENS, TOP_K, workspace

WIRES = {
    "plain": Wire(),
    "fp8_block": Wire(dispatch="fp8_block"),
    "fp8_row": Wire(dispatch="fp8_row"),
    "fp8_tensor": Wire(dispatch="fp8_tensor", input_scale=0.02),
    "answers in E4M3": Wire(dispatch="fp8_tensor", combine="fp8", input_scale=0.02),
}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Yield the PTX of the waiting kernels launched inside the fixture."""
    found: list[str] = []

    def kept(self: Waiting, grid: Any, /, *args: Any, **options: Any) -> None:
        found.append(self.kernel.warmup(*args, grid=grid, **options).asm["ptx"])

    with mock.patch.object(driver, "_active", Hopper()), mock.patch.object(Waiting, "_launch", kept):
        yield found


SHAPES = [(hidden, ranks, wire, False) for hidden in (256, 2048, 7168) for ranks in (2, 4, 8) for wire in WIRES]
SHAPES += [(256, 8, "plain", True), (2048, 2, "plain", True), (7168, 4, "fp8_row", True)]


@pytest.mark.parametrize(("hidden", "ranks", "wire", "per_route"), SHAPES)
def test_warps_leave_together(hidden, ranks, wire, per_route, compiled):
    made = workspace(hidden, ranks, WIRES[wire], per_route=per_route)
    x, out = torch.zeros(TOKENS, hidden, dtype=BF16), torch.zeros(TOKENS, hidden, dtype=BF16)
    ids = PhysicalIds(torch.zeros(TOKENS, TOP_K, dtype=torch.int64))
    routing = PhysicalRouting(ids, torch.ones(ids.shape))
    low_latency.send(made, x, None, routing, TOKENS)
    for put in (False, True):
        low_latency_answers.receive(made, out, TOKENS, put=put)
    bulk.send(made, x, None, routing, TOKENS, 132)
    bulk.receive(made, out, TOKENS, signal_first=True)
    scales = made.dispatch_shape.scales
    bulk.announce(made, torch.zeros(TOKENS, scales) if scales else None, routing, TOKENS)
    route_weights.receive_route_values(made, torch.zeros(TOKENS, TOP_K))
    assert len(compiled) == 7
    for number, ptx in enumerate(compiled):
        assert waiting_loops(ptx) == 1, f"kernel {number}"
        assert divergent_branch(ptx) is None, f"kernel {number}"


@pytest.mark.parametrize(("rows", "loops"), [(16, 1), (512, 1), (1024, 2)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_warps_that_sort_leave_together(ranks, rows, loops, compiled):
    """Warps of the sort kernel leave together, while rows are still arriving."""
    ids, found = torch.zeros(rows, TOP_K, dtype=torch.int32), torch.zeros(rows * TOP_K, dtype=torch.int32)
    ids_ready = torch.zeros(ranks, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    route_sort.group_pairs(
        ids,
        32,
        found,
        found.view(ids.shape),
        found[:32],
        found,
        weights=torch.ones(ids.shape),
        pdl=True,
        ids_ready=ids_ready,
    )
    (ptx,) = compiled
    assert waiting_loops(ptx) == loops
    assert divergent_branch(ptx) is None


@triton.jit
def _waits(packets, out, number, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):  # noqa: N803
    """Wait for packets. Each warp reads them for itself, because they are few."""
    at = tl.arange(0, WIDTH)
    missing = 1
    while missing > 0:
        late = late_packets(tl.load(packets + at, volatile=True), number, at < WIDTH)
        many = tl.zeros([128], tl.int1)
        missing = still_missing(many, any_of(late)) if TOGETHER else any_of(late).to(tl.int32)
        tl.debug_barrier()
    tl.store(out + at, at)


class Driver(Hopper):
    """A driver that loads binaries and counts launches."""

    def __init__(self) -> None:
        self.launched = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda *binary: (object(), object(), 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return self.launch

    def launch(self, *given: Any) -> None:
        self.launched += 1


def test_a_kernel_whose_warps_may_part_is_not_launched(monkeypatch):
    """A kernel whose warps may diverge is not launched.

    In the loop of a kernel that hung, each warp used its own reads.
    """
    looks = mock.Mock(side_effect=divergent_branch)
    monkeypatch.setattr(waiting, "divergent_branch", looks)
    kernel, packets = Waiting(_waits), torch.zeros(8, dtype=torch.int64)
    out = torch.zeros(8, dtype=torch.int32)
    with mock.patch.object(driver, "_active", Driver()) as active:
        for _ in range(2):
            assert kernel[(1,)](packets, out, 1, WIDTH=8, TOGETHER=True) is not None
        assert active.launched == 2
        assert looks.call_count == 1, "once for each binary"
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match=r"'_waits'.*its warps may diverge.*not launched.*all2all="):
                kernel[(1,)](packets, out, 1, WIDTH=8, TOGETHER=False)
        assert active.launched == 2
        _waits.device_caches.clear()


def _jit_functions() -> dict[str, tuple[ast.FunctionDef, set[str]]]:
    """Return every Triton function of the package: its tree, and the names that it calls."""
    found = {}
    for path in Path(ep_moe.__file__).parent.rglob("*.py"):
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.FunctionDef) and "triton.jit" in " ".join(map(ast.unparse, each.decorator_list)):
                called = {call.func.id for call in ast.walk(each)
                          if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}  # fmt: skip
                found[f"{path.stem}.{each.name}"] = (each, called)
    return found


def test_every_kernel_that_waits_is_examined():
    """Every kernel that reaches a waiting loop is examined, found by the volatile or atomic reads of such loops."""
    functions = _jit_functions()
    waits = {name for name, (tree, _) in functions.items()
             if any(re.search("volatile=True|atomic_", ast.unparse(loop)) for loop in ast.walk(tree)
                    if isinstance(loop, ast.While))}  # fmt: skip
    assert {name.split(".")[1] for name in waits} == {"wait", "grid_barrier", "_take", "_await", "_take_weights"}
    reach = {name.split(".")[1] for name in waits}
    while more := {name.split(".")[1] for name, (_, calls) in functions.items() if calls & reach} - reach:
        reach |= more
    called = set().union(*(calls for _, calls in functions.values()))
    kernels = {name for name in functions if name.split(".")[1] in reach and name.split(".")[1] not in called}
    examined = {name for name, (tree, _) in functions.items()
                if ast.unparse(tree.decorator_list[0]) == "Waiting"}  # fmt: skip
    assert kernels
    assert kernels == examined

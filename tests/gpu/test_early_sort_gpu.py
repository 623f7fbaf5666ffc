"""Routes are sorted while rows still arrive, after a kernel that signals its ids late and writes its rows later."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ep_moe.all2all.nvlink_p2p.signals import last_to_count
from ep_moe.experts.hopper import route_sort
from ep_moe.runtime.devices import supports_pdl
from ep_moe.runtime.launch_cache import pdl_trigger

EXPERTS, TOP_K, CALLS, PROGRAMS = 48, 8, 150, 32


@triton.jit
def pause(us):
    end = globaltimer() + us * 1000
    while globaltimer() < end:
        pass


@triton.jit
def send(drawn, ids, rows, written, ids_ready, calls, us, PAIRS: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    """Act as the transport: write ids and their signal, and much later the call's number in place of all rows."""
    pdl_trigger(PDL)
    program, number = tl.program_id(0), tl.load(calls) + 1
    pause(us)
    pair = program * PAIRS + tl.arange(0, PAIRS)
    tl.store(ids + pair, tl.load(drawn + number * (PAIRS * tl.num_programs(0)) + pair))
    if last_to_count(written, tl.num_programs(0)):
        tl.atomic_xchg(ids_ready, number, sem="release", scope="sys")
    pause(4 * us)
    tl.store(rows + pair, number)


@pytest.mark.parametrize("us", [0, 10])
@pytest.mark.parametrize("pairs", [1024, 4096, 8192, 65536])
def test_the_lists_are_right_and_rows_are_here_behind_them(pairs, us):
    if not supports_pdl(torch.device("cuda")):
        pytest.skip("kernels do not start early here")
    on = {"dtype": torch.int32, "device": "cuda"}
    drawn = torch.randint(-EXPERTS, EXPERTS, (CALLS + 1, pairs), generator=torch.Generator("cuda").manual_seed(5), **on)
    ids, rows, written, ids_ready = (torch.zeros(size, **on) for size in (pairs, pairs, 1, 1))
    calls, found = torch.zeros(2, **on), torch.zeros(3, CALLS + 1, pairs, **on)
    ends, space = torch.zeros(CALLS + 1, EXPERTS, **on), torch.zeros(route_sort.group_workspace(pairs, EXPERTS), **on)
    for number in range(1, CALLS + 1):
        source, slots, seen = found[:, number]
        send[(PROGRAMS,)](drawn, ids, rows, written, ids_ready, calls, us, PAIRS=pairs // PROGRAMS, PDL=True)
        route_sort.group_pairs(
            ids.view(-1, TOP_K),
            EXPERTS,
            source,
            slots.view(-1, TOP_K),
            ends[number],
            space,
            ids_ready=(ids_ready, calls),
        )
        seen.copy_(rows)
        calls[:1] += 1
    assert not calls[1]
    for number in range(1, CALLS + 1):
        source, slots, seen = found[:, number].long()
        expert = torch.where(drawn[number] < 0, EXPERTS, drawn[number]).long()
        order, total = expert.argsort(stable=True), int((expert < EXPERTS).sum())
        assert torch.equal(ends[number].long(), expert.bincount(minlength=EXPERTS + 1)[:EXPERTS].cumsum(0)), number
        assert torch.equal(source[:total], order[:total] // TOP_K), number
        placed = torch.empty_like(order).scatter_(0, order, torch.arange(pairs, device="cuda"))
        assert torch.equal(slots, torch.where(expert < EXPERTS, placed, -1)), number
        assert bool((seen == number).all()), f"call {number}: rows of the call before"

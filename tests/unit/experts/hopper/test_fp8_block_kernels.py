"""Test the Triton kernels for fp8 blocks against plain torch in float64; on a CPU, in Triton's interpreter.

The checks are functions of a device: `tests/gpu/test_fp8_block_kernels_gpu.py` calls them with other shapes.
"""

import threading

import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe.experts.hopper import gemm_fp8_block as kernels
from ep_moe.experts.hopper import route_sort
from ep_moe.experts.hopper.experts import ACTIVATIONS
from tests.fixtures.fp8_block_kernels import (
    DEVICE,
    E4M3,
    check_activation,
    check_gemm,
    check_group,
    check_quantize,
    check_quantize_pairs,
    check_reduce,
    random_operands,
)

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)


@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [([5, 0, 17], 128, 256), ([1], 256, 128), ([0, 33, 0, 2], 384, 384), ([0, 0], 128, 128)],
)
@pytest.mark.parametrize("layout", ["contiguous", "starts", "batched"])
def test_gemm(counts, n, k, layout):
    check_gemm(counts, n, k, batched=layout == "batched", starts=layout == "starts")


@pytest.mark.parametrize("config", [kernels.GemmConfig(32, 64, group_m=1), kernels.GemmConfig(16, 128, group_m=2)])
def test_gemm_configs(config):
    check_gemm([40, 3], 256, 128, config=config, dtype=torch.float16)


@pytest.mark.parametrize("rows", [8, 32 * 16, 32 * 40, 32 * 1024])
@pytest.mark.parametrize("hopper", [False, True])
def test_config_for(rows, hopper):
    config = kernels.config_for(rows, 32, 1536, hopper=hopper)
    assert config.hopper == hopper
    assert config.block_n % 128 == 0
    assert kernels.config_for(rows, 32, 1536, activated=True).block_n == 256


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 384), (9, 1024)])
def test_quantize(rows, k):
    check_quantize(rows, k)


@pytest.mark.parametrize(("rows", "top_k", "k"), [(1, 1, 128), (13, 3, 384)])
def test_quantize_pairs(rows, top_k, k):
    check_quantize_pairs(rows, top_k, k)


@pytest.mark.parametrize("activation", COMPUTED)
@pytest.mark.parametrize("up_first", [False, True])
def test_activation(activation, up_first):
    check_activation(6, 256, activation, up_first)


@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 1, 128), (5, 3, 1280)])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce(rows, top_k, size, weighted):
    check_reduce(rows, top_k, size, weighted=weighted)


@pytest.mark.parametrize("size", [128, 1280])
def test_copy_rows(size):
    """Each row is copied to all its places, and nothing else is written."""
    x = torch.randn(5, size, device=DEVICE)
    slots = torch.tensor([[3, -1], [0, 6], [-1, -1], [7, 2], [1, -1]], dtype=torch.int32, device=DEVICE)
    room = torch.full((8, size), torch.nan, device=DEVICE)
    route_sort.copy_rows(x, slots, room[:7])  # place 7 is outside, and no row has places 4 and 5
    assert torch.equal(room[[3, 0, 6, 2, 1]], x[[0, 1, 1, 3, 4]])
    assert bool(room[[4, 5, 7]].isnan().all())


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (300, 5, 6), (700, 3, 40), (600, 7, 270)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group(rows, top_k, experts, dtype):
    """Routes are grouped by expert, with local ids and with global ids."""
    check_group(rows, top_k, experts, dtype=dtype)
    check_group(rows, top_k, experts, dtype=dtype, base=64)


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (300, 5, 6), (700, 3, 40), (4097, 3, 37)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_group_beside_rows_that_still_come(ranks, rows, top_k, experts):
    """Routes are grouped while rows still travel, once all ranks have set `ids_ready`."""
    calls = torch.tensor([2**31 - 1, 0], dtype=torch.int32, device=DEVICE)
    ids_ready = torch.full((ranks,), -(2**31), dtype=torch.int32, device=DEVICE)
    check_group(rows, top_k, experts, ids_ready=(ids_ready, calls))
    check_group(rows, top_k, experts, ids_ready=(ids_ready, calls), base=64, dtype=torch.int64)


@pytest.mark.skipif(DEVICE != "cpu", reason="what is written while a kernel runs: in the interpreter alone")
@pytest.mark.parametrize("rows", [20, 2048, 2049])
def test_ids_are_awaited(rows):
    ids_ready, calls = torch.tensor([8, 7, 8], dtype=torch.int32), torch.tensor([7, 0], dtype=torch.int32)
    check_awaited(lambda: check_group(rows, 2, 5, ids_ready=(ids_ready, calls)), ids_ready[1], 8)


def check_awaited(call, place, number):
    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    place.fill_(number)
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.skipif(DEVICE != "cpu", reason="what is written while a kernel runs: in the interpreter alone")
def test_programs_wait_for_each_other():
    """At the grid barrier, each of two programs waits for the other."""
    made, calls = [], torch.tensor([7, 0], dtype=torch.int32)
    ids, room = torch.randint(0, 5, (2049, 2), dtype=torch.int32), torch.zeros(3 * 4098, dtype=torch.int32)
    lists = room[:4098], room[4098:8196].view(2049, 2), room[8196:8201]
    ids_ready = torch.tensor([8], dtype=torch.int32), calls
    launch = lambda kernel, grid, *args, **by_name: made.append((kernel, grid, args, by_name))  # noqa: E731
    route_sort.group_pairs(ids, 5, *lists, room[8201:], ids_ready=ids_ready, launch=launch)
    ((kernel, grid, args, by_name),) = made
    assert grid == (1,)
    check_awaited(lambda: kernel[2,](*args, **by_name), calls[1], 2)


def test_group_in_few_programs(monkeypatch):
    """A grid of few programs is right, where each one handles several parts of the routes."""
    monkeypatch.setattr(route_sort, "PROGRAMS", 10)
    check_group(1500, 3, 40, base=64)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_group_extremes(share):
    check_group(400, 4, 5, share=share, only=3)


def test_no_rows():
    check_group(0, 2, 3)
    none = torch.empty(0, 128, device=DEVICE)
    kernels.quantize_rows(none.bfloat16(), none.to(E4M3), torch.empty(0, 1, device=DEVICE))
    route_sort.reduce(none.bfloat16(), torch.empty(0, 2, dtype=torch.int32, device=DEVICE), None, 0, 3, none)
    _, _, b, b_scale = random_operands(0, 2, 128, 128, DEVICE)
    ends = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    kernels.grouped_gemm(none.to(E4M3), torch.empty(0, 1, device=DEVICE), b, b_scale, ends, none)

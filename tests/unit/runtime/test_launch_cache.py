"""Test repeated kernel launches, in the interpreter or over a driver that records its arguments."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ep_moe.runtime import devices, launch_cache
from ep_moe.runtime.launch_cache import KeptLaunches, LaunchCache, LaunchSpec, RecordedLaunches, launch_directly
from ep_moe.runtime.versions import launcher_known
from tests.fixtures.launches import INTERPRETED, Driver

compiled = pytest.mark.skipif(INTERPRETED, reason="Triton compiles nothing")


@triton.jit(do_not_specialize=["tokens"])
def _add(x, y, tokens, out, size, by, SIZE: tl.constexpr, TWICE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    total = tl.load(x + at, mask=at < tokens, other=0) + by
    if y is not None:
        total += tl.load(y + at, mask=at < tokens, other=0)
    if TWICE:
        total *= 2
    tl.store(out + at, total, mask=at < size)


def spec(x, y, tokens, out, *, twice=True, warps=1):
    return LaunchSpec(_add, (1,), (x, y, tokens), (out, len(out), 3), {"SIZE": 8, "TWICE": twice, "num_warps": warps})


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_a_replay_reads_what_lies_there_now():
    x, y, out = torch.arange(8), torch.arange(8), torch.zeros(8, dtype=torch.int64)
    recorded = RecordedLaunches()
    launch = spec(x, y, 8, out)
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    assert out.tolist() == [2 * (2 * n + 3) for n in range(8)]
    x.fill_(1)
    recorded.replay()
    assert out.tolist() == [2 * (1 + n + 3) for n in range(8)]


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_a_cached_launch_takes_what_changes():
    cache, out = LaunchCache(), torch.zeros(8, dtype=torch.int64)
    for tokens, x in ((8, torch.arange(8)), (2, torch.ones(8, dtype=torch.int64))):
        cache.launch("key", (x, None, tokens), lambda x=x, tokens=tokens: spec(x, None, tokens, out, twice=False))
        assert out.tolist() == [int(x[n]) * (n < tokens) + 3 for n in range(8)]


@pytest.fixture
def driver():
    from triton.runtime import driver

    made = Driver()
    _add.device_caches.clear()
    with mock.patch.object(driver, "_active", made):
        yield made
        _add.device_caches.clear()  # the driver that loaded a binary must unload it


@pytest.fixture
def looked():
    """Return the launches that go through Triton itself."""
    from triton.runtime.jit import JITFunction

    found, run = [], JITFunction.run

    def counted(self, *args, **options):
        found.append(self)
        return run(self, *args, **options)

    with mock.patch.object(JITFunction, "run", counted):
        yield found


def tensors():
    """Return three tensors whose addresses are multiples of 16 bytes."""
    whole = torch.zeros(64, dtype=torch.int64)
    begin = -whole.data_ptr() % 16 // 8
    return [whole[begin + n * 16 : begin + n * 16 + 8] for n in range(3)]


@compiled
def test_again_gives_a_binary_what_triton_gave_it(driver, looked):
    x, y, out = tensors()
    recorded = RecordedLaunches()
    for twice in (False, True):
        launch = spec(x, y, 8, out, twice=twice)
        recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    assert len(driver.found) == len(looked) == 2
    recorded.replay()
    assert len(looked) == 2
    assert driver.found[2:] == driver.found[:2]
    assert driver.found[0][2:] == (x.data_ptr(), y.data_ptr(), 8, out.data_ptr(), 8, 3, 8, False)


@compiled
def test_a_profiler_hears_of_every_launch(driver):
    x, y, out = tensors()
    recorded, heard = RecordedLaunches(), []
    launch = spec(x, y, 8, out)
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    hooks = triton.knobs.runtime.launch_enter_hook
    with mock.patch.object(hooks, "calls", [lambda metadata: heard.append(metadata.get()["name"])]):
        recorded.replay()
    assert heard == ["_add"]
    assert driver.found[1] == driver.found[0]
    recorded.replay()
    assert heard == ["_add"]


@compiled
def test_another_triton_is_left_to_itself(driver, monkeypatch, caplog):
    """An unknown Triton version launches by its own code, and one warning says so."""
    launch_cache._say_slow.cache_clear()
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    x, y, out = tensors()
    recorded = RecordedLaunches()
    launch = spec(x, y, 8, out)
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    driver.enter = []
    recorded.replay()
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    assert driver.enter[0] is triton.knobs.runtime.launch_enter_hook
    assert driver.found[1] == driver.found[0]
    (said,) = caplog.records
    assert (said.name, said.levelname) == ("ep_moe.runtime", "WARNING")
    assert "Triton 4.0.0" in said.getMessage()


@compiled
def test_this_triton_is_launched_the_short_way(driver, caplog):
    """A known Triton version is launched directly, without hooks. CI pins the installed version."""
    x, y, out = tensors()
    recorded = RecordedLaunches()
    launch = spec(x, y, 8, out)
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    driver.enter = []
    recorded.replay()
    if launcher_known(triton.__version__):
        assert driver.enter == [None], "no hooks are handed over"
        assert not caplog.records
    else:
        assert driver.enter == [triton.knobs.runtime.launch_enter_hook]


@compiled
def test_what_changes_is_given_anew(driver, looked):
    x, y, out = tensors()
    cache = LaunchCache()
    for given, tokens in ((x, 8), (y, 1), (x, 5)):
        cache.launch("key", (given, None, tokens), lambda given=given, tokens=tokens: spec(given, None, tokens, out))
        assert driver.found[-1][2:] == (given.data_ptr(), None, tokens, out.data_ptr(), 8, 3, 8, True)
    assert len(looked) == 1
    cache.launch("other", (x, y, 8), lambda: spec(x, y, 8, out))
    assert driver.found[-1][2:4] == (x.data_ptr(), y.data_ptr())
    assert len(looked) == 2


@compiled
def test_what_begins_elsewhere_is_looked_at_each_time(driver, looked):
    """A tensor with another alignment goes through Triton.

    A binary for 16-byte aligned pointers reads 16 bytes at once.
    """
    x, _, out = tensors()
    cache = LaunchCache()
    cache.launch("key", (x, None, 8), lambda: spec(x, None, 8, out))
    odd = x[1:]
    for _ in range(2):
        cache.launch("key", (odd, None, 7), lambda: spec(odd, None, 7, out))
        assert driver.found[-1][2] == odd.data_ptr()
    assert len(looked) == 3
    cache.launch("key", (x, None, 8), lambda: spec(x, None, 8, out))
    assert len(looked) == 3


@compiled
def test_calls_of_one_kind_are_looked_at_once(driver, looked):
    """Calls of one specialization go through Triton once.

    Triton specializes on alignment, 1, multiples of 16, dtypes, None and constants. Grids may differ.
    """
    x, y, out = tensors()
    kept, constants = KeptLaunches(), {"SIZE": 8, "TWICE": True, "num_warps": 1}
    for grid, given, size in (((1,), x, 8), ((3, 2), y, 7), ((1,), x, 3)):
        kept(_add, grid, given, None, 5, out, size, 3, **constants)
        assert driver.found[-1][0] == (*grid, 1, 1)[:3]
        assert driver.found[-1][2:] == (given.data_ptr(), None, 5, out.data_ptr(), size, 3, 8, True)
    assert len(looked) == 1
    others = [
        ((x[1:], None, 5, out, 8, 3), {}),
        ((x.float(), y, 5, out, 32, 3), {}),
        ((x, None, 5, out, 1, 3), {}),
        ((x, None, 5, out, 1 << 33, 3), {}),
        ((x, None, 5, out, 8, 3), {"TWICE": False}),
    ]
    for count, (given, changes) in enumerate(others, 2):
        for _ in range(2):
            kept(_add, (1,), *given, **(constants | changes))
            assert driver.found[-1][2] == given[0].data_ptr()
        assert len(looked) == count, given
    assert len({id(function) for function in driver.functions}) >= len(others), "binaries of other kinds"


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_calls_of_one_kind_in_the_interpreter():
    kept, out = KeptLaunches(), torch.zeros(8, dtype=torch.int64)
    for x in (torch.arange(8), torch.ones(8, dtype=torch.int64)):
        kept(_add, (1,), x, None, 8, out, 8, 3, SIZE=8, TWICE=False)
        assert torch.equal(out, x + 3)


@compiled
def test_nothing_is_held_but_addresses(driver):
    import gc
    import weakref

    x, y, out = (torch.zeros(8, dtype=torch.int64) for _ in range(3))
    recorded, cache = RecordedLaunches(), LaunchCache()
    launch = spec(x, y, 8, out)
    recorded(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    cache.launch("key", (x, y, 8), lambda launch=launch: launch)
    held = [weakref.ref(tensor) for tensor in (x, y, out)]
    del x, y, out, launch
    driver.found.clear()
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 3
    recorded.replay()


@compiled
def test_a_direct_launch(driver):
    x, y, out = tensors()
    launch = spec(x, y, 8, out)
    launch_directly(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
    assert driver.found[0][:2] == ((1, 1, 1), 7)


def transport_calls(workspace):
    """Return calls of every `nvlink_p2p` kernel, with all variations that its launch depends on: [call]."""
    from ep_moe import ExpertMap
    from ep_moe.all2all.nvlink_p2p import bulk, low_latency, low_latency_answers, route_weights
    from ep_moe.placement.deferred import DeferredRouting
    from ep_moe.placement.placement import Placement
    from ep_moe.types import PhysicalRouting

    g, found = workspace.dispatch_shape, []
    maps = [
        ExpertMap.linear(g.num_physical, g.num_ranks),
        ExpertMap.redundant(g.num_physical - 2, g.num_ranks, g.slots_per_rank),
    ]
    tables = [Placement(made, ep_rank=rank).tables for made in maps for rank in (0, 1)]
    for tokens, bound in ((1, 1), (1, 2), (2, 2)):
        plain = torch.zeros(tokens, g.hidden_size, dtype=g.dtype)
        travelling = torch.zeros(tokens, g.columns, dtype=g.row_dtype)
        scale = torch.zeros(tokens, g.scales, dtype=torch.float32) if g.scales else None
        ids = [torch.zeros(tokens, g.top_k, dtype=dtype) for dtype in (torch.int32, torch.int64)]
        weights = torch.ones(tokens, g.top_k)
        placed = [PhysicalRouting(own, weights) for own in ids]
        to_place = [(ids[0], tables[0]), *zip(ids * 2, tables[::-1], strict=True)]  # each dtype, each table
        for routing in (*placed, *(DeferredRouting(own, weights, table) for own, table in to_place)):
            for rows in {plain.dtype: (plain, None), travelling.dtype: (travelling, scale)}.values():
                for allow_pdl in (False, True):
                    given = (workspace, *rows, routing, bound)
                    found.append(partial(low_latency.send, *given, allow_pdl=allow_pdl))
                    found += [partial(bulk.send, *given, blocks, allow_pdl=allow_pdl) for blocks in (1, 2)]
        found += [partial(bulk.announce, workspace, scale, routing, bound) for routing in placed]
        for how in (False, True):
            found.append(partial(low_latency_answers.receive, workspace, plain, bound, put=how))
            found.append(partial(bulk.receive, workspace, plain, bound, signal_first=how))
        found.append(partial(bulk.send_answers, workspace, bound))
        found.append(partial(bulk.signal_answers_written, workspace))
        numbers = torch.zeros(g.num_ranks * bound, g.top_k)
        found.append(partial(route_weights.send_route_values, workspace, numbers, bound))
        found.append(partial(route_weights.receive_route_values, workspace, weights))
    return found


@compiled
@pytest.mark.timeout(900)  # hundreds of kernels
@pytest.mark.parametrize("wire", ["plain", "fp8_block"])
def test_a_key_says_all_that_a_launch_depends_on(wire, driver, looked, monkeypatch):
    """A cache key contains all that a launch depends on.

    Each call of a transport launches the same through the shared cache as through an empty one.
    """
    from ep_moe.config import Wire
    from tests.fixtures.waiting_loops import workspace

    monkeypatch.setattr(devices, "supports_pdl", lambda device: True)
    monkeypatch.setattr("ep_moe.runtime.launch_cache._MAX_CACHED", 1000)
    made = workspace(256, 2, Wire(dispatch=wire))
    calls, shared, first = transport_calls(made), made.launch_cache, []
    for call in calls:
        made.launch_cache = LaunchCache()
        call()
        first.append((driver.functions[-1], driver.found[-1]))
    made.launch_cache = shared
    for call in calls:
        call()
    seen = len(looked)
    for call, expected in zip(calls, first, strict=True):
        call()
        assert (driver.functions[-1], driver.found[-1]) == expected, call
    assert len(looked) == seen

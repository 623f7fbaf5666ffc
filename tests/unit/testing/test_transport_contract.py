"""Test the contract of transports: what a check leaves for the next one, and in the caller's process."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from ep_moe import EPContext
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.testing import distributed, rank_device, transport_case, transport_contract
from ep_moe.testing.transport_contract import _uninitialised_is_nan
from ep_moe.types import LocalIds, Received, RowLayout, Weighting


@pytest.mark.parametrize("fill", [False, True])
def test_torchs_switches_are_as_they_were(monkeypatch, fill):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    with contextlib.suppress(KeyError), _uninitialised_is_nan(torch.device("cpu")):
        assert torch.empty(3).isnan().all()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is fill


def test_a_transport_that_writes_to_its_rows_changes_none_of_the_next_check():
    for _ in range(2):
        x, routing = transport_case.rows(0, 3, torch.float32), transport_case.routes(0, 3, 2, 2)
        assert x.any()
        assert routing.weights.all()
        assert (routing.ids < 99).all()
        x.zero_(), routing.weights.zero_(), routing.ids.fill_(99)


class RowsOfRoutes(TorchAll2AllDispatcher):
    capabilities = dataclasses.replace(TorchAll2AllDispatcher.capabilities, per_route=True)


@distributed(1)
def test_what_a_transport_promises_is_checked(world_size):
    shapes = []
    with mock.patch.object(transport_contract, "_check_shape", lambda _, shape, *__: shapes.append(shape)):
        for kind in (TorchAll2AllDispatcher, RowsOfRoutes):
            shapes.append(kind)
            transport_contract.check_dispatcher(kind, top_ks=(2, 3))
    plain, promised = shapes[1 : shapes.index(RowsOfRoutes)], shapes[shapes.index(RowsOfRoutes) + 1 :]
    assert promised[: len(plain)] == plain
    assert not any(shape.per_route for shape in plain)
    assert [shape.per_route for shape in promised[len(plain) :]] == [True]


class WritesToPeers(TorchAll2AllDispatcher):
    capabilities = dataclasses.replace(TorchAll2AllDispatcher.capabilities, peer_out=True)


@distributed(1)
def test_rows_that_are_written_to_peers_are_checked_too(world_size):
    checked = []

    def run(check, dispatcher, device, *, to_peers=False):
        checked.append((check, to_peers))

    with mock.patch.object(transport_contract, "run", run):
        for kind in (TorchAll2AllDispatcher, WritesToPeers):
            transport_contract.check_dispatcher(kind, top_ks=(2,), dtypes=(torch.bfloat16,), wires=())
            assert {check for check, to_peers in checked if to_peers} == (
                set(transport_contract.CHECKS) if kind is WritesToPeers else set()
            )


class KeepsRows(TorchAll2AllDispatcher):
    """A transport that adds zero times an earlier call's buffer to the next rows. This changes no finite number."""

    behind = torch.zeros(1)

    def _dispatch(self, *arguments):
        pending = super()._dispatch(*arguments)

        def finish():
            received = pending.wait()
            x = received.x + 0 * self.behind.sum()
            received = dataclasses.replace(received, x=x, out=torch.empty_like(x))
            self.behind = getattr(received, self.kept)
            return received

        return mock.Mock(wait=finish, ready=False)


@distributed(1)
@pytest.mark.parametrize("kept", ["x", "out"])
def test_what_a_call_leaves_behind_is_seen_in_the_next_one(kept, world_size):
    """A transport that reads what an earlier call left is detected: received rows, and the buffer for results."""
    with EPContext.from_groups(device=rank_device()) as context:
        shape = transport_case.dispatch_shape(1, 2, torch.float32)
        transport = KeepsRows(shape, context.rank_groups["ep"])
        transport.kept = kept
        with pytest.raises(AssertionError, match=r"poisoned buffers .*turn 1"):
            transport_case.run(transport_contract.poisoned_buffers, transport, rank_device())


@distributed(2)
def test_the_rank_that_failed_is_named_and_not_the_one_that_waited(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=5) as context:
        group = context.rank_groups["ep"]
        for odd in range(world_size):
            own = "ValueError: boom" if group.rank == odd else "PeerTimeout: it never came"
            with pytest.raises(AssertionError, match=rf"a check on ranks \[0, 1\]; rank {odd}: ValueError: boom"):
                transport_case._exchange_faults("a check", group, [own])


def test_rows_with_a_single_route_here_are_compared_too():
    """Rows with a single local route are compared, since most rows of an expert-parallel rank have one.

    Rows without a local route may hold anything.
    """
    ids = torch.tensor([[0, -1], [-1, -1], [1, 0]])

    def bits(x, x_scale):
        received = Received(
            x, RowLayout.RANK_MAJOR, Weighting.EXPERTS, None, local_ids=LocalIds(ids), weights=torch.ones(3, 2),
            x_scale=x_scale,
        )  # fmt: skip
        return transport_contract._bits(received)

    rows = {"x": torch.ones(3, 4), "x_scale": torch.ones(3, 2)}
    for name in rows:
        for row, compared in enumerate((True, False, True)):
            other = rows[name].clone()
            other[row, 1] = 2.0
            assert torch.equal(bits(**rows | {name: other}), bits(**rows)) != compared

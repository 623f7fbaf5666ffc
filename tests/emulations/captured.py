"""A layer whose captured calls are replayed without a GPU, on the tensors that they were captured with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.execution import graphs
from ep_moe.execution.recorded_calls import CopiedInputs
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.types import Routing
from tests.emulations.graph import EmulatedRecorder
from tests.fixtures.helpers import assert_same

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=3, shared_intermediate_size=16)
COUNTED = 1  # a graph that includes the router also copies the number of tokens


@pytest.fixture
def layer(monkeypatch):
    """Yield a layer on one rank in float32. Its numbers are random, so that another summation order shows."""
    monkeypatch.setattr(graphs, "Recorder", EmulatedRecorder)
    monkeypatch.setattr(EmulatedRecorder, "replays", 0)
    able = dataclasses.replace(ReferenceExperts.capabilities, cuda_graph=True)
    monkeypatch.setattr(ReferenceExperts, "capabilities", able)
    with EPContext.local(CPU) as context:
        yield MoELayer(CONFIG, context)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def replayed(layer: MoELayer, x: Tensor, routing: Routing | None = None) -> bool:
    """Return whether such a call is a replay. Check that it equals the eager call bit for bit.

    The eager call has as many rows as were captured, since on a CPU sums over columns depend on the number of rows.
    """
    before, tokens = EmulatedRecorder.replays, x.numel() // CONFIG.hidden_size
    with torch.no_grad():
        y = layer(x) if routing is None else layer.forward_routed(x, routing)
        count = EmulatedRecorder.replays - before
        calls = layer._graphs._calls.get((CopiedInputs, None, routing is not None))
        call = calls.serving(tokens) if count and calls is not None else None
        if call is None or call.most == tokens:
            assert_same(y, layer.run(x, routing))
        else:
            assert_same(y, among(layer, call.most, x, routing))
    assert y.shape == x.shape
    assert y.is_contiguous()
    return count == 1


def among(layer: MoELayer, most: int, x: Tensor, routing: Routing | None) -> Tensor:
    """Return the result of a call that is padded to `most` rows, which no expert computes."""
    tokens = x.numel() // CONFIG.hidden_size
    wide = torch.zeros(most, CONFIG.hidden_size, dtype=x.dtype)
    wide[:tokens] = x.reshape(tokens, CONFIG.hidden_size)
    chosen = layer.router(wide) if routing is None else routing
    ids, weights = torch.full((most, CONFIG.top_k), -1), torch.ones(most, CONFIG.top_k)
    ids[:tokens], weights[:tokens] = chosen.ids[:tokens], chosen.weights[:tokens]
    return layer.run(wide, Routing(ids, weights))[:tokens].view(x.shape)


def served(layer: MoELayer) -> list:
    ((_, calls),) = layer._graphs._calls.items()
    assert calls.sizes == [call.most for call in calls.calls]
    return calls.calls

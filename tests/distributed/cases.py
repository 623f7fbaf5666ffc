"""What several tests on ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import EPContext, EPMoEError, MoEConfig, MoELayer, RankLayout, Tokens
from ep_moe.parallel import collectives
from ep_moe.runtime.devices import on_device
from ep_moe.testing import rank_device
from ep_moe.types import Routing
from tests.helpers import assert_same, integer_routing, integer_rows, moved, oracle


def everywhere(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found = [None] * dist.get_world_size()
    with on_device(rank_device()):  # objects travel by the current one
        dist.all_gather_object(found, value)
    return found


def batch_of(layout: RankLayout, rank: int) -> int:
    """Which batch a rank passes: tp ranks share one where tokens are replicated."""
    place = layout.ranks.index(rank)
    return place // layout.tp if layout.tokens is Tokens.REPLICATED else place


def batches(layout: RankLayout) -> int:
    """How many different batches all ranks together pass."""
    return batch_of(layout, layout.ranks[-1]) + 1


def same_error(kind: type[EPMoEError], call: Callable[[], Any]) -> str:
    """The sentence of the error that `call` must raise, the same one on all ranks."""
    try:
        call()
        mine = ("no error", "")
    except EPMoEError as error:
        mine = (type(error).__name__, str(error))
    found = everywhere(mine)
    assert found == [(kind.__name__, found[0][1])] * len(found), f"expected one {kind.__name__}, got {found}"
    return found[0][1]


@contextmanager
def no_payload() -> Iterator[None]:
    """No collective that carries rows may be entered inside."""

    def entered(*_: Any) -> Any:
        raise AssertionError("a payload collective was entered")

    with (
        mock.patch.object(collectives, "_all_to_all", entered),
        mock.patch.object(collectives, "_all_gather", entered),
        mock.patch.object(collectives, "_reduce_scatter", entered),
    ):
        yield


def ran(layer: MoELayer, x: Tensor, routing: Routing | None) -> Tensor:
    """`MoELayer.run`, which is called on the layer's device."""
    with on_device(layer.device):
        return layer.run(x, routing)


def check_call(
    layer: MoELayer, context: EPContext, tokens: int = 5, *, what: object = "", seed: int = 0, **bounds: float
) -> None:
    """One good call against the oracle, exact unless there are bounds. seed: of the weights."""
    config: MoEConfig = layer.config
    batch = batch_of(context.layout, dist.get_rank())
    x, routing = integer_rows(tokens, config.hidden_size, batch), integer_routing(tokens, config, batch)
    with torch.no_grad():
        y = layer.forward_routed(x.to(context.device), moved(routing, context.device))
    assert_same(y, oracle(config, x, routing, seed), what, **bounds)

"""Recorded calls with gradients are replayed without a GPU: `reference` with the attributes of recorded kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from ep_moe.execution import trained_graphs
from ep_moe.experts.base import Experts
from ep_moe.experts.differentiable import RowGradients
from ep_moe.experts.reference import ReferenceExperts
from tests.emulations.graph import EmulatedRecorder


def kernel(wrong: str | None = None) -> dict[str, object]:
    """Return attributes that give `reference` a backward of its own, which writes gradients and can be recorded.

    `wrong` plants a fault: "kept apart" and "product apart" (in memory of its own), "gradient of x", "rows to peers",
    "gradient to peers", "all to peers".
    """

    def sent(received, rows, peer_out, what):
        if peer_out is None:
            return rows
        if peer_out.packets is not None:  # on GPUs all rows may be written, as peers read only their own
            peer_out.write(rows)
            return peer_out
        here = (received.local_ids >= 0).any(1) | (wrong == "all to peers")
        rows = -rows if wrong == f"{what} to peers" else rows
        for block, part, wanted in zip(peer_out.blocks, *(t.split(peer_out.bound) for t in (rows, here)), strict=True):
            block[wanted] = part[wanted]
        return peer_out

    def compute_saving(self, received, allocate=None, peer_out=None):
        # backward multiplies by it, so that memory overwritten by another call shows
        sum_of_x = received.x.float().nan_to_num().sum()
        kept = sum_of_x.clone() if allocate is None or wrong == "kept apart" else allocate("kept", (), torch.float32)
        return sent(received, self.compute(received, None), peer_out, "rows"), (kept.copy_(sum_of_x),)

    def gradients(self, received, saved, stored, grad, wanted, into=None, peer_out=None):
        into = into or {}
        needed = {name: wanted[name] or name in into for name in wanted}
        found = Experts.gradients(self, received, saved, stored, grad, needed)
        for name, to in into.items():
            write(found.stored[name], to)
        returned = {name: found.stored[name] if wanted[name] and name not in into else None for name in wanted}
        return found._replace(stored=returned, x=sent(received, found.x, peer_out, "gradient"))

    def row_gradients(self, received, saved, stored, grad, allocate, peer_out=None):
        same = saved[0] == received.x.float().nan_to_num().sum()  # otherwise NaN
        found = Experts.gradients(self, received, saved, stored, grad, dict.fromkeys(stored, True))
        products = {}
        for name, gradient in found.stored.items():
            kept = torch.empty_like(gradient) if wrong == "product apart" else None
            kept = allocate(name, tuple(gradient.shape), gradient.dtype) if kept is None else kept
            kept.copy_(gradient)
            products[name] = lambda to, kept=kept: write(kept, to)
        x = found.x.where(same, torch.nan)
        x = sent(received, -x if wrong == "gradient of x" else x, peer_out, "gradient")
        return RowGradients(x, found.weights, products)

    return {
        "own_backward": True, "writes_gradients": True, "trains_to_peers": True, "compute_saving": compute_saving,
        "gradients": gradients, "row_gradients": row_gradients,
        "records_training": lambda self, rows: rows <= 2 * 64 and self.weights.device.type == "cpu",
    }  # fmt: skip


def write(gradient, to) -> None:
    if to.accumulate:
        to.out.add_(gradient, alpha=to.factor)
    else:
        to.out.copy_(gradient * to.factor)


@contextlib.contextmanager
def recorded_kernel(wrong: str | None = None) -> Iterator[None]:
    with mock.patch.multiple(ReferenceExperts, create=True, **kernel(wrong)):
        yield


def stand_in() -> None:
    """Replace recorder and kernel in a rank's process."""
    trained_graphs.Recorder, EmulatedRecorder.replays = EmulatedRecorder, 0
    for name, attribute in kernel().items():
        setattr(ReferenceExperts, name, attribute)

"""Calls with gradients that are recorded and made again without a GPU: `reference`, with what recorded kernels have."""

from __future__ import annotations

import torch

from ep_moe.execution import trained_graphs
from ep_moe.experts.base import Experts
from ep_moe.experts.differentiable import RowGradients
from ep_moe.experts.reference import ReferenceExperts
from tests.emulations.graph import EmulatedRecorder


def _saving(self, received, room=None):
    y = self.compute(received, None)
    # what backward multiplies by, so that memory that another call wrote shows
    factor = torch.ones(()) if room is None else room("factor", (), torch.float32).fill_(1.0)
    return y, (factor,)


def _gradients(self, received, saved, stored, grad, wanted, into=None):
    into = into or {}
    needed = {name: wanted[name] or name in into for name in wanted}
    found = Experts.gradients(self, received, saved, stored, grad, needed)
    for name, to in into.items():
        _write(found.stored[name], to)
    return found._replace(
        stored={name: found.stored[name] if wanted[name] and name not in into else None for name in wanted}
    )


def _row_gradients(self, received, saved, stored, grad, room):
    found = Experts.gradients(self, received, saved, stored, grad, dict.fromkeys(stored, True))
    kept = {name: room(name, tuple(t.shape), t.dtype).copy_(t) for name, t in found.stored.items()}
    products = {name: lambda to, tensor=tensor: _write(tensor, to) for name, tensor in kept.items()}
    return RowGradients(found.x * saved[0], found.weights, products)


def _write(gradient, to) -> None:
    if to.accumulate:
        to.out.add_(gradient, alpha=to.factor)
    else:
        to.out.copy_(gradient * to.factor)


def stand_in() -> None:
    """Within a rank's process."""
    trained_graphs.Recorder, EmulatedRecorder.replays = EmulatedRecorder, 0
    ReferenceExperts.own_backward = ReferenceExperts.writes_gradients = True
    ReferenceExperts.compute_saving, ReferenceExperts.gradients = _saving, _gradients
    ReferenceExperts.row_gradients = _row_gradients
    ReferenceExperts.records_training = lambda self, rows: rows <= 2 * 64

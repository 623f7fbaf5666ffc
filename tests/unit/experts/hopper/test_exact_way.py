"""Exact Hopper kernels: one way for every number of rows, and bf16 as it is trained. Launches nothing."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_moe import ExpertsOptions, MoEConfig
from ep_moe.experts.hopper import gradients
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.scaling import SCALINGS
from ep_moe.experts.hopper.step import hopper_moe
from ep_moe.types import LocalIds, Received, RowLayout, Weighting, WireIds

SLOTS, HIDDEN, INNER = 8, 128, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALES = {
    "none": [],
    "matrix": [torch.ones(SLOTS)] * 4,
    "channel": [torch.ones(SLOTS, 2 * INNER), torch.ones(SLOTS, HIDDEN)],
}


def ways(scaling: str, rows: int, exact: bool) -> list[str]:
    """Which of a scaling's ways one call takes."""
    dtype, taken = BF16 if scaling == "none" else E4M3, []
    weights = [torch.zeros(SLOTS, *size).to(dtype) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    kind = SCALINGS[scaling]

    def takes(name: str) -> Any:
        return mock.patch.object(kind, name, mock.Mock(side_effect=lambda *_, **__: taken.append(name)))

    with (
        takes("few"),
        takes("streamed"),
        takes("grouped"),
        mock.patch.object(kind, "rounded", lambda s, rows, own: rows),
    ):
        hopper_moe(
            torch.zeros(rows, HIDDEN).to(BF16), torch.zeros(1 << 24, dtype=torch.uint8), scaling,
            torch.zeros(rows, HIDDEN).to(BF16), None, None, BF16, torch.zeros(rows, 1, dtype=torch.int32), 0, None,
            None, None, None, None, *weights, SCALES[scaling], [], "swiglu", 0.0, 0.0, 1.0, 1 << 14, 0, exact, None, 0,
            1, 0, None, 0, launch=lambda *_, **__: None,
        )  # fmt: skip
    return taken


@pytest.mark.parametrize("scaling", SCALES)
def test_every_number_of_rows_goes_one_way(scaling):
    with mock.patch.object(SCALINGS[scaling], "sorted", lambda self, rows, lists, own: rows):
        assert [ways(scaling, rows, True) for rows in (1, 30, 200, 600)] == [["grouped"]] * 4
    assert ways(scaling, 1, False) == ["few"]  # the way of few rows otherwise


@torch.no_grad()
def test_bf16_takes_the_trained_way_without_gradients_too(monkeypatch):
    """Which rounds between the products where the other does not: a rollout's bits are the trainer's."""
    taken = []

    def forward(step: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        taken.append(ids.tolist())
        return x + 1, SimpleNamespace(slots=None, ends=None, source=None), x

    monkeypatch.setattr(gradients.TrainedStep, "forward", forward)
    tensors = {"w13": torch.zeros(4, 2 * INNER, HIDDEN, dtype=BF16), "w2": torch.zeros(4, HIDDEN, INNER, dtype=BF16)}
    held = SimpleNamespace(
        named=False, num_slots=4, dtype=BF16, stored_tensors=lambda: tensors, anchor=None, etp=SimpleNamespace(size=1),
        adds_output_bias=True,
    )  # fmt: skip
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=8, top_k=1)
    experts: Any = Bf16TritonExperts(config, held, options=ExpertsOptions(exact=True))  # type: ignore[arg-type]
    assert experts.workspace_bytes() == 0, "nothing that no call uses is in plan()"
    x, ones = torch.zeros(3, HIDDEN, dtype=BF16), torch.ones(3, 1)
    wire = WireIds(torch.tensor([[4], [7], [2]], dtype=torch.int32), 4)  # type: ignore[arg-type]
    common = {"layout": RowLayout.RANK_MAJOR, "weighting": Weighting.EXPERTS, "handle": None, "weights": ones}
    y = experts(Received(x=x, wire_ids=wire, **common))
    assert torch.equal(y, x + 1)
    out = torch.empty_like(x)
    ids = LocalIds(torch.tensor([[0], [3], [-1]], dtype=torch.int32))
    assert torch.equal(experts(Received(x=x, local_ids=ids, **common), out), x + 1)
    assert torch.equal(out, x + 1)
    assert taken == [[[0], [3], [-1]]] * 2

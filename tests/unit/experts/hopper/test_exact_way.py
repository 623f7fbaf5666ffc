"""Test exact Hopper kernels: which paths share one order of sums, and how bf16 matches training.

Nothing is launched.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_moe import ExpertsOptions, MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.step import SCALINGS, hopper_moe

SLOTS, HIDDEN, INNER = 8, 128, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALES = {
    "trained": [],
    "matrix": [torch.ones(SLOTS)] * 4,
    "channel": [torch.ones(SLOTS, 2 * INNER), torch.ones(SLOTS, HIDDEN)],
}


def ways(scaling: str, rows: int, exact: bool, activation: str = "swiglu") -> list[str]:
    """Return the paths of a scaling that one call takes."""
    dtype, taken = BF16 if scaling in ("none", "trained") else E4M3, []
    weights = [torch.zeros(SLOTS, *size).to(dtype) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    kind = SCALINGS[scaling]

    def takes(name: str) -> Any:
        return mock.patch.object(kind, name, mock.Mock(side_effect=lambda *_, **__: taken.append(name)))

    with (
        takes("run_skinny"),
        takes("streamed"),
        takes("grouped"),
        mock.patch.object(kind, "prepare_rows", lambda s, rows, scratch: rows),
        mock.patch.object(kind, "prepare_sorted_rows", lambda s, rows, lists, scratch: rows),
    ):
        hopper_moe(
            torch.zeros(rows, HIDDEN).to(BF16), torch.zeros(1 << 24, dtype=torch.uint8), scaling,
            torch.zeros(rows, HIDDEN).to(BF16), None, None, BF16, torch.zeros(rows, 1, dtype=torch.int32), 0, None,
            None, None, None, None, *weights, SCALES[scaling], [], activation, 0.0, 0.0, 1.0, 1 << 14, 0, exact, False,
            None, 0, 1, 0, None, 0, launch=lambda *_, **__: None,
        )  # fmt: skip
    return taken


@pytest.mark.parametrize("scaling", SCALES)
def test_ways_of_one_order_of_sums(scaling):
    """An exact call takes only paths that add in the same order.

    `tests/gpu/test_exact_gpu.py` tests that their bits are equal. The path for the fewest rows adds in another order.
    """
    found = [ways(scaling, rows, True) for rows in (1, 30, 200, 600)]
    assert found == [["streamed"], ["streamed"], ["streamed"], ["grouped"]]
    gelu = [ways(scaling, rows, True, "geglu") for rows in (1, 600)]
    assert gelu == [["streamed" if scaling == "trained" else "grouped"], ["grouped"]]
    assert ways(scaling, 1, False) == ["run_skinny"]  # otherwise few rows take this path


def test_bf16_computes_as_it_is_trained():
    """Exact bf16 rounds between the first product and the activation, as training does.

    The bits of a rollout therefore equal the trainer's.
    """
    held: Any = SimpleNamespace(num_slots=4, dtype=BF16, anchor=None, etp=SimpleNamespace(size=1))
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=8, top_k=1)
    exact, plain = (Bf16TritonExperts(config, held, options=ExpertsOptions(exact=flag)) for flag in (True, False))
    assert (exact.scaling, plain.scaling) == ("trained", "none")
    rounded = exact.workspace_bytes() - plain.workspace_bytes()
    assert rounded == exact.routes * 2 * INNER * BF16.itemsize, "the first product's results are in plan()"
    for kernel in (exact, plain):
        assert kernel.workspaces.reserved == kernel.workspace_bytes(), "a call of the most rows has room"


def test_float8_is_refused():
    with pytest.raises(ConfigError, match="float8 is True, and exact=True"):
        ExpertsOptions(float8=True, exact=True)

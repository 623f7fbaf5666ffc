"""The contract of fused kernels reports the faults of each layer that it checks."""

from types import SimpleNamespace

import torch

from ep_moe.testing.fused_contract import layers_that_share


def test_faults_of_both_layers_that_share_buffers_are_reported():
    def layer(name):
        faults: list[str] = []
        return SimpleNamespace(
            faults=faults,
            device=torch.device("cpu"),
            call=lambda *_: None,
            check=lambda _, where: faults.append(f"{name}, {where}"),
        )

    first, second = layer("first"), layer("second")
    layers_that_share(first, second)
    assert first.faults == [f"{name}, turn {turn}" for name in ("first", "second") for turn in range(3)]

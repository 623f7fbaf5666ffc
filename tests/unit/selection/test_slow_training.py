"""Test the warning that names a kernel which would train faster, and why it is not used."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from ep_moe.selection.explain import BackendChoice
from ep_moe.selection.resolve import SlowTraining


def layer(device="cuda", chosen="reference", asked="auto", status="refused", transport="allgather"):
    rows = [
        BackendChoice("allgather", "bf16_triton", status, "dtype float32 is not among bfloat16"),
        BackendChoice("pplx", "bf16_triton", "refused", "pplx-kernels is not installed"),
        BackendChoice("allgather", "fp8_block_triton", "refused", "another"),
        BackendChoice("allgather", "reference", "chosen", "first"),
    ]
    return SimpleNamespace(
        name="moe0", context=SimpleNamespace(device=torch.device(device)), dtype=torch.bfloat16,
        choice=SimpleNamespace(all2all=transport, experts=chosen), _asked={"experts": asked}, explain=lambda: rows,
    )  # fmt: skip


def test_once_with_the_reason():
    checks = SlowTraining()
    with pytest.warns(UserWarning, match=r"moe0 .*reference.*bf16_triton: dtype float32") as caught:
        checks.warn_once(layer())
    assert "fp8_block_triton" not in str(caught[0].message), "it has no backward"
    assert "pplx" not in str(caught[0].message), "the layer has another transport"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.warn_once(layer())


def test_a_layer_that_was_converted_says_what_to_pass():
    with pytest.warns(UserWarning, match=r"bf16_triton: the layer was built in another dtype.* dtype=torch.bfloat16"):
        SlowTraining().warn_once(layer(status="possible"))


@pytest.mark.parametrize(
    "other", [{"device": "cpu"}, {"chosen": "bf16_triton"}, {"asked": "reference"}, {"transport": "local"}]
)
def test_not_where_nothing_is_faster_or_it_was_named(other):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SlowTraining().warn_once(layer(**other))

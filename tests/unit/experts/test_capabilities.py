"""Test what the capabilities of a kernel refuse, field by field."""

import dataclasses

import pytest
import torch

from ep_moe import Activation, MoEConfig
from ep_moe.experts.capabilities import ExpertsCapabilities, ExpertsOptions, FusedCapabilities
from ep_moe.quant.schemes import PLAIN, SCHEMES

LEAST = {"activations": frozenset({Activation.SWIGLU}), "dtypes": frozenset({torch.float32})}
EXPERTS = ExpertsCapabilities(**LEAST)
FUSED = FusedCapabilities(**LEAST, travels=False, routes=False, any_map=False, static=False)


def refused(can, *, dtype=torch.float32, etp=1, scheme=PLAIN, options=None, **fields):
    config = MoEConfig(**{"hidden_size": 16, "intermediate_size": 16, "num_experts": 4, "top_k": 2} | fields)
    return can.unsupported_reason(config, dtype, etp, scheme, options)


@pytest.mark.parametrize("can", [EXPERTS, FUSED], ids=["experts", "fused"])
@pytest.mark.parametrize(
    ("asked", "having", "why"),
    [
        ({"scheme": SCHEMES["mxfp8"]}, {"schemes": frozenset({"mxfp8"})}, "quantization mxfp8 is not among none"),
        ({"options": ExpertsOptions(deterministic=True)}, {"deterministic": True}, "it is not deterministic"),
        (
            {"options": ExpertsOptions(exact=True)},
            {"exact": True},
            "it does not promise that a row's result is independent of other rows (exact=True)",
        ),
        (
            {"options": ExpertsOptions(spare_sms=2)},
            {"spare_sms": True},
            "it cannot leave multiprocessors free (spare_sms=2)",
        ),
        ({"options": ExpertsOptions(recompute=True)}, {"differentiable": True}, "it has no backward (recompute=True)"),
        (
            {"options": ExpertsOptions(float8=True)},
            {"float8": True},
            "its backward multiplies only in the layer's dtype (float8=True)",
        ),
        ({"dtype": torch.float16}, {"dtypes": frozenset({torch.float16})}, "dtype float16 is not among float32"),
        (
            {"activation": Activation.GEGLU},
            {"activations": frozenset(Activation)},
            "activation geglu is not among swiglu",
        ),
        ({"expert_bias": True}, {"biases": True}, "it has no expert biases (expert_bias=True)"),
        ({"etp": 2}, {"etp": True}, "it cannot cut experts over ranks (etp=2)"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_each_field_is_what_a_layer_may_ask(can, asked, having, why):
    assert refused(can) is None
    assert refused(can, **asked) == why
    assert refused(dataclasses.replace(can, **having), **asked) is None


def test_exact_sums_are_those_of_one_rank():
    can = dataclasses.replace(EXPERTS, exact=True, etp=True)
    assert refused(can, etp=2) is None
    why = "etp=2 cuts a row's sum over ranks, which exact=True forbids; use etp=1"
    assert refused(can, etp=2, options=ExpertsOptions(exact=True)) == why


@pytest.mark.parametrize(
    ("dtype", "options", "unit"),
    [
        (torch.float32, None, 4),
        (torch.bfloat16, None, 8),
        (torch.bfloat16, ExpertsOptions(), 8),
        (torch.bfloat16, ExpertsOptions(float8=True), 16),
    ],
)
def test_rows_are_aligned_in_the_narrowest_numbers_that_are_read(dtype, options, unit):
    can = dataclasses.replace(EXPERTS, dtypes=frozenset({dtype}), float8=True, etp=True)
    asked = {"dtype": dtype, "options": options}
    name = "float8_e4m3fn" if unit == 16 else str(dtype).removeprefix("torch.")
    for hidden, inner, etp, wrong in (
        (unit, unit, 1, None),
        (3 * unit, 5 * unit, 1, None),
        (unit, 2 * unit, 2, None),
        (unit + unit // 2, unit, 1, f"hidden_size must be a multiple of {unit} in {name}, got {unit + unit // 2}"),
        (unit, unit, 2, f"intermediate_size / etp must be a multiple of {unit} in {name}, got {unit // 2}"),
    ):
        assert refused(can, hidden_size=hidden, intermediate_size=inner, etp=etp, **asked) == wrong


def test_defaults_promise_nothing():
    """The defaults promise no optional feature, and restrict neither a layer's sizes nor the ranks."""
    for can, rest in (
        (
            EXPERTS,
            {"layouts", "weightings", "alignment_bytes", "row_formats", "wire_ids", "peer_out", "per_route", "devices"},
        ),
        (FUSED, {"travels", "routes", "any_map", "static", "devices", "hidden_unit", "inner_unit", "min_ranks"}),
    ):
        promised = {field.name for field in dataclasses.fields(can) if getattr(can, field.name)} - rest
        assert promised == {"activations", "dtypes", "host_sync", "schemes"}
    assert not any((EXPERTS.wire_ids, EXPERTS.peer_out, EXPERTS.per_route))
    assert (FUSED.hidden_unit, FUSED.inner_unit, FUSED.min_ranks, FUSED.max_ranks) == (1, 1, 1, None)
    assert (EXPERTS.devices, FUSED.devices) == ({"cpu", "cuda"}, {"cuda"})

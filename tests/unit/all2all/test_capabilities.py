"""Test which rows a transport refuses."""

import dataclasses
from types import SimpleNamespace

import torch

from ep_moe import RankLayout, Wire, registry
from ep_moe.all2all.capabilities import DeclaredTransport, capturable

FP8_TENSOR = Wire(dispatch="fp8_tensor", input_scale=0.25)


def test_rows_that_transports_cannot_align():
    """Rows of one-byte numbers are refused if they break the transport's alignment.

    They have fewer bytes than rows of the layer's dtype.
    """
    for name in ("nvlink_p2p", "pplx", "flashinfer_nvlink"):
        kind = registry.load("dispatchers", name)
        assert kind.unsupported_reason(24, 1, 2, torch.bfloat16, 8) is None
        reason = kind.unsupported_reason(24, 1, 2, torch.bfloat16, 8, FP8_TENSOR)
        assert reason == f"{name} needs hidden_size to be a multiple of 16 in float8_e4m3fn, got 24"
        assert kind.unsupported_reason(32, 1, 2, torch.bfloat16, 8, FP8_TENSOR) is None
    assert "deepep carries fp8_block, plain rows in dispatch, not fp8_tensor" in (
        registry.load("dispatchers", "deepep").unsupported_reason(32, 1, 2, torch.bfloat16, 8, FP8_TENSOR) or ""
    )


def test_scales_that_a_transport_cannot_align(monkeypatch):
    kind = registry.load("dispatchers", "torch_a2a")
    assert kind.unsupported_reason(32, 1, 2, torch.bfloat16, None, Wire(dispatch="fp8_row")) is None
    able = dataclasses.replace(kind.capabilities, scale_alignment_bytes=16)
    monkeypatch.setattr(kind, "capabilities", able)
    reason = kind.unsupported_reason(32, 1, 2, torch.bfloat16, None, Wire(dispatch="fp8_row"))
    assert reason == "torch_a2a needs a multiple of 16 bytes of scales in a row, and fp8_row rows have 4"


def test_transports_that_can_be_captured_are_named(monkeypatch):
    able = {"waits": False, "captured": True, "missing": True, "also": True}
    kinds = {name: SimpleNamespace(capabilities=SimpleNamespace(cuda_graph=can)) for name, can in able.items()}
    monkeypatch.setattr(registry, "targets", lambda kind: able)
    monkeypatch.setattr(registry, "unsupported_reason", lambda kind, name: "no" if name == "missing" else None)
    monkeypatch.setattr(registry, "load", lambda kind, name: kinds[name])
    assert capturable() == (
        "of those available here captured, also can (with EPContext.from_torchrun(max_tokens=...) where buffers are "
        "fixed)"
    )


def test_a_transport_that_states_no_place_is_tried_late():
    layout = RankLayout(world=4, rank=0, dp=4, ep=4)
    built_in = registry.built_in("dispatchers")
    place, reason = DeclaredTransport.preference(2, layout)
    assert reason == "it states no place"
    assert place > max(registry.load("dispatchers", name).preference(2, layout)[0] for name in built_in)

"""Test why a transport and a kernel cannot serve a layer: `selection.refusals`, one reason at a time."""

# ruff: noqa: F811

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig, RankLayout, Wire, registry
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.config import PLAIN_WIRE
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.selection.refusals import BackendCache, Refusals
from ep_moe.types import RowLayout, Weighting
from tests.fixtures.fused_routes import RoutesInside
from tests.fixtures.plugins import plugins  # noqa: F401 (a fixture)

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
ALONE = RankLayout(world=1, rank=0)


def asked(**changes) -> Refusals:
    fields = {
        "backends": BackendCache(CPU),
        "config": CONFIG,
        "layout": ALONE,
        "device": CPU,
        "dtype": torch.float32,
        "scheme": PLAIN,
        "options": ExpertsOptions(),
        "max_tokens": None,
        "wire": PLAIN_WIRE,
        "expert_map": None,
    }
    return Refusals(**fields | changes)


def changed(monkeypatch, kind: type, **capabilities) -> None:
    monkeypatch.setattr(kind, "capabilities", dataclasses.replace(kind.capabilities, **capabilities))


def test_a_pair_that_serves_is_not_refused():
    assert asked().of_pair("local", "reference") is None


TRANSPORT = {
    "gpus": ({"devices": frozenset({"cuda"})}, {}, "local runs on cuda, not on cpu"),
    "order": ({"deterministic": False}, {"deterministic": True}, "local is not deterministic"),
    "bits": (
        {"exact": False}, {"exact": True},
        "local does not promise that it delivers each row in order and unchanged (exact=True)",
    ),
    "weights of many": (
        {"weighting": Weighting.COMBINE}, {},
        "local delivers rows of several experts each and leaves their weights to combine",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPORT)
def test_a_transport_is_refused_by_what_it_states(name, monkeypatch):
    capabilities, options, sentence = TRANSPORT[name]
    changed(monkeypatch, LocalDispatcher, **capabilities)
    found = asked(options=ExpertsOptions(**options)).of_pair("local", "reference")
    assert found == sentence


def test_a_kernel_that_takes_other_rows_is_refused(monkeypatch):
    changed(monkeypatch, ReferenceExperts, layouts=frozenset({RowLayout.BATCHED}))
    assert asked().of_pair("local", "reference") == "local delivers rank_major rows, reference takes batched"


def test_a_kernel_that_weighs_rows_otherwise_is_refused(monkeypatch):
    changed(monkeypatch, ReferenceExperts, weightings=frozenset({Weighting.COMBINE}))
    words = "local leaves the routing weights to experts, reference does not work that way"
    assert asked().of_pair("local", "reference") == words


def test_any_rows_can_be_seen_as_those_of_ranks(monkeypatch):
    changed(monkeypatch, LocalDispatcher, layout=RowLayout.CONTIGUOUS)
    changed(monkeypatch, ReferenceExperts, layouts=frozenset({RowLayout.RANK_MAJOR}))
    assert asked().of_pair("local", "reference") is None


def test_a_kernel_is_refused_by_what_it_states(monkeypatch):
    changed(monkeypatch, ReferenceExperts, devices=frozenset({"cuda"}))
    assert asked().of_pair("local", "reference") == "reference runs on cuda, not on cpu"


def test_the_scheme_is_asked_first():
    """The scheme is checked before a backend is imported, because no pair could serve such a layer."""
    with mock.patch.object(registry, "load", side_effect=AssertionError("a backend was imported")):
        found = asked(scheme=SCHEMES["fp8_block"]).of_pair("local", "reference")
    assert "128" in found


def test_rows_that_are_rounded_on_their_way_back_are_not_exact():
    refusals = asked(wire=Wire(combine="fp8"), options=ExpertsOptions(exact=True))
    with mock.patch.object(LocalDispatcher, "unsupported_reason", classmethod(lambda cls, *_: None)):
        found = refusals.of_pair("local", "reference")
    assert found == "combine in fp8 rounds rows, which exact=True forbids"


def test_a_backend_is_asked_once_for_all_its_pairs():
    refusals = asked()
    with mock.patch.object(LocalDispatcher, "available", side_effect=lambda: "no library") as available:
        for kernel in ("reference", "bf16_triton"):
            assert refusals.of_pair("local", kernel) == "local: no library"
    assert available.call_count == 1


def test_what_has_a_backward(monkeypatch):
    assert asked().trains("local", "reference")
    assert not asked(wire=Wire(dispatch="fp8_block")).trains("local", "reference")
    changed(monkeypatch, ReferenceExperts, differentiable=False)
    assert not asked().trains("local", "reference")


FUSED = {
    "bits": ({"options": ExpertsOptions(exact=True)}, {}, "exact"),
    "fixed buffers": ({}, {"static": True}, "it has fixed buffers; set their size"),
    "a map": ({"expert_map": ExpertMap.from_ranks([[0, 1, 2, 3, 0]], 4, allow_duplicates=True)}, {}, "slots"),
    "its own row format": (
        {"wire": Wire(dispatch="fp8_block")},
        {},
        "routes_inside has its own row format for dispatch and combine",
    ),
    "a scheme": ({"scheme": SCHEMES["fp8_dynamic"], "dtype": torch.bfloat16}, {}, "fp8_dynamic is not among none"),
    "a dtype": ({"dtype": torch.float16}, {}, "float16"),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_is_refused_by_what_it_states(name, monkeypatch, plugins):
    plugins(fused={"routes_inside": "tests.fixtures.fused_routes:RoutesInside"})
    question, capabilities, reason = FUSED[name]
    assert asked().of_fused("routes_inside") is None
    changed(monkeypatch, RoutesInside, **capabilities)
    found = asked(**question).of_fused("routes_inside")
    assert found is not None
    assert reason in found

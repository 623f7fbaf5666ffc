"""Test other libraries' kernels for 4-bit weights, over emulations of their contracts.

Each call passes the codes and scales of our layers, and computes the layer.
"""

from __future__ import annotations

import dataclasses
import sys
from unittest import mock

import pytest
import torch

from ep_moe import MoEConfig
from ep_moe.bench import experts, libraries, libraries_4bit
from ep_moe.bench.floors import Rates
from ep_moe.errors import BackendUnavailable
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.microscale import unpack_nibbles
from ep_moe.quant.schemes import SCHEMES
from ep_moe.types import Activation
from ep_moe.weights.initial import random_expert
from tests.emulations import bench_libraries_4bit as emulated
from tests.emulations.bench_libraries import dense

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
GPT_OSS = dataclasses.replace(CONFIG, activation=Activation.SWIGLU_CLAMPED, expert_bias=True)
RATES, CPU = Rates(4.3e12, 800e12, 1468e12), torch.device("cpu")
SCHEMES_4BIT = ("int4", "mxint4", "mxfp4")


@pytest.fixture(autouse=True)
def nothing_installed():
    """Hide installed libraries, and remove what a test adds to sys.modules."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "triton_kernels")]:
            del sys.modules[name]
        yield


def peers(config: MoEConfig, scheme: str, monkeypatch) -> tuple[dict[str, experts.ExpertsLine], list[str]]:
    monkeypatch.setattr(experts, "replayed", lambda calls: [(calls[0](), 7.0)[1]])
    said: list[str] = []
    lines = experts.peer_lines("m", config, scheme, (16,), RATES, CPU, said.append)
    return {line.kernel: line for line in lines}, said


@pytest.mark.parametrize("scheme", SCHEMES_4BIT)
def test_libraries_get_the_numbers_of_this_ranks_experts(scheme):
    """Libraries compute the layer with the weights of this rank's experts, 2 to 4 of 8."""
    emulated.marlin()
    emulated.triton_kernels()
    tensors = [random_expert(CONFIG, SCHEMES[scheme], expert, torch.bfloat16) for expert in range(3)]
    slots = torch.full((8,), -1, dtype=torch.int32)
    slots[2:5] = torch.arange(3, dtype=torch.int32)
    rank_experts = libraries.RankExperts(
        slots=slots, **{name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}
    )
    w13, w2 = (torch.stack([SCHEMES[scheme].dequantize(own, name) for own in tensors]) for name in ("w13", "w2"))
    x, weights = torch.randn(40, 256).bfloat16(), torch.rand(40, 2)
    ids = torch.rand(40, 8).topk(2).indices.int()
    wanted = dense(x, w13, w2, slots[ids.long()], weights)
    steps = [libraries_4bit.marlin(rank_experts, scheme)]
    if scheme == "mxfp4":
        steps.append(libraries_4bit.triton_kernels(rank_experts))
    for step in steps:
        y = step(x, ids, weights)
        assert bool(((y.float() - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-4).all())
    assert wanted.std() > 0.1


def test_gptq_codes_are_ours_and_eight():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    signed = unpack_nibbles(codes).int()
    signed = torch.where(signed > 7, signed - 16, signed)
    assert torch.equal(emulated.gptq(libraries_4bit.gptq_codes(codes)), signed + 8)


@pytest.mark.parametrize("scheme", SCHEMES_4BIT)
def test_lines_beside_the_reference(scheme, monkeypatch):
    names = {"peer: vLLM Marlin"} | ({"peer: triton_kernels"} if scheme == "mxfp4" else set())
    none, said = peers(CONFIG, scheme, monkeypatch)
    assert none == {}
    assert len(said) == len(names)
    assert all("cannot be imported (No module named" in sentence for sentence in said)
    emulated.marlin()
    emulated.triton_kernels()
    found, said = peers(CONFIG, scheme, monkeypatch)
    assert (set(found), said) == (names, [])
    for line in found.values():
        assert line.error is not None
        assert (line.us, line.wrong, line.error < 0.01) == (7.0, False, True)


def test_experts_of_gpt_oss_run_on_what_fuses_their_activation(monkeypatch):
    emulated.marlin()
    emulated.triton_kernels()
    found, said = peers(GPT_OSS, "mxfp4", monkeypatch)
    assert (set(found), said) == ({"peer: triton_kernels"}, [])
    line = found["peer: triton_kernels"]
    assert line.error is not None
    assert (line.wrong, line.error < 0.01) == (False, True)
    other = dataclasses.replace(GPT_OSS, activation_limit=10.0)
    assert peers(other, "mxfp4", monkeypatch)[0] == {}, "its constants are those of GPT-OSS"


def test_a_library_that_computes_something_else_is_marked(monkeypatch):
    emulated.marlin()
    module = sys.modules["vllm.model_executor.layers.fused_moe.experts.marlin_moe"]
    monkeypatch.setattr(module, "fused_marlin_moe", lambda x, *rest, **how: torch.zeros_like(x))
    found, _ = peers(CONFIG, "int4", monkeypatch)
    assert found["peer: vLLM Marlin"].wrong


def test_lines_stand_where_the_reference_has_no_memory(monkeypatch):
    emulated.marlin()

    def none_left(self, received, out=None):
        raise torch.OutOfMemoryError("10 GiB more than there are")

    monkeypatch.setattr(ReferenceExperts, "__call__", none_left)
    found, said = peers(CONFIG, "int4", monkeypatch)
    assert said == ["not compared: other libraries, int4, 16 rows: 10 GiB more than there are"]
    line = found["peer: vLLM Marlin"]
    assert (line.us, line.error, line.wrong) == (7.0, None, False)


def test_routes_to_other_ranks_take_their_experts_in_turns():
    received = experts.received_rows(CONFIG, 2, 40, CPU)
    ids = experts.global_ids(received, 2, 8)
    assert received.local_ids is not None
    here = received.local_ids >= 0
    assert torch.equal(ids[here], received.local_ids[here].int())
    assert set(ids[~here].tolist()) == {2, 3, 4, 5, 6, 7}
    assert ids.dtype == torch.int32


def test_what_is_not_installed_is_named():
    rank_experts = libraries.RankExperts(w13=torch.empty(0), w2=torch.empty(0), slots=torch.empty(0))
    with pytest.raises(BackendUnavailable, match=r"marlin_moe cannot be imported"):
        libraries_4bit.marlin(rank_experts, "int4")

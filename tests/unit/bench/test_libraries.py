"""Test the benchmark's calls of other libraries' kernels, over emulations of their contracts.

Each call passes what the library requires, and computes the layer. Without a library, its line is left out and the
reason is printed.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_moe import EPContext, MoEConfig
from ep_moe.bench import breakdown, experts, harness, layer, libraries
from ep_moe.bench.floors import Rates
from ep_moe.errors import BackendUnavailable
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed
from ep_moe.types import Activation
from ep_moe.weights.initial import random_expert
from tests.emulations import bench_libraries as emulated

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
RATES, HELD = Rates(4.3e12, 800e12, 1468e12), 3
LIBRARIES = ("vllm", "sglang", "sonicmoe", "quack", "deep_gemm")


@pytest.fixture(autouse=True)
def nothing_installed():
    """Hide installed libraries, and remove what a test adds to sys.modules."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]:
            del sys.modules[name]
        yield


def rank_experts(scheme: str) -> libraries.RankExperts:
    """Return weights of experts 2 to 4 of 8."""
    tensors = [random_expert(CONFIG, SCHEMES[scheme], expert, torch.bfloat16) for expert in range(HELD)]
    slots = torch.full((8,), -1, dtype=torch.int32)
    slots[2 : 2 + HELD] = torch.arange(HELD, dtype=torch.int32)
    stacked = {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}
    return libraries.RankExperts(slots=slots, **stacked)


def given(count: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, ids and weights; some rows have no expert on this rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, CONFIG.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(count, 8, generator=generator).topk(2).indices.int()
    return x, ids, torch.rand(count, 2, generator=generator)


def expected(own: libraries.RankExperts, x, ids, weights) -> torch.Tensor:
    w13, w2 = (emulated.wide(w, scale) for w, scale in ((own.w13, own.w13_scale), (own.w2, own.w2_scale)))
    return emulated.dense(x, w13, w2, own.slots[ids.long()], weights)


def same(y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert equality up to one rounding to bf16 and another order of sums."""
    assert wanted.std() > 0.1
    assert bool(((y.float() - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-4).all())


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
@pytest.mark.parametrize(
    ("library", "emulation"),
    [("vLLM", emulated.vllm), ("vLLM", lambda: emulated.vllm(quant_config=False)), ("SGLang", emulated.sglang)],
    ids=["vLLM", "vLLM before 0.11", "SGLang"],
)
def test_fused_moe_gets_this_ranks_experts(library, emulation, scheme):
    emulation()
    own = rank_experts(scheme)
    same(libraries.FUSED_MOE[library](own)(*given()), expected(own, *given()))


def test_sonic_gets_routes_and_rows_of_gate_and_up_in_turns():
    emulated.sonic()
    own, (x, ids, weights) = rank_experts("none"), given()
    same(libraries.sonic(own, ids, weights)(x), expected(own, x, ids, weights))
    total = sys.modules["sonicmoe.functional.reduction_over_k_gather"].token_gather_sum_kernel
    assert len(total.configs) == 1


def test_deepgemm_gets_rows_grouped_and_filled_up():
    products = emulated.deepgemm()
    own, (_, ids, _) = rank_experts("fp8_block"), given(300)
    libraries.deepgemm_products(own, ids)()
    (layout, first), (again, second) = products
    assert torch.equal(layout, again)
    assert first is own.w13
    assert second is own.w2
    for slot in range(HELD):
        rows = int((own.slots[ids.long()] == slot).sum())
        start = int((layout == slot).nonzero()[0])
        assert start % 128 == 0
        assert bool((layout[start : start + rows] == slot).all())
        assert int((layout == slot).sum()) == rows


@pytest.mark.parametrize("other", [{"expert_bias": True}, {"activation": Activation.GEGLU}])
def test_experts_that_no_library_is_called_for(other):
    """Other libraries are left out for experts with biases (as in GPT-OSS) or other activations."""
    said: list[str] = []
    config = dataclasses.replace(CONFIG, **other)
    assert experts.peer_lines("m", config, "none", (16,), RATES, torch.device("cpu"), said.append) == []
    assert said == ["left out: other libraries, none: called for experts of SwiGLU without biases; name another model"]


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_lines_of_local_experts(scheme, monkeypatch):
    """Each library has its line of local experts, or the reason why it has none is printed."""
    monkeypatch.setattr(experts, "replayed", lambda calls: [(calls[0](), 7.0)[1]])
    monkeypatch.setattr(experts, "eager", lambda calls: [(calls[0](), 9.0)[1]])

    def lines() -> tuple[dict[tuple[str, int], float], list[str]]:
        said: list[str] = []
        found = experts.peer_lines("m", CONFIG, scheme, (16, 64), RATES, torch.device("cpu"), said.append)
        return {(line.kernel, line.rows): line.us for line in found}, said

    none, said = lines()
    assert none == {}
    names = {"none": ["vLLM fused_moe", "SGLang fused_moe", "SonicMoE"]}
    names["fp8_block"] = [*names["none"][:2], "DeepGEMM, two products alone"]
    assert [sentence.split(", " + scheme)[0] for sentence in said] == [f"left out: {name}" for name in names[scheme]]
    assert all("cannot be imported (No module named" in sentence for sentence in said)
    for emulation in (emulated.vllm, emulated.sglang, emulated.sonic, emulated.deepgemm):
        emulation()
    found, said = lines()
    assert said == []
    wanted = {
        (f"peer: {name}", rows): 9.0 if name == "SonicMoE" else 7.0 for name in names[scheme] for rows in (16, 64)
    }
    assert found == wanted


def test_what_is_not_installed_is_named():
    with pytest.raises(BackendUnavailable, match=r"deep_gemm cannot be imported .*put the library and what it needs"):
        libraries.deepgemm_products(rank_experts("fp8_block"), given()[1])


# --- layers ---------------------------------------------------------------------------------------------------------

MACHINE = layer.Machine(RATES, 389e9)
PLAIN, BLOCK = (layer.Variant("reference", scheme, "plain", "allgather") for scheme in ("none", "fp8_block"))
VARIANTS = [PLAIN, BLOCK, PLAIN.exactly()]
PEERS = {
    ("DeepGEMM mega", "fp8_block", "fp8 / bf16"),
    ("transformers all_to_all, eager", "none", "bf16 / bf16"),
    *((f"NCCL AG/RS + {library} fused_moe", scheme, "bf16 / bf16")
      for library in ("vLLM", "SGLang") for scheme in ("none", "fp8_block")),
}  # fmt: skip


def lines_of(context: EPContext) -> list[layer.LayerLine]:
    """Return the layer's lines in a rank's process, on the CPU."""
    layer.captured = lambda call, repeat: SimpleNamespace(replay=call)
    layer.interleaved_times = lambda calls, repeat, replays, before: [1.0 + (call() is None) for call in calls]
    layer.host = lambda call, calls, before: harness.host(call, calls=1, samples=1, before=before)
    breakdown.timeline = lambda call, device: []
    with torch.no_grad():
        return layer.measure(context, "m", CONFIG, VARIANTS, MACHINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(2)
def test_layers_of_other_libraries_compute_the_same(world_size):
    for emulation in (emulated.vllm, emulated.sglang, emulated.deepgemm):
        emulation()
    with EPContext.from_groups(device=torch.device("cpu"), deadline_s=30, max_tokens=8) as context:
        lines = lines_of(context)
    peers = [line for line in lines if line.owner == "peer"]
    assert {(line.name, line.scheme, line.rows) for line in peers} == PEERS
    assert not [line for line in lines if line.wrong]
    # an eager call returns None, and a replayed call returns rows
    eager = [line.name for line in lines if line.us == 2]
    assert eager == ["transformers all_to_all, eager"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(2)
def test_layers_without_the_libraries(world_size):
    with EPContext.from_groups(device=torch.device("cpu"), deadline_s=30, max_tokens=8) as context:
        lines = lines_of(context)
    assert {line.name for line in lines if line.owner == "peer"} == {"transformers all_to_all, eager"}
    assert {line.name for line in lines if line.owner == "ours"} == {PLAIN.name, f"{PLAIN.name}, exact"}

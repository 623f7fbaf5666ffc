"""Test what a fused kernel refuses, with the reason, and how the backend table shows it."""

import dataclasses

import pytest
import torch

from ep_moe import Activation, BackendUnavailable, ConfigError, ExpertMap, MoEConfig, RankLayout, Wire, registry
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import FusedDispatchShape, fused_dispatch_shape
from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaBf16, FlashInferMegaFp8
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import choose, explain

BOTH = [FlashInferMegaBf16, FlashInferMegaFp8]
CPU = torch.device("cpu")


def layout(ep: int = 4, etp: int = 1) -> RankLayout:
    return RankLayout(world=ep * etp, rank=0, dp=ep * etp, ep=ep, etp=etp)


def config(**fields) -> MoEConfig:
    return MoEConfig(**{"hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "top_k": 4} | fields)


def reason(kind, *, ep=4, etp=1, dtype=torch.bfloat16, scheme=None, max_tokens=64, expert_map=None, options=None, **of):
    scheme = SCHEMES[scheme or sorted(kind.capabilities.schemes)[0]]
    rest = {"expert_map": expert_map, "max_tokens": max_tokens, "options": options}
    return kind.unsupported_reason(config(**of), layout(ep, etp), dtype, scheme, **rest)


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, None),
        ({"top_k": 3}, None),
        ({"etp": 2}, None),
        ({"expert_map": ExpertMap.redundant(16, 4, 8)}, None),
        ({"scheme": "fp8_static"}, "quantization fp8_static is not among"),
        ({"dtype": torch.float16}, "dtype float16 is not among bfloat16"),
        ({"activation": Activation.GEGLU}, "activation geglu is not among swiglu"),
        ({"expert_bias": True}, "it has no expert biases"),
        ({"ep": 1}, "it serves 2 to 32 ranks, ep=1"),
        ({"ep": 64, "num_experts": 64}, "it serves 2 to 32 ranks, ep=64"),
        ({"top_k": 9}, "top_k must be at most 8, got 9"),
        ({"hidden_size": 320}, "hidden_size must be a multiple of"),
        ({"intermediate_size": 192}, "intermediate_size / etp must be a multiple of 128, got 192"),
        ({"intermediate_size": 384, "etp": 2}, "intermediate_size / etp must be a multiple of 128, got 192"),
        ({"max_tokens": None}, r"it has fixed buffers; set their size with EPContext.from_torchrun\(max_tokens=...\)"),
        ({"options": ExpertsOptions(spare_sms=8)}, r"it cannot leave multiprocessors free \(spare_sms=8\)"),
        (
            {"expert_map": ExpertMap.linear(10, 4), "num_experts": 10},
            r"the same number of slots on every rank, got \[3, 3, 2, 2\]; .* ExpertMap.redundant\(10, 4, 2\)",
        ),
    ],
)
def test_reasons(kind, asked, sentence):
    found = reason(kind, **asked)
    if sentence is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=sentence):
            raise AssertionError(found)


def test_sizes_that_one_of_them_has_no_room_for():
    assert reason(FlashInferMegaBf16, hidden_size=640) == "hidden_size must be a multiple of 256, got 640"
    assert reason(FlashInferMegaFp8, hidden_size=640) is None
    assert "at most 16384, got 16512" in reason(FlashInferMegaFp8, intermediate_size=16512)
    assert reason(FlashInferMegaBf16, intermediate_size=16512) is None
    assert "at most 65535 tokens per rank" in reason(FlashInferMegaBf16, max_tokens=1 << 16, hidden_size=256, top_k=1)
    big = {"hidden_size": 7168, "top_k": 8}
    assert reason(FlashInferMegaBf16, max_tokens=18000, **big) is None
    said = reason(FlashInferMegaBf16, max_tokens=19000, **big)
    most = int(said.split("at most ")[1].split()[0])
    assert reason(FlashInferMegaBf16, max_tokens=most, **big) is None
    assert reason(FlashInferMegaBf16, max_tokens=most + 1, **big) is not None
    assert -(-4 * most * 8 // 128) * 128 * 7168 <= 1 << 32, "FlashInfer's own check, with the last tile"


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
def test_the_gpu_that_it_needs(kind, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for found, sentence in (((9, 0), None), ((8, 9), "9.0, this one has 8.9"), ((10, 0), "9.0, this one has 10.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        said = kind.unsupported_platform(layout(), gpu)
        assert said is None if sentence is None else said.endswith(f"needs a GPU of compute capability {sentence}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "one host" in kind.unsupported_platform(layout(8), gpu)
    assert kind.unsupported_platform(layout(), CPU) == f"{kind.name} runs on cuda, not on cpu"


def test_every_built_in_loads_and_runs_here_or_says_what_is_missing():
    for name in registry.targets("fused"):
        assert registry.load("fused", name).name == name
        assert registry.unsupported_reason("fused", name) in (
            None,
            "FlashInfer is not installed; pip install ep-moe[gpu]",
        )


# --- selection ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Make both mega kernels available on this CPU."""
    for kind in BOTH:
        monkeypatch.setattr(kind, "available", classmethod(lambda cls: None))
        monkeypatch.setattr(kind, "unsupported_platform", classmethod(lambda cls, layout, device: None))


def rows(**asked):
    shape = {"max_tokens": 64} | asked
    return explain(config(), layout(), CPU, torch.bfloat16, **shape)


def test_a_fused_kernel_is_a_row_and_not_chosen_by_itself(here):
    table = {row.experts: row for row in rows() if row.all2all == "inside"}
    assert set(table) == set(registry.targets("fused"))
    assert table["flashinfer_mega_bf16"].status == "possible"
    assert "experts='flashinfer_mega_bf16' is asked for" in table["flashinfer_mega_bf16"].reason
    assert table["flashinfer_mega_fp8"].reason == "quantization none is not among fp8_block"
    assert choose(config(), layout(), CPU, torch.bfloat16, max_tokens=64).all2all != "inside"


def test_where_nothing_else_can_it_is_still_not_chosen(here, monkeypatch):
    monkeypatch.setitem(registry._BUILT_IN, "experts", {})
    with pytest.raises(BackendUnavailable):
        choose(config(), layout(), CPU, torch.bfloat16, max_tokens=64)


def test_a_fused_kernel_that_is_named_runs(here):
    for name, scheme in (("flashinfer_mega_bf16", "none"), ("flashinfer_mega_fp8", "fp8_block")):
        shape = config(), layout(), CPU, torch.bfloat16
        row = choose(*shape, experts=name, scheme=SCHEMES[scheme], max_tokens=64)
        assert (row.all2all, row.experts, row.status) == ("inside", name, "chosen")
        (chosen,) = (r for r in rows(experts=name, scheme=SCHEMES[scheme]) if r.status == "chosen")
        assert chosen == row


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"all2all": "torch_a2a"}, "has a built-in all2all; leave all2all='auto'"),
        ({"all2all": "allgather"}, "has a built-in all2all; leave all2all='auto'"),
        ({"wire": Wire(dispatch="fp8_block")}, "has its own row format for dispatch and combine, not Wire"),
        ({"wire": Wire(combine="fp8")}, "has its own row format for dispatch and combine, not Wire"),
        ({"max_tokens": None}, "it has fixed buffers"),
        ({"scheme": SCHEMES["mxfp4"]}, "quantization mxfp4 is not among none"),
        ({"expert_map": ExpertMap.uneven([3, 5, 4, 4])}, r"got \[3, 5, 4, 4\]"),
    ],
)
def test_what_a_named_one_is_refused_with(here, asked, sentence):
    with pytest.raises(BackendUnavailable, match=sentence):
        choose(config(), layout(), CPU, torch.bfloat16, experts="flashinfer_mega_bf16", **{"max_tokens": 64} | asked)


def test_one_that_is_not_here_says_so():
    with pytest.raises(BackendUnavailable, match=r"FlashInfer is not installed|runs on cuda, not on cpu"):
        choose(config(), layout(), CPU, torch.bfloat16, experts="flashinfer_mega_bf16", max_tokens=64)


def test_unknown_names_list_the_fused_ones_too():
    with pytest.raises(ConfigError, match=r"named 'mega'; there are .*reference.* fused ones: flashinfer_mega_bf16"):
        choose(config(), layout(), CPU, torch.bfloat16, experts="mega")


# --- planned memory -------------------------------------------------------------------------------------------------


def dispatch_shape(kind, **fields) -> FusedDispatchShape:
    sizes = {
        "hidden_size": 512,
        "top_k": 4,
        "slots_per_rank": 3,
        "num_ranks": 4,
        "dtype": torch.bfloat16,
        "max_tokens": 100,
    }
    return FusedDispatchShape(**sizes | {"kernel": kind.name, "intermediate_size": 256} | fields)


def test_a_shard_of_each_expert_sizes_the_buffers():
    layout = RankLayout(world=4, rank=0, dp=2, tp=2, ep=2, etp=2)
    shape = fused_dispatch_shape("a kernel", config(), layout, 8, torch.bfloat16, 9)
    assert shape.intermediate_size == config().intermediate_size // 2


def test_planned_memory_is_the_sum_of_what_flashinfer_allocates():
    """Planned memory is the sum of what FlashInfer allocates, without alignment and flags.

    The sizes are those of window and runner buffers in FlashInfer 0.7.2.post1 (protocol.py, cake_runner.py, runner.py).
    """
    routes, padded = 4 * 100 * 4, 1664  # padded to a multiple of 128
    window = 400 * 512 * 2 + routes * 16 + 100 * 4 * 512 * 2
    runner = padded * (512 * 2 + 4 * 4 + 4 + 256 * 2 + 512 * 2) + 400 * 4 + 400 * 4 * 4 + 400 * 4
    assert FlashInferMegaBf16.buffer_bytes(dispatch_shape(FlashInferMegaBf16)) == window + runner
    window = 400 * 512 + 400 * 4 * 4 + routes * 16 + 100 * 4 * 512 * 2
    runner = padded * (512 + 4 * 4 + 4 + 2 * 2 * 256 + 256 + 2 * 512)
    rest = FlashInferMegaFp8.buffer_bytes(dispatch_shape(FlashInferMegaFp8)) - window - runner
    scales = 4 * (512 // 128 + 256 // 128) * routes
    assert scales <= rest <= scales + 4 * 6 * (31 * 3 + 32)


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
def test_layers_that_differ_share_no_buffers(kind):
    one = dispatch_shape(kind)
    assert one == dispatch_shape(kind)
    others = [
        dispatch_shape(kind, **change) for change in ({"intermediate_size": 128}, {"kernel": "x"}, {"max_tokens": 9})
    ]
    assert len({one, *others}) == 4
    assert dataclasses.replace(one, top_k=3) != one

"""Test `bench/layer` on a CPU: floors, stages and tables, and that lines which fail or are wrong are reported."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from ep_moe import EPContext, MoEConfig, MoELayer, Wire
from ep_moe.all2all import flashinfer_nvlink
from ep_moe.bench import all2all, breakdown, floors, harness, layer, layer_report, peers
from ep_moe.bench.floors import Rates
from ep_moe.bench.layer_report import LayerLine
from ep_moe.bench.overlap import overlapped_share
from ep_moe.bench.wire_rows import remote_ranks
from ep_moe.config import load_model_config
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaBf16, FlashInferMegaFp8, library
from ep_moe.testing import distributed
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.emulations import mega as mega_emulation
from tests.emulations.cutlass import emulate
from tests.emulations.cutlass_sm100 import SM90_FLAGS, emulate_call
from tests.emulations.flashinfer_nvlink import communication

# one run on 4 H200: bytes/s copied, bf16 and fp8 operations/s; bytes/s peer to peer
H200, P2P = Rates(4.3e12, 800e12, 1468e12), 389e9

# microseconds in turn and overlapped in bf16, overlapped in fp8, computed by hand from those rates
FLOORS = {
    "qwen3-30b-a3b": {1: (16, 16, 8), 16: (70, 69, 35), 128: (78, 70, 35), 1024: (155, 97, 53), 8192: (1243, 773, 421)},
    "deepseek-v3": {
        1: (157, 156, 78),
        16: (1142, 1139, 570),
        128: (1337, 1311, 655),
        1024: (1516, 1311, 655),
        8192: (8852, 7216, 3932),
    },
}


def expected_load(num_experts: int, top_k: int, ranks: int, tokens: int) -> floors.Load:
    """Return the expected load of any rank under uniform routing."""
    touched = floors.experts_touched(num_experts, top_k, num_experts // ranks, ranks * tokens)
    rows = tokens * remote_ranks(num_experts, top_k, ranks)
    return floors.Load(touched, tokens * top_k, rows, 2 * rows)


@pytest.mark.parametrize("model", FLOORS)
def test_floors_are_those_worked_out_by_hand(model):
    config = load_model_config(model).moe
    for tokens, (apart, overlap, fp8) in FLOORS[model].items():
        load = expected_load(config.num_experts, config.top_k, 4, tokens)
        plain = floors.counted_floor(config, load, floors.KINDS["bf16"].at(H200, P2P))
        rounded = floors.counted_floor(config, load, floors.KINDS["fp8"].at(H200, P2P))
        found = (plain.in_turn, plain.overlapped, rounded.overlapped)
        if (model, tokens) == ("qwen3-30b-a3b", 1024):  # products take 96.6 us in bf16, and 52.7 us in fp8
            assert rounded.overlapped == rounded.products
        assert found[:2] == pytest.approx((apart, overlap), abs=0.51, rel=2e-4)
        # the hand computation leaves out the scales of fp8 weights, one float32 per 128 x 128 block
        assert found[2] == pytest.approx(fp8, abs=0.51 + fp8 * 4 / 128**2)


def test_fp8_rows_travel_out_and_bf16_rows_back():
    config = load_model_config("deepseek-v3").moe
    found = floors.counted_floor(config, floors.Load(1, 1, 1000, 2000), floors.KINDS["fp8"].at(H200, P2P))
    row = 7168 + 4 * 56 + 2 * 7168  # the row sent has 56 scales
    assert found.wire == found.link == pytest.approx(1e6 * 1000 * row / P2P)


def test_load_of_a_batch():
    # 2 ranks with experts 0-1 and 2-3; rank 0 has two tokens, rank 1 has one and a token without experts
    ids = torch.tensor([[[0, 1], [2, 0]], [[0, 2], [-1, -1]]])
    found = floors.load_of(ids, 4)
    assert found == floors.Load(experts=2, pairs=4, rows=1, both=2)
    everything_to_one = torch.tensor([[[0, 1], [0, 1]], [[0, 1], [1, -1]]])
    assert floors.load_of(everything_to_one, 4) == floors.Load(experts=2, pairs=7, rows=2, both=2)


def test_load_of_uniform_routes_is_what_is_expected_of_them():
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(4, 2048, 64, generator=generator).topk(4).indices
    found, wanted = floors.load_of(ids, 64), expected_load(64, 4, 4, 2048)
    assert found.experts == 16
    assert wanted.experts == pytest.approx(16)
    # the largest of 4 (or 8) binomial draws is within 5 deviations of the mean
    pairs, rows = 5 * wanted.pairs**0.5, 5 * wanted.rows**0.5
    assert found.pairs == pytest.approx(wanted.pairs, abs=pairs)
    assert found.rows == pytest.approx(wanted.rows, abs=rows)
    assert found.both == pytest.approx(wanted.both, abs=2 * rows)


# --- stages --------------------------------------------------------------------------------------------------------


def call_of(at: float, *, sent: str = "_send", received: str = "_receive") -> list[tuple[str, float, float]]:
    """Return kernel spans of a call, with 13 us between calls: rest 2, dispatch 3 after a gap, experts 4, combine 4."""
    return [
        ("place", at, at + 2),
        (sent, at + 2.5, at + 5),
        ("gemm", at + 5, at + 7),
        ("Memcpy DtoD", at + 7, at + 7.5),
        ("gemm", at + 4.5, at + 9),  # launched before its predecessor ends
        (received, at + 9, at + 13),
    ]


@pytest.mark.parametrize(
    ("sent", "received"),
    [("_send", "_receive"), ("void moeA2ADispatchKernel<...>(...)", "void moeA2ACombineKernel<...>(...)")],
)
def test_stages_add_up_to_the_time_from_call_to_call(sent, received):
    spans = call_of(0, sent=sent, received=received)
    spans[-1] = (received, 9, 63.0)  # it waited for a late rank
    spans.append(("cast", 63.0 + 13 * 4, 63.0 + 13 * 4 + 1))  # belongs to no call
    for number in range(4):
        spans += call_of(63.0 + 13 * number, sent=sent, received=received)
    found = breakdown.split(spans)
    assert found == breakdown.Stages(dispatch=3, experts=4, combine=4, rest=2)


def test_a_fused_kernel_has_no_stages():
    assert breakdown.split([("mega", 0.0, 5.0), ("mega", 5.0, 9.0)]) is None
    assert breakdown.split([]) is None


def test_of_two_kernels_of_combine_the_last_ends_it():
    one = [("A2ADispatch", 0.0, 1.0), ("A2ASanitize", 1.0, 2.0), ("gemm", 2.0, 4.0), ("A2APrepareCombine", 4.0, 5.0)]
    one.append(("A2ACombine", 5.0, 8.0))
    spans = [(name, start + 8 * number, end + 8 * number) for number in range(3) for name, start, end in one]
    assert breakdown.split(spans) == breakdown.Stages(dispatch=2, experts=2, combine=4, rest=0)


def test_answers_that_the_transport_writes_are_part_of_combine():
    one = [("_send", 0.0, 2.0), ("gemm", 2.0, 4.0), ("_give", 4.0, 5.0), ("_receive", 5.0, 8.0)]
    spans = [(name, start + 8 * number, end + 8 * number) for number in range(3) for name, start, end in one]
    assert breakdown.split(spans) == breakdown.Stages(dispatch=2, experts=2, combine=4, rest=0)
    assert overlapped_share([("gemm", 0.0, 4.0), ("_give", 1.0, 2.0), ("_receive", 4.0, 5.0)]) == 0.5


# --- the host, memory ----------------------------------------------------------------------------------------------


def test_host_time_is_that_of_one_call(monkeypatch):
    made: list[int] = []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def call() -> None:
        made.append(1)
        clock.now += 1e-3 if len(made) <= 10 * 4 else 9e-3  # the last sample is slow

    def before() -> None:
        clock.now += 5e-2

    us = harness.host(call, calls=10, samples=3, before=before)
    assert us == pytest.approx(1000), "of one call, and what precedes a sample does not count"
    assert len(made) == 10 * (3 + 2)


def test_bytes_that_were_taken():
    """`taken` returns the bytes that tensors and libraries took, at rest and at the peak.

    Of 1000 free bytes, a cache held 50 before. Then tensors hold 100, 20 more at the peak, and a library takes 300.
    """
    before = breakdown._Mark(allocated=40, peak=40, outside=-1000 - 50)
    after = breakdown._Mark(allocated=140, peak=160, outside=-(1000 - 300 - 60) - 110)
    assert breakdown.taken(before, after) == (400, 420)


# --- lines ---------------------------------------------------------------------------------------------------------


def line_of(
    owner: str, name: str, us: float, *, weights: str = "bf16", tokens: int = 1, error: float = 0.0
) -> LayerLine:
    scheme = "none" if weights == "bf16" else "fp8_block"
    return LayerLine("m", 4, tokens, owner, name, scheme, weights, "bf16 / bf16", us, error, us / 2, us / 4)


def test_the_fastest_right_peer_with_weights_of_the_same_kind_is_what_counts():
    lines = [
        line_of("ours", "a", 10.0),
        line_of("peer", "b", 15.0),
        line_of("peer", "c", 12.0),
        line_of("peer", "wrong", 1.0, error=0.03),
        line_of("peer", "no number", 2.0, error=float("inf")),
        line_of("peer", "fp8", 3.0, weights="fp8"),
        line_of("ours", "d", 6.0, weights="fp8", error=0.14),
    ]
    layer.compared(lines)
    assert [line.x_peer for line in lines] == [1.2, 0.8, 1.0, 12.0, 6.0, 1.0, 0.5]
    assert [line.name for line in lines if line.wrong] == ["wrong", "no number"]
    assert layer.compared([line_of("ours", "a", 1.0)])[0].x_peer is None


def test_tables_csv_and_panels(tmp_path):
    lines = [
        line_of(owner, owner, us * tokens, weights=weights, tokens=tokens)
        for tokens in (1, 16)
        for weights, us in (("bf16", 3.0), ("fp8", 2.0))
        for owner in ("ours", "peer")
    ]
    lines[0].error, lines[0].dispatch_us, lines[0].plan_bytes, lines[0].held_bytes = (
        float("nan"),
        4.5,
        9 << 20,
        10 << 20,
    )
    console = Console(width=150, record=True)
    console.print(layer_report.table(layer.compared(lines[:4])), layer_report.stage_table(lines[:4]))
    text = console.export_text()
    assert "WRONG" in text
    assert "0.900" in text, "plan / held"
    harness.write(lines, tmp_path / "lines.csv")
    # compare by repr, because NaN does not equal itself
    assert repr(layer_report.read(tmp_path / "lines.csv")) == repr(lines)
    rows = list(csv.DictReader((tmp_path / "lines.csv").open()))
    assert len(rows) == 8
    assert (rows[0]["dispatch_us"], rows[1]["dispatch_us"]) == ("4.5", "")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    layer_report.plot(lines, tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size > 10_000


def test_lines_that_differ_in_what_travels_alone_are_told_apart(tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes", reason="matplotlib is not installed")
    lines = [line_of("ours", "a", 4.0, weights="fp8", tokens=tokens) for tokens in (1, 16)]
    lines += [dataclasses.replace(line, rows="fp8 / fp8", us=3.0) for line in lines]
    console = Console(width=150, record=True)
    console.print(layer_report.stage_table(lines))
    assert console.export_text().count("fp8 / fp8") == 2
    curves, draw = {}, axes.Axes.plot

    def plot(self, x, y, *style, **given):
        curves[given["label"]] = list(x)
        return draw(self, x, y, *style, **given)

    monkeypatch.setattr(axes.Axes, "plot", plot)
    layer_report.plot(lines, tmp_path / "lines.png")
    ours = {label: x for label, x in curves.items() if label.startswith("ours")}
    assert ours == {"ours, a, fp8_block, bf16 / bf16": [1, 16], "ours, a, fp8_block, fp8 / fp8": [1, 16]}


def test_relative_error():
    one = torch.tensor([[1.0, -4.0]])
    assert harness.relative_error(one, one) == 0
    assert harness.relative_error(torch.tensor([[1.0, -3.0]]), one) == 0.25
    assert harness.relative_error(torch.tensor([[1.0, torch.nan]]), one) > 1e30


@pytest.mark.parametrize(("tokens", "calls"), [(1, 10), (128, 10), (1024, 4), (8192, 2)])
def test_calls_of_a_graph(tokens, calls):
    assert layer.calls_per_graph(tokens) == calls


# --- dispatch and combine with EPLB's statistics -------------------------------------------------------------------


def test_load_rides_on_dispatch(monkeypatch):
    made, seen = [], []
    library = SimpleNamespace(
        dispatch=lambda x, ids, weights, *, eplb_local_stats: seen.append(eplb_local_stats),
        get_combine_input_buffer=lambda dtype: "the experts' rows",
        combine=seen.append,
    )
    monkeypatch.setattr(flashinfer_nvlink, "communication", lambda *asked: made.append(asked) or library)
    context = SimpleNamespace(
        rank_groups={"ep": SimpleNamespace(size=4, rank=1, group=None)}, layout=SimpleNamespace(ep=4)
    )
    ids = torch.rand(5, all2all.EXPERTS).topk(all2all.TOP_K).indices
    routing = PhysicalRouting(PhysicalIds(ids), torch.ones(ids.shape))
    dispatch_shape = all2all.dispatch_shape_of(context, 64, 5, Wire())
    pairs = all2all.load_pairs(context, dispatch_shape, torch.zeros(5, 64), routing)
    without, riding = pairs["without_load_us"], pairs["with_load_us"]
    without()
    riding()
    assert [seen[0], seen[1], seen[3]] == [None, "the experts' rows", "the experts' rows"]
    assert seen[2].dtype == torch.int32
    assert seen[2].tolist() == [int((ids == expert).sum()) for expert in range(all2all.EXPERTS)]
    ((_, params, config),) = made
    assert config == {"eplb_stats_num_experts": all2all.EXPERTS}
    assert (params["max_tokens_per_rank"], params["num_experts"]) == (5, all2all.EXPERTS)


# --- all of it, over emulations of FlashInfer ----------------------------------------------------------------------

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
TOKENS, TILES = 8, [3, 5]
FLAGS = cutlass_op.runner_of(torch.bfloat16, torch.bfloat16, "none", True).flags
MACHINE = layer.Machine(H200, P2P)
Variant = layer.Variant
VARIANTS = [
    *(Variant("flashinfer_cutlass", scheme, "plain", "allgather") for scheme in ("none", "fp8_static", "fp8_block")),
    Variant("flashinfer_mega_bf16", "none", "plain", "auto"),
    Variant("flashinfer_mega_fp8", "fp8_block", "plain", "auto"),
    Variant("no such kernel", "none", "plain", "allgather"),
    Variant("flashinfer_cutlass", "none", "plain", "pplx"),
]
HAND, NCCL = "FlashInfer one-sided + CUTLASS", "NCCL AG/RS + CUTLASS"
PEERS = {
    (HAND, "none", "bf16 / bf16"), (HAND, "fp8_static", "fp8 / bf16"), (HAND, "fp8_block", "bf16 / bf16"),
    ("FlashInfer mega", "none", "bf16 / bf16"), ("FlashInfer mega", "fp8_block", "fp8 / fp8"),
    (NCCL, "none", "bf16 / bf16"), (f"{NCCL}, grouped", "none", "bf16 / bf16"),
}  # fmt: skip
OURS = {
    ("flashinfer_cutlass + allgather", "none", "bf16 / bf16"),
    ("flashinfer_cutlass + allgather", "fp8_static", "bf16 / bf16"),
    ("flashinfer_cutlass + allgather", "fp8_block", "bf16 / bf16"),
    ("flashinfer_mega_bf16", "none", "bf16 / bf16"),
    ("flashinfer_mega_fp8", "fp8_block", "fp8 / bf16"),
}


def cutlass_fused_moe(  # the signature of FlashInfer 0.7.2.post1, by name
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,  # noqa: A002
    quant_scales, *, output, ep_size, ep_rank, enable_alltoall, profile_ids, workspace_buffer, **flags,
) -> None:  # fmt: skip
    scheme = "fp8_block" if flags["use_deepseek_fp8_block_scale"] else "other"
    assert profile_ids == ([-1, -1] if scheme == "fp8_block" else TILES)
    assert workspace_buffer.numel() >= len(input)
    flags["use_mxfp8_act_scaling"] = False
    emulate(
        output, input, token_selected_experts, token_final_scales, fc1_expert_weights, None, fc2_expert_weights, None,
        quant_scales, None, None, None, tp_size=1, tp_rank=0, ep_size=ep_size, ep_rank=ep_rank, activation_type=3,
        output_dtype=output_dtype, **{name: flags[name] for name in SM90_FLAGS},
    )  # fmt: skip
    if enable_alltoall:  # the library may leave rows without a local expert unwritten
        held = len(fc2_expert_weights)
        output[(token_selected_experts // held != ep_rank).all(1)] = torch.nan


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_flashinfer_takes_what_the_peers_hand_over():
    from flashinfer.fused_moe import core
    from flashinfer.moe_ep import NVLinkOneSidedAlltoAll, NVLinkOneSidedConfig

    ours, theirs = (list(inspect.signature(f).parameters) for f in (cutlass_fused_moe, core.cutlass_fused_moe))
    assert ours[:7] == theirs[:7], "by place"
    assert {*ours[7:-1], *FLAGS} <= set(theirs)
    sizes = list(inspect.signature(core.cutlass_fused_moe_workspace_size).parameters)
    assert sizes[:5] == ["max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k"]
    assert {"x_dtype", "weight_dtype", "output_dtype", "device", "ep_size", "ep_rank", *FLAGS} <= set(sizes)
    dispatch = inspect.signature(NVLinkOneSidedAlltoAll.dispatch).parameters
    assert {"hidden_states_scale", "max_tokens_per_rank", "eplb_local_stats"} <= set(dispatch)
    known = {field.name for field in dataclasses.fields(NVLinkOneSidedConfig)}
    assert {"extra_payload_bytes_per_token", "use_low_precision_combine", "eplb_stats_num_experts"} <= known
    default = library("flashinfer_mega_fp8").config(intermediate_size=128, top_k=2)
    emulated = mega_emulation.Fp8Config(intermediate_size=128, top_k=2)
    assert {name: getattr(default, name) for name in vars(emulated)} == vars(emulated)


def on_the_cpu() -> list[object]:
    """Replace GPU libraries by emulations in a rank's process. Return the configurations of mega kernels."""
    fused = ModuleType("flashinfer.fused_moe")
    fused.cutlass_fused_moe = cutlass_fused_moe
    fused.cutlass_fused_moe_workspace_size = lambda rows, *shape, **rest: rows
    sys.modules |= {"flashinfer": ModuleType("flashinfer"), "flashinfer.fused_moe": fused}
    sys.modules["flashinfer"].__spec__ = ModuleSpec("flashinfer", None)
    cutlass_op.run_moe = lambda runner, **arguments: emulate_call(runner.flags, runner.output, arguments)
    cutlass_op.scratch_bytes = lambda *shape: 1024
    tiles = {"fp8_block": [-1, -1]}
    FlashInferCutlassExperts.tune = lambda self, rows, cache: [*rows, *tiles.get(self.weights.scheme.name, TILES)]
    FlashInferCutlassExperts.capabilities = dataclasses.replace(
        FlashInferCutlassExperts.capabilities, devices=frozenset({"cpu"})
    )
    FlashInferCutlassExperts.available = classmethod(lambda cls: None)
    FlashInferCutlassExperts.compute_capability = classmethod(lambda cls, scheme: (None, None))
    mega_emulation.on_the_cpu(FlashInferMegaBf16, FlashInferMegaFp8)
    made: list[object] = []
    mega_emulation.Fp8Kernel.validate_init = lambda self, *fleet: made.append(self.config)
    peers.communication = communication
    layer.captured = lambda call, repeat: SimpleNamespace(replay=call)
    layer.interleaved_times = lambda calls, repeat, replays, before: [10.0 + len(call()) for call in calls]
    layer.host = lambda call, calls, before: harness.host(call, calls=1, samples=1, before=before)
    breakdown.timeline = lambda call, device: [span for number in range(3) for span in call_of(13.0 * number)]
    return made


def lines_of(context: EPContext, **asked: object) -> list[LayerLine]:
    with torch.no_grad():
        return layer.measure(context, "m", CONFIG, VARIANTS, MACHINE, **asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(2)
def test_every_line_is_there_and_computes_the_same(world_size):
    made = on_the_cpu()
    with EPContext.from_groups(device=torch.device("cpu"), deadline_s=30, max_tokens=TOKENS) as context:
        lines = lines_of(context)
    assert {(line.name, line.scheme, line.rows) for line in lines if line.owner == "peer"} == PEERS
    assert {(line.name, line.scheme, line.rows) for line in lines if line.owner == "ours"} == OURS
    assert not [line for line in lines if line.wrong]
    # the first line is the reference; others differ from it where they round
    assert [line.error for line in lines[:1]] == [0]
    assert all(line.error > 0 for line in lines if line.weights == "fp8")
    assert all(line.x_peer is not None for line in lines)
    assert {line.dispatch_us for line in lines} == {3.0, None}
    assert {line.ranks for line in lines} == {world_size}
    default = [config for config in made if (config.combine_dtype, config.grouped_combine) == ("fp8", True)]
    assert len(default) == 1, "FlashInfer's own choices, once"
    assert len(made) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="over emulations, on the CPU")
@distributed(2)
def test_what_fails_or_is_wrong_takes_no_other_with_it(world_size):
    on_the_cpu()
    gathered = peers.Peers.gathered

    def fails_on_one(self, *asked):
        if self.rank_group.rank == 1:
            raise RuntimeError("out of memory")
        return gathered(self, *asked)

    def doubled(self, *asked):
        entry = hand_made(self, *asked)
        return dataclasses.replace(entry, call=lambda: 1.05 * entry.call())

    hand_made = peers.Peers.hand_made
    peers.Peers.gathered, peers.Peers.hand_made = fails_on_one, doubled
    with EPContext.from_groups(device=torch.device("cpu"), deadline_s=30, max_tokens=1) as context:
        lines = lines_of(context)
        assert {line.name for line in lines if line.owner == "peer"} == {HAND, "FlashInfer mega"}
        assert [line.name for line in lines if line.wrong] == [HAND], "in bf16; the bound for fp8 is wider"
        assert all(line.host_us > 0 for line in lines), "peers' too"
        assert all(line.captured_host_us is None for line in lines), "there are no CUDA graphs here"
        captured: list[list[int]] = []
        dropped: list[object] = []
        MoELayer.capture_routed = lambda self, tokens: (captured.append(tokens), dropped.append(self._graphs))
        own = [line for line in lines_of(context, peers=False) if line.owner == "ours"]
        assert all(line.captured_host_us > 0 for line in own)
        assert captured == [[1]] * len(own)
        assert not any(map(len, dropped)), "graphs of one line take no memory from the next"
        assert all(line.owner == "ours" for line in lines_of(context, peers=False))

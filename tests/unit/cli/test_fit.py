"""Test `ep-moe fit` and `ep-moe explain --gpu` for GPUs that this machine does not have."""

import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from ep_moe import (
    ConfigError,
    EPContext,
    ExpertMap,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Wire,
    load_model_config,
    registry,
)
from ep_moe.bench import fit
from ep_moe.bench.expected_time import ITSELF, RANKS, held_back
from ep_moe.bench.fit_question import Question
from ep_moe.bench.measured_lines import measured
from ep_moe.bench.wire_rows import two_level
from ep_moe.cli.app import app
from ep_moe.cli.fit import FitOptions, Model, _kv_numbers, _memory, _time, read_model
from ep_moe.cli.fit import run as run_fit
from ep_moe.cli.run import DEMO
from ep_moe.experts.fused.base import INSIDE
from ep_moe.quant.schemes import scheme_of
from ep_moe.runtime.gpus import GPUS
from ep_moe.selection.explain import BackendChoice
from ep_moe.testing import distributed, rank_device

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "benchmarks"
SMALL = MoEConfig(
    hidden_size=128, intermediate_size=256, num_experts=6, top_k=2, shared_intermediate_size=64, shared_gate=True
)
ANSWER = {"model": "qwen3-30b-a3b", "gpus": 4, "tokens": 128}


def ask(*args: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "80"})
    assert found.exit_code == code, found.output
    return found.output


def test_a_revision_is_of_a_model_of_the_hub(tmp_path):
    for name in ("qwen3-30b-a3b", str(tmp_path / "own.toml"), str(tmp_path)):
        with pytest.raises(ConfigError, match=f"--revision is for models of the Hub, got 'main' with '{name}'"):
            read_model(name, "main")


def question(**fields) -> Question:
    rest = {"config": SMALL, "layers": 3, "gpu": GPUS["h200"], "gpus": 4, "per_host": 8, "tokens": 8}
    rest |= {"scheme": scheme_of("none"), "all2all": "allgather", "experts": "reference"}
    return Question(**rest | fields)


# --- memory --------------------------------------------------------------------------------------------------------


@distributed(4)
def test_bytes_are_those_of_real_layers():
    for scheme, sizes, redundant, transport in (
        ("none", {"ep": 4}, 2, "allgather"),
        ("none", {"ep": 2, "etp": 2}, 0, "torch_a2a"),
        ("fp8_block", {"ep": 4}, 0, "hierarchical_static"),
        ("mxfp4", {"ep": 2}, 1, "allgather"),
    ):
        parallel = ParallelConfig(dp=4, **sizes)
        asked = question(scheme=scheme_of(scheme), redundant=redundant, all2all=transport)
        found = fit.answer(asked, parallel)
        with EPContext.from_groups(parallel, device=rank_device(), max_tokens=8) as context:
            layers = [
                MoELayer(
                    SMALL,
                    context,
                    expert_map=ExpertMap.redundant(6, context.layout.ep, redundant),
                    all2all=transport,
                    experts="reference",
                    quantization=scheme,
                    dtype=torch.bfloat16,
                )
                for _ in range(asked.layers)
            ]
            if context.layout.ep_rank == 0:
                assert found.memory.layer == layers[0].plan(), (scheme, sizes)
                assert found.memory.total == sum(context.plan().values())
            else:
                assert found.memory.total >= sum(context.plan().values())


def test_bytes_are_those_that_gpus_held():
    """Predicted bytes are within 3 % of what torch's allocator held for a layer on 4 H200, and of `plan` there.

    The test compares kernels whose workspace can be computed without a GPU.
    """
    compared = 0
    with (DOCS / "layer-h200.csv").open(newline="") as text:
        lines = [line for line in csv.DictReader(text) if line["plan_bytes"]]
    for line in lines:
        kernel, _, transport = line["name"].partition(" + ")
        if not kernel.endswith("_triton"):
            continue
        wires = {"fp8_block": Wire(dispatch="fp8_block"), "fp8_static": Wire(dispatch="fp8_tensor", input_scale=1.0)}
        asked = question(
            config=load_model_config(line["model"]).moe, layers=1, scheme=scheme_of(line["scheme"]),
            tokens=int(line["tokens"]), wire=wires.get(line["scheme"], Wire()), all2all=transport, experts=kernel,
        )  # fmt: skip
        found = fit.answer(asked, ParallelConfig(dp=int(line["ranks"]))).memory.total
        for name in ("plan_bytes", "held_bytes"):
            assert abs(found / int(line[name]) - 1) < 0.03, (line["name"], name, found, line[name])
        compared += 1
    assert compared == 4


def test_a_model_that_no_prediction_knows():
    """Predictions hold for a model that they are not based on: GPT-OSS on 4 H100.

    It was measured after the prediction was made, and its lines are not among those that predict.
    """
    with (DOCS / "layer-gpt-oss-h100-ep4.csv").open(newline="") as text:
        lines = list(csv.DictReader(text))
    assert len(lines) == 2
    for line in lines:
        asked = "--gpus", 4, "--gpu", "h100", "--tokens", line["tokens"], "--experts", "bf16_triton", "--json"
        found = json.loads(ask("fit", line["model"], *asked))
        held = sum(found["memory"]["layer_bytes"].values())
        assert abs(held / int(line["held_bytes"]) - 1) < 0.03
        assert abs(found["layer_time"]["expected_us"] / float(line["us"]) - 1) < 0.2


def test_a_model_that_is_too_large_does_not_fit():
    small = json.loads(ask("fit", "deepseek-v3", "--gpus", 16, "--quantization", "fp8_block", "--json"))
    assert small["memory"]["fits"]
    assert small["memory"]["left_bytes"] == GPUS["h200"].memory_bytes - small["memory"]["total_bytes"]
    output = ask("fit", "deepseek-v3", "--gpus", 4, "--quantization", "fp8_block", code=1)
    assert "DOES NOT FIT" in output
    assert "none fits" in output


def test_the_rest_of_a_model_is_counted_from_its_folder():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_config(config)
    blocks = sum(p.numel() for layer in model.model.layers for p in layer.mlp.parameters())
    found = read_model(str(DEMO))
    assert found.layers == config.num_hidden_layers
    assert found.rest == sum(p.numel() for p in model.parameters()) - blocks
    cache = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    assert found.kv_numbers == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    output = ask("fit", DEMO, "--gpus", 2)
    assert "KV cache" in output
    assert "left out" not in output
    assert "left out: this configuration has MoE layers alone" in ask("fit", "demo", "--gpus", 2)


def test_a_model_of_the_hub_comes_from_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text((DEMO / "config.json").read_text())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = json.loads(ask("fit", "org/small", "--gpus", 2, "--json"))
    folder = json.loads(ask("fit", DEMO, "--gpus", 2, "--json"))
    assert found["memory"] == folder["memory"]
    assert "org/other" in ask("fit", "org/other", "--gpus", 2, code=2)


def test_what_only_a_library_knows_is_not_in_the_total(monkeypatch):
    monkeypatch.setattr(fit, "_workspace_bytes", lambda *_: None)
    output = ask("fit", "demo", "--gpus", 2, "--experts", "flashinfer_cutlass")
    assert "not counted: workspace (only the library tells, on a GPU), CUDA context" in output


def test_a_kernel_with_a_transport_inside_has_none_that_is_counted():
    """A kernel with an internal transport reports no transport bytes, because its buffers are its own."""
    assert fit._transport_bytes(None, None, BackendChoice(INSIDE, "flashinfer_mega", "possible", ""), None) is None


# --- bytes and time ------------------------------------------------------------------------------------------------


def test_a_layer_that_was_measured_gets_its_time():
    """A measured layer gets its measured time, for all lines that the command can ask for.

    The command has no option for fp8 rows on the way back.
    """
    formats, asked = {"fp8_static": "fp8_tensor", "fp8_block": "fp8_block"}, 0
    for line in measured():
        experts, _, all2all = line.pair.partition(" + ")
        if line.rows.endswith("/ fp8"):
            continue
        dispatch = formats.get(line.scheme, "fp8_row") if "fp8" in line.rows else "plain"
        wire = Wire(dispatch=dispatch, input_scale=1.0 if dispatch == "fp8_tensor" else None)
        one = question(
            config=line.config, layers=1, gpu=GPUS[line.gpu], gpus=line.ranks, tokens=line.tokens,
            scheme=scheme_of(line.scheme), wire=wire, all2all=all2all, experts=experts,
        )  # fmt: skip
        layout = one.layout(ParallelConfig(dp=line.ranks))
        time = fit.layer_time(one, layout, one.choose(layout))
        assert time.expected.us == line.us
        assert time.expected.basis == ITSELF
        assert f"{line.file}: {line.model}, {line.ranks} ranks" in time.expected.source
        asked += 1
    assert asked > 150
    assert "us, measured: this layer" in ask("fit", "qwen3-30b-a3b", "--gpus", 4, "--tokens", 128)


def test_a_prediction_says_how_far_off_such_predictions_are():
    answered = run_fit(FitOptions(**ANSWER | {"gpus": 8}))["layer_time"]
    held = held_back(RANKS)
    assert answered["accuracy"] == {
        "predicted_from": RANKS, "held_back_lines": len(held.errors), "within_20_percent": held.within(0.2),
        "median_error": held.median, "worst_error": max(held.errors, key=abs),
        "worst_error_to_16_tokens": max(held.few, key=abs),
    }  # fmt: skip
    assert "4 ranks for 8" in answered["source"]
    untold = ask("fit", "qwen3-30b-a3b", "--gpus", 4, "--quantization", "fp8_block")
    assert "from another row format of dispatch: no measured lines tell how far off that is" in untold
    output = ask("fit", "qwen3-30b-a3b", "--gpus", 8)
    assert f"within 20 % on {held.within(0.2)} of {len(held.errors)} measured lines that were held back" in output


def test_what_was_not_measured_is_said():
    for more in ({"gpus": 16}, {"gpu": "b200"}, {"all2all": "allgather"}, {"tp": 2}, {"redundant": 4}):
        time = run_fit(FitOptions(**ANSWER | more))["layer_time"]
        assert time["expected_us"] is None
        assert time["accuracy"] is None
        assert time["source"] == "floor only, not measured"
    other = run_fit(FitOptions(**ANSWER | {"model": "mixtral-8x7b"}))["layer_time"]
    assert "for experts of 4 times the size" in other["source"]


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_bytes_of_a_call_are_those_of_its_tokens(tp, etp):
    """Bytes of a call are those of its tokens, including the traffic within tp and etp groups.

    Ranks of an etp group also send each other's tokens. They gather and sum rows, as a tp group gathers them.
    """
    found = run_fit(FitOptions(**ANSWER | {"gpus": 16, "tp": tp, "etp": etp, "tokens": 64}))["wire"]
    assert found["tokens_sent_by_a_rank"] == 64 * etp
    rows = two_level(load_model_config("qwen3-30b-a3b").moe, 16 // etp, 8 // etp)
    row, within = 2048 * 2 * 2 + 8 * 8, 2048 * 2 * (tp - 1 + 2 * (etp - 1))
    for link, count in (("nvlink", etp * rows.near * row + within), ("nic", etp * rows.far * row)):
        assert found[f"{link}_bytes_per_token"] == pytest.approx(count)
        assert found[f"{link}_bytes_per_call"] == pytest.approx(64 * count)


def test_320_ranks_hold_256_experts_with_and_without_replicas():
    asked = {"model": "deepseek-v3", "gpus": 320, "quantization": "fp8_block"}
    idle, filled = (run_fit(FitOptions(**asked, redundant=redundant)) for redundant in (0, 64))
    assert idle["layout"]["idle_ranks_of_an_ep_group"] == 64
    assert filled["layout"]["idle_ranks_of_an_ep_group"] == 0
    assert filled["layout"]["ep"] == 320
    assert filled["memory"]["layer_bytes"]["experts"] == idle["memory"]["layer_bytes"]["experts"]
    assert filled["layer_time"]["floor_us"] == pytest.approx(idle["layer_time"]["floor_us"], rel=0.01)
    line = "64 of 320 ranks hold no expert; --redundant 64 gives each of them a replica"
    args = ["fit", "deepseek-v3", "--gpus", 320, "--quantization", "fp8_block"]
    assert line in ask(*args)
    assert "hold no expert" not in ask(*args, "--redundant", 64)


def test_redundant_experts_count_in_the_floor():
    plain, more = (run_fit(FitOptions(**ANSWER | {"redundant": redundant})) for redundant in (0, 128))
    weights = [one["layer_time"]["floor_parts_us"]["weights"] for one in (plain, more)]
    assert weights[1] == pytest.approx(2 * weights[0], rel=0.01)  # a rank reads 64 slots instead of 32


def test_crossover_needs_two_hosts():
    assert run_fit(FitOptions(**ANSWER))["crossover"] is None
    found = run_fit(FitOptions(**ANSWER | {"gpus": 16}))
    cross, hierarchical = found["crossover"], found["wire"]
    assert cross["two_level_us"] < cross["flat_us"]
    said = ask("fit", "qwen3-30b-a3b", "--gpus", 16)
    assert "ns in two levels (to each host, then to its ranks)" in said
    assert "two levels are faster: from" in said
    tokens = int(cross["two_level_pays"].removeprefix("from "))
    gain = cross["flat_us"] - cross["two_level_us"]
    assert (tokens - 1) * gain < cross["second_level_costs_us"] <= tokens * gain
    assert found["backends"]["all2all"] == "hierarchical"
    flat = run_fit(FitOptions(**ANSWER | {"gpus": 16, "all2all": "torch_a2a"}))["wire"]
    assert hierarchical["nic_bytes_per_token"] < flat["nic_bytes_per_token"]


# --- layouts -------------------------------------------------------------------------------------------------------


def test_best_layout_is_the_least_floor_that_fits():
    asked = question(config=load_model_config("qwen3-30b-a3b").moe, layers=48, tokens=64, all2all="auto")
    found = fit.best(asked)
    every = []
    for parallel in fit.layouts(asked):
        try:
            one = fit.answer(asked, parallel)
        except ConfigError:
            continue
        if one.fits(asked):
            every.append(one.time.floor_us)
    assert len(every) > 5
    assert found[0].time.floor_us == min(every)
    assert [one.time.floor_us for one in found] == sorted(every)[: len(found)]


def test_layouts_that_do_not_fit_are_left_out():
    asked = question(
        config=load_model_config("deepseek-v3").moe, layers=58, scheme=scheme_of("fp8_block"), all2all="auto"
    )
    assert fit.best(asked) == []
    found = fit.best(dataclasses.replace(asked, gpus=8))
    assert found
    assert all(one.layout.ep * one.layout.etp == 8 for one in found)


# --- the command line ----------------------------------------------------------------------------------------------


def test_json_is_one_object_and_nothing_else():
    found = json.loads(ask("fit", "qwen3-30b-a3b", "--gpus", 4, "--quantization", "fp8_block", "--json"))
    sizes = {"dp": 4, "tp": 1, "ep": 4, "etp": 1, "replicas": 1}
    assert found["layout"] == {**sizes, "hosts_of_an_ep_group": 1, "idle_ranks_of_an_ep_group": 0}
    assert found["backends"]["experts"] == "fp8_block_triton"
    assert set(found["memory"]["layer_bytes"]) >= {"experts", "router", "placement", "workspace", "transport"}


def test_text_names_the_source_of_each_number():
    output = ask("fit", "qwen3-30b-a3b", "--gpus", 16, "--tokens", 128, "--quantization", "fp8_block")
    for part in (
        "docs/reference/benchmarks/layers.md", "not measured", "datasheet", "hierarchical with fp8_block_triton",
        "not counted", "floor only", "best layouts",
    ):  # fmt: skip
        assert part in output, part


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["qwen3", "--gpus", "4"], ["qwen3", "qwen3-30b-a3b"]),
        (["demo", "--gpus", "0"], ["--gpus", "at least 1", "0"]),
        (["demo", "--gpus", "12"], ["--per-host must divide --gpus", "12"]),
        (["demo", "--gpus", "4", "--gpu", "a100"], ["gpu (--gpu) must be one of h100, h200, b200", "a100"]),
        (["demo", "--gpus", "4", "--tokens", "0"], ["--tokens", "at least 1"]),
        (["demo", "--gpus", "4", "--nic-gb-s", "0"], ["--nic-gb-s"]),
        (["demo", "--gpus", "4", "--tp", "3"], ["dp * tp must be all --gpus", "--tp 3 for 4 GPUs"]),
        (["demo", "--gpus", "4", "--dp", "3"], ["dp * tp must be all --gpus", "--dp 3 and --tp 1 for 4 GPUs"]),
        *(
            (["demo", "--gpus", "4", f"--{name}", "0"], [f"--{name} must be an integer of at least 1, got 0"])
            for name in ("dp", "tp", "ep", "etp", "per-host")
        ),
        (["demo", "--gpus", "4", "--ep", "3"], ["ep * etp must divide dp * tp, got ep=3"]),
        (["demo", "--gpus", "4", "--quantization", "fp7"], ["quantization", "fp7"]),
        (["demo", "--gpus", "4", "--dtype", "int8"], ["--dtype must be one of bfloat16", "int8"]),
        (["demo", "--gpus", "4", "--redundant", "-1"], ["--redundant", "-1"]),
        (["demo", "--gpus", "16", "--tp", "16", "--ep", "1", "--etp", "16"], ["tp must divide the 8 GPUs", "16"]),
        (["demo", "--gpus", "4", "--redundant", "999"], ["--redundant must be at most", "999"]),
        (["demo", "--gpus", "4", "--experts", "flashinfer_trtllm"], ["compute capability"]),
    ],
)
def test_wrong_values_are_named(args, parts):
    output = ask("fit", *args, code=2)
    assert output.startswith("error: ")
    for part in parts:
        assert part in output


def test_explain_of_gpus_that_are_not_here():
    def chosen(*args: object) -> str:
        lines = ask("explain", "--config", "deepseek-v3", *args).splitlines()
        return next(line for line in lines if line.startswith("chosen"))

    hopper = ["--gpu", "h200", "--quantization", "fp8_block"]
    assert chosen(*hopper, "--dp", 8).split()[1:3] == ["nvlink_p2p", "fp8_block_triton"]
    assert chosen(*hopper, "--dp", 16, "--ranks-per-node", 8).split()[1:3] == ["hierarchical", "fp8_block_triton"]
    blackwell = chosen("--gpu", "b200", "--dp", 8, "--quantization", "fp8_block")
    assert "fp8_block_triton" not in blackwell
    assert "NOT RUN on compute capability 10.0" in blackwell
    output = ask("explain", "--config", "deepseek-v3", "--gpu", "h200", "--dp", 8)
    # pplx is installed separately, so its state here decides
    reason = registry.unsupported_reason("dispatchers", "pplx")
    assert reason is None or f"pplx: {reason}" in output
    assert "gpu (--gpu) must be one of" in ask("explain", "--config", "demo", "--gpu", "x", code=2)


@pytest.mark.parametrize(
    ("fields", "a_layer"),
    [
        ({}, 2 * 8 * 16),
        ({"num_key_value_heads": 2}, 2 * 2 * 16),
        ({"head_dim": 64}, 2 * 8 * 64),
        ({"num_key_value_heads": 2, "head_dim": 64}, 2 * 2 * 64),
        ({"head_dim": None, "num_key_value_heads": None}, 2 * 8 * 16),
        ({"kv_lora_rank": 4, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7}, 8 * (5 + 6 + 7)),
    ],
)
def test_heads_of_the_cache_are_those_that_the_configuration_states(fields, a_layer):
    text = SimpleNamespace(num_attention_heads=8, hidden_size=128, num_hidden_layers=3, **fields)
    assert _kv_numbers(text) == 3 * a_layer


@pytest.mark.parametrize(("total", "tokens"), [(90, 10 // 4), (130, 0)])
def test_what_does_not_fit_leaves_room_for_no_tokens(total, tokens):
    asked = SimpleNamespace(dtype=torch.bfloat16, gpu=SimpleNamespace(memory_bytes=100), rest_bytes=0)
    found = SimpleNamespace(memory=SimpleNamespace(layer={}, total=total), fits=lambda asked: total <= 100)
    model = Model(name="tiny", config=SMALL, layers=1, rest=0, kv_numbers=2)
    assert _memory(asked, model, found)["kv_tokens_in_what_is_left"] == tokens


def test_a_transport_without_a_model_of_its_time_has_none():
    answered = _time(SimpleNamespace(time=None))
    assert answered == {
        "floor_us": None, "expected_us": None, "source": "no model of this transport or quantization",
    }  # fmt: skip

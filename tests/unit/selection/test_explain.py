"""Test the choice of a backend: the order of preference, backends by name, and each refusal with its reason."""

# ruff: noqa: F811

import dataclasses
import re

import pytest
import torch

from ep_moe import (
    Activation,
    BackendUnavailable,
    ConfigError,
    EPContext,
    MoELayer,
    ParallelConfig,
    Tokens,
    Wire,
    load_model_config,
    registry,
)
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection import explain as explaining
from ep_moe.selection.explain import choose, explain
from tests.fixtures.backend_choice import CPU, config, layout, refusal
from tests.fixtures.plugins import plugins  # noqa: F401 (a fixture)


def table(top_k: int, ep: int, etp: int) -> dict[tuple[str, str], str]:
    rows = explain(config(top_k), layout(ep, etp), CPU, torch.float32)
    return {(row.all2all, row.experts): row.status for row in rows if row.experts == "reference"}


TRANSPORTS = {name: registry.load("dispatchers", name).capabilities for name in registry.built_in("dispatchers")}
OF_GPUS = [(name, "reference") for name, can in TRANSPORTS.items() if "cpu" not in can.devices]


def test_what_a_command_names_reaches_the_table(monkeypatch):
    seen = {}
    monkeypatch.setattr(explaining, "explain", lambda *given, **rest: seen.update(rest, given=given))
    wire, sizes = Wire(dispatch="fp8_block"), ParallelConfig(dp=2, tp=2, ep=2, etp=2, tokens=Tokens.SHARDED)
    explaining.explain_model("demo", sizes, "allgather", "reference", "fp8_block", "float16", 64, wire, 2)
    moe, layout, _, dtype = seen.pop("given")
    assert (moe, dtype) == (load_model_config("demo").moe, torch.float16)
    asked = {"all2all": "allgather", "experts": "reference", "scheme": SCHEMES["fp8_block"], "wire": wire}
    assert (layout.dp, layout.ep, layout.etp, layout.ep_node_count) == (2, 2, 2, 2)
    assert seen == asked | {"max_tokens": 128}, "of etp peers too"


def test_a_rank_may_have_a_node_of_its_own():
    rows = explaining.explain_model("demo", ParallelConfig(dp=4), ranks_per_node=1)
    assert next(row.all2all for row in rows if row.status == "chosen") != "hierarchical", "no node has two ranks"
    with pytest.raises(ConfigError, match="ranks_per_node must be an integer of at least 1, got 0"):
        explaining.explain_model("demo", ParallelConfig(dp=4), ranks_per_node=0)


# --- the built-in ones ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "ep", "chosen"),
    [
        (1, 1, "local"),
        (8, 1, "local"),
        (2, 2, "allgather"),
        (4, 2, "allgather"),
        (8, 8, "allgather"),
        (1, 2, "torch_a2a"),
        (2, 4, "torch_a2a"),
        (7, 8, "torch_a2a"),
    ],
)
@pytest.mark.parametrize("etp", [1, 2])
def test_the_transport_that_is_chosen(top_k, ep, etp, chosen):
    found = table(top_k, ep, etp)
    assert found == {
        ("local", "reference"): "chosen" if ep == 1 else "refused",
        **dict.fromkeys(OF_GPUS, "refused"),
        ("hierarchical", "reference"): "possible",
        ("hierarchical_static", "reference"): "refused",  # it needs max_tokens
        ("allgather", "reference"): "chosen" if chosen == "allgather" else "possible",
        ("torch_a2a", "reference"): "chosen" if chosen == "torch_a2a" else "possible",
    }
    assert choose(config(top_k), layout(ep, etp), CPU, torch.float32).all2all == chosen


def test_reasons_have_the_numbers():
    reasons = {row.all2all: row.reason for row in explain(config(2), layout(4), CPU, torch.float32)}
    assert reasons["local"] == "local serves at most 1 rank, ep=4"
    assert "top_k=2 < ep=4" in reasons["torch_a2a"]
    assert "top_k=2 >= ep=2" in choose(config(2), layout(2), CPU, torch.float32).reason
    assert choose(config(2), layout(1), CPU, torch.float32).reason == "one rank, nothing travels"


def test_best_comes_first():
    for ep in (1, 2, 8):
        rows = [row for row in explain(config(4), layout(ep), CPU, torch.float32) if row.status != "refused"]
        assert [row.status for row in rows] == ["chosen"] + ["possible"] * (len(rows) - 1)


def test_a_row_is_printed_in_columns():
    row = choose(config(2), layout(1), CPU, torch.float32)
    assert str(row).split() == ["chosen", "local", "reference", "trains", "one", "rank,", "nothing", "travels"]


def test_pairs_with_a_backward_are_marked():
    """Pairs with a backward are marked, if no wire format rounds rows. A transport's backward may be its own code."""
    for wire, some in ((Wire(), True), (Wire(dispatch="fp8_block"), False)):
        table = explain(config(2), layout(2), CPU, torch.bfloat16, wire=wire)
        trains = {(row.all2all, row.experts) for row in table if row.trains}
        assert bool(trains) == some
        if some:
            assert {("nvlink_p2p", "bf16_triton"), ("allgather", "reference"), ("nvlink_p2p", "reference")} <= trains
            assert not any(kernel.startswith(("fp8", "flashinfer")) for _, kernel in trains)
            assert not any(transport.startswith(("deepep", "flashinfer")) for transport, _ in trains)


def test_choice_with_experts_cut_over_one_ep_rank():
    assert choose(config(2), layout(1, etp=4), CPU, torch.float32).all2all == "local"


@pytest.mark.parametrize("kind", ["dispatchers", "experts"])
def test_every_built_in_loads_and_runs_here_or_says_what_is_missing(kind):
    for name in registry.targets(kind):
        assert registry.load(kind, name).name == name
        missing = r"(FlashInfer|Triton|DeepEP \(module deep_ep\)|pplx-kernels) is not installed; .*"
        assert re.fullmatch(f"None|{missing}", str(registry.unsupported_reason(kind, name)))
    assert registry.unsupported_reason("experts", "reference") is None


# --- backends by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allgather", "torch_a2a"])
def test_a_named_transport_is_chosen(name):
    assert choose(config(2), layout(4), CPU, torch.float32, all2all=name).all2all == name
    found = explain(config(2), layout(4), CPU, torch.float32, all2all=name, experts="reference")
    for row in found:
        if row.all2all in {"allgather", "torch_a2a"} - {name} and row.experts == "reference":
            assert (row.status, row.reason) == ("refused", f"all2all={name!r} was asked for")


def test_a_named_kernel_is_chosen(plugins):
    plugins(
        experts={
            "of_gpus": "tests.fixtures.plugins:OfGpus",
            "second": "ep_moe.experts.reference:ReferenceExperts",
        }
    )
    assert choose(config(), layout(1), CPU, torch.float32).experts == "reference"
    row = choose(config(), layout(1), CPU, torch.float32, experts="second")
    assert (row.all2all, row.experts) == ("local", "second")
    assert refusal("local", "reference", experts="second") == "experts='second' was asked for"


def test_a_transport_whose_bits_vary_is_refused_where_equal_ones_are_asked_for(plugins):
    plugins(dispatchers={"hasty": "tests.fixtures.plugins:Hasty"})
    wanted = ExpertsOptions(deterministic=True)
    assert refusal("hasty", "reference", options=wanted) == "hasty is not deterministic"
    assert choose(config(), layout(1), CPU, torch.float32, all2all="hasty").all2all == "hasty"
    assert choose(config(), layout(1), CPU, torch.float32, all2all="local", options=wanted).all2all == "local"


def test_what_does_not_keep_an_exact_layers_promise_is_refused_with_the_reason(plugins):
    plugins(
        dispatchers={"hasty": "tests.fixtures.plugins:Hasty"}, experts={"inexact": "tests.fixtures.plugins:Inexact"}
    )
    wanted = ExpertsOptions(exact=True)
    assert refusal("local", "inexact", options=wanted) == (
        "it does not promise that a row's result is independent of other rows (exact=True)"
    )
    assert "it delivers each row in order and unchanged (exact=True)" in refusal("hasty", "reference", options=wanted)
    assert "etp=2 cuts a row's sum" in refusal("torch_a2a", "reference", options=wanted, layout=layout(2, 2))
    rows = explain(config(), layout(2), CPU, torch.float32, options=wanted)
    able = {(row.all2all, row.experts) for row in rows if row.status != "refused"}
    assert able == {("torch_a2a", "reference"), ("allgather", "reference")}


def test_named_transport_that_cannot_run_names_the_reason_and_those_that_can():
    with pytest.raises(BackendUnavailable) as error:
        choose(config(2), layout(4), CPU, torch.float32, all2all="local")
    text = str(error.value)
    assert "all2all='local' with experts='auto' cannot run here" in text
    assert "local serves at most 1 rank, ep=4" in text
    assert "Pairs that can: torch_a2a with reference, allgather with reference" in text
    assert "was asked for" not in text


def test_reasons_are_those_of_what_is_installed(monkeypatch):
    """The error gives reasons for installed backends, and only the names of others.

    A reason that many pairs share is given once.
    """
    monkeypatch.setattr(
        registry, "unsupported_reason", lambda kind, name: None if name in ("local", "reference") else "not here"
    )
    with pytest.raises(BackendUnavailable) as error:
        choose(dataclasses.replace(config(2), hidden_size=60), layout(1), CPU, torch.bfloat16)
    text = str(error.value)
    assert "(hidden_size must be a multiple of 8 in bfloat16, got 60; not installed: allgather, bf16_triton, " in text
    assert len(text) < 700


def test_pairs_with_reasons_of_their_own_are_named_with_them(plugins):
    plugins(experts={"of_cuda": "tests.fixtures.plugins:OfCuda"})
    with pytest.raises(BackendUnavailable) as error:
        choose(config(2), layout(4), CPU, torch.float32, all2all="local")
    assert "local with of_cuda: of_cuda runs on cuda, not on cpu" in str(error.value)
    assert "local with reference: local serves at most 1 rank, ep=4" in str(error.value)


def test_where_nothing_can_run_that_is_said():
    with pytest.raises(BackendUnavailable) as error:
        choose(config(2), layout(1), CPU, torch.float64)
    assert "dtype float64 is not among bfloat16, float16, float32" in str(error.value)
    assert "Pairs that can: none" in str(error.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"all2all": "nvshmem"},
            f"no backend among dispatchers is named 'nvshmem'; there are {', '.join(TRANSPORTS)}",
        ),
        (
            {"experts": "cutlas"},
            f"no backend among experts is named 'cutlas'; there are {', '.join(registry.built_in('experts'))}, and "
            f"fused ones: {', '.join(registry.built_in('fused'))}",
        ),
    ],
)
def test_unknown_name_lists_the_known_ones(asked, message):
    with pytest.raises(ConfigError) as error:
        choose(config(), layout(1), CPU, torch.float32, **asked)
    assert message in str(error.value)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_rows_in_another_layout_come_through_the_adapter(plugins):
    plugins(dispatchers={"batched": "tests.fixtures.plugins:Batched"})
    row = choose(config(), layout(1), CPU, torch.float32, all2all="batched")
    assert (row.all2all, row.experts) == ("batched", "reference")


def test_kernel_for_another_layout_is_refused_by_name(plugins):
    plugins(
        dispatchers={"batched": "tests.fixtures.plugins:Batched"},
        experts={"takes_batches": "tests.fixtures.plugins:TakesBatches"},
    )
    assert refusal("local", "takes_batches") == "local delivers rank_major rows, takes_batches takes batched"
    row = choose(config(), layout(1), CPU, torch.float32, all2all="batched", experts="takes_batches")
    assert row.status == "chosen"


def test_weights_left_to_the_transport_are_refused_by_name(plugins):
    plugins(dispatchers={"weighing": "tests.fixtures.plugins:Weighing"})
    assert refusal("weighing", "reference") == (
        "weighing delivers rows of several experts each and leaves their weights to combine"
    )


def test_layer_refuses_a_mismatch_at_construction(plugins):
    plugins(dispatchers={"weighing": "tests.fixtures.plugins:Weighing"})
    with pytest.raises(BackendUnavailable) as error:
        MoELayer(config(), EPContext.local(CPU), all2all="weighing")
    assert "weighing delivers rows of several experts each" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": torch.float64}, "dtype float64 is not among bfloat16, float16, float32"),
        ({"config": config(hidden_size=18)}, "hidden_size must be a multiple of 4 in float32, got 18"),
        (
            {"config": config(hidden_size=20), "dtype": torch.bfloat16},
            "hidden_size must be a multiple of 8 in bfloat16, got 20",
        ),
        ({"config": config(intermediate_size=6)}, "intermediate_size / etp must be a multiple of 4 in float32, got 6"),
        ({"layout": layout(1, etp=8)}, "intermediate_size / etp must be a multiple of 4 in float32, got 2"),
        ({"device": torch.device("xpu")}, "local runs on cpu, cuda, not on xpu"),
    ],
)
def test_shape_dtype_and_device_are_refused_with_the_value(fields, reason):
    assert refusal("local", "reference", **fields) == reason


def test_kernel_that_needs_a_newer_gpu_is_refused(plugins):
    plugins(experts={"of_gpus": "tests.fixtures.plugins:OfGpus"})
    assert refusal("local", "of_gpus") == "of_gpus needs a GPU of compute capability 9.0 or newer, this is a cpu"


def test_activation_is_part_of_the_choice(plugins, monkeypatch):
    narrow = dataclasses.replace(ReferenceExperts.capabilities, activations=frozenset({Activation.SWIGLU}))
    monkeypatch.setattr(ReferenceExperts, "capabilities", narrow)
    wide = dataclasses.replace(config(), activation=Activation.RELU2)
    assert refusal("local", "reference", config=wide) == "activation relu2 is not among swiglu"

"""The choice of a backend: the order of preference, every refusal with its reason, and backends of other packages."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from ep_moe import (
    Activation,
    BackendUnavailable,
    ConfigError,
    EPContext,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RankLayout,
    Tokens,
    Wire,
    load_model_config,
    registry,
)
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.cli import doctor
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection import explain as explaining
from ep_moe.selection.explain import choose, explain
from ep_moe.types import RowLayout
from tests.fixtures.plugins import (
    Aligned,
)

CPU = torch.device("cpu")


def config(top_k: int = 2, **fields) -> MoEConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_experts": 8} | fields
    return MoEConfig(**sizes, top_k=top_k)


def layout(ep: int, etp: int = 1) -> RankLayout:
    return RankLayout(world=ep * etp, rank=0, dp=ep * etp, ep=ep, etp=etp)


def table(top_k: int, ep: int, etp: int) -> dict[tuple[str, str], str]:
    rows = explain(config(top_k), layout(ep, etp), CPU, torch.float32)
    return {(row.all2all, row.experts): row.status for row in rows if row.experts == "reference"}


TRANSPORTS = {name: registry.load("dispatchers", name).capabilities for name in registry.built_in("dispatchers")}
OF_GPUS = [(name, "reference") for name, can in TRANSPORTS.items() if "cpu" not in can.devices]


def refusal(*names: str, **fields) -> str:
    """The reason in the row of these names, which must be refused."""
    arguments = {"config": config(), "layout": layout(1), "device": CPU, "dtype": torch.float32} | fields
    rows = explain(**arguments)
    (row,) = (row for row in rows if (row.all2all, row.experts) == names)
    assert row.status == "refused"
    return row.reason


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


@pytest.fixture
def plugins(monkeypatch):
    """Registers classes of this file, or any import string, as another package's entry points would."""

    def register(**kinds: dict[str, str]) -> None:
        def entry_points(*, group: str) -> list[SimpleNamespace]:
            found = kinds.get(group.removeprefix("ep_moe."), {})
            return [SimpleNamespace(name=name, value=value) for name, value in found.items()]

        monkeypatch.setattr(registry, "entry_points", entry_points)
        registry._plugins.cache_clear()

    yield register
    registry._plugins.cache_clear()


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
        ("hierarchical_static", "reference"): "refused",  # without max_tokens
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
    """Over rows that nothing rounds. A transport's backward may be calls of its own."""
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
        "it does not promise that a row's bits are the same among any other rows (exact=True)"
    )
    assert "single rows travel in order and unchanged (exact=True)" in refusal("hasty", "reference", options=wanted)
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
    """And one for many pairs is said once; of what is not there, the names."""
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


# --- other packages' backends ---------------------------------------------------------------------------------------


def test_entry_point_is_a_backend(plugins):
    plugins(dispatchers={"sibling": "tests.fixtures.plugins:Sibling"})
    assert registry.targets("dispatchers")["sibling"] == "tests.fixtures.plugins:Sibling"
    assert "sibling" not in registry.targets("experts")
    assert registry.load("dispatchers", "sibling").name == "sibling"
    assert registry.available("dispatchers", "sibling")
    rows = explain(config(), layout(1), CPU, torch.float32)
    assert (rows[-1].all2all, rows[-1].status, rows[-1].reason) == (
        "sibling",
        "possible",
        "registered by another package",
    )
    assert choose(config(), layout(1), CPU, torch.float32).all2all == "local"


def test_layer_runs_on_another_packages_transport(plugins):
    plugins(dispatchers={"sibling": "tests.fixtures.plugins:Sibling"})
    layer = MoELayer(config(), EPContext.local(CPU), all2all="sibling")
    assert layer(torch.ones(3, 16)).shape == (3, 16)
    assert layer._dispatcher().name == "sibling"
    assert [row.all2all for row in layer.explain() if row.status == "chosen"] == ["sibling"]


def test_entry_point_with_the_name_of_a_built_in_is_ignored_with_a_warning(plugins):
    plugins(dispatchers={"local": "tests.fixtures.plugins:Sibling"})
    with pytest.warns(UserWarning, match=r"'local' in group ep_moe.dispatchers is tests.fixtures.plugins:Sibling, "):
        assert registry.load("dispatchers", "local") is LocalDispatcher


def test_backend_that_says_it_is_unavailable(plugins):
    plugins(dispatchers={"missing": "tests.fixtures.plugins:Missing"})
    assert registry.unsupported_reason("dispatchers", "missing") == "libsibling.so is not installed"
    assert not registry.available("dispatchers", "missing")
    assert refusal("missing", "reference") == "missing: libsibling.so is not installed"
    with pytest.raises(BackendUnavailable) as error:
        choose(config(), layout(1), CPU, torch.float32, all2all="missing")
    assert "libsibling.so is not installed" in str(error.value)


BAD_TRANSPORTS = {
    "SaysYes": "it answered True when it was asked whether it can run: None or the reason why not is expected",
    "Leaves": "it raised SystemExit when it was asked whether it can run: no license",
    "Nameless": "has no name: a class attribute that errors call it by, got None",
    "Spelled": "capabilities that make no sense: DispatcherCapabilities.weighting must be a Weighting, got 'experts'",
    "Changed": "DispatcherCapabilities.alignment_bytes must be an integer of at least 1, got 0",
    "Property": "does not import: RuntimeError: ask me tomorrow",
    "NoDispatcher": "is no subclass of ep_moe.all2all.base.Dispatcher",
    "Incomplete": "does not define ",
    "WithoutCapabilities": "has no capabilities: a class attribute that is a DispatcherCapabilities",
    "RaisesWhenAsked": "it raised OSError when it was asked whether it can run: libsibling.so: undefined symbol",
    "RaisesForAShape": "it raised ZeroDivisionError when it was asked whether it can run",
}


@pytest.mark.parametrize("name", BAD_TRANSPORTS)
def test_a_bad_plugin_takes_no_other_down(name, plugins):
    plugins(dispatchers={"bad": f"tests.fixtures.plugins:{name}"})
    reason = BAD_TRANSPORTS[name]
    assert choose(config(), layout(1), CPU, torch.float32).all2all == "local"
    assert reason in refusal("bad", "reference")
    with pytest.raises(BackendUnavailable, match=re.escape(reason)):
        choose(config(), layout(1), CPU, torch.float32, all2all="bad")
    if name != "RaisesForAShape":
        assert any(row[1] == "bad" and reason in row[2] for row in doctor.backends())


@pytest.mark.parametrize("alignment", [1, 2, 3, 6])
def test_rows_of_any_alignment(alignment, plugins, monkeypatch):
    """In bytes, which need not be a multiple of a number's."""
    can = dataclasses.replace(ReferenceExperts.capabilities, alignment_bytes=alignment)
    monkeypatch.setattr(Aligned, "capabilities", can)
    plugins(experts={"aligned": "tests.fixtures.plugins:Aligned"})
    for size in (16, 18, 20):
        fits = all(width * 4 % alignment == 0 for width in (size, 16))
        row = next(
            row
            for row in explain(config(hidden_size=size), layout(1), CPU, torch.float32)
            if (row.all2all, row.experts) == ("local", "aligned")
        )
        assert (row.status != "refused") is fits, row


@pytest.mark.parametrize("wrong", [0, -1, 1.5, None, True, "16"])
def test_capabilities_that_make_no_sense_are_refused(wrong):
    for can, fields in (
        (ReferenceExperts.capabilities, ("alignment_bytes",)),
        (LocalDispatcher.capabilities, ("alignment_bytes", "scale_alignment_bytes")),
    ):
        for field in fields:
            with pytest.raises(ConfigError, match=rf"{field} must be an integer of at least 1, got"):
                dataclasses.replace(can, **{field: wrong}).check()


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("devices", "cpu"),
        ("devices", frozenset({CPU})),
        ("layouts", [RowLayout.BATCHED]),
        ("layouts", frozenset({"batched"})),
        ("dtypes", frozenset({"float32"})),
        ("activations", None),
        ("cuda_graph", 1),
        ("min_compute_capability", 9),
        ("max_compute_capability", (9,)),
        ("tested_capabilities", frozenset({90})),
    ],
)
def test_a_kernels_capabilities_hold_what_their_class_says(plugins, monkeypatch, field, wrong):
    monkeypatch.setattr(
        Aligned, "capabilities", dataclasses.replace(ReferenceExperts.capabilities, **{field: wrong}), raising=False
    )
    plugins(experts={"aligned": "tests.fixtures.plugins:Aligned"})
    assert f"ExpertsCapabilities.{field} must be a " in refusal("local", "aligned")
    assert choose(config(), layout(1), CPU, torch.float32).experts == "reference"
    with pytest.raises(BackendUnavailable, match=f"capabilities that make no sense: ExpertsCapabilities.{field}"):
        registry.load("experts", "aligned")


@pytest.mark.parametrize("module", ["raise SystemExit(7)", "import pytest; pytest.importorskip('nothing_there')"])
def test_a_module_that_ends_the_process_takes_no_other_down(plugins, tmp_path, monkeypatch, module):
    (tmp_path / "ends_it.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    plugins(experts={"ends": "ends_it:Class"})
    assert "ends_it:Class does not import: S" in refusal("local", "ends")
    assert choose(config(), layout(1), CPU, torch.float32).experts == "reference"
    assert any(row[1] == "ends" and "does not import" in row[2] for row in doctor.backends())
    sys.modules.pop("ends_it", None)


@pytest.mark.parametrize("target", ["tests.fixtures.plugins:Outer.Inner", "tests.fixtures.plugins:Outer.Inner [gpu]"])
def test_entry_points_are_read_as_packages_write_them(plugins, target):
    plugins(experts={"inner": target})
    assert choose(config(), layout(1), "cpu", torch.float32, experts="inner").experts == "inner"


@pytest.mark.parametrize(
    ("kinds", "name", "owner"),
    [
        ({"experts": {"auto": "tests.fixtures.plugins:Aligned"}}, "auto", "the choice of the best"),
        (
            {"dispatchers": {"inside": "tests.fixtures.plugins:Sibling"}},
            "inside",
            "the transport of fused kernels",
        ),
        (
            {"fused": {"reference": "tests.fixtures.plugins:Aligned"}},
            "reference",
            "ep_moe.experts.reference:Ref",
        ),
        ({"experts": {"own": "a:B"}, "fused": {"own": "c:D"}}, "own", "a:B"),
    ],
)
def test_names_that_would_mean_two_things_are_ignored_with_a_warning(plugins, kinds, name, owner):
    plugins(**kinds)
    with pytest.warns(UserWarning, match=f"{name!r} in group .* and {owner}.* has that name"):  # noqa: PT031
        for kind in ("dispatchers", "experts", "fused"):
            registry.targets(kind)
    assert choose(config(), layout(1), CPU, torch.float32).experts == "reference"


def test_metadata_that_cannot_be_read_takes_no_backend_down(monkeypatch):
    def entry_points(*, group):
        raise ValueError("a line without '='")

    monkeypatch.setattr(registry, "entry_points", entry_points)
    registry._plugins.cache_clear()
    with pytest.warns(UserWarning, match="ep_moe.experts cannot be read: ValueError: a line without '='"):
        assert choose(config(), layout(1), CPU, torch.float32).experts == "reference"


@pytest.mark.parametrize("names", [("first", "eager"), ("eager", "first")])
def test_a_plugin_may_go_ahead_of_another(plugins, names):
    classes = {"first": "BeforeEager", "eager": "EagerTransport"}
    plugins(dispatchers={name: f"tests.fixtures.plugins:{classes[name]}" for name in names})
    order = list(dict.fromkeys(row.all2all for row in explain(config(), layout(1), CPU, torch.float32)))
    assert order[:3] == ["first", "eager", "local"]


def test_a_plugin_may_go_ahead_of_others(plugins):
    plugins(
        dispatchers={
            "eager": "tests.fixtures.plugins:EagerTransport",
            "sibling": "tests.fixtures.plugins:Sibling",
        },
        experts={"own": "tests.fixtures.plugins:EagerKernel"},
    )
    rows = explain(config(), layout(1), CPU, torch.float32)
    chosen = next(row for row in rows if row.status == "chosen")
    assert (chosen.all2all, chosen.experts) == ("eager", "own")
    assert "of another package, by its own word ahead of local" in chosen.reason
    order = list(dict.fromkeys(row.all2all for row in rows))
    assert order.index("sibling") > order.index("torch_a2a") > order.index("local") > order.index("eager")
    assert choose(config(), layout(4), CPU, torch.float32).all2all == "torch_a2a"  # the eager one serves one rank


BROKEN = {
    "no such module": ("nowhere_at_all.module:Class", "nowhere_at_all"),
    "no such class": ("tests.fixtures.plugins:Nobody", "Nobody"),
    "no class named": ("tests.unit.selection.test_select", "tests.unit.selection.test_select"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_backend_that_does_not_import_has_a_reason(plugins, name):
    target, word = BROKEN[name]
    plugins(dispatchers={"broken": target})
    reason = registry.unsupported_reason("dispatchers", "broken")
    assert reason is not None
    assert word in reason
    assert not registry.available("dispatchers", "broken")


@pytest.mark.parametrize("name", BROKEN)
def test_backend_that_does_not_import_stops_no_other(plugins, name):
    target, word = BROKEN[name]
    plugins(dispatchers={"broken": target}, experts={"broken": target})
    assert choose(config(), layout(1), CPU, torch.float32).all2all == "local"
    assert word in refusal("broken", "reference")
    assert word in refusal("local", "broken")


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("kind", ["all2all", "experts"])
def test_named_backend_that_does_not_import_is_unavailable(plugins, kind, name):
    """And no ImportError, which one rank alone would raise while the others wait for it."""
    target, word = BROKEN[name]
    plugins(dispatchers={"broken": target}, experts={"broken": target})
    with pytest.raises(BackendUnavailable) as error:
        choose(config(), layout(1), CPU, torch.float32, **{kind: "broken"})
    assert word in str(error.value)
    assert "Pairs that can: local with reference" in str(error.value)


def test_backend_whose_library_does_not_load_has_a_reason(plugins, tmp_path, monkeypatch):
    """As ctypes.CDLL says it: OSError, not ImportError."""
    (tmp_path / "needs_a_library.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    plugins(dispatchers={"broken": "needs_a_library:Class"})
    assert "libcudart.so.99" in registry.unsupported_reason("dispatchers", "broken")
    assert choose(config(), layout(1), CPU, torch.float32).all2all == "local"


@pytest.mark.parametrize("kind", ["dispatchers", "experts"])
def test_every_built_in_loads_and_runs_here_or_says_what_is_missing(kind):
    for name in registry.targets(kind):
        assert registry.load(kind, name).name == name
        missing = r"(FlashInfer|Triton|DeepEP \(module deep_ep\)|pplx-kernels) is not installed; .*"
        assert re.fullmatch(f"None|{missing}", str(registry.unsupported_reason(kind, name)))
    assert registry.unsupported_reason("experts", "reference") is None


def test_activation_is_part_of_the_choice(plugins, monkeypatch):
    narrow = dataclasses.replace(ReferenceExperts.capabilities, activations=frozenset({Activation.SWIGLU}))
    monkeypatch.setattr(ReferenceExperts, "capabilities", narrow)
    wide = dataclasses.replace(config(), activation=Activation.RELU2)
    assert refusal("local", "reference", config=wide) == "activation relu2 is not among swiglu"

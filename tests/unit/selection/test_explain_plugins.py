"""Test backends of other packages: they join the choice, and a broken one has a reason and affects no other."""

# ruff: noqa: F811

import dataclasses
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from ep_moe import BackendUnavailable, ConfigError, EPContext, MoELayer, registry
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.cli import doctor
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.selection.explain import choose, explain
from ep_moe.types import RowLayout
from tests.fixtures.backend_choice import CPU, config, layout, refusal
from tests.fixtures.plugins import Aligned, EagerTransport, plugins  # noqa: F401 (a fixture)


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


@pytest.mark.parametrize("answer", [True, "", 0])
def test_an_answer_that_is_no_reason_is_one(answer):
    why = registry.query_unsupported_reason("dispatchers", "local", lambda: answer)
    assert why is not None
    assert why.startswith(f"it answered {answer!r} when it was asked")


def test_what_a_plug_in_raises_is_a_reason_and_what_our_own_raise_is_a_bug(plugins):
    def ask():
        raise KeyError("libown.so")

    plugins(dispatchers={"sibling": "tests.fixtures.plugins:Sibling"})
    assert "it raised KeyError when it was asked whether it can run" in registry.query_unsupported_reason(
        "dispatchers", "sibling", ask
    )
    with pytest.raises(KeyError, match=r"libown.so"):
        registry.query_unsupported_reason("dispatchers", "local", ask)


def test_an_interrupt_is_no_reason(plugins, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    plugins(dispatchers={"sibling": "tests.fixtures.plugins:Sibling"})
    with pytest.raises(KeyboardInterrupt):
        registry.query_unsupported_reason("dispatchers", "sibling", interrupted)
    monkeypatch.setattr(registry.importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.load("dispatchers", "sibling")


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
    """Rows of any alignment in bytes are supported, also if it is not a multiple of the element size."""
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


def test_an_entry_point_that_is_listed_twice_is_one(plugins, monkeypatch):
    """An entry point that is listed twice counts once. Metadata of an earlier version may remain beside a package's."""
    point = SimpleNamespace(name="sibling", value="tests.fixtures.plugins:Sibling")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [point, point] * group.endswith("dispatchers"))
    registry._plugins.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.targets("dispatchers")["sibling"] == point.value


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


def test_a_plugin_goes_ahead_of_all_that_it_names(plugins, monkeypatch):
    named = dataclasses.replace(EagerTransport.capabilities, ahead_of=frozenset({"allgather", "local", "torch_a2a"}))
    monkeypatch.setattr(EagerTransport, "capabilities", named)
    plugins(dispatchers={"eager": "tests.fixtures.plugins:EagerTransport"})
    rows = explain(config(), layout(1), CPU, torch.float32)
    assert list(dict.fromkeys(row.all2all for row in rows))[:2] == ["eager", "local"]
    assert next(row for row in rows if row.status == "chosen").all2all == "eager"


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
    assert "of another package, which ranks it ahead of local" in chosen.reason
    order = list(dict.fromkeys(row.all2all for row in rows))
    assert order.index("sibling") > order.index("torch_a2a") > order.index("local") > order.index("eager")
    # the eager transport serves one rank only
    assert choose(config(), layout(4), CPU, torch.float32).all2all == "torch_a2a"


BROKEN = {
    "no such module": ("nowhere_at_all.module:Class", "nowhere_at_all"),
    "no such class": ("tests.fixtures.plugins:Nobody", "Nobody"),
    "no class named": ("tests.unit.selection.test_explain_plugins", "tests.unit.selection.test_explain_plugins"),
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
    """A named backend that does not import raises BackendUnavailable.

    An ImportError would be raised on one rank, while the others wait for it.
    """
    target, word = BROKEN[name]
    plugins(dispatchers={"broken": target}, experts={"broken": target})
    with pytest.raises(BackendUnavailable) as error:
        choose(config(), layout(1), CPU, torch.float32, **{kind: "broken"})
    assert word in str(error.value)
    assert "Pairs that can: local with reference" in str(error.value)


def test_backend_whose_library_does_not_load_has_a_reason(plugins, tmp_path, monkeypatch):
    """A library that does not load gives a reason. ctypes.CDLL raises OSError for it, and not ImportError."""
    (tmp_path / "needs_a_library.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    plugins(dispatchers={"broken": "needs_a_library:Class"})
    assert "libcudart.so.99" in registry.unsupported_reason("dispatchers", "broken")
    assert choose(config(), layout(1), CPU, torch.float32).all2all == "local"

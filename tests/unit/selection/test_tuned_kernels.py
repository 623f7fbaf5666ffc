"""Test which rank measures a layer's kernels, how long the others wait, and which layers share the result."""

# ruff: noqa: F811

from types import SimpleNamespace

import torch

from ep_moe import ExpertMap, MoELayer
from ep_moe.context import TUNING_S
from ep_moe.experts.base import ExpertsOptions
from ep_moe.selection.tuned import tuned_on_one_rank
from tests.fixtures.single_layer import EXPERTS, context, shape  # noqa: F401 (a fixture)


def test_the_busiest_rank_measures_while_the_others_wait_long(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = {}

    def tune(rows, cache):
        seen.update(rows=rows, cache=cache)
        return [7]

    def compute_on_owner(what, call, **how):
        seen.update(how, what=what)
        return call()

    consensus = SimpleNamespace(compute_on_owner=compute_on_owner)
    ranks = SimpleNamespace(consensus=consensus, layout=SimpleNamespace(etp=2, rank=0))
    held = ExpertMap.uneven([1, 3, 2])
    assert tuned_on_one_rank(SimpleNamespace(tune=tune, name="own"), ranks, held, (8, 64), "~/found", "moe3") == [7]
    wanted = {"what": "tune moe3", "owner": 2, "deadline_s": TUNING_S, "rows": [8, 64], "cache": tmp_path / "found"}
    assert seen == wanted


def test_layers_that_differ_are_measured_apart(context):
    spare = ExpertMap.from_ranks([[*range(EXPERTS), 0]], EXPERTS, allow_duplicates=True)
    layers = [
        MoELayer(shape(), context),
        MoELayer(shape(top_k=1), context),
        MoELayer(shape(), context, expert_map=spare),
        MoELayer(shape(), context, dtype=torch.bfloat16),
        MoELayer(shape(), context, options=ExpertsOptions(chunk_rows=8)),
    ]
    assert len({layer.shape for layer in layers}) == len(layers)
    assert layers[0].shape == MoELayer(shape(), context).shape


def test_what_a_layer_returns_is_of_its_first_kernel(context, monkeypatch):
    layer = MoELayer(shape(), context)
    layer._small_batch_kernels = {"another": SimpleNamespace(name="another")}
    monkeypatch.setattr(MoELayer, "_tune_kernel", lambda self, kernel, rows, cache: [kernel.name, *rows])
    assert layer.tune((8,)) == ["reference", 8]


def test_kernels_of_equal_layers_are_measured_once_each(context, monkeypatch):
    kernels = [SimpleNamespace(name=name) for name in ("first", "second")]
    measured, used = [], []
    monkeypatch.setattr(MoELayer, "_kernels", property(lambda self: kernels))
    monkeypatch.setattr(
        MoELayer, "_tune_kernel", lambda self, kernel, *_: measured.append(kernel.name) or [kernel.name]
    )
    monkeypatch.setattr(MoELayer, "_use", lambda self, kernel, found: used.append((self.name, kernel.name, found)))
    layers = [MoELayer(shape(), context, name=name) for name in ("a", "b")]
    context.tune((8,))
    assert measured == ["first", "second"]
    assert used == [("b", "first", ["first"]), ("b", "second", ["second"])]
    assert [layer.name for layer in layers] == ["a", "b"]

"""Test tuned tiles: stored with what they depend on, read again, and never measured inside a capture."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from ep_moe import Activation, ExpertMap, InputError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts, Tactics
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.flashinfer_cutlass import BF16, build, emulated, shape  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> list[int]:
    """Fake the measurement of tiles. Return the numbers of rows that were measured."""
    counts: list[int] = []

    def measure(self: Tactics, rows: int) -> list[int]:
        counts.append(rows)
        return [rows % 7, rows % 5]

    monkeypatch.setattr(Tactics, "_measure", measure)
    monkeypatch.setattr("ep_moe.experts.flashinfer.cutlass.version", lambda name: "9.9")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counts


def kernel(scheme: str = "none", **options) -> FlashInferCutlassExperts:
    return build(shape(), SCHEMES[scheme], **options)[0]


def test_counts_are_measured_once_each_in_order(measured):
    assert kernel().tune((64, 8, 64), None) == [8, 1, 3, 64, 1, 4]
    assert measured == [8, 64]


def test_without_a_folder_nothing_is_kept(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernel().tune((8,), None)
    kernel().tune((8,), None)
    assert measured == [8, 8]
    assert not list(tmp_path.iterdir())


def test_findings_are_read_again_and_added_to(measured, tmp_path):
    folder = tmp_path / "made" / "on the way"
    first = kernel().tune((8, 64), folder)
    measured.clear()
    assert kernel().tune((8, 64), folder) == first
    assert not measured
    assert kernel().tune((8, 9), folder) == [8, 1, 3, 9, 2, 4]
    assert measured == [9]
    assert kernel().tune((8, 9, 64), folder) == [8, 1, 3, 9, 2, 4, 64, 1, 4]
    assert measured == [9]
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no temporary file is left


CHANGES = {
    "gpu": lambda patch: patch.setattr(torch.cuda, "get_device_name", lambda device=None: "another GPU"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "99"),
    "flashinfer": lambda patch: patch.setattr("ep_moe.experts.flashinfer.cutlass.version", lambda name: "10"),
    "runner": lambda patch: None,
    "scheme": lambda patch: None,
}
SHAPES = {
    "hidden_size": 512, "intermediate_size": 256, "num_experts": 10, "top_k": 2, "activation": Activation.GEGLU,
    "expert_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("change", [*CHANGES, *SHAPES])
def test_what_they_depend_on_is_the_key(change, measured, tmp_path, monkeypatch):
    kernel().tune((8,), tmp_path)
    CHANGES.get(change, lambda patch: None)(monkeypatch)
    match change:
        case "runner":
            other = kernel(deterministic=True)
        case _ if change in SHAPES:
            other = build(dataclasses.replace(shape(), **{change: SHAPES[change]}), SCHEMES["none"])[0]
        case "scheme":
            other = kernel("mxfp4")
        case _:
            other = kernel()
    other.tune((8,), tmp_path)
    assert measured == [8, 8]
    assert len(list(tmp_path.iterdir())) == 2
    kernel().tune((8,), tmp_path)
    other.tune((8,), tmp_path)
    assert measured == [8, 8]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"tactics": {"8": [5, 5]}}', '{"key": {}, "tactics": {"8": [5, 5]}}', '{"key": 1}'],
)
def test_a_file_that_is_not_ours_is_measured_again(content, measured, tmp_path):
    kernel().tune((8,), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert kernel().tune((8,), tmp_path) == [8, 1, 3]
    assert measured == [8, 8]
    assert json.loads(file.read_text())["tactics"] == {"8": [1, 3]}


@pytest.mark.parametrize("entry", ['{"8": [5]}', '{"8": ["a", "b"]}', '{"8": 5}', "[1, 2]"])
def test_entries_that_are_no_tiles_are_measured_again(entry, measured, tmp_path):
    kernel().tune((8,), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tactics": json.loads(entry)}))
    assert kernel().tune((8,), tmp_path) == [8, 1, 3]


def test_more_rows_than_a_chunk_are_one_chunk(measured):
    assert kernel(chunk_rows=16).tune((8, 100, 1000), None) == [8, 1, 3, 16, 2, 1]
    assert measured == [8, 16]


def test_a_tile_that_is_refused_leaves_the_kernel_as_it_was():
    used = []

    def refused(received, out):
        raise RuntimeError("no such tile on this GPU")

    experts = SimpleNamespace(tactics=[1, 2, 3], use=used.append, compute=refused)
    received = SimpleNamespace(x=torch.ones(4, 1))
    assert Tactics(experts, None)._time(received, received.x, (5, 6)) == float("inf")
    assert used == [[4, 5, 6], [1, 2, 3]]


def test_never_inside_a_capture(measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="cannot run inside a CUDA graph capture"):
        kernel().tune((8,), None)
    assert not measured


def test_a_rank_without_experts_has_nothing_to_tune(measured):
    weights = ExpertWeights(
        shape(), ExpertMap.uneven([8, 0]), ep_rank=1, dtype=BF16, weight_layout=FlashInferCutlassExperts.weight_layout
    )
    assert FlashInferCutlassExperts(shape(), weights, options=ExpertsOptions()).tune((8,), None) == []
    assert not measured


def test_the_smallest_measured_count_that_is_not_less():
    table = [8, 1, 2, 64, 3, 4]
    found = {rows: cutlass_op.tactic_for(table, rows) for rows in (1, 8, 9, 64, 65, 10_000)}
    assert found == {1: [1, 2], 8: [1, 2], 9: [3, 4], 64: [3, 4], 65: [3, 4], 10_000: [3, 4]}
    assert cutlass_op.tactic_for([], 5) == [-1, -1]

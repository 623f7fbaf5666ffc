"""Test the shape that a transport is made for, and the dtypes to which a table's backends can change."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ExpertMap, Wire
from ep_moe.experts.base import ExpertsOptions
from ep_moe.quant.schemes import PLAIN
from ep_moe.selection import backend_table
from ep_moe.selection.backend_table import BackendTable, TableEntry
from ep_moe.selection.explain import BackendChoice
from tests.fixtures.backend_choice import config, layout

MAP, WIRE = ExpertMap.redundant(8, 4, 4), Wire(dispatch="fp8_block")


def entry(all2all: str, experts: str, buffer_tokens: int | None) -> TableEntry:
    return TableEntry(64, BackendChoice(all2all, experts, "chosen", ""), None, buffer_tokens)


@pytest.mark.parametrize(
    ("all2all", "exact", "repeats", "top_k", "rows", "per_route"),
    [
        ("torch_a2a", False, False, 2, 1, False),
        ("torch_a2a", True, False, 1, 2, False),  # a token travels once per route
        ("nvlink_p2p", True, False, 2, 1, True),  # nvlink_p2p returns a row for each route
        ("nvlink_p2p", True, True, 1, 2, False),
    ],
)
@pytest.mark.parametrize("buffer_tokens", [None, 16])
def test_the_shape_of_a_call(all2all, exact, repeats, top_k, rows, per_route, buffer_tokens):
    kernel = "bf16_triton" if all2all == "nvlink_p2p" else "reference"
    shape = entry(all2all, kernel, buffer_tokens).dispatch_shape(
        config(2), MAP, torch.float16, WIRE, exact=exact, repeats=repeats
    )
    assert (shape.top_k, shape.per_route) == (top_k, per_route)
    assert shape.max_tokens == (None if buffer_tokens is None else buffer_tokens * rows)
    assert (shape.hidden_size, shape.slots_per_rank, shape.num_ranks) == (config(2).hidden_size, 3, 4)
    assert (shape.dtype, shape.wire) == (torch.float16, WIRE)


@pytest.mark.parametrize(
    ("all2all", "experts", "dtype", "problem"),
    [
        ("torch_a2a", "reference", torch.float16, None),
        ("torch_a2a", "bf16_triton", torch.float16, "experts=bf16_triton does not compute in it: "),
        ("deepep", "reference", torch.float32, "all2all=deepep does not carry it: "),
        ("inside", "flashinfer_mega_bf16", torch.bfloat16, "experts=flashinfer_mega_bf16 has buffers of the dtype"),
    ],
)
def test_another_dtype(all2all, experts, dtype, problem):
    table = BackendTable([entry(all2all, experts, 16)])
    found = table.dtype_problem(dtype, config(2), layout(4), PLAIN, ExpertsOptions(), Wire())
    assert found is None if problem is None else found.startswith(problem)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("transport", [False, True])
def test_a_row_of_each_route_comes_back_where_both_can(transport, kernel, monkeypatch):
    can = {"dispatchers": transport, "experts": kernel}
    kinds = {kind: SimpleNamespace(capabilities=SimpleNamespace(per_route=one)) for kind, one in can.items()}
    monkeypatch.setattr(backend_table.registry, "load", lambda kind, name: kinds[kind])
    shape = entry("one", "other", None).dispatch_shape(config(2), MAP, torch.float16, WIRE, exact=True, repeats=False)
    both = transport and kernel
    assert (shape.per_route, shape.top_k) == (both, 2 if both else 1)


def buckets(*pairs: tuple[int | None, str, str]) -> BackendTable:
    """Return a table of entries (tokens, transport, kernel)."""
    return BackendTable(
        [TableEntry(tokens, BackendChoice(one, other, "chosen", ""), None, tokens) for tokens, one, other in pairs]
    )


@pytest.mark.parametrize(("bound", "tokens"), [(1, 8), (8, 8), (9, 64), (64, 64), (65, 200), (999, 200), (None, 200)])
def test_the_first_bucket_that_holds_a_bound_serves_it(bound, tokens):
    table = buckets((8, "a", "x"), (64, "a", "y"), (200, "b", "x"))
    assert table.entry_for(bound).tokens == tokens


@pytest.mark.parametrize("bound", [1, 999, None])
def test_an_entry_for_any_number_of_tokens_serves_all(bound):
    table = buckets((None, "a", "x"))
    assert table.entry_for(bound) is table.last


def test_kernels_of_a_table_are_those_of_the_most_tokens_first():
    assert buckets((8, "a", "x"), (64, "a", "y"), (200, "b", "x"), (300, "b", "z")).kernels == ["z", "x", "y"]


@pytest.mark.parametrize(
    ("all2all", "buffer_tokens", "fixed"),
    [("buffers", 8, True), ("buffers", None, False), ("grows", 8, False), ("inside", 8, False)],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_table_has_fixed_buffers_if_any_transport_has_them(first, all2all, buffer_tokens, fixed, monkeypatch):
    def load(kind, name):
        assert name != "inside", "a fused kernel has no transport"
        return SimpleNamespace(capabilities=SimpleNamespace(static=name == "buffers"))

    monkeypatch.setattr(backend_table.registry, "load", load)
    entries = [entry(all2all, "x", buffer_tokens), entry("grows", "x", None)]
    assert BackendTable(entries if first else entries[::-1]).has_fixed_buffers is fixed


def test_other_pairs_than_the_tables_are_no_more_chosen():
    table = buckets((8, "a", "x"), (64, "b", "y"))
    rows = [BackendChoice(*pair, status, "why") for *pair, status in (
        ("a", "x", "possible"), ("c", "x", "chosen"), ("c", "y", "refused"), ("b", "y", "possible"),
    )]  # fmt: skip
    assert [row.status for row in table.explained(rows)] == ["chosen", "possible", "refused", "chosen"]
    assert [row.reason for row in table.explained(rows)] == ["", "why", "why", ""]


def test_buffers_of_a_transport_are_counted_once_and_as_often_as_its_parts_are_under_way(monkeypatch):
    kind = SimpleNamespace(buffer_bytes=lambda shape: len(shape) * 100, calls_in_parts=lambda shape: 3)
    monkeypatch.setattr(backend_table.registry, "load", lambda _, name: kind)
    entries = [
        TableEntry(64, BackendChoice(name, "x", "chosen", ""), pipeline, 64)
        for name, pipeline in (("a", None), ("a", 16), ("a", None), ("b", None))
    ]
    assert BackendTable(entries).transport_bytes(lambda one: "shape") == {("a", "shape"): 1500, ("b", "shape"): 500}


def test_backends_are_asked_of_the_layer_in_the_other_dtype(monkeypatch):
    def kernel(config, dtype, etp, scheme, options):
        assert (dtype, etp, scheme) == (torch.float16, 1, PLAIN)

    def transport(hidden_size, top_k, ranks, dtype, max_tokens, wire):
        return f"{hidden_size} {top_k} {ranks} {dtype} {max_tokens}"

    kinds = {"experts": kernel, "dispatchers": transport}
    load = lambda kind, name: SimpleNamespace(unsupported_reason=kinds[kind])  # noqa: E731
    monkeypatch.setattr(backend_table.registry, "load", load)
    asked = config(2)
    found = buckets((64, "a", "x")).dtype_problem(torch.float16, asked, layout(4), PLAIN, ExpertsOptions(), Wire())
    assert found == f"all2all=a does not carry it: {asked.hidden_size} 2 4 torch.float16 64"

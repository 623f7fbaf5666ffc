"""Test what every transport adds to the rows that it delivers."""

import pytest
import torch

from ep_moe import EPContext, InputError, MoEConfig, MoELayer, Wire
from ep_moe.all2all import base
from ep_moe.all2all.base import DispatchShape, routing_problem
from ep_moe.all2all.torch_collectives import LocalDispatcher, TorchAll2AllDispatcher
from ep_moe.config import ONE_SCALE
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import ROW_FORMATS, dequantize_from_wire, quantize_for_wire
from ep_moe.types import Pending, PhysicalRouting


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_received_rows_say_how_they_were_written(name):
    """`Received` names the row format and scale, from which a kernel can widen the rows."""
    wire = Wire(dispatch=name, input_scale=0.25 if name in ONE_SCALE else None)
    shape = DispatchShape(hidden_size=256, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.bfloat16, wire=wire)
    x, ids = torch.randn(3, 256).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    sent, scale = quantize_for_wire(x, wire)
    assert scale is None or scale.shape == (3, shape.scales)
    for whole, empty in zip((sent, scale), shape.no_rows(x.device), strict=True):
        assert (whole is None) == (empty is None), "a rank without tokens sends as its peers do"
        if whole is not None:
            assert (empty.shape, empty.dtype) == ((0, whole.shape[1]), whole.dtype)
    received = LocalDispatcher(shape, RankGroup.alone()).dispatch(sent, PhysicalRouting(ids, ids.float()), scale)
    reported = Wire(dispatch=received.format, input_scale=received.input_scale)
    assert reported == wire
    assert torch.equal(
        dequantize_from_wire(received.x, received.x_scale, reported, x.dtype),
        dequantize_from_wire(sent, scale, wire, x.dtype),
    )


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_a_shape_knows_the_bytes_of_its_rows(name):
    """`DispatchShape` gives the bytes of a row and its scales, and the empty tensors of a call without tokens."""
    wire = Wire(dispatch=name, input_scale=0.25 if name in ONE_SCALE else None)
    shape = DispatchShape(hidden_size=256, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.bfloat16, wire=wire)
    sent, scale = quantize_for_wire(torch.randn(3, 256).bfloat16(), wire)
    assert shape.row_bytes == sent[0].nbytes
    assert shape.scale_bytes == (0 if scale is None else scale[0].nbytes)
    no_rows, no_scale = shape.no_rows(torch.device("cpu"))
    assert (no_rows.shape, no_rows.dtype) == (sent[:0].shape, sent.dtype)
    assert (no_scale is None) == (scale is None)
    if scale is not None:
        assert (no_scale.shape, no_scale.dtype) == (scale[:0].shape, scale.dtype)


def test_ids_out_of_range_are_named_by_the_ranks_of_the_job():
    shape = DispatchShape(hidden_size=8, top_k=1, slots_per_rank=2, num_ranks=2, dtype=torch.bfloat16)
    dispatcher = LocalDispatcher(shape, RankGroup(None, (4, 6), 0, FlightRecorder()))
    with pytest.raises(InputError, match="got ids out of range: 3 on rank 6"):
        dispatcher._check_ids([0, 3])


def test_a_transport_that_waits_refuses_a_capture(monkeypatch):
    shape = DispatchShape(hidden_size=8, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.float32)
    dispatcher = TorchAll2AllDispatcher(shape, RankGroup.alone())
    routing = PhysicalRouting(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    monkeypatch.setattr(base, "capturing", lambda device: True)
    monkeypatch.setattr(TorchAll2AllDispatcher, "_dispatch", lambda *_: pytest.fail("sent"))
    with pytest.raises(InputError, match=r"^torch_a2a waits for the device and cannot .*; of those available .*"):
        dispatcher.dispatch(torch.ones(3, 8), routing)


def test_a_transport_without_growing_buffers_and_launches_has_none():
    shape = DispatchShape(hidden_size=8, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.float32)
    dispatcher = TorchAll2AllDispatcher(shape, RankGroup.alone())
    assert (dispatcher.held_bytes(), dispatcher.recordable_call(4)) == (0, None)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_transport_writes_to_contiguous_memory_alone(contiguous, monkeypatch):
    """A transport writes the sum only into contiguous memory. It is copied into a non-contiguous `out`."""
    shape = DispatchShape(hidden_size=8, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.float32)
    dispatcher, given = LocalDispatcher(shape, RankGroup.alone()), []
    monkeypatch.setattr(dispatcher, "_combine", lambda y, handle, out: given.append(out) or Pending.of(y))
    y, out = torch.randn(3, 8), torch.zeros(3, 8) if contiguous else torch.zeros(8, 3).t()
    assert dispatcher.combine(y, None, out) is out
    assert torch.equal(out, y)
    assert given[0] is (out if contiguous else None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"ids": torch.zeros(3, 2, dtype=torch.int32)}, None),
        ({"ids": [[0, 1]] * 3}, "routing.ids must be a Tensor, got list"),
        ({"weights": None}, "routing.weights must be a Tensor, got NoneType"),
        ({"ids": torch.zeros(3, 2).to_sparse()}, "routing.ids must be dense, got torch.sparse_coo"),
        ({"weights": torch.ones(2, 2)}, "routing.weights must be [T, K] = [3, 2], got [2, 2]"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "routing.ids must be [T, K] = [3, 2], got [3, 1]"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64, device="meta")}, "routing.ids must be on cpu as x is, got meta"),
        ({"weights": torch.ones(3, 2, device="meta")}, "routing.weights must be on cpu as x is, got meta"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int16)}, "routing.ids must be int32 or int64, got int16"),
        ({"weights": torch.ones(3, 2, dtype=torch.bfloat16)}, "routing.weights must be float32, got bfloat16"),
    ],
)
def test_what_is_wrong_with_a_routing_is_said(changed, words):
    given = {"ids": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.ones(3, 2)} | changed
    said = routing_problem(given["ids"], given["weights"], torch.ones(3, 8), 2)
    assert said is None if words is None else said.startswith(words)


@pytest.mark.parametrize("name", ["plain", "fp8_block"])
def test_rows_come_with_the_scales_of_their_format(name):
    shape = DispatchShape(
        hidden_size=256, top_k=1, slots_per_rank=2, num_ranks=1, dtype=torch.bfloat16, wire=Wire(dispatch=name)
    )
    sent, scale = quantize_for_wire(torch.randn(3, 256).bfloat16(), Wire(dispatch=name))
    routing = PhysicalRouting(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    for wrong in (torch.ones(3, 2) if scale is None else None, torch.ones(3, 5), torch.ones(3, 2).double()):
        wanted = "None" if scale is None else r"float32 \[3, 2\]"
        with pytest.raises(InputError, match=f"x_scale must be {wanted} with rows in {name}, got "):
            LocalDispatcher(shape, RankGroup.alone()).dispatch(sent, routing, wrong)


RETURNED = {
    "rows of another dtype": (
        "_combine",
        lambda y: Pending.of(y.double()),
        r"float32 .*, got float64 \[3, 16\]",
    ),
    "rows of another width": ("_combine", lambda y: Pending.of(y[:, 1:]), r"float32 \[\*, 16\], got float32 \[3, 15\]"),
    "no rows": ("_combine", lambda y: Pending.of(None), "must return a Tensor, .*, got NoneType"),
    "nothing": ("_combine", lambda y: None, "what _combine returns must be a Pending, got NoneType"),
    "bare rows": ("_dispatch", Pending.of, "what _dispatch returns must be a Received, got Tensor"),
    "nothing pending": ("_dispatch", lambda x: x, "what _dispatch returns must be a Pending, got int"),
}


@pytest.mark.parametrize("given", RETURNED)
def test_what_a_transport_of_others_returns_is_looked_at(given, monkeypatch):
    method, returned, words = RETURNED[given]
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=2, top_k=1)
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(config, context, all2all="local")
        x = 3 if given == "nothing pending" else torch.ones(3, 16)
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(LocalDispatcher, method, lambda self, *_: returned(x))
            with pytest.raises(TypeError, match=f"all2all=local: .*{words}; mend .* ep_moe.testing.check_dispatcher"):
                layer(torch.ones(3, 16))
        layer(torch.ones(3, 16))
